"""Memory of this process for tests to copy from and to, filled so that every byte tells where it came from."""

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from layout.copies import Copies
from layout.geometry import Region

Bytes = npt.NDArray[np.uint8]


class Memory:
    """A page-aligned buffer of this process. ``view`` is its bytes."""

    def __init__(self, size: int) -> None:
        self.view: Bytes = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        self.region = Region(self.view.ctypes.data, size)

    @classmethod
    def of_noise(cls, size: int, seed: int) -> "Memory":
        memory = cls(size)
        memory.view[:] = noise(size, seed)
        return memory


@contextmanager
def out_of_reach(region: Region) -> Iterator[None]:
    """The CPU cannot touch these whole pages, as it cannot touch a device's memory."""
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    assert protect(region.address, region.size, 0) == 0
    try:
        yield
    finally:
        assert protect(region.address, region.size, mmap.PROT_READ | mmap.PROT_WRITE) == 0


def noise(size: int, seed: int = 0) -> Bytes:
    """Random bytes, the same for the same seed; none is 0, so that untouched memory shows.

    They repeat after a prime number of bytes, so that no two blocks, pages or heads of them are equal.
    """
    period = np.random.default_rng(seed).integers(1, 256, 65537, np.uint8)
    return np.resize(period, size)


def copies(destination: Region, source: Region, runs: Sequence[tuple[int, int, int]]) -> Copies:
    """Descriptors from (destination offset, source offset, bytes)."""
    table = np.array(runs, np.int64).reshape(-1, 3)
    return Copies(destination.address + table[:, 0], source.address + table[:, 1], table[:, 2].copy())


def even_copies(destination: Region, source: Region, count: int, size: int) -> Copies:
    """``count`` runs of ``size`` bytes, back to back on both sides."""
    offsets = np.arange(count, dtype=np.int64) * size
    return Copies(destination.address + offsets, source.address + offsets, np.full(count, size, np.int64))


def shuffled_copies(target: int, source: int, count: int, size: int) -> tuple[Copies, npt.NDArray[np.int64]]:
    """``count`` blocks of ``size`` bytes, each to another place; and from which place each comes."""
    places = np.random.default_rng(count).permutation(count)
    return Copies(target + np.arange(count) * size, source + places * size, np.full(count, size)), places


def one_copy(target: int, source: int, size: int) -> Copies:
    return Copies(np.array([target]), np.array([source]), np.array([size]))


def whole_copy(target: Bytes, source: Bytes) -> Copies:
    """All of an array in one copy."""
    return one_copy(target.ctypes.data, source.ctypes.data, source.nbytes)
