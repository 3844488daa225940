"""Several pulls from one prefill engine at once, over the in-process engine: what one of them does to the others."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from pd_connector.orders import Cause
from pd_connector.worker import session as session_module
from tests.support.connector.engines import PREFILL, THEIRS, DecodeWorker, PrefillEngine, Site, an_order
from tests.support.engine.in_process import Fault, InProcessEngine, InProcessLink
from tests.support.waiting import WAIT_S, holds_for, until
from transfer.engine.interface import Link

FIRST, SECOND, THIRD = (((1, 2, 8, 3, 11),), ((7, 4, 10, 9, 6),), ((5,),))


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    gate = threading.Event()
    yield gate
    gate.set()


@pytest.mark.parametrize(
    "fault", [Fault(fails=False), Fault(settled=True), Fault(settled=False, landed=2)], ids=["hangs", "fails", "late"]
)
def test_pulls_go_on_beside_one_that_hangs_or_fails(site: Site, gate: threading.Event, fault: Fault) -> None:
    prefill, (worker,) = site.prefill(), site.decode()
    fault = Fault(fault.settled, fault.landed, fault.fails, gate)
    site.fabric.inject(1, fault)
    long, short, last = (prefill.prefill(name, THEIRS) for name in ("long", "short", "last"))
    session = site.session(worker, long)
    session.submit(an_order("long", long, FIRST))
    until(lambda: site.fabric.reads == 1)
    session.submit(an_order("short", short, SECOND))
    end = worker.next_end()
    assert (end.request_id, end.cause) == ("short", "")
    gate.set()
    end = worker.next_end()
    assert (end.request_id, end.cause) == ("long", Cause.READ if fault.fails else "")
    site.fabric.deliver_late_bytes()
    session.submit(an_order("last", last, THIRD, 0, 16))
    assert worker.next_end().cause == ""
    pulled = [(SECOND, 0, 69), (THIRD, 0, 16)] + ([] if fault.fails else [(FIRST, 0, 69)])
    assert fault.landed or worker.holds(pulled)
    assert worker.client.counters.requests == 1 + 3, "a hello, and a release each"


def test_the_next_pull_has_links_of_its_own_that_were_opened_before(site: Site, gate: threading.Event) -> None:
    prefill, (worker,) = site.prefill(), site.decode()
    site.fabric.inject(1, Fault(until=gate, fails=False))
    long, short = (prefill.prefill(name, THEIRS) for name in ("long", "short"))
    session = site.session(worker, long)
    session.submit(an_order("long", long, FIRST))
    until(lambda: site.fabric.reads == 1 and len(worker.engine._links) == 2)
    session.submit(an_order("short", short, SECOND))
    assert worker.next_end().request_id == "short"
    gate.set()
    assert worker.next_end().cause == ""
    assert worker.holds([(FIRST, 0, 69), (SECOND, 0, 69)])


def test_the_links_of_a_lane_to_several_ranks_are_opened_at_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes several round trips. The first lane opens them with the handshake, the next one beside a pull."""
    at_once = threading.Barrier(4, timeout=WAIT_S)
    prefill, (worker,) = site.prefill(replace(PREFILL, tp=4)), site.decode()
    open_link = worker.engine.open

    def open_with_others(*peer: Any) -> Link:
        at_once.wait()
        return open_link(*peer)

    monkeypatch.setattr(worker.engine, "open", open_with_others)
    remote = prefill.prefill("r", THEIRS)
    session = site.session(worker, remote)
    session.submit(an_order("r", remote, FIRST))
    assert worker.next_end().cause == ""
    until(lambda: len(worker.engine._links) == 8)
    assert worker.holds([(FIRST, 0, 69)])


def test_links_that_nobody_will_read_over_again_are_closed_without_the_next_pull(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefill engine may be gone, and its session is kept for minutes."""
    monkeypatch.setattr(session_module, "_LANE_IDLE_S", 0.02)
    prefill, (worker,) = site.prefill(replace(PREFILL, tp=2)), site.decode()
    remotes = [prefill.prefill(name, THEIRS) for name in ("first", "second", "third")]
    session = site.session(worker, remotes[0])
    session.submit(an_order("first", remotes[0], FIRST))
    assert worker.next_end().cause == ""
    until(lambda: len(session._lanes) == 1 and len(open_links(worker)) == 2)
    forgotten, kept = open_links(worker)
    forgotten.is_forgotten = True
    until(lambda: forgotten.closed)
    holds_for(lambda: not kept.closed, 0.1)
    session.submit(an_order("second", remotes[1], SECOND))
    assert worker.next_end().cause == ""
    kept.is_forgotten = True
    until(lambda: kept.closed)
    session.submit(an_order("third", remotes[2], THIRD, 0, 16))
    assert worker.next_end().cause == ""
    assert worker.holds([(FIRST, 0, 69), (SECOND, 0, 69), (THIRD, 0, 16)])
    assert worker.client.counters.requests == 1 + 3, "there was another handshake"


def test_a_process_that_took_the_address_while_lanes_read_fails_them_and_no_link_is_opened_to_it(
    site: Site, gate: threading.Event
) -> None:
    prefill, (worker,) = site.prefill(), site.decode()
    remotes = [prefill.prefill(f"r{number}", THEIRS) for number in range(4)]
    for read in (1, 2):
        site.fabric.inject(read, Fault(until=gate, fails=False))
    session = site.session(worker, remotes[0])
    for number, blocks in enumerate((FIRST, SECOND)):
        session.submit(an_order(f"r{number}", remotes[number], blocks))
    until(lambda: site.fabric.reads == 2 and len(worker.engine._links) == 3)
    take_address(site, prefill)
    gate.set()
    ends = [worker.next_end() for _ in range(2)]
    assert {end.cause for end in ends} == {Cause.READ}
    causes = []
    for number in (2, 3):  # one of them on the links that were open, if its lane comes first
        session.submit(an_order(f"r{number}", remotes[number], THIRD, 0, 16))
        causes.append(worker.next_end().cause)
    assert set(causes) <= {Cause.READ, Cause.UNREACHABLE}
    assert Cause.UNREACHABLE in causes, "a link was opened"


def open_links(worker: DecodeWorker) -> list[InProcessLink]:
    return [link for link in worker.engine._links if not link.closed]


def take_address(site: Site, prefill: PrefillEngine) -> None:
    """Let another process answer at the address of the prefill engine's worker."""
    usurper = site.add(InProcessEngine(site.fabric))
    usurper.register(prefill.ranks[0].geometry.regions)
    site.fabric.replace(prefill.engines[0].address, usurper)
