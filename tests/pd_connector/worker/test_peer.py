"""Pulls from a prefill engine: the right bytes, the right verdict, and no byte after the verdict.

Real control channel, real leases and real bytes; the transfer engine is the in-process one, told where to fail.
"""

import logging
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from layout.copies import Copies
from pd_connector.orders import Cause
from pd_connector.params import EngineAddress
from pd_connector.scheduler.prefill.leases import LeaseTable
from pd_connector.worker import session as session_module
from pd_connector.worker.peer import Peer, connect_peer
from pd_connector.worker.pull_end import PullEnd, PullFailed
from tests.support.connector.engines import (
    DECODE,
    MODEL,
    OURS,
    PREFILL,
    THEIRS,
    DecodeWorker,
    PrefillEngine,
    Site,
    an_order,
    pull_once,
)
from tests.support.connector.requests import RecordingClient
from tests.support.control.faulty_network import Direction, FaultyNetwork, deliver
from tests.support.engine.in_process import Fault, InProcessEngine, InProcessFabric, InProcessLink
from tests.support.layout.oracle import Engine
from tests.support.waiting import ManualClock, holds_for, until
from transfer.control.messages import Hello, Release, Request, decode_request
from transfer.engine.interface import GivenUp, ReadFailed


class RememberingEngine(InProcessEngine):
    """Remembers the links that were opened."""

    def __init__(self, fabric: InProcessFabric) -> None:
        super().__init__(fabric)
        self.opened: list[InProcessLink] = []

    def open(self, *arguments: Any, **named: Any) -> InProcessLink:
        self.opened.append(super().open(*arguments, **named))
        return self.opened[-1]


@pytest.fixture
def one_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """No second lane has links that are open when the first has lost its own."""
    monkeypatch.setattr(session_module, "LANES", 1)


# The way that succeeds


def test_a_pull_brings_exactly_its_bytes_and_releases_the_lease(site: Site) -> None:
    prefill, (worker,) = site.prefill(), site.decode()
    end = pull_once(site, prefill.prefill("r", THEIRS), worker)
    assert (end.cause, end.reason, end.tokens) == ("", "", 69)
    assert end.copied_bytes == 80 * MODEL.layers * MODEL.kv_heads * sum(MODEL.contents) * MODEL.item_size
    assert end.descriptors > 0
    assert worker.holds([(OURS, 0, 69)])
    assert prefill.leases.collect() == ("r",)
    assert prefill.leases.take_counts()["released"] == 1


def test_every_phase_of_a_pull_is_timed(site: Site) -> None:
    end = pull_once(site, site.prefill().prefill("r", THEIRS))
    assert end.seconds.keys() == {"queue", "handshake", "plan", "read", "release", "total"}
    assert all(seconds >= 0 for seconds in end.seconds.values())
    assert end.seconds["total"] >= max(end.seconds[phase] for phase in ("handshake", "read", "release"))


def test_a_prefix_that_is_here_already_is_not_read(site: Site) -> None:
    prefill, (worker,) = site.prefill(), site.decode()
    remote = prefill.prefill("r", THEIRS)
    site.session(worker, remote).submit(an_order("r", remote, OURS, first=32))
    assert worker.next_end().cause == ""
    assert worker.holds([(OURS, 32, 69)])


def test_blocks_outside_a_sliding_window_are_not_read(site: Site) -> None:
    windowed = replace(MODEL, groups=((0, 2), (1,)), windows=(0, 32))
    prefill, (worker,) = site.prefill(model=windowed), site.decode(model=windowed)
    theirs, ours = ((5, 6, 3, 9, 2), (0, 0, 1, 4, 7)), ((1, 2, 8, 3, 11), (0, 0, 0, 9, 5))
    remote = prefill.prefill("r", theirs)
    site.session(worker, remote).submit(an_order("r", remote, ours))
    assert worker.next_end().cause == ""
    assert worker.holds([(ours, 0, 69)])


def test_a_prefill_engine_without_the_draft_is_read_as_far_as_it_goes(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    prefill = site.prefill(model=replace(MODEL, groups=((0, 1),)))
    (worker,) = site.decode(model=replace(MODEL, drafts=(2,)))
    end = pull_once(site, prefill.prefill("r", THEIRS), worker)
    assert (end.cause, end.reason, end.tokens) == ("", "", 69)
    assert end.copied_bytes == 80 * 2 * MODEL.kv_heads * sum(MODEL.contents) * MODEL.item_size
    assert prefill.leases.collect() == ("r",)
    assert "layers model.layers.2 draft tokens and are not there: fewer drafts are accepted" in caplog.text


def test_a_draft_that_only_the_prefill_engine_has_is_left_there(site: Site) -> None:
    prefill = site.prefill(model=replace(MODEL, groups=((0, 1, 2, 3),), drafts=(3,)))
    (worker,) = site.decode()
    assert pull_once(site, prefill.prefill("r", THEIRS), worker).cause == ""
    assert worker.holds([(OURS, 0, 69)])


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 2), (1, 2), (4, 2), (2, 1), (2, 8)])
def test_every_decode_rank_gets_its_heads_and_the_last_release_ends_the_lease(
    site: Site, prefill_tp: int, decode_tp: int
) -> None:
    prefill = site.prefill(replace(PREFILL, tp=prefill_tp))
    workers = site.decode(replace(DECODE, tp=decode_tp))
    remote = prefill.prefill("r", THEIRS)
    for worker in workers:
        assert prefill.leases.collect() == ()
        site.session(worker, remote).submit(an_order("r", remote, OURS))
        assert worker.next_end().cause == ""
    assert prefill.leases.collect() == ("r",)
    assert all(worker.holds([(OURS, 0, 69)]) for worker in workers)


def test_pipeline_stages_and_another_block_size_on_the_prefill_side(site: Site) -> None:
    engine = Engine(layout="LBNHC", block_tokens=32, blocks=6, tp=2, pp=2)
    prefill, (worker,) = site.prefill(engine), site.decode()
    remote = prefill.prefill("r", ((4, 1, 3),))
    site.session(worker, remote).submit(an_order("r", remote, OURS))
    assert worker.next_end().cause == ""
    assert worker.holds([(OURS, 0, 69)], engine)


def test_many_pulls_need_one_handshake(site: Site) -> None:
    prefill, (worker,) = site.prefill(), site.decode()
    remotes = [prefill.prefill(f"r{number}", THEIRS) for number in range(4)]
    session = site.session(worker, remotes[0])
    for number, remote in enumerate(remotes):
        session.submit(an_order(f"r{number}", remote, ((number + 1,) * 5,), 0, 16))
    ends = [worker.next_end() for _ in remotes]
    assert {end.request_id for end in ends if not end.cause} == {"r0", "r1", "r2", "r3"}
    assert worker.client.counters.requests == 1 + len(remotes)  # a hello, and a release each
    until(lambda: session.idle)


def met(site: Site, worker: DecodeWorker, prefill: PrefillEngine, deadline_s: float = 10.0) -> Peer:
    """The prefill engine after a handshake."""
    context = worker.context()
    address = EngineAddress(prefill.service.engine_id, "127.0.0.1", prefill.port)
    return connect_peer(context, address, context.clock() + deadline_s)


def test_a_link_is_opened_once_and_anew_after_it_was_dropped(site: Site) -> None:
    (worker,) = site.decode()
    worker.engine = site.add(RememberingEngine(site.fabric))
    worker.engine.register(worker.rank.geometry.regions)
    peer = met(site, worker, site.prefill(replace(PREFILL, tp=2)))
    assert len(worker.engine.opened) == 2
    first, second = peer.link(0), peer.link(1)
    assert [first, second] == worker.engine.opened
    peer.drop_link(0)
    assert (worker.engine.opened[0].closed, worker.engine.opened[1].closed) == (True, False)
    assert peer.link(0) is worker.engine.opened[2]
    assert peer.link(1) is second
    peer.close()
    assert all(link.closed for link in worker.engine.opened)


def test_a_handshake_of_which_one_rank_cannot_be_reached_keeps_no_link(site: Site) -> None:
    (worker,), prefill = site.decode(), site.prefill(replace(PREFILL, tp=2))
    worker.engine = site.add(RememberingEngine(site.fabric))
    worker.engine.register(worker.rank.geometry.regions)
    prefill.engines[1].close()
    with pytest.raises(PullFailed, match="prefill rank 1: cannot reach") as failed:
        met(site, worker, prefill)
    assert failed.value.cause is Cause.UNREACHABLE
    assert [link.closed for link in worker.engine.opened] == [True]


def test_a_handshake_takes_no_longer_than_the_pull_may(site: Site) -> None:
    (worker,), prefill = site.decode(), site.prefill()
    client = RecordingClient()
    context = replace(worker.context(), client=client, handshake_timeout_s=10.0, clock=ManualClock())
    for deadline_s in (60.0, 4.0, -1.0):
        with pytest.raises(TimeoutError), patch.object(Future, "result", side_effect=TimeoutError):
            connect_peer(context, EngineAddress("engine-p", "127.0.0.1", prefill.port), context.clock() + deadline_s)
    assert client.timeouts == [10.0, 4.0, 1.0]


# Reads that fail


def test_a_read_that_failed_and_is_settled_fails_the_pull_and_releases_the_lease(site: Site) -> None:
    prefill, (worker,) = site.prefill(), site.decode()
    site.fabric.inject(1, Fault(settled=True, landed=2))
    end = pull_once(site, prefill.prefill("r", THEIRS), worker)
    assert end.cause == "read"
    assert "a fault was injected" in end.reason
    assert prefill.service.engine_id in end.reason
    until(lambda: prefill.leases.collect() == ("r",))


def test_no_late_byte_of_an_unsettled_read_lands_after_the_pull_was_reported(site: Site) -> None:
    prefill, (worker,) = site.prefill(), site.decode()
    at_the_report: list[tuple[int, bool]] = []

    def settle(end: PullEnd) -> None:
        reported = worker.rank.memory.copy()
        late = site.fabric.deliver_late_bytes()
        at_the_report.append((late, bool((worker.rank.memory == reported).all())))
        worker.ends.put(end)

    site.fabric.inject(1, Fault(settled=False, landed=1))
    remote = prefill.prefill("r", THEIRS)
    site.session(worker, remote, settle=settle).submit(an_order("r", remote, OURS))
    assert worker.next_end().cause == "read"
    assert at_the_report == [(0, True)]


def test_no_late_byte_lands_when_one_of_two_prefill_ranks_fails(site: Site) -> None:
    prefill, (worker,) = site.prefill(replace(PREFILL, tp=2)), site.decode()
    late: list[int] = []
    site.fabric.inject(2, Fault(settled=False))

    def settle(end: PullEnd) -> None:
        late.append(site.fabric.deliver_late_bytes())
        worker.ends.put(end)

    remote = prefill.prefill("r", THEIRS)
    site.session(worker, remote, settle=settle).submit(an_order("r", remote, OURS))
    end = worker.next_end()
    assert (end.cause, late) == ("read", [0])
    assert "prefill rank" in end.reason


def test_a_slow_prefill_rank_does_not_hold_back_the_reads_from_the_others(site: Site) -> None:
    prefill, (worker,) = site.prefill(replace(PREFILL, tp=2)), site.decode()
    gate = threading.Event()
    site.fabric.inject(1, Fault(until=gate, fails=False))
    remote = prefill.prefill("r", THEIRS)
    site.session(worker, remote).submit(an_order("r", remote, OURS))
    until(lambda: site.fabric.reads == 2)
    gate.set()
    assert worker.next_end().cause == ""
    assert worker.holds([(OURS, 0, 69)])


def test_a_pull_of_which_one_rank_failed_is_not_settled_before_the_reads_from_the_others(site: Site) -> None:
    prefill, (worker,) = site.prefill(replace(PREFILL, tp=2)), site.decode()
    gate = threading.Event()
    site.fabric.inject(1, Fault(until=gate, fails=False))
    site.fabric.inject(2, Fault(settled=True))
    remote = prefill.prefill("r", THEIRS)
    site.session(worker, remote).submit(an_order("r", remote, OURS))
    until(lambda: site.fabric.reads == 2)
    holds_for(worker.ends.empty, 0.2)
    gate.set()
    assert worker.next_end().cause == "read"


def test_no_late_byte_lands_when_one_rank_fails_and_another_surprises(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, (worker,) = site.prefill(replace(PREFILL, tp=2)), site.decode()
    read, late = InProcessLink.read, []

    def surprise(link: InProcessLink, copies: Copies, timeout_s: float, later_bytes: int, given_up: GivenUp) -> None:
        try:
            read(link, copies, timeout_s, later_bytes, given_up)
        except ReadFailed as error:
            if error.settled:
                raise
            raise MemoryError from error

    def settle(end: PullEnd) -> None:
        late.append(site.fabric.deliver_late_bytes())
        worker.ends.put(end)

    monkeypatch.setattr(InProcessLink, "read", surprise)
    site.fabric.inject(1, Fault(settled=True))
    site.fabric.inject(2, Fault(settled=False))
    remote = prefill.prefill("r", THEIRS)
    site.session(worker, remote, settle=settle).submit(an_order("r", remote, OURS))
    assert worker.next_end().cause in {"read", "internal"}
    assert late == [0]


@pytest.mark.parametrize("settled", [True, False])
def test_the_pull_after_a_failed_read_succeeds_on_a_new_link(site: Site, settled: bool) -> None:
    prefill, (worker,) = site.prefill(), site.decode()
    first, second = prefill.prefill("r1", THEIRS), prefill.prefill("r2", THEIRS)
    site.fabric.inject(1, Fault(settled=settled, landed=0))
    session = site.session(worker, first)
    session.submit(an_order("r1", first, ((1, 2, 8, 3, 11),)))
    assert worker.next_end().cause == "read"
    session.submit(an_order("r2", second, ((7, 4, 10, 9, 6),)))
    assert worker.next_end().cause == ""
    site.fabric.deliver_late_bytes()
    assert worker.holds([(((7, 4, 10, 9, 6),), 0, 69)])


@pytest.mark.usefixtures("one_lane")
def test_a_read_that_hangs_is_given_up_at_the_pull_timeout(site: Site) -> None:
    prefill, (worker,) = site.prefill(), site.decode()
    worker.pull_timeout_s = 1.0
    site.fabric.inject(1, Fault(until=(pause := threading.Event()), landed=1))
    first, second = prefill.prefill("r1", THEIRS), prefill.prefill("r2", THEIRS)
    session = site.session(worker, first, settle=lambda end: (worker.ends.put(end), pause.wait(0.2)))  # type: ignore[func-returns-value]
    session.submit(an_order("r1", first, OURS))
    session.submit(an_order("r2", second, OURS))
    ends = [worker.next_end(), worker.next_end()]
    assert [(end.request_id, end.cause) for end in ends] == [("r1", "timeout"), ("r2", "timeout")]
    assert all("1.0 s was over" in end.reason and "raise pull_timeout_s" in end.reason for end in ends)
    assert site.fabric.deliver_late_bytes() == 0


@pytest.mark.usefixtures("one_lane")
def test_a_prefill_worker_that_died_fails_the_pull(site: Site) -> None:
    prefill, (worker,) = site.prefill(), site.decode()
    remotes = [prefill.prefill(f"r{number}", THEIRS) for number in range(3)]
    session = site.session(worker, remotes[0])
    session.submit(an_order("r0", remotes[0], OURS))
    assert worker.next_end().cause == ""
    prefill.engines[0].close()
    for number, cause in ((1, "read"), (2, "unreachable")):
        session.submit(an_order(f"r{number}", remotes[number], OURS))
        end = worker.next_end()
        assert (end.request_id, end.cause) == (f"r{number}", cause)
        assert prefill.engines[0].address in end.reason


# The release decides


@pytest.mark.parametrize("ended", ["expired", "cancelled"])
def test_a_pull_whose_lease_ended_during_the_read_has_failed(site: Site, ended: str) -> None:
    prefill, (worker,) = site.prefill(), site.decode()
    clock = ManualClock()
    prefill.service.leases = LeaseTable(30.0, clock)
    reading = threading.Event()
    site.fabric.inject(1, Fault(until=reading, fails=False, landed=3))
    remote = prefill.prefill("r", THEIRS)
    site.session(worker, remote).submit(an_order("r", remote, OURS))
    until(lambda: site.fabric.reads == 1)
    if ended == "expired":
        clock.advance(30.0)
    else:
        prefill.leases.cancel([remote.lease_id])
    assert prefill.leases.collect() == ("r",)
    reading.set()
    end = worker.next_end()
    assert end.cause == "lease"
    assert re.search(f"lease {remote.lease_id} (had expired|was cancelled)", end.reason)


def asked(kind: type[Request], then: Callable[[], object]) -> Callable[[Direction, bytes], Any]:
    """A network that loses all requests of one kind, and calls ``then`` for each."""

    def rule(direction: Direction, frame: bytes) -> Any:
        if direction is Direction.REQUEST and isinstance(decode_request(frame)[1], kind):
            then()
            return []
        return deliver(direction, frame)

    return rule


@pytest.mark.usefixtures("one_lane")
def test_a_worker_whose_port_was_taken_during_the_read_fails_the_pull(site: Site) -> None:
    """The lease is valid, all bytes have landed, and they may be anybody's."""
    prefill, (worker,) = site.prefill(), site.decode()
    reading = threading.Event()
    site.fabric.inject(1, Fault(until=reading, fails=False, landed=3))
    first, second = prefill.prefill("r1", THEIRS), prefill.prefill("r2", THEIRS)
    session = site.session(worker, first)
    session.submit(an_order("r1", first, OURS))
    until(lambda: site.fabric.reads == 1)
    usurper = site.add(InProcessEngine(site.fabric))
    usurper.register(prefill.ranks[0].geometry.regions)
    site.fabric.replace(prefill.engines[0].address, usurper)
    reading.set()
    end = worker.next_end()
    assert end.cause == "read"
    assert f"another process than the one that was announced answers at {prefill.engines[0].address}" in end.reason
    session.submit(an_order("r2", second, OURS))
    assert worker.next_end().cause == "unreachable"


def test_a_worker_that_announces_no_identity_is_not_read(site: Site) -> None:
    prefill, (worker,) = site.prefill(replace(PREFILL, tp=2)), site.decode()
    geometries = [rank.geometry for rank in prefill.ranks]
    prefill.service.set_workers((geometries[0], replace(geometries[1], identity=None)))
    end = pull_once(site, prefill.prefill("r", THEIRS), worker)
    assert end.cause == "incompatible"
    assert "prefill rank 1 announces no identity" in end.reason
    assert site.fabric.reads == 0


def test_a_pull_whose_release_is_never_answered_has_failed(site: Site) -> None:
    prefill, (worker,) = site.prefill(), site.decode()
    worker.pull_timeout_s = 1.0
    lost: list[int] = []
    with FaultyNetwork(prefill.port, asked(Release, lambda: lost.append(1))) as network:
        end = pull_once(site, prefill.prefill("r", THEIRS), worker, remote_port=network.port)
    assert end.cause == "unconfirmed"
    assert "did not answer 'release'" in end.reason
    assert len(lost) > 1  # it was asked again
    assert prefill.leases.active == 1


def test_a_release_whose_answer_is_lost_is_confirmed_by_the_next(site: Site) -> None:
    prefill, (worker,) = site.prefill(), site.decode()
    lost = [0]

    def rule(direction: Direction, frame: bytes) -> Any:
        if direction is Direction.REPLY and prefill.leases.active == 0 and lost[0] < 2:
            lost[0] += 1
            return []
        return deliver(direction, frame)

    with FaultyNetwork(prefill.port, rule) as network:
        end = pull_once(site, prefill.prefill("r", THEIRS), worker, remote_port=network.port)
    assert (end.cause, lost) == ("", [2])
    assert prefill.leases.collect() == ("r",)


def test_a_handshake_that_is_lost_is_asked_for_again(site: Site) -> None:
    prefill, (worker,) = site.prefill(), site.decode()
    lost: list[int] = []
    with FaultyNetwork(prefill.port) as network:
        lose = asked(Hello, lambda: lost.append(1))
        network.rule = lambda direction, frame: lose(direction, frame) if len(lost) < 3 else deliver(direction, frame)
        end = pull_once(site, prefill.prefill("r", THEIRS), worker, remote_port=network.port)
    assert (end.cause, len(lost)) == ("", 3)


def test_a_release_under_way_when_the_client_closes_is_not_taken_for_an_answer(site: Site) -> None:
    prefill, (worker,) = site.prefill(), site.decode()
    released = threading.Event()
    with FaultyNetwork(prefill.port, asked(Release, released.set)) as network:
        remote = prefill.prefill("r", THEIRS)
        order = an_order("r", remote, OURS, remote_port=network.port)
        site.session(worker, order.remote).submit(order)
        assert released.wait(5.0)
        worker.client.close()
        assert worker.next_end().cause == "unconfirmed"


# Exactly once


@pytest.mark.thorough
def test_every_pull_is_settled_exactly_once_whatever_fails(site: Site) -> None:
    """A mix of ends over one session: each is reported once, and only those that succeeded changed their blocks."""
    prefill, (worker,) = site.prefill(), site.decode()
    remotes = [prefill.prefill(f"r{number}", THEIRS) for number in range(30)]
    session = site.session(worker, remotes[0])
    for read, fault in ((2, Fault(settled=False)), (5, Fault(settled=True)), (6, Fault(settled=False, landed=0))):
        site.fabric.inject(read, fault)
    prefill.leases.cancel([remotes[number].lease_id for number in (14, 25)])
    for number, remote in enumerate(remotes):
        wrong = {"remote_block_ids": ((99,),)} if number % 10 == 9 else {}
        session.submit(an_order(f"r{number}", remote, OURS, 0, 16, **wrong))
    ends = [worker.next_end() for _ in remotes]
    session.close()
    assert session.join(10.0)
    assert sorted(end.request_id for end in ends) == sorted(f"r{number}" for number in range(30))
    until(lambda: prefill.leases.active == 0)
    assert worker.ends.empty()
    causes = [end.cause for end in ends]
    assert {cause: causes.count(cause) for cause in set(causes)} == {"": 22, "read": 3, "lease": 2, "params": 3}


def test_closing_ends_the_links_of_a_session(site: Site) -> None:
    """Also those of the lane that waits for the next pull."""
    prefill, (worker,) = site.prefill(), site.decode()
    engine = RememberingEngine(site.fabric)
    engine.register(worker.rank.geometry.regions)
    remote = prefill.prefill("r", THEIRS)
    with closing(engine):
        session = site.session(worker, remote, engine=engine)
        session.submit(an_order("r", remote, OURS))
        assert worker.next_end().cause == ""
        until(lambda: len(engine.opened) == 2)
        session.close()
        assert session.join(10.0)
        assert [link.closed for link in engine.opened] == [True, True]
