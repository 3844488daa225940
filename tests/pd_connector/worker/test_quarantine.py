"""Pulls whose reads settle late, or never: their blocks are nobody else's before, and nothing hangs.

Real pulls over the in-process engine, on which closing a link settles nothing: what a failed read has left is written
when the test says so.
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import create_autospec, patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_connector.orders import Cause, Orders
from pd_connector.stats import StatsRecorder
from pd_connector.worker import quarantine as module
from pd_connector.worker.peer import Peer
from pd_connector.worker.pull import Pull
from pd_connector.worker.pull_end import PullEnd
from pd_connector.worker.pulls import Pulls
from pd_connector.worker.quarantine import HeldRead, Quarantine, UnsettledPull, UnsettledReadError
from pd_connector.worker.remote_reader import SLOTS, RemoteReader
from tests.support.connector.engines import PREFILL, PrefillEngine, Site, an_order, tables
from tests.support.connector.staging import TCP, TWO_RANKS, stage
from tests.support.engine.in_process import Fault, InProcessEngine, InProcessLink
from tests.support.waiting import ManualClock, until
from transfer.control.client import ControlClient

BLOCKS = ((1, 7), (4, 2), (9, 3), (10, 5))  # of the decode engine, for four requests of 32 tokens


class LateWorld:
    """A decode worker's pulls from two prefill ranks, over an engine that completes late."""

    def __init__(self, site: Site, **changes: Any) -> None:
        site.fabric.closing_settles = False
        self.site, self.fabric = site, site.fabric
        self.prefill: PrefillEngine = site.prefill(changes.pop("engine", replace(PREFILL, tp=2)))
        (self.worker,) = site.decode()
        self.clock, self.stats = ManualClock(), StatsRecorder()
        if slot_bytes := changes.pop("slot_bytes", 0):
            self.pool = stage(self.worker, slot_bytes)
        if land := changes.pop("land", None):
            self.worker.reads = RemoteReader(TCP, self.worker.rank.geometry.regions, land=land)
        self.pulls = Pulls(replace(self.worker.context(), clock=self.clock, **changes), 600.0, self.stats)
        self.ended: dict[str, PullEnd] = {}
        self.at_the_report: dict[str, Any] = {}

    def submit(self, number: int) -> None:
        name = f"r{number}"
        remote = self.prefill.prefill(name, ((5, 6),), tokens=33)
        order = an_order(name, remote, (BLOCKS[number],), 0, 32)
        assert self.pulls.execute(Orders(pulls=(order,))) == [name]

    def collect(self) -> None:
        """A step of vLLM: what is reported now may be reused from now on."""
        for end in self.pulls.take_ends():
            assert end.request_id not in self.ended
            self.ended[end.request_id] = end
            self.at_the_report[end.request_id] = self.bytes_of(int(end.request_id[1:])).copy()
        self.pulls.check_integrity()

    def collected(self, count: int) -> bool:
        self.collect()
        return len(self.ended) >= count

    def positions(self, number: int) -> Any:
        rank, (table,) = self.worker.rank, tables((BLOCKS[number],))
        return np.concatenate([rank.positions(held, table, list(range(32))).ravel() for held in rank.planes])

    def bytes_of(self, number: int) -> Any:
        return self.worker.rank.memory[self.positions(number)]

    @property
    def idle(self) -> bool:
        return all(session.idle for session in self.pulls._sessions.values())

    @property
    def quarantined(self) -> float:
        return self.stats._gauges.get("quarantined_blocks", 0)

    def close(self) -> None:
        self.pulls.close()
        self.worker.engine.close()
        self.pulls.join()


@contextmanager
def a_world(**changes: Any) -> Iterator[LateWorld]:
    with closing(Site()) as site, closing(LateWorld(site, **changes)) as world:
        yield world


@pytest.fixture
def world() -> Iterator[LateWorld]:
    with a_world() as world:
        yield world


FAULTS = st.one_of(st.none(), st.builds(Fault, settled=st.booleans(), landed=st.integers(0, 3)))


@pytest.mark.thorough
@settings(max_examples=20, deadline=None)
@given(
    faults=st.lists(FAULTS, min_size=8, max_size=8),
    steps=st.lists(st.one_of(st.just("collect"), st.integers(1, 5)), max_size=12),
    data=st.data(),
)
def test_no_block_is_reported_before_its_last_byte_has_landed(
    faults: list[Fault | None], steps: list[str | int], data: st.DataObject
) -> None:
    """Whichever reads fail, however much of them lands when: after the report, nothing is written."""
    with a_world() as world:
        for read, fault in enumerate(faults, 1):
            if fault is not None:
                world.fabric.inject(read, fault)
        waiting = list(range(len(BLOCKS)))
        while waiting or steps:
            if waiting and (not steps or data.draw(st.booleans())):
                world.submit(waiting.pop(0))
            elif steps:
                step = steps.pop(0)
                if step == "collect":
                    world.collect()
                else:
                    world.fabric.deliver_late_bytes(int(step))
        until(lambda: world.idle)
        world.collect()
        while world.fabric.deliver_late_bytes(1):
            world.collect()
        until(lambda: world.collected(len(BLOCKS)))
        for number in range(len(BLOCKS)):
            assert np.array_equal(world.at_the_report[f"r{number}"], world.bytes_of(number)), "written after the report"
        outside = np.ones(len(world.worker.rank.memory), bool)
        outside[np.concatenate([world.positions(number) for number in range(len(BLOCKS))])] = False
        assert np.array_equal(world.worker.rank.memory[outside], world.worker.before[outside])
        assert world.quarantined == 0


def test_a_pull_in_quarantine_is_counted_and_said_and_reported_when_it_has_settled(
    world: LateWorld, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("pd_connector"), "propagate", True)
    caplog.set_level(logging.INFO)
    world.fabric.inject(1, Fault(settled=False, landed=1))
    world.submit(0)
    until(lambda: world.idle)
    world.collect()
    assert (world.ended, world.quarantined) == ({}, 2)
    assert "request r0: 2 blocks are in quarantine until 1 reads have settled: pull from engine" in caplog.text
    world.clock.advance(3.0)
    assert world.fabric.deliver_late_bytes() > 0
    world.collect()
    assert world.ended["r0"].cause == Cause.READ
    assert world.quarantined == 0
    assert "request r0: its reads have settled after 3.0 s, 2 blocks leave quarantine" in caplog.text


def test_the_lease_is_released_though_the_reads_have_not_settled(world: LateWorld) -> None:
    """They may read what they like in the blocks of the prefill engine: it is never used."""
    world.fabric.inject(1, Fault(settled=False))
    world.submit(0)
    until(lambda: world.prefill.leases.collect() == ("r0",))
    world.collect()
    assert world.ended == {}


def test_other_pulls_go_on_beside_one_in_quarantine(world: LateWorld) -> None:
    world.fabric.inject(1, Fault(settled=False))
    world.submit(0)
    until(lambda: world.idle)
    world.submit(1)
    until(lambda: world.collected(1))
    assert world.ended["r1"].cause == Cause.NONE


def test_staging_memory_stays_borrowed_until_the_read_has_settled() -> None:
    with a_world(engine=TWO_RANKS, slot_bytes=1 << 20) as world:
        world.fabric.inject(1, Fault(settled=False))
        world.submit(0)
        until(lambda: world.idle)
        world.collect()
        assert len(world.pool._lent) == 1
        world.fabric.deliver_late_bytes()
        world.collect()
        assert world.ended.keys() == {"r0"}
        with ExitStack() as stack:
            assert None not in [stack.enter_context(world.pool.borrow()) for _ in range(SLOTS)]


@pytest.mark.parametrize("settled", [True, False])
def test_what_a_failed_read_has_brought_is_in_place_before_its_blocks_are_reported(*, settled: bool) -> None:
    """A device may still copy it, though the transfer engine writes no more."""
    under_way: list[int] = []  # reads whose bytes may still come, at each wait for the device
    late: LateWorld
    with a_world(land=lambda: under_way.append(len(late.fabric._late))) as late:
        for read in (1, 2):
            late.fabric.inject(read, Fault(settled=settled, landed=1))
        late.submit(0)
        until(lambda: late.idle)
        if not settled:
            late.collect()
            assert (late.ended, under_way) == ({}, [])
            late.fabric.deliver_late_bytes()
        late.collect()
        assert late.ended["r0"].cause == Cause.READ
        assert under_way == [0, 0], "of each rank"


def test_a_read_that_never_settles_ends_the_worker_when_it_has_had_its_time(world: LateWorld) -> None:
    world.fabric.inject(1, Fault(settled=False))
    world.submit(0)
    until(lambda: world.idle)
    world.collect()
    world.clock.advance(module.MAX_AGE_S)
    world.collect()
    world.clock.advance(1.0)
    with pytest.raises(UnsettledReadError, match=r"request r0 have not settled for 301 s, of at most 300.*a fault was"):
        world.collect()


def test_what_several_hold_on_a_rank_is_counted_together(world: LateWorld) -> None:
    """Pulls, landings and prefixes have a quarantine each, and one recorder."""
    stats = StatsRecorder()
    held, empty = Quarantine(stats), Quarantine(stats)
    order = an_order("r", world.prefill.prefill("r", ((5, 6),), tokens=33), ((1, 2),), 0, 32)
    read = create_autospec(HeldRead, instance=True)
    read.release.return_value = False
    held.add(UnsettledPull(order, PullEnd("r", Cause.READ, "as told"), [read]))
    assert held.take_settled() == empty.take_settled() == []
    taken = stats.take()
    assert taken is not None
    assert taken["gauges"] == {"quarantined_blocks": 2}
    held.close()
    taken = stats.take()
    assert taken is not None
    assert taken["gauges"] == {"quarantined_blocks": 0}, "nobody asks it again"


def test_blocks_are_counted_once_however_many_pulls_come_together(world: LateWorld) -> None:
    """On the model's thread: where a network is cut, a thousand come, and each count takes milliseconds."""
    held = Quarantine(StatsRecorder())
    remote = world.prefill.prefill("r", ((5, 6),), tokens=33)
    read = create_autospec(HeldRead, instance=True)
    read.release.return_value = False
    with patch.object(Quarantine, "_count", autospec=True, side_effect=Quarantine._count) as counting:
        for number in range(3):
            order = an_order(f"r{number}", remote, ((1, 2),), 0, 32)
            held.add(UnsettledPull(order, PullEnd(order.request_id, Cause.READ, "as told"), [read]))
        for _ in range(2):
            assert not held.take_settled()
    assert counting.call_count == 1


def test_closing_the_engine_settles_what_is_in_quarantine(world: LateWorld) -> None:
    world.fabric.inject(1, Fault(settled=False))
    world.submit(0)
    until(lambda: world.idle)
    world.collect()
    world.worker.engine.close()
    world.collect()
    assert world.ended.keys() == {"r0"}


# Whatever raises, wherever


class SurpriseError(Exception):
    """What nobody expects."""


def surprise(*_: object, **__: object) -> Any:
    raise SurpriseError("nobody expects it")


STEPS: dict[str, tuple[object, str]] = {
    "the handshake": (ControlClient, "request"),
    "opening a link": (InProcessEngine, "open"),
    "planning": (Pull, "_plan"),
    "reading": (InProcessLink, "read"),
    "dropping a link": (Peer, "drop_link"),
    "the confirmation": (Pull, "confirm"),
    "the release": (Pull, "_send"),
    "the verdict": (__import__("pd_connector.worker.pull", fromlist=["pull"]), "verdict"),
    "closing a link": (InProcessLink, "close"),
    "the end of a failed pull": (Pull, "_report_failed"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("fault", [None, Fault(), Fault(settled=False)], ids=["no fault", "settled", "unsettled"])
@pytest.mark.parametrize("step", STEPS)
def test_whatever_raises_no_request_waits_for_ever(
    monkeypatch: pytest.MonkeyPatch, step: str, fault: Fault | None
) -> None:
    """It is reported, when nothing is written any more; or the worker ends."""
    with a_world() as world:
        if fault is not None:
            world.fabric.inject(1, fault)
        monkeypatch.setattr(*STEPS[step], surprise)

        def ends() -> bool:
            world.clock.advance(1.0)
            try:
                return world.collected(1)
            except UnsettledReadError:
                return True

        world.submit(0)
        until(lambda: world.idle)
        late = world.fabric.is_late
        until(ends)
        if world.ended and fault is not None and not fault.settled and step != "opening a link":
            assert not any(late(link) for link in list(world.worker.engine._links))
        monkeypatch.undo()
