"""One read over Mooncake: split into calls, kept within the peer's window, polled until all bytes have landed.

A read is split into calls of ``descriptors_per_call``, with as many in flight as the peer's window allows. A call is
two Mooncake batches: first all descriptors but the last, then the last one alone. Mooncake works in order, and can tell
only of a batch of one whether it is done. So the last descriptor is polled, with sleeps in between; when it is done,
the others are collected, which have finished by then or do so within a few microseconds.

``mooncake`` owns links and engines, and decides what becomes of them after a failure.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from layout.copies import Copies
from transfer.engine.base import ReadFailed
from transfer.engine.batches import Window
from transfer.engine.mooncake_native import NativeEngine

# Between two polls a read sleeps for an eighth of the time it has taken so far, within these limits. Longer sleeps
# leave the cores to the threads that move the bytes (500 us: 5-10% faster than 100 us above 1 ms); shorter ones do not
# pay off (20 us: 10-15% slower).
SHORTEST_POLL_S = 50e-6
_LONGEST_POLL_S = 500e-6


@dataclass(slots=True)
class _Call:
    """One call's descriptors in flight. A batch id is 0 if Mooncake holds no such batch (any more)."""

    index: int
    count: int
    size: int  # bytes
    body: int  # batch id of all descriptors but the last
    tail: int  # batch id of the last descriptor


class MooncakeRead:
    """Owns one read: its calls in flight, oldest first. Used once, by one thread."""

    def __init__(self, native: NativeEngine, address: str, copies: Copies, per_call: int, window: Window) -> None:
        self._native = native
        self._address = address
        self._copies = copies
        self._per_call = per_call
        self._window = window
        self._calls: deque[_Call] = deque()
        self._submitted = 0  # descriptors
        self._started = time.monotonic()

    @property
    def in_flight(self) -> int:
        """Number of descriptors that Mooncake may still be writing."""
        return sum(call.count for call in self._calls)

    def run(self, timeout_s: float, closing: Callable[[], bool]) -> None:
        """Submit calls and collect them until all descriptors have landed.

        Measured against Mooncake's blocking call, which spins on a core (median of 20, 2 cores, 47 x 737 KB), polling
        takes 15.9 ms instead of 22.3, 19.6 instead of 31.5 beside a busy process, 26 instead of 41 beside a busy Python
        thread of this process, and a third of the CPU time. One batch per descriptor needs the GIL too often: 271 ms.
        """
        deadline = self._started + timeout_s
        while self._calls or self._submitted < len(self._copies):
            self._submit_what_fits()
            if self._calls and self._collect(self._calls[0]):
                continue
            now = time.monotonic()
            if closing():
                self._fail("the link was closed")
            if now >= deadline:
                self._fail(f"it did not finish within {timeout_s:.3f} s")
            time.sleep(min(max((now - self._started) / 8, SHORTEST_POLL_S), _LONGEST_POLL_S))

    def _submit_what_fits(self) -> None:
        while self._submitted < len(self._copies):
            part = self._copies[self._submitted : self._submitted + self._per_call]
            if not self._window.try_acquire(len(part)):
                return
            call = _Call(self._submitted // self._per_call, len(part), part.total_bytes, 0, 0)
            self._calls.append(call)  # counts as in flight from here on, whatever happens
            self._submitted += len(part)
            destinations, sources, sizes = part.destinations.tolist(), part.sources.tolist(), part.sizes.tolist()
            if len(part) > 1:
                call.body = self._submit(call, destinations[:-1], sources[:-1], sizes[:-1])
            call.tail = self._submit(call, destinations[-1:], sources[-1:], sizes[-1:])

    def _submit(self, call: _Call, destinations: list[int], sources: list[int], sizes: list[int]) -> int:
        batch = self._native.submit(self._address, destinations, sources, sizes)
        if not batch:
            self._fail("Mooncake refused to queue it", call)
        return batch

    def _collect(self, call: _Call) -> bool:
        """Remove the oldest call if it is done, and return whether it was."""
        if call.tail:
            state = self._native.poll(call.tail)
            if state == 0:
                return False
            call.tail = 0
            if state < 0:
                self._fail(f"Mooncake reported an error (code {state})", call)
        if call.body:
            state, call.body = self._native.wait(call.body), 0
            if state != 0:
                self._fail(f"Mooncake reported an error (code {state})", call)
        self._calls.popleft()
        self._window.release(call.count)
        return True

    def _fail(self, reason: str, call: _Call | None = None) -> None:
        call = call or (self._calls[0] if self._calls else None)
        total = -(-len(self._copies) // self._per_call)
        where = "waiting for room in the peer's window"
        if call:
            where = f"in call {call.index + 1} of {total} ({call.count} descriptors, {call.size} bytes)"
        raise ReadFailed(
            f"read from {self._address} failed {where} after {time.monotonic() - self._started:.3f} s: {reason}; the "
            f"whole read is {len(self._copies)} descriptors, {self._copies.total_bytes} bytes",
            settled=not self._calls,
        )
