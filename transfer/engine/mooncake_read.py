"""One read over Mooncake: split into calls, kept within the peer's window, looked at until all bytes have landed.

A read is split into calls of at most ``descriptors_per_call`` and of a part of the time that may be in flight, with as
many in flight as the peer's window allows. Each call is one batch, and ``mooncake_batches`` tells how far it is.
Descriptors may land in any order.

``mooncake`` owns links and engines, and decides what becomes of them after a failure.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from layout.copies import Copies
from layout.cost import CostModel
from transfer.engine.interface import GivenUp, ReadFailed
from transfer.engine.mooncake_batches import ReadBatch, submit
from transfer.engine.mooncake_limits import Limits
from transfer.engine.mooncake_native import NativeEngine
from transfer.engine.window import Window


@dataclass(frozen=True, slots=True)
class _Call:
    """One call's descriptors in flight."""

    index: int
    size: int  # bytes
    seconds: float  # predicted
    batch: ReadBatch


class MooncakeRead:
    """Owns one read: its calls in flight, oldest first. Used once, by one thread."""

    def __init__(
        self,
        native: NativeEngine,
        address: str,
        copies: Copies,
        limits: Limits,
        cost: CostModel,
        window: Window,
        later_bytes: int = 0,
    ) -> None:
        self._native = native
        self._address = address
        self._copies = copies
        self._limits = limits
        self._window = window
        #: [descriptors + 1]: predicted seconds before each descriptor, and of all.
        self._before_s = np.concatenate([[0.0], np.cumsum(cost.alpha + cost.beta * copies.sizes)])
        self._later_s = cost.beta * later_bytes
        self._calls: deque[_Call] = deque()
        self._calls_made = 0
        self._submitted = 0  # descriptors
        self._started = time.monotonic()
        self._flow = window.enter()  # until ``run`` returns

    @property
    def in_flight(self) -> list[ReadBatch]:
        """The batches that Mooncake may still be writing. They occupy the window."""
        return [call.batch for call in self._calls]

    def run(self, timeout_s: float, given_up: GivenUp) -> None:
        """Submit calls and collect them until all descriptors have landed.

        Measured against Mooncake's blocking call, which spins on a core (median of 20, 2 cores, 47 x 737 KB), polling
        takes 15.9 ms instead of 22.3, 19.6 instead of 31.5 beside a busy process, 26 instead of 41 beside a busy Python
        thread of this process, and a third of the CPU time. One batch per descriptor needs the GIL too often: 271 ms.

        Raises:
            ReadFailed: settled if nothing is ``in_flight``.
        """
        try:
            self._run(self._started + timeout_s, timeout_s, given_up)
        finally:
            self._window.leave(self._flow)

    def _run(self, deadline: float, timeout_s: float, given_up: GivenUp) -> None:
        looked, pause_s = self._started, 0.0
        while self._calls or self._submitted < len(self._copies):
            self._submit_what_fits()
            collected = self._collect()
            now = time.monotonic()
            self._window.note_late(now - looked - pause_s)
            looked, pause_s = now, 0.0
            if collected:
                continue
            if reason := given_up():
                self._fail(reason)
            if now >= deadline:
                self._fail(f"it did not finish within {timeout_s:.3f} s")
            pause_s = self._limits.pause_s(now - self._started)
            time.sleep(pause_s)

    def settle(self, patience_s: float, closing: Callable[[], bool]) -> bool:
        """Wait, after a failure, until nothing is in flight; return whether that is so within ``patience_s``."""
        started = time.monotonic()
        while True:
            for call in list(self._calls):
                if call.batch.look().is_final:
                    self._calls.remove(call)
                    self._window.release_abandoned(1, call.batch.descriptors)
            waited = time.monotonic() - started
            if not self._calls or waited >= patience_s or closing():
                return not self._calls
            time.sleep(self._limits.pause_s(waited))

    def _submit_what_fits(self) -> None:
        while self._submitted < len(self._copies):
            end = self._end_of_call()
            part, seconds = self._copies[self._submitted : end], float(self._before_s[end] - self._done_s)
            self._flow.left_s = float(self._before_s[-1] - self._done_s) + self._later_s
            if not self._window.try_acquire(self._flow, len(part), seconds):
                return
            batch = submit(self._native, self._address, part)
            if batch is None:
                self._window.release(self._flow, len(part), seconds)
                self._fail("Mooncake refused to queue it", f"in call {self._calls_made + 1}")
            self._calls.append(_Call(self._calls_made, part.total_bytes, seconds, batch))
            self._calls_made += 1
            self._submitted = end

    @property
    def _done_s(self) -> float:
        """Predicted seconds of what has been submitted."""
        return float(self._before_s[self._submitted])

    def _end_of_call(self) -> int:
        """Return the number of descriptors that are submitted after the next call, which has at least one."""
        if self._native.counts is None:
            return self._submitted + 1  # the first batch of an engine shows what Mooncake's batches look like
        in_time = int(np.searchsorted(self._before_s, self._done_s + self._window.call_s, side="right")) - 1
        per_call = min(self._limits.per_call, self._window.call_descriptors(self._flow))
        most = min(self._submitted + per_call, len(self._copies))
        return max(min(in_time, most), self._submitted + 1)

    def _collect(self) -> bool:
        """Remove calls that are done, oldest first, and return whether there were any. Raise if a call has failed."""
        collected = False
        for call in list(self._calls):
            state = call.batch.look()
            if state.is_failure:
                self._fail("Mooncake reported an error", _place(call))
            if not state.is_final:
                break  # the calls behind it have rarely overtaken it
            self._calls.remove(call)
            self._window.release(self._flow, call.batch.descriptors, call.seconds)
            collected = True
        return collected

    def _fail(self, reason: str, where: str = "") -> NoReturn:
        if not where:
            where = _place(self._calls[0]) if self._calls else "waiting for room in the peer's window"
        raise ReadFailed(
            f"read from {self._address} failed {where} after {time.monotonic() - self._started:.3f} s: {reason}; the "
            f"whole read is {len(self._copies)} descriptors, {self._copies.total_bytes} bytes",
            settled=not self._calls,
        )


def _place(call: _Call) -> str:
    return f"in call {call.index + 1} ({call.batch.descriptors} descriptors, {call.size} bytes)"
