"""Computes checksums, as ``layout.checksums`` defines them, of blocks in memory that the CPU can read.

Does not keep, compare or send them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, njit, types
from numba.extending import intrinsic

from layout.checksums import PlaneSums, UInt64Array, item_weights, mix, run_tokens, word_bytes
from layout.copies import Int64Array
from layout.geometry import Plane
from layout.plan import BlockTable, PlanError

#: Bytes of a plane that are read at once, and so the most that a caller who must stop has to wait for.
CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class ReadableBlocks:
    """Blocks of a plane in memory that the CPU can read, valid as long as this object lives."""

    plane: Plane  # the same contents, perhaps at another address
    blocks: Int64Array  # the requested blocks, as numbers in ``plane``
    owner: object = None  # keeps the memory alive


class BlockReader(Protocol):
    """Makes blocks of a plane readable for the CPU."""

    def __call__(self, plane: Plane, blocks: Int64Array, /) -> ReadableBlocks:
        """Return the kernel blocks ``blocks``, in total at most about ``CHUNK_BYTES``."""


def in_place(plane: Plane, blocks: Int64Array) -> ReadableBlocks:
    """Return the blocks as they are: the reader for caches in host memory."""
    return ReadableBlocks(plane, blocks)


def sum_plane(
    plane: Plane, group_tokens: int, table: BlockTable, first_token: int, end_token: int, read: BlockReader = in_place
) -> PlaneSums:
    """Return the checksums of the tokens ``first_token`` to ``end_token`` (exclusive) of a request.

    Only tokens before ``end_token`` count in the last run, except that an opaque plane is summed in whole blocks, and a
    compressed one in whole rows. Runs in holes of ``table``, whose blocks have ``group_tokens`` tokens, count as 0.
    Releases the GIL while it sums.

    Raises:
        PlanError: the first of the tokens, if there are any, does not start a run, the table has no entry for a token,
            or the plane lacks a block.
    """
    run, of_row = run_tokens(plane), plane.tokens_per_row
    first, end = plane.tokens.before(np.array([first_token, end_token])).tolist()
    if first % run and first < end:
        raise PlanError(f"checksums cover runs of {run} tokens and cannot start at token {first_token}")
    rows = replace(plane, tokens_per_row=1)
    sums = _sum_rows(rows, group_tokens // of_row, table, (first // of_row, -(-end // of_row)), run // of_row, read)
    return replace(sums, run_tokens=run)


def _sum_rows(
    plane: Plane, group_rows: int, table: BlockTable, window: tuple[int, int], run: int, read: BlockReader
) -> PlaneSums:
    """Return the sums of a window of rows, the first of which begins a run, in runs of so many rows."""
    first, end = window
    end = -(-end // run) * run if plane.packing else end
    first_run = first // run
    sums = np.zeros((-(-end // run) - first_run + 1, len(plane.layers), plane.heads), np.uint64)
    starts = np.arange(first // plane.block_tokens * plane.block_tokens, end, plane.block_tokens, dtype=np.int64)
    for held, view in held_blocks(plane, group_rows, table, starts, read):
        _add(view, held, (first, end), (run, first_run), sums[1:])
    return PlaneSums(run, first_run, np.cumsum(sums, axis=0, dtype=np.uint64), plane.tokens)


def sum_states(plane: Plane, table: BlockTable, read: BlockReader = in_place) -> PlaneSums:
    """Return the checksums of the states in the blocks of ``table``, a run for each entry; holes count as 0.

    The sum of a state does not depend on its entry. Entries before the first state and behind the last take no memory:
    a table of thousands may have one. Releases the GIL while it sums.

    Raises:
        PlanError: the plane lacks a block.
    """
    held = np.flatnonzero(table.block_ids >= 0).tolist()
    first, end = (held[0], held[-1] + 1) if held else (0, 0)
    sums = np.zeros((end - first + 1, len(plane.layers), plane.heads), np.uint64)
    for entry in held:
        one = BlockTable.of(table.block_ids[entry : entry + 1])
        sums[1 + entry - first] = sum_plane(plane, plane.block_tokens, one, 0, plane.block_tokens, read).totals[-1]
    return PlaneSums(1, first, np.cumsum(sums, axis=0, dtype=np.uint64))


def warm_up(planes: Sequence[Plane]) -> None:
    """Compile the loops of ``sum_plane`` for such planes, which takes a second or two, so that no pull waits for it."""
    nothing = np.empty(0, np.int64)
    for plane in {word_bytes(plane): plane for plane in planes}.values():
        _add(ReadableBlocks(plane, nothing), nothing, (0, 0), (1, 0), np.zeros((1, 1, 1), np.uint64))


def held_blocks(
    plane: Plane, group_tokens: int, table: BlockTable, starts: Int64Array, read: BlockReader
) -> Iterator[tuple[Int64Array, ReadableBlocks]]:
    """Read the plane's blocks that begin at ``starts``, some at a time; yield their starts with them. Leave out holes.

    Starts are places among the tokens that the plane holds: these tokens, if it holds all.
    """
    rows = group_tokens // plane.tokens.ranks
    entries = starts // rows - table.first_block
    if len(entries) and not (entries[0] >= 0 and entries[-1] < len(table.block_ids)):
        raise PlanError(
            f"a block table of {len(table.block_ids)} blocks of {rows} tokens has none for tokens "
            f"{int(starts[0])} to {int(starts[-1])}"
        )
    ids = table.block_ids[entries]
    starts, ids = starts[ids >= 0], ids[ids >= 0]
    blocks = ids * (rows // plane.block_tokens) + starts % rows // plane.block_tokens
    if len(blocks) and int(blocks.max()) >= plane.blocks:
        raise PlanError(f"block {int(blocks.max())} does not exist: part {plane.part!r} has {plane.blocks} blocks")
    step = max(1, CHUNK_BYTES // max(1, plane.block_bytes))
    for chunk in range(0, len(blocks), step):
        yield starts[chunk : chunk + step], read(plane, blocks[chunk : chunk + step])


def _add(
    view: ReadableBlocks, starts: Int64Array, window: tuple[int, int], runs: tuple[int, int], sums: UInt64Array
) -> None:
    """Add the rows of ``window`` in these blocks to ``sums``. Block i begins at place ``starts[i]``.

    ``runs``: rows of a run, and the number of the run that is the first of ``sums``.
    """
    plane, word = view.plane, word_bytes(view.plane)
    words = plane.item_size // word
    items_apart = plane.block_tokens > 1 and plane.content > 1 and plane.content_stride > plane.token_stride
    strides = (plane.layer_stride, plane.block_stride, plane.head_stride, plane.token_stride, plane.content_stride)
    _add_blocks(
        _WORDS[word],
        plane.address,
        strides,
        (plane.block_tokens, words, *runs, int(items_apart)),
        (plane.tokens.interleave, plane.tokens.ranks, plane.tokens.rank),
        window,
        np.ascontiguousarray(view.blocks, np.int64),
        np.ascontiguousarray(starts, np.int64),
        item_weights(plane.content * words),
        sums,
    )


def _emit_words_at(_typing: Any, _address: Any, like: Any) -> Any:
    """Emit ``_words_at(address, like)``, which returns a pointer to words of the type that the array ``like`` has."""

    def emit(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(like.dtype.bitwidth).as_pointer())

    return types.CPointer(like.dtype)(types.int64, like), emit


def _add_loop(
    like: Any, address: Any, strides: Any, form: Any, split: Any, window: Any, blocks: Any, starts: Any, weights: Any,
    sums: Any,
) -> None:  # fmt: skip
    layer_stride, block_stride, head_stride, token_stride, item_stride = strides
    block_tokens, words, run, first_run, items_apart = form
    interleave, ranks, rank = split
    totals, token_weights = np.empty(block_tokens, np.uint64), np.empty(block_tokens, np.uint64)
    for number in range(blocks.size):
        start = starts[number]
        begin, end = max(window[0] - start, 0), min(window[1] - start, block_tokens)
        for inside in range(begin, end):
            turn, rest = divmod(start + inside, interleave)
            token = (turn * ranks + rank) * interleave + rest if ranks > 1 else start + inside
            token_weights[inside] = _compiled_mix(np.uint64(token)) | np.uint64(1)
        for layer in range(sums.shape[1]):
            for head in range(sums.shape[2]):
                place = address + layer * layer_stride + blocks[number] * block_stride + head * head_stride
                if items_apart:
                    _by_item(like, place, token_stride, item_stride, words, begin, end, weights, totals)
                else:
                    _by_token(like, place, token_stride, item_stride, words, begin, end, weights, totals)
                for inside in range(begin, end):
                    sums[(start + inside) // run - first_run, layer, head] += totals[inside] * token_weights[inside]


def _by_token_loop(
    like: Any, place: Any, token_stride: Any, item_stride: Any, words: Any, begin: Any, end: Any, weights: Any,
    totals: Any,
) -> None:  # fmt: skip
    """Sum tokens whose items lie closer together than neighbouring tokens."""
    step = item_stride // like.itemsize if weights.size > words else words
    for inside in range(begin, end):
        row = carray(_words_at(place + inside * token_stride, like), ((weights.size // words - 1) * step + words,))
        total = np.uint64(0)
        if step == words:
            for i in range(weights.size):
                total += np.uint64(row[i]) * np.uint64(weights[i])
        else:
            for i in range(weights.size):
                total += np.uint64(row[i // words * step + i % words]) * np.uint64(weights[i])
        totals[inside] = total


def _by_item_loop(
    like: Any, place: Any, token_stride: Any, item_stride: Any, words: Any, begin: Any, end: Any, weights: Any,
    totals: Any,
) -> None:  # fmt: skip
    """Sum tokens that lie closer together than the items of a token, item by item."""
    step = token_stride // like.itemsize
    totals[begin:end] = 0
    for i in range(weights.size):
        first = place + i // words * item_stride + i % words * like.itemsize
        row = carray(_words_at(first, like), ((end - 1) * step + 1,))
        weight = np.uint64(weights[i])
        if step == 1:
            for inside in range(begin, end):
                totals[inside] += np.uint64(row[inside]) * weight
        else:
            for inside in range(begin, end):
                totals[inside] += np.uint64(row[inside * step]) * weight


_compile = njit(nogil=True)  # compiles at the first call, once per process
_compiled_mix, _words_at = _compile(mix), intrinsic(_emit_words_at)
_by_token, _by_item, _add_blocks = (_compile(loop) for loop in (_by_token_loop, _by_item_loop, _add_loop))
#: For each size of a word, an array of such words, by whose type the loops are compiled.
_WORDS = {size: np.empty(0, f"u{size}") for size in (1, 2, 4)}
