"""How long a pull asks where P has its blocks, and what it makes of silence."""

import threading
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from pd_connector.orders import Cause
from pd_connector.worker.pull import Pull
from pd_connector.worker.pull_end import PullFailed
from tests.support.connector.engines import OURS, THEIRS, Site, an_order
from tests.support.waiting import ManualClock
from transfer.control.failures import PeerUnreachable


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
    clock.advance(60.0 - left_s)
    with pytest.raises(PullFailed) as failed:
        pull._locate()
    assert client.waited == pytest.approx(waited)
    assert (failed.value.cause, failed.value.is_unresponsive) == (cause, is_unresponsive)
