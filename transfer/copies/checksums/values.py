"""Reads what caches hold of a request's tokens, in logical order, so that two caches can be compared by value.

Does not know what the bytes mean, and compares nothing.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from layout.geometry import Plane, Region
from layout.plan import BlockTable
from transfer.copies.checksums.block_checksums import BlockReader, ReadableBlocks, held_blocks, in_place
from transfer.memory import bytes_of

UInt8Array = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class PlaneValues:
    """What a plane holds of consecutive tokens of a request.

    Of an opaque plane, a token's row is its share of the block in the order of memory: no token's own content, but at
    the same place in every plane of the same packing.
    """

    data: UInt8Array  # [layers, tokens, heads, content * item_size]; 0 where a token is not held
    held: npt.NDArray[np.bool_]  # [tokens]


def read_values(
    plane: Plane, group_tokens: int, table: BlockTable, first_token: int, end_token: int, read: BlockReader = in_place
) -> PlaneValues:
    """Return what ``plane`` holds of the tokens ``first_token`` to ``end_token`` (exclusive) of a request.

    Tokens in holes of ``table``, whose blocks have ``group_tokens`` tokens, are not held. Neither are those of an
    opaque plane's blocks that the range cuts: where in such a block its tokens are, only the kernel knows. Of a
    compressed plane, the result has the rows of which all tokens are in the range in the place of tokens.

    Raises:
        PlanError: the table has no entry for a token, or the plane lacks a block.
    """
    if (tokens_per_row := plane.tokens_per_row) > 1:
        first, end = -(-first_token // tokens_per_row), end_token // tokens_per_row
        plane, group_tokens = replace(plane, tokens_per_row=1), group_tokens // tokens_per_row
        return read_values(plane, group_tokens, table, first, max(first, end), read)
    size = plane.block_tokens
    first, last = plane.tokens.before(np.array([first_token, end_token])).tolist()
    begin, end = (-(-first // size), last // size) if plane.packing else (first // size, -(-last // size))
    starts = np.arange(begin, max(begin, end), dtype=np.int64) * size
    tokens = max(0, end_token - first_token)
    values = PlaneValues(
        np.zeros((len(plane.layers), tokens, plane.heads, plane.content * plane.item_size), np.uint8),
        np.zeros(tokens, np.bool_),
    )
    for held, view in held_blocks(plane, group_tokens, table, starts, read):
        rows = _rows(view)
        for number, start in enumerate(held.tolist()):
            low, high = max(start, first), min(start + size, last)
            wanted = plane.tokens.tokens_at(np.arange(low, high)) - first_token
            values.data[:, wanted] = rows[:, number, low - start : high - start]
            values.held[wanted] = True
    return values


def _rows(view: ReadableBlocks) -> UInt8Array:
    """Return a copy of the blocks: [layers, blocks, tokens, heads, content * item_size]."""
    plane, blocks = view.plane, np.asarray(view.blocks, np.int64)
    shape = (len(plane.layers), plane.blocks, plane.block_tokens, plane.heads, plane.content, plane.item_size)
    strides = (plane.layer_stride, plane.block_stride, plane.token_stride, plane.head_stride, plane.content_stride, 1)
    first = bytes_of(Region(plane.address, plane.item_size))
    items = np.lib.stride_tricks.as_strided(first, shape, strides, writeable=False)
    return items[:, blocks].reshape(shape[0], len(blocks), *shape[2:4], plane.content * plane.item_size)
