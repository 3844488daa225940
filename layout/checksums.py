"""Checksums of cached tokens by logical position, comparable across any two geometries.

A checksum belongs to (layer, part, KV head, run of tokens). It covers the items in logical order, not in memory order:

    sum over tokens t and items i of   item[t, i] * ITEM_WEIGHT[i] * TOKEN_WEIGHT[t]     modulo 2**64

An item of more than four bytes counts as several words. All weights are odd, so one wrong word always changes the sum,
however many of its bits are wrong. Several wrong words cancel out only by chance. The weights are public: checksums
detect mistakes, not tampering. Sums of neighbouring runs add up to the sum of both, so a message can carry fewer.

Where ranks share a request's tokens (``layout.context_parallel``), a plane's runs are of the tokens that it holds, so
that a run may have gaps, and the sums of ranks that hold other tokens add up, too.

An opaque plane, which a CPU kernel packs in its own order, is summed in memory order and in whole blocks: it is only
moved between equal packings. Of a compressed plane, rows count in the place of tokens. This module defines the sums;
``transfer.copies.checksums`` reads the memory.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from layout.context_parallel import WHOLE, TokenSplit
from layout.copies import OwnArrays
from layout.geometry import Plane

UInt64Array = npt.NDArray[np.uint64]

#: Tokens of a run, where a block can be cut. It divides nearly every block size. One checksum is 8 bytes, for some
#: thousands of bytes of one head.
RUN_TOKENS = 16
_MAX_WORD_BYTES = 4  # the product of two such words fits 64 bits, so no bit of an item is lost


@dataclass(frozen=True, slots=True)
class PlaneSums(OwnArrays):
    """Checksums of a range of tokens of one plane, in runs of tokens that it holds."""

    run_tokens: int
    first_run: int
    totals: UInt64Array  # [runs + 1, layers, heads]: the sum of all runs before each; blocks not held count as 0
    split: TokenSplit = WHOLE  # which tokens are held

    def between(self, borders: Sequence[int]) -> UInt64Array:
        """Return the sums of the runs that begin between neighbouring ``borders``. Shape [borders - 1, layers, heads].

        ``borders`` are token numbers in ascending order. Runs that were not summed count as 0.
        """
        places = self.split.before(np.asarray(borders, np.int64))
        runs = np.clip(-(-places // self.run_tokens) - self.first_run, 0, len(self.totals) - 1)
        return np.asarray(self.totals[runs[1:]] - self.totals[runs[:-1]], np.uint64)


def run_tokens(plane: Plane) -> int:
    """Return the number of tokens in a run: the whole block of an opaque plane, else a divisor of the block size."""
    rows = math.gcd(plane.block_tokens, max(1, RUN_TOKENS // plane.tokens_per_row))
    return (plane.block_tokens if plane.packing else rows) * plane.tokens_per_row


def word_bytes(plane: Plane) -> int:
    """Return the size in bytes of the words that an item of ``plane`` is summed in: 1, 2 or 4."""
    return math.gcd(plane.item_size, _MAX_WORD_BYTES)


def item_weights(count: int) -> npt.NDArray[np.uint32]:
    """Return the weights of the words of one token: odd 32-bit numbers, shape [count]."""
    mixed = mix(np.arange(count, dtype=np.uint64) + np.uint64(1 << 32))
    return np.asarray((mixed >> np.uint64(32)).astype(np.uint32) | np.uint32(1))


def mix(number: Any) -> Any:
    """Return SplitMix64 of a uint64 array, or of one uint64 in compiled code: each result bit depends on all bits."""
    number = (number + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    number = (number ^ (number >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    number = (number ^ (number >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return number ^ (number >> np.uint64(31))
