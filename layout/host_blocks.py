"""Geometry of the host-memory tier: which device memory makes up a block, and where its bytes lie in a host slot.

The tier is block-major: all bytes of one block id in one cache group, over the layers, heads and parts that this worker
holds, fill one dense *slot* of host memory. All slots have the same size, so a block of any group fits into any slot:

    device (LBHNC)    layer 0 [block 0][block 1][block 2]..      layer 1 [block 0][block 1][block 2]..
    slot of block 1   [layer 0][layer 1][padding up to slot_bytes]

The layout is compiled once for a worker's caches. A few numpy operations then make the descriptors of a batch of
blocks. This module does not decide which slot holds which block, and moves no bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from layout.copies import EMPTY, Copies, Int64Array, concatenate
from layout.geometry import CacheGroup, Plane, Region, WorkerGeometry

SLOT_ALIGNMENT = 64  # bytes: whole cache lines are copied fastest, see transfer.copies.reshape.reshape

Ids = Sequence[int] | npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class BlockRuns:
    """The fewest runs of memory that make up a block of a cache group, each byte once.

    Run r of block b is the ``sizes[r]`` bytes at ``starts[r] + b * strides[r]``; it lies ``offsets[r]`` bytes into a
    slot. Arrays of shape [n], int64; n is 0 if this worker holds no layer of the group. Runs of whole cache lines come
    first, so that they start at whole lines of a slot; apart from that, runs are in address order.
    """

    blocks: int  # block ids of this group: 0 <= id < blocks
    starts: Int64Array  # address of each run in block 0
    strides: Int64Array  # bytes from one block to the next
    sizes: Int64Array
    offsets: Int64Array  # each is the sum of the sizes before it

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return int(self.sizes.sum())


@dataclass(frozen=True, slots=True, eq=False)
class HostLayout:
    """The layout of one worker's blocks in host memory. Made by ``host_layout``; immutable, safe for any thread."""

    slot_bytes: int  # a multiple of SLOT_ALIGNMENT that holds a block of the largest group
    groups: tuple[BlockRuns, ...]
    regions: tuple[Region, ...]  # the memory in which the blocks lie

    def slots_in(self, size: int) -> int:
        """Return how many slots fit into ``size`` bytes."""
        return size // self.slot_bytes

    def stores(self, pool: Region, groups: int | Ids, blocks: Ids, slots: Ids) -> Copies:
        """Return the descriptors that store ``blocks[i]`` in ``slots[i]``, device to host.

        Args:
            pool: the host memory, with slot 0 at its start; fastest at a multiple of ``SLOT_ALIGNMENT``.
            groups: the cache group of each pair, or one number for all pairs.
            blocks: block ids, shape [n], as in the group's block table. Pass arrays: converting lists takes longer
                than everything else.
            slots: slot numbers, shape [n]. No slot may occur twice; this is not checked.

        Raises:
            IndexError: a group, block or slot does not exist. Nothing is returned, not even for the other pairs.
            ValueError: the arguments differ in length.
        """
        loads = self.loads(pool, groups, blocks, slots)
        return Copies(loads.sources, loads.destinations, loads.sizes)

    def loads(self, pool: Region, groups: int | Ids, blocks: Ids, slots: Ids) -> Copies:
        """Return the descriptors that load ``slots[i]`` into ``blocks[i]``, host to device.

        Arguments and errors are those of ``stores``, except that it is blocks that may not occur twice.
        """
        block_ids, slot_ids = np.asarray(blocks, np.int64), np.asarray(slots, np.int64)
        group_ids = np.asarray(groups, np.int64)
        if block_ids.shape != slot_ids.shape or group_ids.shape not in ((), block_ids.shape):
            raise ValueError(
                f"{block_ids.size} blocks, {slot_ids.size} slots and {group_ids.size} cache groups are given; their "
                "numbers must be equal (or give one group for all)"
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
        joined = _join_pairs(blocks, slots) if self._fills_slots(runs) else None
        if joined is not None:
            blocks, slots, counts = joined
            sizes = counts * self.slot_bytes
        else:
            sizes = np.tile(runs.sizes, len(blocks))
        device = np.multiply.outer(blocks, runs.strides) + runs.starts
        host = np.add.outer(slots * self.slot_bytes + pool.address, runs.offsets)
        return Copies(device.ravel(), host.ravel(), sizes)

    def _fills_slots(self, runs: BlockRuns) -> bool:
        """Return whether neighbouring blocks in neighbouring slots form one run, on the device and in host memory.

        This needs blocks that are a single run as large as a slot.
        """
        return int(runs.sizes[0]) == int(runs.strides[0]) == self.slot_bytes


def host_layout(geometry: WorkerGeometry) -> HostLayout:
    """Return the host-memory layout of a worker's blocks. Reads no memory; takes milliseconds.

    A run that several views share completely is moved once; gaps between planes are never moved. Cache groups may share
    memory, because a block id belongs to one group at a time.

    Raises:
        ValueError: two blocks share bytes, or views of a block share only some of their bytes. Names the planes.
    """
    groups = tuple(_block_runs(group, f"cache group {number}") for number, group in enumerate(geometry.groups))
    largest = max((runs.block_bytes for runs in groups), default=0)
    return HostLayout(-(-max(largest, 1) // SLOT_ALIGNMENT) * SLOT_ALIGNMENT, groups, geometry.regions)


@dataclass(frozen=True, slots=True, eq=False)
class _Spans:
    """Runs of memory in block 0, ordered by stride and address. Arrays of shape [n], int64."""

    starts: Int64Array
    sizes: Int64Array
    strides: Int64Array  # bytes to the same run of the next block
    owners: Int64Array  # index of the (plane, layer) in the group

    @property
    def ends(self) -> Int64Array:
        return self.starts + self.sizes

    def take(self, index: Int64Array | npt.NDArray[np.bool_]) -> "_Spans":
        return _Spans(self.starts[index], self.sizes[index], self.strides[index], self.owners[index])

    def same_stride(self) -> npt.NDArray[np.bool_]:
        """Return whether each span but the first has the stride of the one before it. Shape [n - 1]."""
        return np.asarray(self.strides[1:] == self.strides[:-1], np.bool_)


def _block_runs(group: CacheGroup, where: str) -> BlockRuns:
    if not group.planes:
        none = np.empty(0, np.int64)
        return BlockRuns(0, none, none, none, none)
    ratios = [_kernel_blocks_per_block(plane, group, where) for plane in group.planes]
    blocks = min(plane.blocks // ratio for plane, ratio in zip(group.planes, ratios, strict=True))
    pieces = _pieces(group, ratios, blocks, where)
    spans = _join_touching(pieces)
    _check_blocks(spans, pieces, blocks, group, where)
    order = np.lexsort((spans.starts, spans.sizes % SLOT_ALIGNMENT != 0))
    sizes = spans.sizes[order]
    return BlockRuns(blocks, spans.starts[order], spans.strides[order], sizes, np.cumsum(sizes) - sizes)


def _kernel_blocks_per_block(plane: Plane, group: CacheGroup, where: str) -> int:
    """Return the number of kernel blocks of ``plane`` in one block of the group's block table."""
    if group.rows(plane) % plane.block_tokens:
        raise ValueError(
            f"{where}: kernel blocks of {plane.block_tokens} tokens (part {plane.part!r}) do not divide blocks of "
            f"{group.block_tokens} tokens"
        )
    return group.rows(plane) // plane.block_tokens


def _pieces(group: CacheGroup, ratios: Sequence[int], blocks: int, where: str) -> _Spans:
    """Return the runs of every plane and layer in block 0, those that several views share only once."""
    spans, first_owner = [], 0
    for plane, ratio in zip(group.planes, ratios, strict=True):
        offsets, run = _layer_runs(plane, ratio, where)
        layers = np.arange(len(plane.layers), dtype=np.int64)
        starts = np.add.outer(plane.address + layers * plane.layer_stride, offsets).ravel()
        # With a single block there is no next one, and the stride may be any number.
        strides = np.full(starts.shape, plane.block_stride * ratio if blocks > 1 else 0, np.int64)
        owners = np.repeat(first_owner + layers, len(offsets))
        spans.append(_Spans(starts, np.full(starts.shape, run, np.int64), strides, owners))
        first_owner += len(layers)
    together = _Spans(
        *(np.concatenate([getattr(part, name) for part in spans]) for name in ("starts", "sizes", "strides", "owners"))
    )
    pieces = together.take(np.lexsort((together.starts, together.strides)))
    repeated = pieces.same_stride() & (np.diff(pieces.starts) == 0) & (np.diff(pieces.sizes) == 0)
    pieces = pieces.take(np.concatenate(([True], ~repeated)))
    overlaps = pieces.same_stride() & (pieces.ends[:-1] > pieces.starts[1:])
    if overlaps.any():
        _raise_views_overlap(int(np.argmax(overlaps)), pieces, group, where)
    return pieces


def _layer_runs(plane: Plane, ratio: int, where: str) -> tuple[Int64Array, int]:
    """Return the offsets (ascending, from the layer's first item) and the size of one layer's runs in block 0."""
    sizes_and_strides = (
        (plane.content, plane.content_stride),
        (plane.block_tokens, plane.token_stride),
        (plane.heads, plane.head_stride),
        (ratio, plane.block_stride),
    )
    # A stride of 0 repeats the same bytes and adds none.
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


def _join_touching(pieces: _Spans) -> _Spans:
    """Join pieces that touch in every block. The owner of the first piece owns the result."""
    apart = ~pieces.same_stride() | (pieces.ends[:-1] != pieces.starts[1:])
    first = np.flatnonzero(np.concatenate(([True], apart)))
    joined = pieces.take(first)
    return _Spans(joined.starts, np.add.reduceat(pieces.sizes, first), joined.strides, joined.owners)


def _check_blocks(spans: _Spans, pieces: _Spans, blocks: int, group: CacheGroup, where: str) -> None:
    """Raise if two blocks share bytes.

    Spans are grouped into clusters whose memory, over all blocks, lies apart. A cluster needs no check of single blocks
    if all its spans have one stride and fit into it. That is every cluster of a sane layout.
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
    """Raise if two blocks share a byte. Checks all spans of all blocks."""
    starts = np.multiply.outer(np.arange(blocks, dtype=np.int64), spans.strides) + spans.starts
    order = np.argsort(starts, axis=None, kind="stable")
    block, span = np.divmod(order, len(spans.starts))
    ascending = starts.ravel()[order]
    shared = ascending[:-1] + spans.sizes[span[:-1]] > ascending[1:]
    if not shared.any():
        return
    index = int(np.argmax(shared))
    address = int(ascending[index + 1])
    one, other = (
        f"block {block[at]} of {_owner(pieces, address, int(block[at]), int(spans.strides[span[at]]), group)}"
        for at in (index, index + 1)
    )
    raise ValueError(
        f"{where}: {one} and {other} share the byte at {address:#x}; blocks can be kept in host memory only if they "
        "share no bytes"
    )


def _owner(pieces: _Spans, address: int, block: int, stride: int, group: CacheGroup) -> str:
    """Return the name of the part and layer that hold ``address`` in ``block``."""
    offset = address - block * stride
    holds = (pieces.starts <= offset) & (offset < pieces.ends) & (pieces.strides == stride)
    return _name(group, int(pieces.owners[np.argmax(holds)]))


def _raise_views_overlap(index: int, pieces: _Spans, group: CacheGroup, where: str) -> NoReturn:
    one, other = (_name(group, int(pieces.owners[at])) for at in (index, index + 1))
    shared = min(int(pieces.ends[at]) for at in (index, index + 1)) - int(pieces.starts[index + 1])
    raise ValueError(
        f"{where}: {one} and {other} share {shared} bytes from {int(pieces.starts[index + 1]):#x} on, but not the "
        "bytes around them; a block can be kept in host memory only if its views share a run completely or not at all"
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


def _join_pairs(blocks: Int64Array, slots: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array] | None:
    """Join pairs of neighbouring blocks in neighbouring slots: return first blocks, first slots and lengths.

    None if no two pairs are neighbours. The check costs microseconds for thousands of pairs, and a fresh pool hands out
    neighbouring slots, so thousands of descriptors become a few.
    """
    if len(blocks) < 2:
        return None
    apart = (np.diff(blocks) != 1) | (np.diff(slots) != 1)
    if apart.all():
        return None
    first = np.concatenate(([0], np.flatnonzero(apart) + 1))
    return blocks[first], slots[first], np.diff(np.concatenate((first, [len(blocks)])))
