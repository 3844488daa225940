"""What may be in flight to one peer, shared among all reads from it: how a short read gets past a long one.

A read is submitted in calls. What is in flight is bounded in descriptors, as the transport needs it, and in predicted
time. So a read that begins has little in front of it, wherever the queue is: in this process, on the wire or at the
peer. Calls of one read overlap, so that the bound leaves no gap.

    - A read that has nothing in flight may submit a call of up to a quarter of the descriptors, whatever time is in
      flight. Reads that have calls in flight leave that quarter free, also if they hang. So a read that begins waits
      for others that begin, at most, and they take turns.
    - Room for more goes to the read that has the least left: shortest remaining time first.
    - Calls can be bounded as well, where each holds a thread of the transport whatever it does. Then a read that begins
      also waits for a call to end, and comes before the next of those that have one.

Arithmetic and counters only: knows no transport, never waits. A read that gets no room asks again when it looks at its
calls the next time.
"""

import threading
from dataclasses import dataclass

#: Calls into which the time in flight is divided, so that others are in flight while one is replaced.
CALLS = 2

#: The part of the descriptors that is left free for a read that has nothing in flight.
_BEGINNING = 1 / 4

#: A process that was stopped is late by any time. What is in flight does not grow by more than this.
_MOST_LATE_S = 0.05
_WEIGHT = 1 / 4  # of the last time that a read was late


@dataclass(eq=False, slots=True)
class Flow:
    """One read, as the window of its peer knows it. ``left_s`` belongs to its thread, the rest to the window."""

    left_s: float = 0.0  # predicted time of what it has yet to submit
    calls: int = 0  # in flight
    in_flight_s: float = 0.0  # their predicted time
    is_waiting: bool = False  # whether it got no room when it asked last
    turn: int = 0  # among reads that wait with nothing in flight: when it began to


class Window:
    """Counts what is in flight to one peer, over all links to it, and decides who may submit. Any thread."""

    def __init__(self, capacity: int, seconds: float, most_calls: int | None = None) -> None:
        """Allow ``capacity`` descriptors, ``seconds`` of predicted time and ``most_calls`` calls in flight."""
        self.capacity = capacity
        self._most_calls = most_calls
        self._calls = 0
        self._turns = 0
        self._kept = max(1, int(capacity * _BEGINNING))  # descriptors, for reads that have nothing in flight
        self.most_in_flight = 0
        self._in_flight = 0
        self._least_s = seconds
        self._late_s = 0.0
        self._flows: set[Flow] = set()
        self._lock = threading.Lock()

    @property
    def in_flight(self) -> int:
        """Descriptors in flight now."""
        return self._in_flight

    @property
    def seconds(self) -> float:
        """Predicted time that may be in flight: as long as asked for, and as reads are late to replace a call."""
        return self._least_s + self._late_s

    @property
    def call_s(self) -> float:
        """The longest predicted time of a call."""
        return self.seconds / CALLS

    def call_descriptors(self, flow: Flow) -> int:
        """Return the most descriptors that the next call of a read may have."""
        return max(1, (self.capacity - self._kept) // CALLS) if flow.calls else self._kept

    def enter(self) -> Flow:
        """Return a new read, which must ``leave`` when it has ended."""
        with self._lock:
            flow = Flow()
            self._flows.add(flow)
            return flow

    def leave(self, flow: Flow) -> None:
        """Forget a read, also one that has failed with calls in flight: their descriptors still occupy the window."""
        with self._lock:
            self._flows.discard(flow)

    def try_acquire(self, flow: Flow, descriptors: int, seconds: float) -> bool:
        """Reserve room for a call. If there is none for this read now, reserve nothing and return False."""
        with self._lock:
            self._take_turn(flow)
            flow.is_waiting = not (self._has_room(flow, descriptors, seconds) and self._is_first(flow))
            if flow.is_waiting:
                return False
            flow.turn = 0
            flow.calls += 1
            flow.in_flight_s += seconds
            self._calls += 1
            self._in_flight += descriptors
            self.most_in_flight = max(self.most_in_flight, self._in_flight)
            return True

    def release(self, flow: Flow, descriptors: int, seconds: float) -> None:
        """Give back what ``try_acquire`` reserved for a call."""
        with self._lock:
            self._in_flight -= descriptors
            self._calls -= 1
            flow.calls -= 1
            flow.in_flight_s = flow.in_flight_s - seconds if flow.calls else 0.0  # no remainder of rounded sums
            if flow.is_waiting:
                self._take_turn(flow)

    def release_abandoned(self, calls: int, descriptors: int) -> None:
        """Give back the room of calls whose read has left."""
        with self._lock:
            self._calls -= calls
            self._in_flight -= descriptors

    def note_late(self, seconds: float) -> None:
        """Take note that a read looked at its calls so much later than it had meant to.

        Where Python threads compete for the interpreter, that is several milliseconds each time, and what is in flight
        must last for so long.
        """
        with self._lock:
            self._late_s += _WEIGHT * (min(seconds, _MOST_LATE_S) - self._late_s)

    def check_integrity(self) -> None:
        """Raise AssertionError if more is in flight than fits, or more was given back than reserved."""
        with self._lock:
            assert 0 <= self._in_flight <= self.most_in_flight <= self.capacity, "the window's count is wrong"
            assert all(flow.calls >= 0 for flow in self._flows), "a read gave back more calls than it reserved"
            assert sum(flow.calls for flow in self._flows) <= self._calls <= self._in_flight, "the calls are miscounted"
            assert self._most_calls is None or self._calls <= self._most_calls, "more calls are in flight than may be"

    def _has_room(self, flow: Flow, descriptors: int, seconds: float) -> bool:
        if self._calls == self._most_calls:
            return False
        if self._in_flight + descriptors > self.capacity - (self._kept if flow.calls else 0):
            return False
        return not flow.calls or sum(other.in_flight_s for other in self._flows) + seconds <= self.seconds

    def _take_turn(self, flow: Flow) -> None:
        if not flow.calls and not flow.turn:
            self._turns += 1
            flow.turn = self._turns

    def _is_first(self, flow: Flow) -> bool:
        """Return whether no other read that waits comes before this one."""
        return all(_rank(other) >= _rank(flow) for other in self._flows if other.is_waiting)


def _rank(flow: Flow) -> tuple[bool, float]:
    return (True, flow.left_s) if flow.calls else (False, flow.turn)
