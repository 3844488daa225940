"""What comes before a pull's first read: it asks where P has its blocks, and clears what it leaves of its own."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from layout.plan import BlockTable
from pd_connector.orders import Cause
from pd_connector.worker.pull import Pull
from pd_connector.worker.pull_end import PullFailed
from tests.support.connector.engines import DECODE, OURS, PREFILL, THEIRS, Site, an_order, pull_once
from tests.support.layout.oracle import Table
from tests.support.waiting import ManualClock
from transfer.control.failures import PeerUnreachable
from transfer.control.messages import Locate, Located, Place, Welcome
from transfer.copies.clearing import TailCleaner


class SilentClient:
    """Answers nothing, and remembers how long it was to wait for an answer."""

    def __init__(self) -> None:
        self.waited: list[float] = []

    def request(self, host: str, port: int, message: object, timeout_s: float) -> "Future[Any]":
        self.waited.append(timeout_s)
        answer: Future[Any] = Future()
        answer.set_exception(
            PeerUnreachable(host=host, port=port, request_type="locate", tried_s=timeout_s, attempts=1)
        )
        return answer


def test_what_a_pull_leaves_of_its_last_block_is_cleared_before_it_reads(site: Site) -> None:
    """One of four kernel blocks of each side's second block is read."""
    engines = [replace(engine, block_tokens=64, kernel_blocks=4, blocks=4) for engine in (PREFILL, DECODE)]
    prefill, (worker,) = site.prefill(engines[0]), site.decode(engines[1])
    remote = prefill.prefill("r", ((1, 3),))
    cleaner = TailCleaner(worker.rank.geometry, [torch.from_numpy(worker.rank.memory)])
    untouched: list[bool] = []

    def clear(tables: Sequence[BlockTable], end_token: int) -> None:
        untouched.append(worker.untouched)
        cleaner(tables, end_token)

    site.session(worker, remote, clear_tails=clear).submit(an_order("r", remote, ((2, 1),), 0, 69))
    assert worker.next_end().cause == ""
    assert untouched == [True]
    for held in worker.rank.planes:
        behind = worker.rank.positions(held, Table(0, (2, 1)), range(80, 128))
        assert worker.before[behind].any()
        assert not worker.rank.memory[behind].any()
        worker.before[behind] = 0
    assert worker.holds([(((2, 1),), 0, 69)], engines[0])


@pytest.mark.parametrize(
    ("left_s", "waited", "cause", "is_unresponsive"),
    [
        (0.0, [], Cause.TIMEOUT, False),
        (0.01, [1.0], Cause.TIMEOUT, False),
        (3.0, [3.0], Cause.TIMEOUT, False),
        (30.0, [5.0], Cause.UNREACHABLE, True),
    ],
)
def test_only_who_had_time_to_answer_is_unreachable(
    site: Site, left_s: float, waited: list[float], cause: Cause, is_unresponsive: bool
) -> None:
    """Else one pull that comes late would fail all others from the same P."""
    (worker,), clock, client = site.decode(), ManualClock(), SilentClient()
    order = an_order("r", site.prefill().prefill("r", THEIRS), OURS)
    changes: dict[str, Any] = {"clock": clock, "client": client, "pull_timeout_s": 60.0, "handshake_timeout_s": 5.0}
    context = replace(worker.context(), **changes)
    pull = Pull(context, order, lambda end: None, threading.Event())
    peer: Any = None  # it is not looked at
    clock.advance(60.0 - left_s)
    with pytest.raises(PullFailed) as failed:
        pull._locate(peer)
    assert client.waited == pytest.approx(waited)
    assert (failed.value.cause, failed.value.is_unresponsive) == (cause, is_unresponsive)


def test_a_lease_in_host_memory_that_p_has_not_described_is_not_read(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, (worker, *_) = site.prefill(), site.decode()
    handle = prefill.service.handle

    def tells(message: Any) -> Any:
        if isinstance(message, Locate):
            return Located(Place.HOST, ((1, 2, 3, 4, 5),))
        reply = handle(message)
        return msgspec.structs.replace(reply, locates=True) if isinstance(reply, Welcome) else reply

    monkeypatch.setattr(prefill.service, "handle", tells)
    end = pull_once(site, prefill.prefill("r", THEIRS), worker)
    assert end.cause == Cause.PARAMS
    assert "says that the lease lies in 'host', with [5] slots; the block tables have [5] entries" in end.reason
    assert site.fabric.reads == 0
    assert worker.untouched
