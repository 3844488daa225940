"""Host memory that transfers pass through: page aligned, one region to register, lent out in equal slots."""

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from layout.geometry import Region


class SlotPool:
    """One run of host memory, cut into ``slots`` equal parts that threads borrow.

    Pages take memory only once they are written to. Borrowing never waits: a borrower that gets nothing has another
    way, so that no slow peer can keep the others from theirs.
    """

    def __init__(self, total_bytes: int, slots: int) -> None:
        """Slots are whole pages.

        Raises:
            ValueError: less than one page a slot.
        """
        slot_bytes = total_bytes // slots // mmap.PAGESIZE * mmap.PAGESIZE
        if slot_bytes <= 0:
            raise ValueError(
                f"{total_bytes} bytes cannot be cut into {slots} slots of at least one page ({mmap.PAGESIZE} bytes)"
            )
        self.slot_bytes = slot_bytes
        # Not mmap itself: its pages stay until the last array that shows them has gone.
        self._memory = np.frombuffer(mmap.mmap(-1, slot_bytes * slots), np.uint8)
        self._lock = threading.Lock()
        self._free = [self.region.address + slot * slot_bytes for slot in range(slots)]

    @property
    def region(self) -> Region:
        """All slots, for registration with a transfer engine."""
        return Region(self._memory.ctypes.data, self._memory.nbytes)

    @contextmanager
    def borrow(self) -> Iterator[int | None]:
        """The address of a slot for the time of a ``with`` block; None if all are lent out."""
        with self._lock:
            address = self._free.pop() if self._free else None
        try:
            yield address
        finally:
            if address is not None:
                with self._lock:
                    self._free.append(address)
