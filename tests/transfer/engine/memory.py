"""Memory that engines read from and write to, filled so that every byte tells where it came from."""

import mmap
from collections.abc import Sequence

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
    def patterned(cls, size: int, seed: int) -> "Memory":
        memory = cls(size)
        memory.view[:] = pattern(size, seed)
        return memory


def pattern(size: int, seed: int) -> Bytes:
    """What a patterned memory of this seed holds; no byte is 0, so that untouched memory shows.

    It repeats after a prime number of bytes, so that no two blocks, pages or heads of it are equal.
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
