"""How a read is cut into calls, and what it tells the window of its peer. Mooncake is scripted here."""

from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layout.copies import Copies, concatenate
from layout.cost import CostModel
from transfer.engine import mooncake_read as module
from transfer.engine.interface import ReadFailed, never
from transfer.engine.mooncake_batches import ReadBatch, State
from transfer.engine.mooncake_limits import LIMITS
from transfer.engine.mooncake_read import MooncakeRead
from transfer.engine.window import Window

COST = CostModel(10e-6, 1e-9, 0.0, 0.0)
BUDGET_S = 4e-3


class Native:
    """A Mooncake engine whose batches are told by their counters."""

    counts: bool | None = True


class SlowBatch(ReadBatch):
    """A batch that is done when it has been looked at so many times."""

    def __init__(self, wire: "Wire", part: Copies, looks: int) -> None:
        super().__init__(len(part))
        self.wire, self.part, self.looks = wire, part, looks
        self.cost_s = COST.read_s(len(part), part.total_bytes)

    def _look(self) -> State:
        self.looks -= 1
        if self.wire.fails and self.looks <= 0:
            return State.FAILING
        if self.looks > 0:
            return State.PENDING
        self.wire.in_flight.remove(self)
        return State.DONE


class Wire:
    """What is submitted, and what is in flight."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, looks: int = 3) -> None:
        self.looks = looks
        self.fails = False
        self.calls: list[SlowBatch] = []
        self.in_flight: list[SlowBatch] = []
        self.left_s: list[float] = []
        self.most_s = 0.0
        self.window = Window(1024, BUDGET_S)
        monkeypatch.setattr(self.window, "note_late", lambda seconds: None)
        monkeypatch.setattr(module, "submit", self.submit)

    def submit(self, native: Native, address: str, part: Copies) -> SlowBatch:
        self.calls.append(SlowBatch(self, part, self.looks))
        self.in_flight.append(self.calls[-1])
        self.most_s = max(self.most_s, sum(call.cost_s for call in self.in_flight))
        self.left_s += [flow.left_s for flow in self.window._flows]
        return self.calls[-1]

    def read(self, copies: Copies, later_bytes: int = 0) -> MooncakeRead:
        native = cast("Any", Native())
        return MooncakeRead(native, "10.0.0.5:1", copies, LIMITS["tcp"], COST, self.window, later_bytes)


def batch_of(sizes: list[int]) -> Copies:
    size = np.array(sizes, np.int64)
    start = np.cumsum(size) - size
    return Copies(start + 4096, start + 8192, size)


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 500_000), min_size=1, max_size=200), looks=st.integers(1, 4))
def test_calls_hold_all_descriptors_in_order_and_are_never_too_much(sizes: list[int], looks: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        wire, copies = Wire(monkeypatch, looks), batch_of(sizes)
        wire.read(copies).run(60.0, never)
        made = concatenate([call.part for call in wire.calls])
        for name in ("destinations", "sources", "sizes"):
            assert np.array_equal(getattr(made, name), getattr(copies, name))
        assert all(call.cost_s <= wire.window.call_s * 1.000001 for call in wire.calls)
        assert all(len(call.part) <= LIMITS["tcp"].per_call for call in wire.calls)
        assert wire.most_s <= BUDGET_S * 1.000001
        assert wire.window.in_flight == 0
        assert not wire.window._flows


def test_a_first_call_leaves_most_descriptors_to_later_ones_and_these_leave_some_to_other_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever time may be in flight."""
    wire = Wire(monkeypatch)
    wire.window = Window(200, 60.0)
    wire.read(batch_of([1] * 350)).run(60.0, never)
    assert [len(call.part) for call in wire.calls] == [50, 75, 75, 75, 75]
    assert wire.window.most_in_flight == 150


def test_the_next_call_is_in_flight_before_the_one_before_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(monkeypatch)
    wire.read(batch_of([500_000] * 40)).run(60.0, never)
    assert wire.most_s > 0.9 * wire.window.call_s * 2 - COST.read_s(1, 500_000)


def test_a_descriptor_that_is_longer_than_a_call_is_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(monkeypatch)
    wire.read(batch_of([9_000_000, 1, 9_000_000])).run(60.0, never)
    assert [len(call.part) for call in wire.calls] == [1, 1, 1]


def test_what_is_left_counts_what_the_caller_reads_later(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(monkeypatch)
    wire.read(batch_of([400_000] * 12), later_bytes=5_000_000).run(60.0, never)
    whole_s = COST.read_s(12, 12 * 400_000)
    assert wire.left_s[0] == pytest.approx(whole_s + 5e-3)
    assert wire.left_s == sorted(wire.left_s, reverse=True)
    assert wire.left_s[-1] > 5e-3


def test_a_failed_read_leaves_its_time_to_others_and_keeps_its_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(monkeypatch)
    wire.fails = True
    reading = wire.read(batch_of([500_000] * 40))
    with pytest.raises(ReadFailed, match="Mooncake reported an error") as failure:
        reading.run(60.0, never)
    assert not failure.value.settled
    assert not wire.window._flows
    assert wire.window.in_flight == sum(batch.descriptors for batch in reading.in_flight) > 0
    wire.fails = False
    assert reading.settle(60.0, lambda: False)
    assert wire.window.in_flight == 0


def test_a_read_that_is_given_up_says_why_and_has_not_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = Wire(monkeypatch, looks=1000).read(batch_of([500_000] * 4))
    with pytest.raises(ReadFailed, match=r"failed in call 1 .*: its engine is gone; the whole read is") as failure:
        reading.run(60.0, lambda: "its engine is gone")
    assert not failure.value.settled


def test_a_read_that_looks_late_has_more_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(monkeypatch)
    late: list[float] = []
    monkeypatch.setattr(wire.window, "note_late", late.append)
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds + 0.005

    monkeypatch.setattr("transfer.engine.mooncake_read.time.sleep", sleep)
    monkeypatch.setattr("transfer.engine.mooncake_read.time.monotonic", lambda: now[0])
    wire.read(batch_of([1000])).run(60.0, never)
    assert late == pytest.approx([0.0, 0.005, 0.005])
