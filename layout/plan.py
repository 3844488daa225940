"""Plans: how the blocks of one remote rank become blocks of a local one, as descriptor arrays.

A plan is compiled once per remote rank and geometry and instantiated with numpy for every pull. Compiling
fuses the dimensions that are contiguous on both sides; instantiating adds the block addresses and merges
neighbouring blocks.

    compile:      (layer, head, token, content) boxes  ->  runs inside a unit: offsets and sizes
    instantiate:  block ids                            ->  unit addresses
                  unit addresses (+) offsets           ->  descriptors

A *unit* is the largest number of tokens that is cut by no block border on either side: the greatest common
divisor of the two block sizes.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd

import numpy as np
import numpy.typing as npt

from layout.compatibility import check_planes
from layout.copies import Copies, Int64Array, concatenate
from layout.geometry import Plane, WorkerGeometry
from layout.sharding import Share, Source


class PlanError(ValueError):
    """A plan cannot be made or instantiated: the message names the values and the rule."""


@dataclass(frozen=True, slots=True)
class _Side:
    """One side's addressing of units in a plane."""

    group: int
    address: int  # of the unit's first byte in block 0
    blocks: int  # manager blocks held
    group_tokens: int  # tokens of a manager block, to which block ids refer
    block_tokens: int  # tokens of a kernel block; divides group_tokens
    block_stride: int
    token_stride: int

    def unit_addresses(self, block_ids: Int64Array, first_block: int, tokens: Int64Array) -> Int64Array:
        """Addresses of the units that start at ``tokens``; ``block_ids[0]`` is the table's entry ``first_block``."""
        manager = block_ids[tokens // self.group_tokens - first_block]
        inside = tokens % self.group_tokens
        kernel = manager * (self.group_tokens // self.block_tokens) + inside // self.block_tokens
        return self.address + kernel * self.block_stride + (inside % self.block_tokens) * self.token_stride


@dataclass(frozen=True, slots=True)
class _Box:
    """The runs of one share inside a unit; run r copies ``sizes[r]`` bytes."""

    local: _Side
    remote: _Side
    unit_tokens: int
    local_offsets: Int64Array
    remote_offsets: Int64Array
    sizes: Int64Array

    @property
    def joins_units(self) -> int:
        """The unit stride at which neighbouring units join to longer runs, 0 if they never do."""
        return int(self.sizes[0]) if (self.sizes == self.sizes[0]).all() else 0

    @property
    def moves_with(self) -> tuple[_Side, _Side, int]:
        """Boxes with an equal value lie at a constant distance from each other, on both sides, in all units."""
        whole = self.unit_tokens == self.local.block_tokens == self.remote.block_tokens
        local, remote = (
            replace(side, address=0, token_stride=0 if whole else side.token_stride)
            for side in (self.local, self.remote)
        )
        return local, remote, self.unit_tokens


@dataclass(frozen=True, slots=True)
class BlockTable:
    """One cache group's blocks of a request: entry i holds the tokens of block ``first_block + i``.

    A negative id is a hole: a block that this side does not hold, such as one outside a sliding window.
    """

    first_block: int
    block_ids: Int64Array

    @classmethod
    def of(cls, block_ids: Sequence[int] | npt.NDArray[np.int64], first_block: int = 0) -> "BlockTable":
        """A table from any sequence of ids."""
        return cls(first_block, np.asarray(block_ids, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Plan:
    """The compiled reads of one local rank from one remote rank."""

    boxes: tuple[_Box, ...]

    @property
    def unit_tokens(self) -> tuple[int, ...]:
        """The numbers of tokens that are read together, each once, smallest first."""
        return tuple(sorted({box.unit_tokens for box in self.boxes}))

    @property
    def runs(self) -> int:
        """Runs of one unit of every box."""
        return sum(len(box.sizes) for box in self.boxes)

    @property
    def run_bytes(self) -> int:
        """Bytes of one unit of every box."""
        return sum(int(box.sizes.sum()) for box in self.boxes)

    def instantiate(
        self, local: Sequence[BlockTable], remote: Sequence[BlockTable], first_token: int, end_token: int
    ) -> Copies:
        """Descriptors for the tokens ``first_token`` to ``end_token`` (exclusive) of a request.

        ``local`` and ``remote`` hold one table per cache group of the respective side. Units whose local block
        is a hole are not read. The last unit is read whole.

        Raises:
            PlanError: a wanted block is a hole or missing in the remote table, a block id is not one that its
                side holds, or the tokens do not start at a unit border.
        """
        parts = [
            _instantiate(box, local[box.local.group], remote[box.remote.group], first_token, end_token)
            for box in self.boxes
        ]
        return parts[0] if len(parts) == 1 else concatenate(parts)


def compile_plans(
    local: WorkerGeometry, remotes: Sequence[WorkerGeometry], sources: Sequence[Source]
) -> dict[int, Plan]:
    """One plan per remote rank that ``local`` reads from, keyed by its index in ``remotes``.

    The plans together write every byte of a local block exactly once; this is checked here, so that no later
    step has to trust the shares.

    Raises:
        IncompatibleCachesError: two planes cannot be converted.
        PlanError: the shares overlap or leave bytes of a block unwritten.
    """
    boxes: dict[int, list[_Box]] = defaultdict(list)
    by_plane: dict[tuple[int, int], list[_Box]] = defaultdict(list)
    for source in sources:
        for share in source.shares:
            box = _compile(local, remotes[source.remote], share)
            boxes[source.remote].append(box)
            by_plane[share.local_group, share.local_plane].append(box)
    for group_index, group in enumerate(local.groups):
        for plane_index, plane in enumerate(group.planes):
            _check_coverage(plane, by_plane[group_index, plane_index])
    return {remote: Plan(_join_boxes(of_remote)) for remote, of_remote in boxes.items()}


def merge_adjacent(
    local: Int64Array, remote: Int64Array, sizes: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Sort runs by local address and join those that are neighbours on both sides."""
    order = np.argsort(local, kind="stable")
    local, remote, sizes = local[order], remote[order], sizes[order]
    apart = _apart(local, remote, sizes)
    starts = np.concatenate(([0], np.flatnonzero(apart) + 1))
    return local[starts], remote[starts], np.add.reduceat(sizes, starts)


def _apart(local: Int64Array, remote: Int64Array, sizes: Int64Array) -> npt.NDArray[np.bool_]:
    """Whether each run but the first does not continue the one before it on both sides. Shape [n] in, [n - 1] out."""
    continues = (local[:-1] + sizes[:-1] == local[1:]) & (remote[:-1] + sizes[:-1] == remote[1:])
    return np.asarray(~continues, np.bool_)


def _compile(local: WorkerGeometry, remote: WorkerGeometry, share: Share) -> _Box:
    ours, theirs = local.groups[share.local_group], remote.groups[share.remote_group]
    to, source = ours.planes[share.local_plane], theirs.planes[share.remote_plane]
    check_planes(to, source, ours, theirs)
    unit = gcd(to.block_tokens, source.block_tokens)
    run, local_offsets, remote_offsets = _fuse(to.item_size, _dimensions(to, source, share, unit))
    sizes = np.full(local_offsets.shape, run, np.int64)
    local_offsets, remote_offsets, sizes = merge_adjacent(local_offsets, remote_offsets, sizes)
    return _Box(
        _side(to, share.local_group, ours.block_tokens),
        _side(source, share.remote_group, theirs.block_tokens),
        unit,
        local_offsets,
        remote_offsets,
        sizes,
    )


def _join_boxes(boxes: Iterable[_Box]) -> tuple[_Box, ...]:
    """The same bytes in fewer boxes: those with runs that continue each other, as K and V of a head often do."""
    moving: dict[tuple[_Side, _Side, int], list[_Box]] = defaultdict(list)
    for box in boxes:
        moving[box.moves_with].append(box)
    return tuple(joined for together in moving.values() for joined in _join_neighbours(together))


def _join_neighbours(boxes: Sequence[_Box]) -> Iterator[_Box]:
    """Boxes that move together, those joined of which some runs touch."""
    first = boxes[0]
    local = np.concatenate([box.local_offsets + (box.local.address - first.local.address) for box in boxes])
    remote = np.concatenate([box.remote_offsets + (box.remote.address - first.remote.address) for box in boxes])
    sizes = np.concatenate([box.sizes for box in boxes])
    owner = np.repeat(np.arange(len(boxes)), [len(box.sizes) for box in boxes])
    order = np.argsort(local, kind="stable")
    touching = ~_apart(local[order], remote[order], sizes[order])
    cluster = list(range(len(boxes)))  # of each box: the first box of those that it touches, directly or not
    for one, other in sorted(set(zip(owner[order][:-1][touching], owner[order][1:][touching], strict=True))):
        merged = sorted((cluster[one], cluster[other]))
        cluster = [merged[0] if number == merged[1] else number for number in cluster]
    for number in sorted(set(cluster)):
        members = np.isin(owner, [box for box, of in enumerate(cluster) if of == number])
        runs = merge_adjacent(local[members], remote[members], sizes[members])
        yield replace(first, local_offsets=runs[0], remote_offsets=runs[1], sizes=runs[2])


def _side(plane: Plane, group: int, group_tokens: int) -> _Side:
    if group_tokens % plane.block_tokens:
        raise PlanError(f"kernel blocks of {plane.block_tokens} tokens do not divide blocks of {group_tokens} tokens")
    blocks = plane.blocks * plane.block_tokens // group_tokens
    return _Side(group, plane.address, blocks, group_tokens, plane.block_tokens, plane.block_stride, plane.token_stride)


_Dimension = tuple[Int64Array, Int64Array]  # local and remote offset of each index


def _dimensions(to: Plane, source: Plane, share: Share, unit: int) -> list[_Dimension]:
    """Offsets of every logical index of a share inside a unit, one dimension each."""
    local_layers = np.array([to.layers.index(name) for name in share.layers], np.int64)
    remote_layers = np.array([source.layers.index(name) for name in share.layers], np.int64)
    heads = np.arange(share.head_start, share.head_end, dtype=np.int64)
    tokens = np.arange(unit, dtype=np.int64)
    content = np.arange(to.content, dtype=np.int64)
    return [
        (local_layers * to.layer_stride, remote_layers * source.layer_stride),
        ((heads - to.head_start) * to.head_stride, (heads - source.head_start) * source.head_stride),
        (tokens * to.token_stride, tokens * source.token_stride),
        (content * to.content_stride, content * source.content_stride),
    ]


def _fuse(item_size: int, dimensions: list[_Dimension]) -> tuple[int, Int64Array, Int64Array]:
    """Fold every dimension that continues the run so far, on both sides, into it; enumerate the others.

    Returns the bytes of a run and the local and remote offsets of all runs, shape [n] each.
    """
    local = np.array([sum(int(offsets[0]) for offsets, _ in dimensions)], np.int64)
    remote = np.array([sum(int(offsets[0]) for _, offsets in dimensions)], np.int64)
    pending = [(ours - ours[0], theirs - theirs[0]) for ours, theirs in dimensions if len(ours) > 1]
    run = item_size
    while (index := next((i for i, dimension in enumerate(pending) if _continues(dimension, run)), None)) is not None:
        run *= len(pending.pop(index)[0])
    for local_steps, remote_steps in pending:
        local = np.add.outer(local, local_steps).ravel()
        remote = np.add.outer(remote, remote_steps).ravel()
    return run, local, remote


def _continues(dimension: _Dimension, run: int) -> bool:
    """Whether a dimension's indices follow each other at distance ``run`` on both sides."""
    steps = np.arange(len(dimension[0]), dtype=np.int64) * run
    return np.array_equal(dimension[0], steps) and np.array_equal(dimension[1], steps)


def _check_coverage(plane: Plane, boxes: Iterable[_Box]) -> None:
    """Raise unless the boxes write every byte of a block of ``plane`` exactly once."""
    offsets, sizes = [], []
    for box in boxes:
        units = np.arange(plane.block_tokens // box.unit_tokens, dtype=np.int64) * box.unit_tokens * plane.token_stride
        offsets.append(np.add.outer(units, box.local_offsets).ravel())
        sizes.append(np.tile(box.sizes, len(units)))
    starts = np.concatenate(offsets) if offsets else np.empty(0, np.int64)
    lengths = np.concatenate(sizes) if sizes else np.empty(0, np.int64)
    order = np.argsort(starts)
    starts, lengths = starts[order], lengths[order]
    if (starts[:-1] + lengths[:-1] > starts[1:]).any():
        raise PlanError(f"part {plane.part!r}: some bytes of a block would be written twice")
    if int(lengths.sum()) != plane.block_bytes:
        raise PlanError(
            f"part {plane.part!r}: {int(lengths.sum())} of {plane.block_bytes} bytes of a block would be written"
        )


def _instantiate(box: _Box, local: BlockTable, remote: BlockTable, first_token: int, end_token: int) -> Copies:
    unit = box.unit_tokens
    if first_token % unit:
        raise PlanError(f"a pull must start at a multiple of {unit} tokens, not at token {first_token}")
    tokens = np.arange(first_token, end_token, unit, dtype=np.int64)
    wanted = _ids_at(local, tokens, box.local, "local")
    tokens = tokens[wanted >= 0]
    if not len(tokens):
        return concatenate([])
    held = _ids_at(remote, tokens, box.remote, "remote")
    if (held < 0).any():
        token = int(tokens[int(np.argmax(held < 0))])
        raise PlanError(f"the remote side holds no block for token {token}, which is wanted here")
    to = box.local.unit_addresses(local.block_ids, local.first_block, tokens)
    source = box.remote.unit_addresses(remote.block_ids, remote.first_block, tokens)
    return _spread(box, to, source)


def _ids_at(table: BlockTable, tokens: Int64Array, side: _Side, name: str) -> Int64Array:
    """The block id for each token, checked against the table's length and the blocks that the side holds."""
    entries = tokens // side.group_tokens - table.first_block
    if len(entries) and not (entries[0] >= 0 and entries[-1] < len(table.block_ids)):
        raise PlanError(
            f"the {name} block table holds {len(table.block_ids)} blocks from block {table.first_block} on; tokens "
            f"{int(tokens[0])} to {int(tokens[-1])} need blocks {int(tokens[0]) // side.group_tokens} to "
            f"{int(tokens[-1]) // side.group_tokens} of {side.group_tokens} tokens"
        )
    ids = table.block_ids[entries]
    if len(ids) and int(ids.max()) >= side.blocks:
        raise PlanError(f"{name} block id {int(ids.max())} does not exist: the cache has {side.blocks} blocks")
    return ids


def _spread(box: _Box, to: Int64Array, source: Int64Array) -> Copies:
    """Descriptors of all runs at all unit addresses, neighbouring units joined where the runs allow it.

    By source, as far as a walk over the units inside a walk over parts of the runs can be: in every layout where a
    block's runs lie together, or those of a layer.
    """
    stride = box.joins_units
    counts = np.ones(len(to), np.int64)
    if stride and len(to) > 1:
        apart = (np.diff(to) != stride) | (np.diff(source) != stride)
        starts = np.concatenate(([0], np.flatnonzero(apart) + 1))
        counts = np.diff(np.concatenate((starts, [len(to)])))
        to, source = to[starts], source[starts]
    units, runs = np.argsort(source), np.argsort(box.remote_offsets)
    to, source, counts = to[units], source[units], counts[units]
    # Runs that lie further apart than the units reach, such as those of two layers, are of different parts.
    parts = 1 + int(np.count_nonzero(np.diff(box.remote_offsets[runs]) > source[-1] - source[0]))
    shape = (parts, 1, -1) if len(runs) % parts == 0 else (1, 1, -1)
    return Copies(
        (to[:, None] + box.local_offsets[runs].reshape(shape)).ravel(),
        (source[:, None] + box.remote_offsets[runs].reshape(shape)).ravel(),
        (counts[:, None] * box.sizes[runs].reshape(shape)).ravel(),
    )
