"""A second opinion on where KV bytes are: caches as byte numbers, filled and checked one logical index at a time.

An engine's memory is described twice from one source, the array ``index[layer, block, head, token, content]`` of the
first byte of each item: once as the geometry that planning sees, and once as the index itself, by which values are
written and read. Nothing here knows plans, shares or descriptors beyond executing them, so an error in planning cannot
repeat itself here. Must not import ``layout.plan`` or ``layout.sharding``.

Values depend on (layer, head, token, content) only, where content counts through K, V and then the extra parts; a
cache that keeps K and V fused therefore holds the same values as one that keeps them apart.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from math import gcd, prod
from typing import Any

import numpy as np
import numpy.typing as npt

from layout.copies import Copies, Int64Array
from layout.geometry import CacheGroup, Plane, Region, WorkerGeometry

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
WHOLE_HEADS = tuple(layout for layout in LAYOUTS if layout.endswith("NC"))  # a head of a block is one run
LOGICAL = "LBHNC"
GUARD_BYTES = 40  # unregistered, between allocations

Items = npt.NDArray[Any]


@dataclass(frozen=True)
class Extra:
    """A part beside K and V with an allocation of its own: quantisation scales, a sparse indexer's keys."""

    name: str
    content: int  # items of one (head, token)
    item_size: int
    shared: bool = False  # one head that every TP rank holds, instead of one for each KV head


@dataclass(frozen=True)
class Model:
    """What both engines serve. ``groups`` lists the layer numbers of each cache group."""

    kv_heads: int
    contents: tuple[int, int]  # items of K and V per (head, token); of the two MLA parts
    item_size: int
    groups: tuple[tuple[int, ...], ...]
    windows: tuple[int, ...]  # tokens that are kept in each group, 0 for all
    extras: tuple[Extra, ...] = ()
    other_heads: tuple[tuple[int, int], ...] = ()  # (layer, KV heads) of layers that do not have ``kv_heads``
    drafts: tuple[int, ...] = ()  # layers that the remote side may be without
    seen: tuple[tuple[int, int], ...] = ()  # (layer, tokens) that attention sees, if not what its group keeps

    def heads_in(self, layer: int) -> int:
        """KV heads of a layer, over all ranks."""
        return dict(self.other_heads).get(layer, self.kv_heads)

    @property
    def layers(self) -> int:
        return sum(len(group) for group in self.groups)

    def values(
        self, layer: Int64Array, head: Int64Array, token: Int64Array, content: Int64Array, item_size: int
    ) -> Items:
        """The bytes of each logical element, shape [..., item_size]; the four arrays broadcast."""
        number = ((layer * (1 << 6) + head) * (1 << 16) + token) * (1 << 12) + content
        mixed = (number.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        return (mixed >> np.uint64(64 - 8 * item_size)).astype(f"u{item_size}")[..., None].view(np.uint8)


@dataclass(frozen=True)
class Engine:
    """How one engine keeps the cache.

    A group's blocks have ``block_tokens`` tokens, times the group's factor where ``group_factors`` is given.
    ``form``: "fused" (one plane, content K then V), "views" (one allocation, described as two planes), "apart" (two
    allocations; MLA parts too), "packed" (opaque for each head of a block: K transposed, then V), "transposed" (the
    same bytes as "packed", described as two planes).
    """

    layout: str = "LBHNC"
    form: str = "fused"
    tp: int = 1
    pp: int = 1
    block_tokens: int = 16
    kernel_blocks: int = 1  # kernel blocks in a block
    blocks: int = 8
    offset_items: int = 0  # items of the storage before the view starts
    layers_apart: bool = False  # one allocation and plane for each layer
    groups_reversed: bool = False  # numbers its cache groups the other way round
    packing: str = "k_transposed"
    group_factors: tuple[int, ...] = ()

    def tokens_of(self, group: int) -> int:
        """Tokens of a (manager) block of a group."""
        return self.block_tokens * (self.group_factors[group] if self.group_factors else 1)

    def kernel_tokens_of(self, group: int) -> int:
        """Tokens of a kernel block of a group."""
        return self.tokens_of(group) // self.kernel_blocks


@dataclass(frozen=True)
class Table:
    """A cache group's blocks of a request; negative ids are holes."""

    first_block: int
    ids: tuple[int, ...]

    def id_at(self, token: int, block_tokens: int) -> int:
        entry = token // block_tokens - self.first_block
        return self.ids[entry] if 0 <= entry < len(self.ids) else -1


@dataclass(frozen=True)
class Held:
    """One plane of a rank: which logical elements it holds, and the first byte of each."""

    group: int  # of the model
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    first_content: int
    item_size: int
    index: Int64Array  # [layer, kernel block, head, token, content]


@dataclass
class Rank:
    """One worker's memory in an address space of its own."""

    model: Model
    engine: Engine
    geometry: WorkerGeometry
    base: int  # address of byte 0
    memory: Items  # bytes
    planes: list[Held]
    group_order: tuple[int, ...]  # the model's group number of each group of the geometry
    touched: Int64Array = field(init=False)  # change of the number of writers at each byte

    def __post_init__(self) -> None:
        self.touched = np.zeros(len(self.memory) + 1, np.int64)

    def positions(self, held: Held, table: Table, tokens: Sequence[int]) -> Int64Array:
        """Byte numbers of all elements of ``tokens``, shape [token, layer, head, content, byte]."""
        block_tokens, kernel_tokens = self.engine.tokens_of(held.group), self.engine.kernel_tokens_of(held.group)
        kernel_blocks = [
            table.id_at(token, block_tokens) * self.engine.kernel_blocks + token % block_tokens // kernel_tokens
            for token in tokens
        ]
        inside = [token % kernel_tokens for token in tokens]
        first_bytes = held.index[:, np.array(kernel_blocks, int), :, np.array(inside, int), :]
        return first_bytes[..., None] + np.arange(held.item_size)

    def wanted_values(self, held: Held, tokens: Sequence[int]) -> Items:
        """Bytes of all elements of ``tokens``, shape [token, layer, head, content, byte]."""
        return self.model.values(
            np.array(held.layers, np.int64)[None, :, None, None],
            np.array(held.heads, np.int64)[None, None, :, None],
            np.array(tokens, np.int64)[:, None, None, None],
            np.arange(held.first_content, held.first_content + held.index.shape[4], dtype=np.int64),
            held.item_size,
        )

    def fill(self, tables: Sequence[Table]) -> None:
        """Write every element of every block in ``tables`` (one for each group of the model)."""
        for held in self.planes:
            table, block_tokens = tables[held.group], self.engine.tokens_of(held.group)
            first = table.first_block * block_tokens
            tokens = range(first, first + len(table.ids) * block_tokens)
            present = [token for token in tokens if table.id_at(token, block_tokens) >= 0]
            self.memory[self.positions(held, table, present)] = self.wanted_values(held, present)

    def receive(self, copies: Copies, source: "Rank") -> None:
        """Execute ``copies`` one by one, after checking that both sides registered every byte."""
        _check_registered(copies.destinations, copies.sizes, self.geometry.regions)
        _check_registered(copies.sources, copies.sizes, source.geometry.regions)
        to, start = copies.destinations - self.base, copies.sources - source.base
        ours, theirs = self.memory.data, source.memory.data
        for destination, origin, size in zip(to.tolist(), start.tolist(), copies.sizes.tolist(), strict=True):
            ours[destination : destination + size] = theirs[origin : origin + size]
        np.add.at(self.touched, to, 1)
        np.add.at(self.touched, to + copies.sizes, -1)

    def check(
        self, before: Items, tables: Sequence[Table], wanted: Sequence[Sequence[int]], lacking: Collection[int] = ()
    ) -> int:
        """Compare the memory with what it must be, element by element; ``wanted`` holds the tokens of each group.

        ``before`` is the memory before the first copy: whatever is not wanted must still be as it was there, and so
        must the layers that are ``lacking`` on the other side.
        Returns the bytes that had to be written.
        """
        expected = before.copy()
        writers = np.zeros(len(before), np.int64)
        for held in self.planes:
            read = [number for number, layer in enumerate(held.layers) if layer not in lacking]
            positions = self.positions(held, tables[held.group], wanted[held.group])[:, read]
            expected[positions] = self.wanted_values(held, wanted[held.group])[:, read]
            writers[positions] += 1
        wrong = np.flatnonzero(expected != self.memory)
        assert not len(wrong), f"{len(wrong)} bytes are wrong, the first: {self._name(wrong[0], expected)}"
        written = np.cumsum(self.touched[:-1])
        odd = np.flatnonzero(written != writers)
        assert not len(odd), f"byte {odd[0]} was written {written[odd[0]]} times instead of {writers[odd[0]]}"
        return int(writers.sum())

    def _name(self, byte: int, expected: Items) -> str:
        for held in self.planes:
            inside = (held.index <= byte) & (byte < held.index + held.item_size)
            for layer, block, head, token, content in np.argwhere(inside):
                return (
                    f"layer {held.layers[layer]}, kernel block {block}, head {held.heads[head]}, token {token} of it, "
                    f"content {held.first_content + content}: {self.memory[byte]} instead of {expected[byte]}"
                )
        return f"byte {byte}, which belongs to no plane"


def _check_registered(addresses: Int64Array, sizes: Int64Array, regions: Sequence[Region]) -> None:
    assert (sizes > 0).all(), "an empty descriptor"
    ordered = sorted(regions, key=lambda region: region.address)
    found = np.searchsorted([region.address for region in ordered], addresses, side="right") - 1
    assert (found >= 0).all(), "a descriptor starts before all registered memory"
    assert (addresses + sizes <= np.array([region.end for region in ordered])[found]).all(), (
        "a descriptor reaches beyond registered memory"
    )


def build(model: Model, engine: Engine, seed: int, base: int) -> list[Rank]:
    """All ranks of an engine, PP stage by PP stage, their memory filled with noise."""
    ranks: list[Rank] = []
    layers = sorted(layer for group in model.groups for layer in group)
    for pp_rank, stage in enumerate(np.array_split(layers, engine.pp)):
        for tp_rank in range(engine.tp):
            address = base + len(ranks) * (1 << 36)
            ranks.append(_build_rank(model, engine, (tp_rank, pp_rank), stage.tolist(), address))
    noise = np.random.default_rng(seed)
    for rank in ranks:
        rank.memory[:] = np.frombuffer(noise.bytes(len(rank.memory)), np.uint8)
    return ranks


def name_of(layer: int) -> str:
    """The name of a layer, the same on all engines."""
    return f"model.layers.{layer}"


def heads_of(kv_heads: int, tp: int, rank: int) -> tuple[int, ...]:
    """The KV heads of a rank: the heads dealt out in equal runs, or each head given to an equal run of ranks."""
    if kv_heads >= tp:
        return tuple(head for head in range(kv_heads) if head // (kv_heads // tp) == rank)
    return (rank // (tp // kv_heads),)


def _build_rank(model: Model, engine: Engine, place: tuple[int, int], stage: list[int], base: int) -> Rank:
    tp_rank, pp_rank = place
    order = tuple(range(len(model.groups)))[:: -1 if engine.groups_reversed else 1]
    planes: list[Held] = []
    regions: list[Region] = []
    groups = []
    used = GUARD_BYTES
    for group in order:
        described = []
        for layers in _allocated_together(model, engine, [layer for layer in model.groups[group] if layer in stage]):
            for storage in _storages(model, engine, heads_of(model.heads_in(layers[0]), engine.tp, tp_rank)):
                start = used + engine.offset_items * storage.item_size
                grid = _grid(engine, group, len(layers), storage) * storage.item_size + start
                end = start + grid.size * storage.item_size
                regions.append(Region(base + used, end - used))
                for part, first, index, strided in _parts(model, engine, storage, grid):
                    held = Held(group, layers, storage.heads, first, storage.item_size, index)
                    planes.append(held)
                    described.append(_describe(model, engine, base, held, strided, part))
                used = -(-end // 8) * 8 + GUARD_BYTES
        kept, seen = model.windows[group], dict(model.seen)
        windows = {name_of(layer): seen.get(layer, kept) for layer in model.groups[group] if layer in stage}
        groups.append(CacheGroup(engine.tokens_of(group), kept, tuple(described), seen_tokens=windows))
    geometry = WorkerGeometry(tp_rank, engine.tp, pp_rank, engine.pp, f"host:{base}", tuple(groups), tuple(regions))
    return Rank(model, engine, geometry, base, np.zeros(used, np.uint8), planes, order)


@dataclass(frozen=True)
class _Storage:
    """What one allocation holds of each layer."""

    part: str  # empty where the engine's form tells
    first_content: int
    content: int
    item_size: int
    heads: tuple[int, ...]


def _storages(model: Model, engine: Engine, heads: tuple[int, ...]) -> Iterator[_Storage]:
    key, value = model.contents
    if engine.form == "apart":
        yield _Storage("k", 0, key, model.item_size, heads)
        yield _Storage("v", key, value, model.item_size, heads)
    else:
        yield _Storage("", 0, key + value, model.item_size, heads)
    first = key + value
    for extra in model.extras:
        yield _Storage(extra.name, first, extra.content, extra.item_size, (0,) if extra.shared else heads)
        first += extra.content


def _allocated_together(model: Model, engine: Engine, layers: list[int]) -> list[tuple[int, ...]]:
    if engine.layers_apart:
        return [(layer,) for layer in layers]
    alike: dict[tuple[int, bool], list[int]] = {}
    for layer in layers:
        alike.setdefault((model.heads_in(layer), layer in model.drafts), []).append(layer)
    return [tuple(together) for together in alike.values()]


def _grid(engine: Engine, group: int, layers: int, storage: _Storage) -> Int64Array:
    """Item numbers of an allocation in the logical order of axes."""
    sizes = dict(
        zip(
            LOGICAL,
            (
                layers,
                engine.blocks * engine.kernel_blocks,
                len(storage.heads),
                engine.kernel_tokens_of(group),
                storage.content,
            ),
            strict=True,
        )
    )
    shape = [sizes[axis] for axis in engine.layout]
    physical = np.arange(prod(shape), dtype=np.int64).reshape(shape)
    return physical.transpose([engine.layout.index(axis) for axis in LOGICAL])


def _parts(
    model: Model, engine: Engine, storage: _Storage, grid: Int64Array
) -> Iterator[tuple[str, int, Int64Array, Int64Array]]:
    """The planes of an allocation: part, first content item, first byte of each item, and the same as described."""
    key, value = model.contents
    if storage.part:
        yield storage.part, storage.first_content, grid, grid
    elif engine.form == "fused":
        yield "kv", 0, grid, grid
    elif engine.form == "views":
        yield "k", 0, grid[..., :key], grid[..., :key]
        yield "v", key, grid[..., key:], grid[..., key:]
    else:
        tokens = grid.shape[3]
        token, content = np.ogrid[:tokens, : key + value]
        inside = np.where(content < key, content * tokens + token, key * tokens + token * value + content - key)
        index = grid.reshape(*grid.shape[:3], -1)[..., inside]
        if engine.form == "packed":
            yield "kv", 0, index, grid
        else:
            yield "k", 0, index[..., :key], index[..., :key]
            yield "v", key, index[..., key:], index[..., key:]


def _describe(model: Model, engine: Engine, base: int, held: Held, strided: Int64Array, part: str) -> Plane:
    _, blocks, heads, tokens, content = strided.shape
    layer_stride, block_stride, head_stride, token_stride, content_stride = (_step(strided, axis) for axis in range(5))
    shared = {extra.name for extra in model.extras if extra.shared}
    return Plane(
        part=part,
        layers=tuple(map(name_of, held.layers)),
        head_start=held.heads[0],
        heads=heads,
        block_tokens=tokens,
        content=content,
        item_size=held.item_size,
        blocks=blocks,
        address=base + int(strided[0, 0, 0, 0, 0]),
        layer_stride=layer_stride,
        block_stride=block_stride,
        head_stride=head_stride,
        token_stride=token_stride,
        content_stride=content_stride,
        packing=engine.packing if engine.form == "packed" and part == "kv" else "",
        total_heads=1 if part in shared else model.heads_in(held.layers[0]),
        optional=held.layers[0] in model.drafts,
    )


def _step(strided: Int64Array, axis: int) -> int:
    """Bytes between neighbours on an axis; an axis of one index has none, and any value must do."""
    if strided.shape[axis] == 1:
        return 7919
    return int(np.take(strided, 1, axis).flat[0] - np.take(strided, 0, axis).flat[0])


def unit_tokens(local: Engine, remote: Engine, group: int = 0) -> int:
    """The tokens of a group that a pull reads whole."""
    if local.form == "packed":
        return local.kernel_tokens_of(group)
    return gcd(local.kernel_tokens_of(group), remote.kernel_tokens_of(group))
