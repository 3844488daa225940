"""Blocks of noise, and batches that move them to other places."""

import numpy as np
import numpy.typing as npt

from layout.copies import Copies

Bytes = npt.NDArray[np.uint8]
WAIT_S = 20.0


def noise(size: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(1, 256, size, np.uint8)


def shuffled(target: int, source: int, count: int, size: int) -> tuple[Copies, npt.NDArray[np.int64]]:
    """``count`` blocks of ``size`` bytes, each to another place; and from which place each comes."""
    places = np.random.default_rng(count).permutation(count)
    return Copies(target + np.arange(count) * size, source + places * size, np.full(count, size)), places


def one(target: Bytes, source: Bytes) -> Copies:
    """All of an array in one copy."""
    return Copies(np.array([target.ctypes.data]), np.array([source.ctypes.data]), np.array([source.nbytes]))
