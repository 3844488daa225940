"""Plans: how blocks of one remote rank become blocks of a local one, as descriptor arrays.

A plan is compiled once per remote rank and geometry, and instantiated with numpy for every pull. Compiling fuses the
dimensions that are contiguous on both sides. Instantiating adds the block addresses and merges neighbouring blocks.

    compile:      (layer, head, token, content) shares  ->  runs inside a unit: offsets and sizes
    instantiate:  block ids                             ->  unit addresses
                  unit addresses (+) offsets            ->  descriptors

A *unit* is the largest number of tokens that no block border cuts on either side: the greatest common divisor of the
two block sizes. Of states it is one state, and ``layout.states`` says which are read. Of a compressed cache, whose
blocks have thousands of tokens, it is a part of that, so that pulls may begin inside a block. Where ranks share a
request's tokens (``layout.context_parallel``), a unit has those of all ranks, and its runs are of what both sides hold
of them.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm, prod

import numpy as np
import numpy.typing as npt

from layout.compatibility import check_planes, check_states, check_windows
from layout.context_parallel import WHOLE, SharedTokens, TokenSplit, shared_tokens, unit_of
from layout.copies import EMPTY, Copies, Int64Array, apart, concatenate, merge_adjacent
from layout.geometry import CacheGroup, Plane, WorkerGeometry, unit_rows
from layout.sharding import Share, Source
from layout.states import state_entries


class PlanError(ValueError):
    """A plan cannot be compiled or instantiated; the message names the values and the rule."""


#: Of all plans for an engine together, so that what it states of its caches takes neither minutes nor gigabytes: runs
#: in a block here, and patterns. 128 layers of 8 KV heads, each token a run of its own, have 2**21 in 1,024 tokens; K
#: and V of each of these layers by itself, read from 64 ranks, have 2**14 patterns. Units and blocks are no more.
_MOST_RUNS = 1 << 22
_MOST_PATTERNS = 1 << 15


@dataclass(frozen=True, slots=True)
class _UnitAddressing:
    """Where the units of one side's plane lie. Of states, a block is a unit, and tokens are entries of the table."""

    group: int
    address: int  # of the first unit of block 0
    blocks: int  # manager blocks held; block ids refer to these
    group_tokens: int  # tokens in a manager block
    block_rows: int  # held in a kernel block; divides those held in a manager block
    block_stride: int
    row_stride: int
    row_tokens: int = 1  # tokens of a row
    state_tokens: int = 0  # tokens between the states of two blocks; 0 if blocks hold tokens
    split: TokenSplit = WHOLE

    @property
    def block_span(self) -> int:
        """Tokens from the first of a kernel block to that of the next, those of other ranks included."""
        return self.block_rows * self.row_tokens * self.split.ranks

    def unit_addresses(self, block_ids: Int64Array, first_block: int, tokens: Int64Array) -> Int64Array:
        """Return the addresses of the units that start at ``tokens``; ``block_ids[0]`` is block ``first_block``."""
        manager = block_ids[tokens // self.group_tokens - first_block]
        held = self.group_tokens // self.split.ranks // self.row_tokens
        inside = self.split.before(tokens) // self.row_tokens - tokens // self.group_tokens * held
        kernel = manager * (held // self.block_rows) + inside // self.block_rows
        rows = inside % self.block_rows
        return np.asarray(self.address + kernel * self.block_stride + rows * self.row_stride, np.int64)


@dataclass(frozen=True, slots=True)
class _RunPattern:
    """The runs of one or more shares inside a unit, repeated in every unit; run r copies ``sizes[r]`` bytes."""

    local: _UnitAddressing
    remote: _UnitAddressing
    unit_tokens: int
    local_offsets: Int64Array
    remote_offsets: Int64Array
    sizes: Int64Array
    phase: int = 0  # the first unit that has these runs
    phases: int = 1  # after how many units the next one has them

    @property
    def period_tokens(self) -> int:
        """Number of tokens from one unit that has these runs to the next."""
        return self.unit_tokens * self.phases

    @property
    def joins_units(self) -> int:
        """The distance in bytes at which the runs of neighbouring units join, 0 if they never do."""
        return int(self.sizes[0]) if (self.sizes == self.sizes[0]).all() else 0

    @property
    def moves_with(self) -> tuple[_UnitAddressing, _UnitAddressing, int, int, int]:
        """A key: patterns with equal keys are a constant distance apart on both sides, in all units."""
        # Every unit begins with a kernel block on both sides: how far apart rows are does not matter.
        whole = self.unit_tokens == self.local.block_span == self.remote.block_span
        local, remote = (
            replace(side, address=0, row_stride=0 if whole else side.row_stride) for side in (self.local, self.remote)
        )
        return local, remote, self.unit_tokens, self.phase, self.phases


@dataclass(frozen=True, slots=True)
class BlockTable:
    """A request's blocks in one cache group: entry i holds the tokens of block ``first_block + i``.

    A negative id is a hole: a block that this side does not hold, for example outside a sliding window.
    """

    first_block: int
    block_ids: Int64Array

    @classmethod
    def of(cls, block_ids: Sequence[int] | npt.NDArray[np.int64], first_block: int = 0) -> "BlockTable":
        """Return the table of any sequence of ids."""
        return cls(first_block, np.asarray(block_ids, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Plan:
    """The compiled reads of one local rank from one remote rank."""

    patterns: tuple[_RunPattern, ...]  # of tokens
    states: tuple[_RunPattern, ...] = ()

    @property
    def unit_tokens(self) -> tuple[int, ...]:
        """The distinct unit sizes in tokens, in ascending order."""
        return tuple(sorted({pattern.unit_tokens for pattern in self.patterns}))

    @property
    def period_tokens(self) -> tuple[int, ...]:
        """The distinct numbers of tokens in which each pattern's runs are read once, in ascending order."""
        return tuple(sorted({pattern.period_tokens for pattern in self.patterns}))

    @property
    def runs(self) -> int:
        """Number of runs in one unit of every pattern."""
        return sum(len(pattern.sizes) for pattern in self.patterns)

    @property
    def token_runs(self) -> float:
        """Runs that a token takes on average, if no block is a hole, and no unit joins its neighbour."""
        return sum(len(pattern.sizes) / pattern.period_tokens for pattern in self.patterns)

    @property
    def run_bytes(self) -> int:
        """Bytes in one unit of every pattern."""
        return sum(int(pattern.sizes.sum()) for pattern in self.patterns)

    @property
    def token_bytes(self) -> float:
        """Bytes that a token takes on average, if no block is a hole."""
        return sum(int(pattern.sizes.sum()) / pattern.period_tokens for pattern in self.patterns)

    @property
    def state_runs(self) -> int:
        """Number of runs in one state of every layer."""
        return sum(len(pattern.sizes) for pattern in self.states)

    @property
    def state_bytes(self) -> int:
        """Bytes in one state of every layer."""
        return sum(int(pattern.sizes.sum()) for pattern in self.states)

    def instantiate_states(
        self, local: Sequence[BlockTable], remote: Sequence[BlockTable], tokens: int, *, wants_last: bool = True
    ) -> Copies:
        """Return the descriptors for the states of a request of ``tokens`` tokens that both sides' tables have.

        The tables, one per cache group, begin with block 0. ``wants_last``: whether the local ones must have the last.

        Raises:
            PlanError: a table has no state after all tokens, or a block id does not exist on its side.
        """
        tables = ((each, local[each.local.group], remote[each.remote.group]) for each in self.states)
        return concatenate([_instantiate_states(*each, tokens, wants_last=wants_last) for each in tables])

    def lacking_states(
        self, local: Sequence[BlockTable], remote: Sequence[BlockTable], tokens: int
    ) -> set[tuple[int, int]]:
        """Return the local cache groups and entries of their tables whose states the remote side does not have."""
        lacking = set()
        for each in self.states:
            ours = state_entries(local[each.local.group].block_ids, each.local.state_tokens, tokens)
            theirs = state_entries(remote[each.remote.group].block_ids, each.remote.state_tokens, tokens)
            lacking |= {(each.local.group, entry) for after, entry in ours.items() if after not in theirs}
        return lacking

    def instantiate(
        self, local: Sequence[BlockTable], remote: Sequence[BlockTable], first_token: int, end_token: int
    ) -> Copies:
        """Return the descriptors for the tokens ``first_token`` to ``end_token`` (exclusive) of a request.

        ``local`` and ``remote`` hold one block table per cache group of their side. Units whose local block is a hole
        are not read. The last unit is read whole.

        Raises:
            PlanError: a wanted block is a hole in the remote table or missing from a table, a block id does not exist
                on its side, or ``first_token`` is not at a unit border.
        """
        parts = [
            _instantiate(pattern, local[pattern.local.group], remote[pattern.remote.group], first_token, end_token)
            for pattern in self.patterns
        ]
        return parts[0] if len(parts) == 1 else concatenate(parts)

    def remote_blocks(
        self, local: Sequence[BlockTable], first_token: int, end_token: int
    ) -> list[tuple[int, Int64Array]]:
        """Return what ``instantiate`` reads from: remote cache groups, each with its block numbers in ascending order.

        A group comes more than once if it is read into several local groups.

        Raises:
            PlanError: as ``instantiate``, as far as the local side is concerned.
        """
        units = {(each.local.group, each.remote.group, each.phase, each.phases): each for each in self.patterns}
        read: dict[tuple[int, int], list[Int64Array]] = defaultdict(list)
        for (ours, theirs, *_), pattern in units.items():
            tokens = _wanted_tokens(pattern, local[ours], first_token, end_token)
            read[ours, theirs].append(tokens // pattern.remote.group_tokens)
        return [(theirs, np.unique(np.concatenate(numbers))) for (_, theirs), numbers in read.items()]


def compile_plans(
    local: WorkerGeometry, remotes: Sequence[WorkerGeometry], sources: Sequence[Source]
) -> dict[int, Plan]:
    """Compile one plan per remote rank that ``local`` reads from, keyed by its index in ``remotes``.

    Together the plans write every byte of a local block exactly once, except those of optional layers that are not
    read. That is checked here, so no later step has to trust the shares.

    Raises:
        IncompatibleCachesError: two planes cannot be converted.
        PlanError: the shares overlap, leave bytes of a block unwritten, or would take too many runs.
    """
    number = runs = 0
    patterns: dict[int, list[_RunPattern]] = defaultdict(list)
    by_plane: dict[tuple[int, int], list[_RunPattern]] = defaultdict(list)
    layers: dict[tuple[int, int], set[str]] = defaultdict(set)
    for source in sources:
        for share in source.shares:
            for pattern in _compile(local, remotes[source.remote], share):
                patterns[source.remote].append(pattern)
                by_plane[share.local_group, share.local_plane].append(pattern)
                number, runs = number + 1, runs + len(pattern.sizes)
                _check_number(runs, number)
            layers[share.local_group, share.local_plane].update(share.layers)
    runs = 0
    for group_index, group in enumerate(local.groups):
        for plane_index, plane in enumerate(group.planes):
            read = len(layers[group_index, plane_index]) if plane.optional else len(plane.layers)
            runs += _check_coverage(plane, read, by_plane[group_index, plane_index], runs)
    return {remote: _plan(_join_patterns(of_remote)) for remote, of_remote in patterns.items()}


def _check_number(runs: int, patterns: int = 0) -> None:
    if runs > _MOST_RUNS or patterns > _MOST_PATTERNS:
        number, what, most = (runs, "runs", _MOST_RUNS) if runs > _MOST_RUNS else (patterns, "patterns", _MOST_PATTERNS)
        raise PlanError(
            f"reading from the other engine would take {number} {what}, of at most {most}: the strides, heads or "
            "shared tokens that it states fit those here too badly. Start both engines with the same parallel sizes, "
            "--block-size and layout"
        )


def _plan(patterns: Sequence[_RunPattern]) -> Plan:
    of_tokens = tuple(pattern for pattern in patterns if not pattern.local.state_tokens)
    return Plan(of_tokens, tuple(pattern for pattern in patterns if pattern.local.state_tokens))


def _compile(local: WorkerGeometry, remote: WorkerGeometry, share: Share) -> Iterator[_RunPattern]:
    ours, theirs = local.groups[share.local_group], remote.groups[share.remote_group]
    to, source = ours.planes[share.local_plane], theirs.planes[share.remote_plane]
    check_planes(to, source)
    check_windows(ours, theirs, share.layers)
    check_states(ours, theirs, to, source)
    local_side = _addressing(to, share.local_group, ours)
    remote_side = _addressing(source, share.remote_group, theirs)
    unit, phases = unit_of(to.tokens, to.block_tokens, source.tokens, source.block_tokens)
    unit = unit if to.packing else unit_rows(unit, to.tokens_per_row)
    _check_number(0, phases)
    for shared in shared_tokens(to.tokens, source.tokens, unit, phases):
        run, local_offsets, remote_offsets = _fuse(to.item_size, _dimensions(to, source, share, shared))
        runs = merge_adjacent(local_offsets, remote_offsets, np.full(local_offsets.shape, run, np.int64))
        unit_tokens = 1 if ours.states else unit * to.tokens_per_row
        yield _RunPattern(local_side, remote_side, unit_tokens, *runs, shared.phase, phases)


def _join_patterns(patterns: Iterable[_RunPattern]) -> Sequence[_RunPattern]:
    """Return the same bytes in fewer patterns: join those whose runs continue each other, as K and V often do."""
    moving: dict[tuple[object, ...], list[_RunPattern]] = defaultdict(list)
    for pattern in patterns:
        moving[pattern.moves_with].append(pattern)
    return tuple(joined for together in moving.values() for joined in _join_touching(together))


def _join_touching(patterns: Sequence[_RunPattern]) -> Iterator[_RunPattern]:
    """Join those of ``patterns``, which all have equal ``moves_with``, whose runs touch; yield the result."""
    first = patterns[0]
    local = np.concatenate([each.local_offsets + (each.local.address - first.local.address) for each in patterns])
    remote = np.concatenate([each.remote_offsets + (each.remote.address - first.remote.address) for each in patterns])
    sizes = np.concatenate([each.sizes for each in patterns])
    owner = np.repeat(np.arange(len(patterns)), [len(each.sizes) for each in patterns])
    order = np.argsort(local, kind="stable")
    touching = np.flatnonzero(~apart(local[order], remote[order], sizes[order]))
    pairs = owner[order[np.stack((touching, touching + 1))]]  # [2, n]: where one pattern's run continues another's
    first_of, before = np.arange(len(patterns), dtype=np.int64), np.empty(0, np.int64)
    while not np.array_equal(first_of, before):  # of each pattern, the first that it is joined with: spreads by pairs
        before = first_of.copy()
        np.minimum.at(first_of, pairs, first_of[pairs[::-1]])
        first_of = first_of[first_of]
    for number in np.unique(first_of):
        members = first_of[owner] == number
        runs = merge_adjacent(local[members], remote[members], sizes[members])
        yield replace(first, local_offsets=runs[0], remote_offsets=runs[1], sizes=runs[2])


def _addressing(plane: Plane, number: int, group: CacheGroup) -> _UnitAddressing:
    if group.states:
        return _UnitAddressing(
            number, plane.address, plane.blocks, 1, 1, plane.block_stride, 0, state_tokens=group.block_tokens
        )
    rows = group.rows(plane)
    if rows % plane.block_tokens:
        raise PlanError(f"kernel blocks of {plane.block_tokens} tokens do not divide blocks of {rows} tokens")
    return _UnitAddressing(
        number, plane.address, plane.blocks * plane.block_tokens // rows, group.block_tokens, plane.block_tokens,
        plane.block_stride, plane.token_stride, plane.tokens_per_row, split=plane.tokens,
    )  # fmt: skip


_Dimension = tuple[Int64Array, Int64Array]  # local and remote offsets of each index


def _dimensions(to: Plane, source: Plane, share: Share, shared: SharedTokens) -> list[_Dimension]:
    """Return the offsets of a share's logical indices inside a unit, by dimension."""
    local_layers = np.array([to.layers.index(name) for name in share.layers], np.int64)
    remote_layers = np.array([source.layers.index(name) for name in share.layers], np.int64)
    heads = np.arange(share.head_start, share.head_end, dtype=np.int64)
    content = np.arange(to.content, dtype=np.int64)
    return [
        (local_layers * to.layer_stride, remote_layers * source.layer_stride),
        ((heads - to.head_start) * to.head_stride, (heads - source.head_start) * source.head_stride),
        (shared.here * to.token_stride, shared.there * source.token_stride),
        (content * to.content_stride, content * source.content_stride),
    ]


def _fuse(item_size: int, dimensions: list[_Dimension]) -> tuple[int, Int64Array, Int64Array]:
    """Fold each dimension that continues the run on both sides into it, and enumerate the others.

    Returns:
        The bytes of a run, and the local and remote offsets of all runs, shape [n] each.
    """
    local = np.array([sum(int(offsets[0]) for offsets, _ in dimensions)], np.int64)
    remote = np.array([sum(int(offsets[0]) for _, offsets in dimensions)], np.int64)
    pending = [(ours - ours[0], theirs - theirs[0]) for ours, theirs in dimensions if len(ours) > 1]
    run = item_size
    while (index := next((i for i, dimension in enumerate(pending) if _continues(dimension, run)), None)) is not None:
        run *= len(pending.pop(index)[0])
    _check_number(prod(len(steps) for steps, _ in pending))
    for local_steps, remote_steps in pending:
        local = np.add.outer(local, local_steps).ravel()
        remote = np.add.outer(remote, remote_steps).ravel()
    return run, local, remote


def _continues(dimension: _Dimension, run: int) -> bool:
    """Return whether neighbouring indices of a dimension are ``run`` bytes apart on both sides."""
    steps = np.arange(len(dimension[0]), dtype=np.int64) * run
    return np.array_equal(dimension[0], steps) and np.array_equal(dimension[1], steps)


#: Between kernel blocks whose coverage is checked together: more bytes than one of them spans.
_FAR = 1 << 47


def _check_coverage(plane: Plane, layers: int, patterns: Sequence[_RunPattern], runs_before: int) -> int:
    """Raise unless the patterns write every byte of ``layers`` layers of ``plane`` exactly once.

    In one block; where ranks share tokens, in as many as are read before all begins again.

    Returns:
        The runs there. Raises if they are too many with ``runs_before``, those of other planes.
    """
    block_tokens = plane.block_tokens * plane.tokens_per_row * plane.tokens.ranks
    tokens = lcm(block_tokens, *(pattern.period_tokens for pattern in patterns))
    blocks = tokens // block_tokens
    units = [1 if pattern.local.state_tokens else tokens // pattern.period_tokens for pattern in patterns]
    runs = sum(number * len(pattern.sizes) for number, pattern in zip(units, patterns, strict=True))
    _check_number(runs_before + runs, blocks)
    block_bytes = plane.block_bytes // len(plane.layers) * layers * blocks
    offsets, sizes = [], []
    for number, pattern in zip(units, patterns, strict=True):
        starts = pattern.phase * pattern.unit_tokens + np.arange(number, dtype=np.int64) * pattern.period_tokens
        block, row = np.divmod(plane.tokens.before(starts) // plane.tokens_per_row, plane.block_tokens)
        places = block * _FAR + row * plane.token_stride
        offsets.append(np.add.outer(places, pattern.local_offsets).ravel())
        sizes.append(np.tile(pattern.sizes, number))
    starts = np.concatenate(offsets) if offsets else np.empty(0, np.int64)
    lengths = np.concatenate(sizes) if sizes else np.empty(0, np.int64)
    order = np.argsort(starts)
    starts, lengths = starts[order], lengths[order]
    if (starts[:-1] + lengths[:-1] > starts[1:]).any():
        raise PlanError(f"part {plane.part!r}: some bytes of a block would be written twice")
    if int(lengths.sum()) != block_bytes:
        raise PlanError(f"part {plane.part!r}: {int(lengths.sum())} of {block_bytes} bytes of a block would be written")
    return runs


def _instantiate(
    pattern: _RunPattern, local: BlockTable, remote: BlockTable, first_token: int, end_token: int
) -> Copies:
    tokens = _wanted_tokens(pattern, local, first_token, end_token)
    if not len(tokens):
        return concatenate([])
    held = _ids_at(remote, tokens, pattern.remote, "remote")
    if (held < 0).any():
        token = int(tokens[int(np.argmax(held < 0))])
        raise PlanError(f"the remote side holds no block for token {token}, which is needed here")
    to = pattern.local.unit_addresses(local.block_ids, local.first_block, tokens)
    source = pattern.remote.unit_addresses(remote.block_ids, remote.first_block, tokens)
    return _spread(pattern, to, source)


def _instantiate_states(
    pattern: _RunPattern, local: BlockTable, remote: BlockTable, tokens: int, *, wants_last: bool
) -> Copies:
    ours = _states_of(pattern.local, local, tokens, "local", wants_last=wants_last)
    theirs = _states_of(pattern.remote, remote, tokens, "remote", wants_last=True)
    both = sorted(ours.keys() & theirs.keys())
    to, source = (np.array([held[position] for position in both], np.int64) for held in (ours, theirs))
    return _spread(pattern, to, source) if both else EMPTY


def _states_of(side: _UnitAddressing, table: BlockTable, tokens: int, name: str, *, wants_last: bool) -> dict[int, int]:
    """Return the addresses of the states that a table has, by the number of tokens after which each is."""
    entries = state_entries(table.block_ids, side.state_tokens, tokens)
    if wants_last and tokens not in entries:
        raise PlanError(f"the {name} block table has no state after {tokens} tokens, only after {sorted(entries)}")
    held = np.array(list(entries.values()), np.int64)
    _ids_at(table, held, side, name)
    return dict(zip(entries, side.unit_addresses(table.block_ids, table.first_block, held).tolist(), strict=True))


def _wanted_tokens(pattern: _RunPattern, local: BlockTable, first_token: int, end_token: int) -> Int64Array:
    """Return the first token of each unit to read: of those whose local block is not a hole."""
    unit = pattern.unit_tokens
    if first_token % unit:
        raise PlanError(f"a pull must start at a multiple of {unit} tokens, not at token {first_token}")
    first_token += (pattern.phase - first_token // unit) % pattern.phases * unit
    tokens = np.arange(first_token, end_token, pattern.period_tokens, dtype=np.int64)
    return np.asarray(tokens[_ids_at(local, tokens, pattern.local, "local") >= 0], np.int64)


def _ids_at(table: BlockTable, tokens: Int64Array, side: _UnitAddressing, name: str) -> Int64Array:
    """Return the block id of each token, checked against the table's length and the blocks that the side holds."""
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


def _spread(pattern: _RunPattern, to: Int64Array, source: Int64Array) -> Copies:
    """Return the descriptors of all runs in all units. Joins neighbouring units where the runs allow it.

    Sources ascend in every layout that keeps the runs of a block together, or those of a layer: descriptors go by part
    of the runs, within a part by unit, and within a unit by run.
    """
    stride = pattern.joins_units
    counts = np.ones(len(to), np.int64)
    if stride and len(to) > 1:
        apart = (np.diff(to) != stride) | (np.diff(source) != stride)
        starts = np.concatenate(([0], np.flatnonzero(apart) + 1))
        counts = np.diff(np.concatenate((starts, [len(to)])))
        to, source = to[starts], source[starts]
    units, runs = np.argsort(source), np.argsort(pattern.remote_offsets)
    to, source, counts = to[units], source[units], counts[units]
    # Runs that are further apart than the units reach, such as those of two layers, belong to different parts.
    parts = 1 + int(np.count_nonzero(np.diff(pattern.remote_offsets[runs]) > source[-1] - source[0]))
    shape = (parts, 1, -1) if len(runs) % parts == 0 else (1, 1, -1)
    return Copies(
        (to[:, None] + pattern.local_offsets[runs].reshape(shape)).ravel(),
        (source[:, None] + pattern.remote_offsets[runs].reshape(shape)).ravel(),
        (counts[:, None] * pattern.sizes[runs].reshape(shape)).ravel(),
    )
