"""Host memory that transfers use: plain, pinned for a device's copy engines, or lent out in equal slots."""

import mmap
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from layout.geometry import Region


class HostMemory:
    """A page-aligned run of host memory, for as long as this object lives. Pages are taken once they are written to."""

    def __init__(self, size: int) -> None:
        """``size`` in bytes.

        Raises:
            ValueError: ``size`` is not positive.
        """
        if size <= 0:
            raise ValueError(f"host memory must have some bytes, not {size}")
        # Not mmap itself: its pages stay until the last array that shows them has gone.
        self._pages = np.frombuffer(mmap.mmap(-1, size), np.uint8)

    @property
    def region(self) -> Region:
        """All of it."""
        return Region(self._pages.ctypes.data, self._pages.nbytes)


class PinnedMemory:
    """A page-aligned run of host memory that is never swapped and that the driver knows. Made by a backend of copies.

    Let go by ``close``, or with this object.
    """

    def __init__(self, region: Region, release: Callable[[], object], owner: object = None) -> None:
        """``release`` unpins the memory; called once, and not at the interpreter's exit.

        ``owner`` is whatever frees the memory when it goes, if ``release`` does not; it outlives the call of that.
        """
        self.region = region
        self._owner = owner
        self._release = weakref.finalize(self, release)
        self._release.atexit = False  # drivers are torn down by then, and the memory goes with the process

    def close(self) -> None:
        """Unpin and free the memory, which nobody uses any more: every batch over it is settled. Idempotent."""
        self._release()
        self._owner = None


class SlotPool:
    """A run of memory, of the host or of a device, cut into equal slots that threads borrow. Never touches the memory.

    Borrowing never waits: a borrower that gets nothing has another way, so that no slow peer can keep the others from
    theirs.
    """

    def __init__(self, region: Region, slots: int, owner: object) -> None:
        """Slots are whole pages, one after another from the start of ``region``; what is left at its end is not lent.

        ``owner`` is whatever frees the memory when it goes; the pool keeps it.

        Raises:
            ValueError: less than one page a slot.
        """
        slot_bytes = region.size // slots // mmap.PAGESIZE * mmap.PAGESIZE
        if slot_bytes <= 0:
            raise ValueError(
                f"{region.size} bytes cannot be cut into {slots} slots of at least one page ({mmap.PAGESIZE} bytes)"
            )
        self.region = region  # all of it, for registration with a transfer engine
        self.slot_bytes = slot_bytes
        self._owner = owner
        self._lock = threading.Lock()
        self._slots = frozenset(region.address + slot * slot_bytes for slot in range(slots))
        self._free = sorted(self._slots)
        self._lent: set[int] = set()

    @contextmanager
    def borrow(self) -> Iterator[int | None]:
        """The address of a slot for the time of a ``with`` block; None if all are lent out."""
        with self._lock:
            address = self._free.pop() if self._free else None
            if address is not None:
                self._lent.add(address)
        try:
            yield address
        finally:
            if address is not None:
                with self._lock:
                    self._lent.remove(address)
                    self._free.append(address)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every slot is free or lent to one borrower."""
        with self._lock:
            free = set(self._free)
            assert len(free) == len(self._free), "a slot is free twice"
            assert not free & self._lent, "a slot is free and lent at once"
            assert free | self._lent == self._slots, "a slot was lost, or is none of this pool"
