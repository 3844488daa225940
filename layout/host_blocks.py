"""Geometry of the host-memory tier: which memory a block consists of, and where its bytes lie in a host slot.

The tier is block-major: all bytes that one block id means in one cache group, over all layers, heads and parts that
this worker holds, are one dense *slot* of host memory. Slots are equal for all cache groups, so that a block of any
group fits into any slot:

    device (LBHNC)    layer 0 [block 0][block 1][block 2]..      layer 1 [block 0][block 1][block 2]..
    slot of block 1   [layer 0][layer 1][padding up to slot_bytes]

Compiled once for a worker's caches; for a batch of blocks, descriptors are then made with a few numpy operations.
Which slot holds which block, and the moving of bytes, are not decided here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from layout.copies import EMPTY, Copies, Int64Array, concatenate
from layout.geometry import CacheGroup, Plane, Region, WorkerGeometry

SLOT_ALIGNMENT = 64  # bytes: whole lines of memory are copied fastest, see transfer.local_copy.reshape

Ids = Sequence[int] | npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class BlockRuns:
    """The runs of memory of which every block of a cache group consists: as few as there can be, each byte once.

    Run r of block b is the ``sizes[r]`` bytes at ``starts[r] + b * strides[r]``; it lies ``offsets[r]`` bytes into a
    slot. Arrays of shape [n], int64; n is 0 where this worker holds no layer of the group. Runs of whole lines come
    first, so that they lie at whole lines of a slot; otherwise runs are in the order of their addresses.
    """

    blocks: int  # ids that a block of this group can have: 0 <= id < blocks
    starts: Int64Array  # address of each run in block 0
    strides: Int64Array  # bytes from one block to the next
    sizes: Int64Array
    offsets: Int64Array  # dense: where the runs before it end

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return int(self.sizes.sum())


@dataclass(frozen=True, slots=True, eq=False)
class HostLayout:
    """How one worker's blocks lie in host memory. Made by ``host_layout``; immutable, used by any thread."""

    slot_bytes: int  # a multiple of SLOT_ALIGNMENT; what a block of the largest group needs
    groups: tuple[BlockRuns, ...]

    def slots_in(self, size: int) -> int:
        """How many slots fit into ``size`` bytes."""
        return size // self.slot_bytes

    def stores(self, pool: Region, groups: int | Ids, blocks: Ids, slots: Ids) -> Copies:
        """Descriptors that copy blocks into slots, device to host: ``blocks[i]`` of its group into ``slots[i]``.

        Args:
            pool: the host memory, slot 0 at its start; best at a multiple of ``SLOT_ALIGNMENT``.
            groups: the cache group of each pair, or one number for all of them.
            blocks: block ids, shape [n], as in the group's block table. Arrays: converting lists takes longer than
                all the rest.
            slots: slot numbers, shape [n], each at most once in a store: nothing here looks for two blocks in one slot.

        Raises:
            IndexError: there is no such group, block or slot; nothing is returned for the others either.
            ValueError: the arguments differ in length.
        """
        loads = self.loads(pool, groups, blocks, slots)
        return Copies(loads.sources, loads.destinations, loads.sizes)

    def loads(self, pool: Region, groups: int | Ids, blocks: Ids, slots: Ids) -> Copies:
        """Descriptors that copy slots into blocks, host to device: ``slots[i]`` into ``blocks[i]`` of its group.

        Arguments and errors are those of ``stores``, with blocks in the part of slots: no block twice.
        """
        block_ids, slot_ids = np.asarray(blocks, np.int64), np.asarray(slots, np.int64)
        group_ids = np.asarray(groups, np.int64)
        if block_ids.shape != slot_ids.shape or group_ids.shape not in ((), block_ids.shape):
            raise ValueError(
                f"{block_ids.size} blocks, {slot_ids.size} slots and {group_ids.size} cache groups are given; they "
                "must be equally many (or one group for all)"
            )
        _check_ids(group_ids, len(self.groups), "cache group")
        _check_ids(slot_ids, self.slots_in(pool.size), "host slot")
        if not group_ids.ndim:
            return self._loads_of_group(int(group_ids), pool, block_ids, slot_ids)
        members = [np.flatnonzero(group_ids == group) for group in range(len(self.groups))]
        return concatenate(
            [
                self._loads_of_group(group, pool, block_ids[pairs], slot_ids[pairs])
                for group, pairs in enumerate(members)
                if len(pairs)
            ]
        )

    def _loads_of_group(self, group: int, pool: Region, blocks: Int64Array, slots: Int64Array) -> Copies:
        runs = self.groups[group]
        if not len(runs):
            return EMPTY
        _check_ids(blocks, runs.blocks, f"cache group {group}: block")
        joined = _joined_pairs(blocks, slots) if self._fills_slots(runs) else None
        if joined is not None:
            blocks, slots, counts = joined
            sizes = counts * self.slot_bytes
        else:
            sizes = np.tile(runs.sizes, len(blocks))
        device = np.multiply.outer(blocks, runs.strides) + runs.starts
        host = np.add.outer(slots * self.slot_bytes + pool.address, runs.offsets)
        return Copies(device.ravel(), host.ravel(), sizes)

    def _fills_slots(self, runs: BlockRuns) -> bool:
        """Whether neighbouring blocks in neighbouring slots are one run, on the device as in host memory.

        A run as large as a slot is the only one of its block.
        """
        return int(runs.sizes[0]) == int(runs.strides[0]) == self.slot_bytes


def host_layout(geometry: WorkerGeometry) -> HostLayout:
    """Where the blocks of a worker's caches lie in host memory. Reads no memory; takes milliseconds.

    Views that share all bytes of a run are moved once; bytes in gaps between planes never are. Cache groups may share
    memory, as a block id belongs to one of them at a time.

    Raises:
        ValueError: blocks of a group cannot be moved each on its own, or views of a block share some of their bytes:
            the message names the planes.
    """
    groups = tuple(_block_runs(group, f"cache group {number}") for number, group in enumerate(geometry.groups))
    largest = max((runs.block_bytes for runs in groups), default=0)
    return HostLayout(-(-max(largest, 1) // SLOT_ALIGNMENT) * SLOT_ALIGNMENT, groups)


@dataclass(frozen=True, slots=True, eq=False)
class _Spans:
    """Runs of memory in block 0, by stride and address. Arrays of shape [n], int64."""

    starts: Int64Array
    sizes: Int64Array
    strides: Int64Array  # bytes to the same run of the next block
    owners: Int64Array  # whose they are: the number of the (plane, layer) in the group

    @property
    def ends(self) -> Int64Array:
        return self.starts + self.sizes

    def take(self, index: Int64Array | npt.NDArray[np.bool_]) -> "_Spans":
        return _Spans(self.starts[index], self.sizes[index], self.strides[index], self.owners[index])

    def same_stride(self) -> npt.NDArray[np.bool_]:
        """Whether each span but the first has the stride of the one before it. Shape [n - 1]."""
        return np.asarray(self.strides[1:] == self.strides[:-1], np.bool_)


def _block_runs(group: CacheGroup, where: str) -> BlockRuns:
    if not group.planes:
        none = np.empty(0, np.int64)
        return BlockRuns(0, none, none, none, none)
    ratios = [_kernel_blocks(plane, group, where) for plane in group.planes]
    blocks = min(plane.blocks // ratio for plane, ratio in zip(group.planes, ratios, strict=True))
    pieces = _pieces(group, ratios, blocks, where)
    spans = _joined(pieces)
    _check_blocks(spans, pieces, blocks, group, where)
    order = np.lexsort((spans.starts, spans.sizes % SLOT_ALIGNMENT != 0))
    sizes = spans.sizes[order]
    return BlockRuns(blocks, spans.starts[order], spans.strides[order], sizes, np.cumsum(sizes) - sizes)


def _kernel_blocks(plane: Plane, group: CacheGroup, where: str) -> int:
    """Kernel blocks of a plane in one block of the group's table."""
    if group.block_tokens % plane.block_tokens:
        raise ValueError(
            f"{where}: kernel blocks of {plane.block_tokens} tokens (part {plane.part!r}) do not divide blocks of "
            f"{group.block_tokens} tokens"
        )
    return group.block_tokens // plane.block_tokens


def _pieces(group: CacheGroup, ratios: Sequence[int], blocks: int, where: str) -> _Spans:
    """The runs of every plane and layer in block 0, each once where views are of the same bytes."""
    spans, first_owner = [], 0
    for plane, ratio in zip(group.planes, ratios, strict=True):
        offsets, run = _layer_runs(plane, ratio, where)
        layers = np.arange(len(plane.layers), dtype=np.int64)
        starts = np.add.outer(plane.address + layers * plane.layer_stride, offsets).ravel()
        # With one block only, there is no next one, and the stride may be any number.
        strides = np.full(starts.shape, plane.block_stride * ratio if blocks > 1 else 0, np.int64)
        owners = np.repeat(first_owner + layers, len(offsets))
        spans.append(_Spans(starts, np.full(starts.shape, run, np.int64), strides, owners))
        first_owner += len(layers)
    together = _Spans(
        *(np.concatenate([getattr(part, name) for part in spans]) for name in ("starts", "sizes", "strides", "owners"))
    )
    pieces = together.take(np.lexsort((together.starts, together.strides)))
    again = pieces.same_stride() & (np.diff(pieces.starts) == 0) & (np.diff(pieces.sizes) == 0)
    pieces = pieces.take(np.concatenate(([True], ~again)))
    shared = pieces.same_stride() & (pieces.ends[:-1] > pieces.starts[1:])
    if shared.any():
        _refuse_views(int(np.argmax(shared)), pieces, group, where)
    return pieces


def _layer_runs(plane: Plane, ratio: int, where: str) -> tuple[Int64Array, int]:
    """Offsets, ascending, and size of the runs of one layer in block 0, from the layer's first element."""
    sizes_and_strides = (
        (plane.content, plane.content_stride),
        (plane.block_tokens, plane.token_stride),
        (plane.heads, plane.head_stride),
        (ratio, plane.block_stride),
    )
    # A stride of 0 makes more views of the same bytes, not more bytes.
    steps = sorted((stride, count) for count, stride in sizes_and_strides if count > 1 and stride)
    run = plane.item_size
    while steps and steps[0][0] == run:
        run *= steps.pop(0)[1]
    offsets = np.zeros(1, np.int64)
    for stride, count in steps:  # ascending, so that the offsets of a dense layout come out sorted
        offsets = np.add.outer(np.arange(count, dtype=np.int64) * stride, offsets).ravel()
    offsets.sort()
    if len(offsets) > 1 and int(np.diff(offsets).min()) < run:
        raise ValueError(
            f"{where}: elements of part {plane.part!r} of layer {plane.layers[0]!r} share some of their bytes: {ratio} "
            f"kernel blocks, {plane.heads} heads, {plane.block_tokens} tokens and {plane.content} items of "
            f"{plane.item_size} bytes have strides of {plane.block_stride}, {plane.head_stride}, {plane.token_stride} "
            f"and {plane.content_stride} bytes"
        )
    return offsets, run


def _joined(pieces: _Spans) -> _Spans:
    """Pieces that touch, in every block, as one; its owner is that of the first."""
    apart = ~pieces.same_stride() | (pieces.ends[:-1] != pieces.starts[1:])
    first = np.flatnonzero(np.concatenate(([True], apart)))
    joined = pieces.take(first)
    return _Spans(joined.starts, np.add.reduceat(pieces.sizes, first), joined.strides, joined.owners)


def _check_blocks(spans: _Spans, pieces: _Spans, blocks: int, group: CacheGroup, where: str) -> None:
    """Raise unless the bytes of every block are its own.

    Spans whose memory over all blocks lies apart from that of others need no look at single blocks; nor do those that
    come before the first of them comes again, in the next block. That is all of them in every sane layout.
    """
    if blocks <= 1:
        return
    spans = spans.take(np.argsort(spans.starts, kind="stable"))
    reach = np.maximum.accumulate(spans.ends + (blocks - 1) * spans.strides)
    first = np.flatnonzero(np.concatenate(([True], spans.starts[1:] >= reach[:-1])))
    last = np.concatenate((first[1:], [len(spans.starts)])) - 1
    strides = spans.strides[first]
    regular = np.minimum.reduceat(spans.strides, first) == np.maximum.reduceat(spans.strides, first)
    regular &= spans.ends[last] - spans.starts[first] <= strides
    for cluster in np.flatnonzero(~regular).tolist():
        members = np.arange(first[cluster], last[cluster] + 1)
        _check_every_block(spans.take(members), pieces, blocks, group, where)


def _check_every_block(spans: _Spans, pieces: _Spans, blocks: int, group: CacheGroup, where: str) -> None:
    """Raise if a byte belongs to two blocks, by looking at all spans of all blocks."""
    starts = np.multiply.outer(np.arange(blocks, dtype=np.int64), spans.strides) + spans.starts
    order = np.argsort(starts, axis=None, kind="stable")
    block, span = np.divmod(order, len(spans.starts))
    ascending = starts.ravel()[order]
    shared = ascending[:-1] + spans.sizes[span[:-1]] > ascending[1:]
    if not shared.any():
        return
    index = int(np.argmax(shared))
    address = int(ascending[index + 1])  # a byte that both have
    of = [
        f"block {block[at]} of {_owner(pieces, address, int(block[at]), int(spans.strides[span[at]]), group)}"
        for at in (index, index + 1)
    ]
    raise ValueError(
        f"{where}: {of[0]} and {of[1]} share the byte at {address:#x}; to be kept in host memory, blocks must have "
        "all of their bytes for themselves"
    )


def _owner(pieces: _Spans, address: int, block: int, stride: int, group: CacheGroup) -> str:
    """The plane and layer that has ``address`` in ``block``."""
    offset = address - block * stride
    holds = (pieces.starts <= offset) & (offset < pieces.ends) & (pieces.strides == stride)
    return _name(group, int(pieces.owners[np.argmax(holds)]))


def _refuse_views(index: int, pieces: _Spans, group: CacheGroup, where: str) -> NoReturn:
    one, other = (_name(group, int(pieces.owners[at])) for at in (index, index + 1))
    shared = min(int(pieces.ends[at]) for at in (index, index + 1)) - int(pieces.starts[index + 1])
    raise ValueError(
        f"{where}: {one} and {other} share {shared} bytes from {int(pieces.starts[index + 1]):#x} on, but not the "
        "bytes around them; to be kept in host memory, views of a block must share a run of bytes whole or not at all"
    )


def _name(group: CacheGroup, owner: int) -> str:
    names = [f"part {plane.part!r} of layer {layer!r}" for plane in group.planes for layer in plane.layers]
    return names[owner]


def _check_ids(ids: Int64Array, count: int, what: str) -> None:
    if not ids.size:
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= count:
        raise IndexError(f"{what} {low if low < 0 else high} does not exist: there are {count}, counted from 0")


def _joined_pairs(blocks: Int64Array, slots: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array] | None:
    """First block, first slot and length of every row of neighbouring blocks in neighbouring slots, as given.

    None where no two pairs are neighbours. Looking costs microseconds for thousands of pairs, and a pool that is still
    fresh hands out neighbours: thousands of descriptors become a few.
    """
    if len(blocks) < 2:
        return None
    apart = (np.diff(blocks) != 1) | (np.diff(slots) != 1)
    if apart.all():
        return None
    first = np.concatenate(([0], np.flatnonzero(apart) + 1))
    return blocks[first], slots[first], np.diff(np.concatenate((first, [len(blocks)])))
