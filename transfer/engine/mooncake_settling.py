"""What failed reads have left in flight on an engine that links share, until Mooncake is done with it.

Nothing in Mooncake cancels a descriptor, and on RDMA and Ascend none has a time limit while it waits in a queue. So
batches are watched until their counters say that they are final. A worker thread of Mooncake's may be stuck in a call
to the peer that does not answer; interrupting that call lets it go on.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from transfer.engine.interface import ReadFailed
from transfer.engine.mooncake_batches import ReadBatch
from transfer.engine.mooncake_native import NativeEngine

_SHORTEST_LOOK_S = 0.001
_LONGEST_LOOK_S = 0.05
_INTERRUPT_S = 1.0


class Leftover:
    """Batches of one failed read. ``settled`` is set once nothing of them is written any more, and never cleared."""

    def __init__(self, address: str, batches: Sequence[ReadBatch], release: Callable[[], None]) -> None:
        """``release`` gives back what the batches hold; called once, when they are final or their engine is gone."""
        self.address = address  # of the peer
        self._batches = list(batches)
        self._release = release
        self._settled = threading.Event()
        self._interrupt_at = time.monotonic()

    @property
    def settled(self) -> bool:
        """Whether nothing of the batches is written any more."""
        return self._settled.is_set()

    def look(self) -> bool:
        """Return whether all batches are final. Never waits."""
        self._batches = [batch for batch in self._batches if not batch.look().is_final]
        return not self._batches

    def is_due(self, now: float) -> bool:
        """Return whether calls to the peer are to be interrupted now, which is so about once a second."""
        if now < self._interrupt_at:
            return False
        self._interrupt_at = now + _INTERRUPT_S
        return True

    def end(self) -> None:
        """Take note that nothing is written any more, and give back what the batches held."""
        self._release()
        self._settled.set()


class Settling:
    """Owns the leftovers of one engine. Its thread runs while there are any. Safe to use from any thread."""

    def __init__(self, native: NativeEngine) -> None:
        self._native = native
        self._lock = threading.Lock()
        self._leftovers: list[Leftover] = []
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, leftover: Leftover) -> None:
        """Watch ``leftover`` until it is final."""
        with self._lock:
            self._leftovers.append(leftover)
            self._start()

    def check(self, address: str) -> None:
        """Raise ReadFailed if reads from the peer at ``address`` have failed and not settled."""
        with self._lock:
            self._start()
            if any(leftover.address == address for leftover in self._leftovers):
                reason = f"{address} is not opened or read now: earlier reads from it have failed and not settled"
                raise ReadFailed(reason, settled=True)

    def stop(self) -> None:
        """Stop the thread and wait for it. What has not settled stays so until ``engine_deleted``."""
        self._stopping.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def engine_deleted(self) -> None:
        """Settle everything: an engine that is deleted writes nothing any more. Call it after ``stop``."""
        with self._lock:
            leftovers, self._leftovers = self._leftovers, []
        for leftover in leftovers:
            leftover.end()

    def _start(self) -> None:
        """Start the thread if it is needed. If the system has none left, the next ``check`` does. Holds the lock."""
        if self._leftovers and self._thread is None and not self._stopping.is_set():
            thread = threading.Thread(target=self._run, name="pd-settling", daemon=True)
            with suppress(RuntimeError):
                thread.start()  # it waits for the lock before it ends
                self._thread = thread

    def _run(self) -> None:
        try:
            self._watch()
        finally:  # if something was raised, the next leftover or check starts another thread
            with self._lock:
                if self._thread is threading.current_thread():
                    self._thread = None

    def _watch(self) -> None:
        pause_s = _SHORTEST_LOOK_S
        while not self._stopping.wait(pause_s):
            pause_s = min(2 * pause_s, _LONGEST_LOOK_S)
            with self._lock:
                leftovers = list(self._leftovers)
            for leftover in leftovers:
                if leftover.look():
                    with self._lock:
                        self._leftovers.remove(leftover)
                    leftover.end()
                    pause_s = _SHORTEST_LOOK_S
                elif leftover.is_due(time.monotonic()):
                    with suppress(OSError):
                        self._native.interrupt(leftover.address)
            with self._lock:
                if not self._leftovers:
                    self._thread = None
                    return
