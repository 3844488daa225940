"""Determines how CPU attention kernels order the items of a head's block, by writing marks and finding them again.

A CPU kernel stores K and V of one (layer, block, head) in an order that suits its instruction set, which one small
write on this machine reveals. If K and V are strided in it, a block can be cut by token and converted to any other
form. If not, the block is opaque: it moves whole, and only to the same order.

This module uses arithmetic and torch only. ``kernels`` calls the kernels.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import numpy as np
import numpy.typing as npt
import torch

from layout.copies import Int64Array

#: Marks are written digit by digit. The digits 0 to 7 are exact in every cache data type.
_BASE = 8

#: Stores keys and values, each [tokens, 1, head_size], into block 0 of a cache [1, 1, tokens, 2 * head_size].
Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


class UnknownOrderError(RuntimeError):
    """The kernel does not store each item of K and V in a place of its own."""


@dataclass(frozen=True, slots=True)
class StridedPart:
    """K or V inside a head's block: item (token, content) lies at ``offset + token * token_stride + content *
    content_stride`` items from the block's first."""

    offset: int
    token_stride: int
    content_stride: int


@dataclass(frozen=True, slots=True)
class HeadOrder:
    """Where a kernel puts K and V in a head's block. Both are None if either of the two is not strided."""

    packing: str  # equal names mean equal orders
    key: StridedPart | None
    value: StridedPart | None


def find_order(
    write: Write, block_tokens: int, head_size: int, dtype: torch.dtype, cache_dtype: torch.dtype
) -> HeadOrder:
    """Return the order in which ``write`` stores keys and values of ``dtype`` in a cache of ``cache_dtype``.

    Raises:
        UnknownOrderError: an item is stored nowhere, twice, or changed beyond recognition.
    """
    half = block_tokens * head_size

    def stored(digits: Int64Array) -> npt.NDArray[np.uint8]:
        """Write ``digits`` [2 * half]; return what each place holds then, [2 * half, bytes of an item]."""
        items = torch.from_numpy(digits).to(device="cpu", dtype=dtype).view(2, block_tokens, 1, head_size)
        cache = torch.zeros(1, 1, block_tokens, 2 * head_size, dtype=cache_dtype, device="cpu")
        write(items[0], items[1], cache)
        return np.asarray(cache.view(torch.uint8).numpy().reshape(2 * half, -1), np.uint8)

    constants = [stored(np.full(2 * half, digit, np.int64)) for digit in range(_BASE)]
    seen = np.zeros(2 * half, np.int64)  # index of the item at each place
    for power in count():
        if _BASE**power >= 2 * half:
            break
        digits = stored(np.arange(2 * half) // _BASE**power % _BASE)
        matches = np.stack([(digits == constant).all(axis=1) for constant in constants])
        if (matches.sum(axis=0) != 1).any():
            raise UnknownOrderError("the kernel's cache does not keep the numbers 0 to 7 apart")
        seen += matches.argmax(axis=0) * _BASE**power
    if not np.array_equal(np.sort(seen), np.arange(2 * half)):
        raise UnknownOrderError("the kernel does not store each item of K and V exactly once")
    places = np.argsort(seen).reshape(2, block_tokens, head_size)  # of each item of K, then of V
    key, value = _strided(places[0]), _strided(places[1])
    both = key is not None and value is not None
    digest = hashlib.blake2b(places.astype("<i8").tobytes(), digest_size=4).hexdigest()
    return HeadOrder(f"cpu-{digest}", key if both else None, value if both else None)


def _strided(places: Int64Array) -> StridedPart | None:
    """Return the strides of ``places`` [tokens, content]; None if it is not strided."""
    tokens, content = places.shape
    first = int(places[0, 0])
    token_stride = int(places[1, 0]) - first if tokens > 1 else content
    content_stride = int(places[0, 1]) - first if content > 1 else 1
    expected = first + np.add.outer(np.arange(tokens) * token_stride, np.arange(content) * content_stride)
    return StridedPart(first, token_stride, content_stride) if np.array_equal(places, expected) else None
