"""What may be in flight to one peer, shared among reads: bounded, without starvation, and short reads first."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from transfer.engine.window import CALLS, Flow, Window

BUDGET_S = 4.0
CALL_S = BUDGET_S / CALLS


@pytest.fixture
def window() -> Window:
    return Window(100, BUDGET_S)


def entered(window: Window, left_s: float = 10.0) -> Flow:
    flow = window.enter()
    flow.left_s = left_s
    return flow


def test_a_window_gives_no_more_descriptors_than_it_has(window: Window) -> None:
    first, second, third = (entered(window) for _ in range(3))
    assert window.try_acquire(first, 70, 0.1)
    assert not window.try_acquire(second, 40, 0.1)
    assert not window.try_acquire(first, 31, 0.1)
    window.leave(second)
    assert window.try_acquire(third, 30, 0.1)
    window.release(first, 70, 0.1)
    assert window.try_acquire(first, 70, 0.1)
    assert (window.in_flight, window.most_in_flight) == (100, 100)
    window.check_integrity()


def test_one_read_has_as_many_calls_in_flight_as_the_time_allows(window: Window) -> None:
    flow = entered(window)
    assert [window.try_acquire(flow, 1, CALL_S) for _ in range(CALLS + 1)] == [True] * CALLS + [False]
    window.release(flow, 1, CALL_S)
    assert window.try_acquire(flow, 1, CALL_S)


def test_a_call_that_is_longer_than_all_that_may_be_in_flight_goes_alone(window: Window) -> None:
    flow = entered(window)
    assert window.try_acquire(flow, 1, 10 * BUDGET_S)
    assert not window.try_acquire(flow, 1, 0.1)
    window.release(flow, 1, 10 * BUDGET_S)
    assert window.try_acquire(flow, 1, 0.1)


def test_a_read_that_begins_has_a_call_in_flight_at_once(window: Window) -> None:
    """Whatever the others have: they may hang, or be as long as they like."""
    long = entered(window, 1000.0)
    while window.try_acquire(long, 1, CALL_S):
        pass
    assert window.try_acquire(entered(window, 2000.0), 1, CALL_S)


@pytest.mark.parametrize("capacity", [4, 100, 256, 1024, 2048])
def test_a_read_that_begins_finds_descriptors_whatever_another_has_in_flight(capacity: int) -> None:
    window = Window(capacity, BUDGET_S)
    hanging = entered(window)
    calls = []
    while window.try_acquire(hanging, descriptors := window.call_descriptors(hanging), 0.0):
        calls.append(descriptors)
    assert len(calls) >= CALLS, "calls do not overlap"
    new = entered(window, 1000.0)
    assert window.call_descriptors(new) == capacity // 4
    assert window.try_acquire(new, window.call_descriptors(new), CALL_S)


def test_a_window_of_one_descriptor_serves_reads_one_after_another() -> None:
    window = Window(1, BUDGET_S)
    first, second = entered(window), entered(window)
    assert window.try_acquire(first, window.call_descriptors(first), CALL_S)
    assert not window.try_acquire(first, window.call_descriptors(first), CALL_S)
    assert not window.try_acquire(second, window.call_descriptors(second), CALL_S)
    window.release(first, 1, CALL_S)
    assert window.try_acquire(second, 1, CALL_S)


def test_room_goes_to_the_read_with_the_least_left(window: Window) -> None:
    long, short = entered(window, 100.0), entered(window, 3.0)
    for flow in (long, long, short):
        assert window.try_acquire(flow, 1, CALL_S)
    assert not window.try_acquire(short, 1, CALL_S)
    window.release(long, 1, CALL_S)  # there is room for one call less than before the short one came
    assert not window.try_acquire(long, 1, CALL_S)
    window.release(long, 1, CALL_S)
    assert window.try_acquire(long, 1, CALL_S), "a read always has a call in flight"
    window.release(short, 1, CALL_S)
    assert window.try_acquire(short, 1, CALL_S)
    window.release(long, 1, CALL_S)
    window.try_acquire(short, 1, CALL_S)
    window.leave(short)
    assert window.try_acquire(long, 1, CALL_S)


def test_a_longer_read_leaves_room_to_a_shorter_one_that_asked_for_it(window: Window) -> None:
    long, short = entered(window, 100.0), entered(window, 3.0)
    for flow in (short, long, long):
        window.try_acquire(flow, 1, CALL_S / 2)
    assert not window.try_acquire(short, 1, 3.0)
    assert not window.try_acquire(long, 1, 0.1), "it would fit, and the short one would never find room"
    window.leave(short)
    assert window.try_acquire(long, 1, 0.1)


def test_one_that_has_nothing_in_flight_comes_before_a_shorter_one_that_wants_more(window: Window) -> None:
    short, new = entered(window, 1.0), entered(window, 50.0)
    begun = entered(window)
    assert window.try_acquire(begun, 30, 0.1)
    for _ in range(2):
        assert window.try_acquire(short, 20, 0.1)
    assert not window.try_acquire(new, 40, 0.1)
    assert not window.try_acquire(short, 5, 0.1), "it would fit, and the new one would never find room"
    window.release(begun, 30, 0.1)
    assert not window.try_acquire(short, 5, 0.1)
    assert window.try_acquire(new, 30, 0.1)
    assert window.try_acquire(short, 5, 0.1)


def test_a_read_that_failed_leaves_its_descriptors_behind_and_its_time_to_others(window: Window) -> None:
    failed, other = entered(window), entered(window)
    assert window.try_acquire(failed, 50, BUDGET_S)
    assert window.try_acquire(other, 10, CALL_S)
    assert not window.try_acquire(other, 10, CALL_S)
    window.leave(failed)
    assert window.in_flight == 60
    assert window.try_acquire(other, 10, CALL_S)
    window.release_abandoned(1, 50)
    assert window.in_flight == 20
    window.check_integrity()


def test_calls_are_bounded_where_each_holds_a_thread() -> None:
    window = Window(100, BUDGET_S, most_calls=2)
    long, short, third = entered(window, 100.0), entered(window, 3.0), entered(window, 1.0)
    assert [window.try_acquire(flow, 1, 0.1) for flow in (long, short, third, long)] == [True, True, False, False]
    window.release(short, 1, 0.1)
    assert not window.try_acquire(long, 1, 0.1), "one that has nothing in flight waits"
    assert window.try_acquire(third, 1, 0.1)
    window.release(third, 1, 0.1)
    assert window.try_acquire(long, 1, 0.1), "nobody else waits"


def test_calls_of_a_read_that_has_failed_are_counted_until_they_have_ended() -> None:
    window = Window(100, BUDGET_S, most_calls=2)
    failed, other = entered(window), entered(window)
    assert window.try_acquire(failed, 10, 0.1)
    assert window.try_acquire(failed, 10, 0.1)
    window.leave(failed)
    assert not window.try_acquire(other, 1, 0.1)
    window.release_abandoned(1, 10)
    assert window.try_acquire(other, 1, 0.1)
    assert not window.try_acquire(other, 1, 0.1)
    window.release_abandoned(1, 10)
    assert window.try_acquire(other, 1, 0.1)
    window.check_integrity()


def test_a_long_read_takes_turns_with_short_ones_that_keep_coming() -> None:
    """Two calls may be in flight, and there are always three short reads, each of one call."""
    window = Window(100, BUDGET_S, most_calls=2)
    long, short = entered(window, 100.0), [entered(window, 1.0) for _ in range(3)]
    wire: list[Flow] = []
    calls_of_long = 0
    for _ in range(100):
        for flow in [flow for flow in short if flow not in wire] + [long] * (long not in wire):
            if window.try_acquire(flow, 1, CALL_S):
                wire.append(flow)
        done = wire.pop(0)
        window.release(done, 1, CALL_S)
        calls_of_long += done is long
        if done is not long:
            window.leave(done)
            short[short.index(done)] = entered(window, 1.0)
    assert calls_of_long >= 20


def test_more_is_in_flight_where_reads_are_late_and_no_more_when_they_are_in_time_again(window: Window) -> None:
    for _ in range(50):
        window.note_late(0.01)
    assert window.seconds == pytest.approx(BUDGET_S + 0.01, rel=1e-5)
    assert window.call_s == pytest.approx(window.seconds / CALLS)
    for _ in range(50):
        window.note_late(0.0)
    assert window.seconds == pytest.approx(BUDGET_S, rel=1e-5)
    window.note_late(3600.0)  # the process was stopped
    assert window.seconds < BUDGET_S + 0.1


class SharedWindow(RuleBasedStateMachine):
    """Reads that come, submit, fail and go in any order."""

    @initialize(capacity=st.integers(4, 40), most_calls=st.none() | st.integers(1, 4))
    def begins(self, capacity: int, most_calls: int | None) -> None:
        self.window, self.most_calls = Window(capacity, BUDGET_S, most_calls), most_calls
        self.calls: dict[Flow, list[tuple[int, float]]] = {}
        self.abandoned: list[int] = []

    @rule(left_s=st.floats(0.1, 50.0))
    def comes(self, left_s: float) -> None:
        self.calls[entered(self.window, left_s)] = []

    @rule(data=st.data(), descriptors=st.integers(1, 6), seconds=st.floats(0.0, CALL_S))
    def submits(self, data: st.DataObject, descriptors: int, seconds: float) -> None:
        if not self.calls:
            return
        flow = data.draw(st.sampled_from(list(self.calls)))
        before = self.in_flight_s
        if not self.window.try_acquire(flow, descriptors, seconds):
            return
        assert not self.calls[flow] or before + seconds <= BUDGET_S + 1e-9, "a second call exceeds the time in flight"
        self.calls[flow].append((descriptors, seconds))

    @rule(data=st.data())
    def a_call_ends(self, data: st.DataObject) -> None:
        if flows := [flow for flow, calls in self.calls.items() if calls]:
            flow = data.draw(st.sampled_from(flows))
            self.window.release(flow, *self.calls[flow].pop())

    @rule(data=st.data())
    def goes(self, data: st.DataObject) -> None:
        if self.calls:
            flow = data.draw(st.sampled_from(list(self.calls)))
            self.window.leave(flow)
            self.abandoned += [descriptors for descriptors, _ in self.calls.pop(flow)]

    @rule()
    def what_was_abandoned_settles(self) -> None:
        if self.abandoned:
            self.window.release_abandoned(1, self.abandoned.pop())

    @property
    def in_flight_s(self) -> float:
        return sum(seconds for calls in self.calls.values() for _, seconds in calls)

    @invariant()
    def the_books_balance(self) -> None:
        if not hasattr(self, "window"):
            return
        self.window.check_integrity()
        descriptors = sum(count for calls in self.calls.values() for count, _ in calls) + sum(self.abandoned)
        assert self.window.in_flight == descriptors <= self.window.capacity
        calls = sum(map(len, self.calls.values())) + len(self.abandoned)
        assert self.most_calls is None or calls <= self.most_calls
        assert self.in_flight_s <= BUDGET_S + CALL_S * len(self.calls)

    @invariant()
    def somebody_can_go_on(self) -> None:
        """If all ask, one gets room, unless the descriptors are all in flight: nobody waits for one that sleeps."""
        if not getattr(self, "calls", None) or self.window.in_flight or self.abandoned:
            return
        asked = [flow for flow in self.calls if self.window.try_acquire(flow, 1, 0.1)]
        assert asked, "nothing is in flight, and nobody may submit"
        for flow in asked:
            self.window.release(flow, 1, 0.1)


TestSharedWindow = SharedWindow.TestCase
TestSharedWindow.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=2, max_size=4), most_calls=st.sampled_from([None, 1, 2, 3]))
def test_every_read_ends_and_a_shorter_one_ends_first(lengths: list[int], most_calls: int | None) -> None:
    """Reads of equal calls over a wire that carries one call after another, fairly."""
    window = Window(1000, BUDGET_S, most_calls)
    left = {entered(window, float(length)): length for length in lengths}
    wire: list[Flow] = []
    ended: list[int] = []
    length_of = dict(left)
    flows = list(left)
    for turn in itertools.count():
        for flow in flows[turn % len(flows) :] + flows[: turn % len(flows)]:
            flow.left_s = float(left[flow])
            while left[flow] and window.try_acquire(flow, 1, CALL_S):
                left[flow] -= 1
                flow.left_s = float(left[flow])
                wire.append(flow)
        if not wire:
            break
        done = wire.pop(0)
        window.release(done, 1, CALL_S)
        if not left[done] and done not in wire:
            window.leave(done)
            flows.remove(done)
            ended.append(length_of[done])
            if not flows:
                break
        assert turn < 1000
    assert len(ended) == len(lengths)
    for first, second in itertools.pairwise(ended):
        assert first <= second + len(lengths), "a much shorter read ended after a longer one"
