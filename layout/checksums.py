"""Checksums of cached tokens by their logical place, so that they compare across any two geometries.

A checksum belongs to (layer, part, KV head, run of tokens). It is taken over the items as they mean, not as they lie:

    sum over tokens t and items i of   item[t, i] * ITEM_WEIGHT[i] * TOKEN_WEIGHT[t]     modulo 2**64

with an item of more than four bytes as several words. All weights are odd: one wrong item, however many of its bits,
always changes the sum. Several cancel each other by chance only. The weights are public: mistakes are found, not fraud.
Sums of neighbouring runs add up to the sum of both, which is how they are shortened for a message.

What a CPU kernel packs in an order of its own (an opaque plane) is summed as it lies, in whole blocks: it is moved
between equal packings only. Defined here; memory is read in ``transfer.local_copy.checksums``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from layout.geometry import Plane

UInt64Array = npt.NDArray[np.uint64]

#: Tokens of a run, where blocks can be cut: what divides nearly every block size. A checksum of so many tokens of one
#: head is 8 bytes for some thousands.
RUN_TOKENS = 16
_MAX_WORD_BYTES = 4  # products of two of them fit 64 bits, so that no bit of an item is lost


@dataclass(frozen=True, slots=True)
class PlaneSums:
    """The checksums of some tokens of a plane."""

    run_tokens: int
    first_run: int
    totals: UInt64Array  # [runs + 1, layers, heads]: the sum of all runs before each; blocks not held count as 0

    def between(self, borders: Sequence[int]) -> UInt64Array:
        """The sum of the runs that begin between each token of ``borders`` and the next, [borders - 1, layers, heads].

        ``borders`` ascend; runs that were not summed count as 0.
        """
        tokens = np.asarray(borders, np.int64)
        runs = np.clip(-(-tokens // self.run_tokens) - self.first_run, 0, len(self.totals) - 1)
        return np.asarray(self.totals[runs[1:]] - self.totals[runs[:-1]], np.uint64)


def run_tokens(plane: Plane) -> int:
    """The tokens whose checksum cannot be divided: a block where it is opaque, else some that divide it."""
    return plane.block_tokens if plane.packing else math.gcd(plane.block_tokens, RUN_TOKENS)


def word_bytes(plane: Plane) -> int:
    """Return the size of the words that an item of ``plane`` is summed in: 1, 2 or 4 bytes."""
    return math.gcd(plane.item_size, _MAX_WORD_BYTES)


def item_weights(count: int) -> npt.NDArray[np.uint32]:
    """Return the weights of a token's words: odd numbers of 32 bits, shape [count]."""
    mixed = mix(np.arange(count, dtype=np.uint64) + np.uint64(1 << 32))
    return np.asarray((mixed >> np.uint64(32)).astype(np.uint32) | np.uint32(1))


def mix(number: Any) -> Any:
    """SplitMix64: 64 bits that depend on all bits of ``number``. Of an array of uint64, or of one in compiled code."""
    number = (number + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    number = (number ^ (number >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    number = (number ^ (number >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return number ^ (number >> np.uint64(31))
