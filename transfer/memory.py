"""Memory that transfers pass through: a run of it on the host, and any run of it lent out in equal slots."""

import mmap
import threading
from collections.abc import Iterator
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
