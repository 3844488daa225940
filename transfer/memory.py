"""Host memory that transfers use: plain, pinned for a device's copy engines, or lent out in equal slots."""

import ctypes
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from layout.geometry import Region
from transfer import numa

logger = logging.getLogger(__name__)


def warn_of_node(node: int, error: OSError) -> None:
    """Log that memory was not asked for on a NUMA node, and why: it is good all the same."""
    logger.warning("host memory is not placed on NUMA node %d: %s", node, error.strerror or error)


def is_readable(address: int) -> bool:
    """Return whether the kernel can send the byte at ``address`` for this process, by a socket or a pipe.

    It cannot if that is a device's memory, where the CPU does not reach it.
    """
    write = ctypes.CDLL(None).write
    write.argtypes, write.restype = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_ssize_t
    reading, writing = os.pipe()
    try:
        return bool(write(writing, address, 1) == 1)
    finally:
        os.close(reading)
        os.close(writing)


def bytes_of(region: Region) -> npt.NDArray[np.uint8]:
    """Return host memory as an array, valid as long as the memory is. Shape [bytes]."""
    return np.frombuffer(memoryview((ctypes.c_uint8 * region.size).from_address(region.address)), np.uint8)


class HostMemory:
    """A page-aligned range of host memory that lives as long as this object. Pages are allocated on first write."""

    def __init__(self, size: int, node: int | None = None) -> None:
        """Reserve ``size`` bytes, of NUMA node ``node`` as long as that has any; None: the kernel decides.

        What the kernel refuses is logged.

        Raises:
            ValueError: ``size`` is not positive.
        """
        if size <= 0:
            raise ValueError(f"the size of host memory must be positive, not {size} bytes")
        # An array, not the mmap itself: the pages then live until the last array over them is gone.
        self._pages = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        if node is not None:
            try:
                numa.prefer(self.region, node)
            except OSError as error:
                warn_of_node(node, error)

    @property
    def region(self) -> Region:
        """The whole range."""
        return Region(self._pages.ctypes.data, self._pages.nbytes)

    def allocate(self) -> None:
        """Let the system allocate all pages now, so that no later write waits for it. Overwrites nothing but zeros."""
        self._pages[:: mmap.PAGESIZE] |= 0


class PinnedMemory:
    """A page-aligned range of host memory that is pinned and known to the driver. Made by a copy backend.

    Freed by ``close``, or with this object.
    """

    def __init__(self, region: Region, release: Callable[[], object], owner: object = None) -> None:
        """Take over ``region``, which ``release`` unpins: called once, and not at interpreter exit.

        ``owner`` is kept until after ``release`` was called; it frees the memory if ``release`` does not.
        """
        self.region = region
        self._owner = owner
        self._release = weakref.finalize(self, release)
        self._release.atexit = False  # drivers are torn down by then, and the process frees the memory

    def close(self) -> None:
        """Unpin and free the memory. Every batch that uses it must be settled. Idempotent."""
        self._release()
        self._owner = None


class SlotPool:
    """Lends equal slots of host or device memory to threads. Never touches the memory.

    Borrowing waits no longer than it is told to: a borrower that gets no slot must have another way, so a slow peer
    cannot hold up the others for long.
    """

    def __init__(self, region: Region, slots: int, owner: object) -> None:
        """Cut ``region`` into ``slots`` slots of whole pages, from its start on; the remainder is not lent.

        ``owner`` is kept as long as the pool, because it frees the memory when it is garbage collected.

        Raises:
            ValueError: a slot would be smaller than a page.
        """
        slot_bytes = region.size // slots // mmap.PAGESIZE * mmap.PAGESIZE
        if slot_bytes <= 0:
            raise ValueError(
                f"{region.size} bytes cannot be cut into {slots} slots of at least one page ({mmap.PAGESIZE} bytes)"
            )
        self.region = region  # for registration with a transfer engine
        self.slot_bytes = slot_bytes
        self._owner = owner
        self._lock = threading.Condition()  # notified when a slot is free again
        self._slots = frozenset(region.address + slot * slot_bytes for slot in range(slots))
        self._free = sorted(self._slots)
        self._lent: set[int] = set()

    @contextmanager
    def borrow(self, patience_s: float = 0.0) -> Iterator[int | None]:
        """Lend a slot for the duration of a ``with`` block.

        Yields its address, or None if all are still lent out after ``patience_s`` seconds.
        """
        with self._lock:
            if not self._free and patience_s > 0:
                self._lock.wait_for(lambda: self._free, patience_s)
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
                    self._lock.notify()

    def check_integrity(self) -> None:
        """Raise AssertionError unless every slot is free or lent to one borrower."""
        with self._lock:
            free = set(self._free)
            assert len(free) == len(self._free), "a slot is free twice"
            assert not free & self._lent, "a slot is free and lent at once"
            assert free | self._lent == self._slots, "a slot was lost, or does not belong to this pool"
