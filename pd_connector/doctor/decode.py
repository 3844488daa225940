"""The caches that a decode engine would have for what a prefill engine describes: the same layout, its own sizes.

The planes of a group that move together on the prefill side, such as K and V, keep their places relative to each other,
so a plan has the runs that it has between two engines of this layout. Padding between blocks and layers is left out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from layout.geometry import Identity, Plane, Region, WorkerGeometry
from layout.plan import BlockTable
from layout.sharding import held_heads
from pd_connector.orders import block_table
from pd_connector.vllm.cache_specs import retention_in

_ALIGNMENT = 64  # bytes, of a group's first block


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a decode engine may have otherwise than the prefill engine."""

    tensor_parallel: int = 1
    block_tokens: int = 0  # 0: the prefill engine's

    def __post_init__(self) -> None:
        if self.tensor_parallel < 1 or self.block_tokens < 0:
            raise ValueError(
                f"tensor parallel size {self.tensor_parallel} and block size {self.block_tokens} must be at least 1 "
                "and 0 (the prefill engine's)"
            )


@dataclass(frozen=True, slots=True)
class _Bundle:
    """Planes of one group whose layers, blocks and heads are equally far apart: one memory, several parts."""

    planes: tuple[Plane, ...]  # by address

    def inner(self, plane: Plane) -> str:
        """Return the axes that lie inside a part of a plane, outermost first."""
        return _by_stride({axis: stride for axis, stride in _strides(plane).items() if stride <= self._spread})

    def outer(self) -> str:
        """Return the axes that lie outside all parts, outermost first; of a single part all do."""
        return _by_stride({axis: stride for axis, stride in _strides(self.planes[0]).items() if stride > self._spread})

    def form(self) -> tuple[object, ...]:
        """Return what bundles of two pipeline stages have in common if one cache can hold both."""
        parts = tuple(
            (p.part, p.block_tokens, p.content, p.item_size, p.packing, p.optional, self.inner(p)) for p in self.planes
        )
        return parts, self.outer()

    @property
    def _spread(self) -> int:
        return self.planes[-1].address - self.planes[0].address


def _strides(plane: Plane) -> dict[str, int]:
    """Return the strides by axis: layer, block, head, token (N), content."""
    strides = plane.layer_stride, plane.block_stride, plane.head_stride, plane.token_stride, plane.content_stride
    return dict(zip("LBHNC", strides, strict=True))


def _by_stride(strides: dict[str, int]) -> str:
    """Return the axes from the longest stride to the shortest."""
    return "".join(sorted(strides, key=lambda axis: (-strides[axis], "LBHNC".index(axis))))


def decode_geometry(workers: Sequence[WorkerGeometry], sizes: Sizes, tokens: int) -> WorkerGeometry:
    """Return the caches of rank 0 of a decode engine, for a prompt of ``tokens`` and vLLM's null block, at address 0.

    Raises:
        ValueError: the KV heads cannot be shared among so many ranks, or the block size does not fit.
    """
    groups, end = [], 0
    for index, remote in enumerate(workers[0].groups):
        block_tokens = sizes.block_tokens or remote.block_tokens
        blocks = 1 + -(-tokens // block_tokens)
        planes: list[Plane] = []
        for bundle in _bundles(workers, index):
            end = -(-end // _ALIGNMENT) * _ALIGNMENT
            placed, end = _place(bundle, workers, sizes, blocks, block_tokens, end)
            planes += placed
        groups.append(replace(remote, block_tokens=block_tokens, planes=tuple(planes), seen_tokens={}))
    return WorkerGeometry(0, sizes.tensor_parallel, 0, 1, "", tuple(groups), (Region(0, end),))


def at(geometry: WorkerGeometry, address: int, engine_address: str, transport: str, own: Identity) -> WorkerGeometry:
    """Return a geometry of ``decode_geometry`` whose memory lies at ``address``, with its transfer engine."""
    groups = tuple(
        replace(group, planes=tuple(replace(plane, address=plane.address + address) for plane in group.planes))
        for group in geometry.groups
    )
    region = Region(address, geometry.regions[0].size)
    return replace(
        geometry, groups=groups, regions=(region,), engine_address=engine_address, transport=transport, identity=own
    )


def local_blocks(geometry: WorkerGeometry, remote: Sequence[Sequence[int]], sizes: Sequence[int]) -> list[list[int]]:
    """Return the block table of each group for a prompt that has the block tables ``remote`` on the prefill engine.

    Args:
        geometry: of ``decode_geometry``.
        remote: by group, an id for each block; 0 marks one that is not held.
        sizes: the prefill engine's block sizes, by group.
    """
    tables = []
    for group, ids, size in zip(geometry.groups, remote, sizes, strict=True):
        count = -(-len(ids) * size // group.block_tokens)
        table = []
        for block in range(count):
            first, end = block * group.block_tokens, (block + 1) * group.block_tokens
            there = ids[first // size : -(-end // size)]
            table.append(block + 1 if there and all(there) else 0)
        tables.append(table)
    return tables


def imagined_blocks(workers: Sequence[WorkerGeometry], tokens: int) -> list[list[int]]:
    """Return block tables that a prefill engine could have for a prompt: ascending ids, holes outside windows.

    Raises:
        ValueError: it has fewer blocks than that.
    """
    tables = []
    for group in workers[0].groups:
        count = -(-tokens // group.block_tokens)
        held = min((plane.blocks * plane.block_tokens // group.block_tokens for plane in group.planes), default=count)
        first = retention_in(group).first_needed(tokens) // group.block_tokens
        if count - first >= held:
            raise ValueError(f"a prompt of {tokens} tokens takes {count - first} blocks; the prefill engine has {held}")
        tables.append([0] * first + list(range(1, 1 + count - first)))
    return tables


def tables_of(block_ids: Sequence[Sequence[int]]) -> list[BlockTable]:
    """Return the tables in the form that plans take."""
    return [block_table(ids) for ids in block_ids]


def _bundles(workers: Sequence[WorkerGeometry], group: int) -> Iterator[_Bundle]:
    """Yield the bundles of a group over the layers of all pipeline stages, seen at one rank of each."""
    stages: dict[int, WorkerGeometry] = {}
    for worker in workers:
        stages.setdefault(worker.pp_rank, worker)
    found: dict[tuple[object, ...], list[_Bundle]] = {}
    for _, worker in sorted(stages.items()):
        alike: dict[tuple[object, ...], list[Plane]] = {}
        for plane in worker.groups[group].planes:
            strides = plane.layer_stride, plane.block_stride, plane.head_stride
            key = plane.layers, plane.heads, plane.block_tokens, plane.blocks, strides
            alike.setdefault(key, []).append(plane)
        for planes in alike.values():
            bundle = _Bundle(tuple(sorted(planes, key=lambda plane: plane.address)))
            found.setdefault(bundle.form(), []).append(bundle)
    for same in found.values():
        layers = tuple(dict.fromkeys(name for bundle in same for name in bundle.planes[0].layers))
        yield _Bundle(tuple(replace(plane, layers=layers) for plane in same[0].planes))


def _place(
    bundle: _Bundle, workers: Sequence[WorkerGeometry], sizes: Sizes, blocks: int, block_tokens: int, start: int
) -> tuple[list[Plane], int]:
    """Return the planes of a bundle in one dense memory from ``start`` on, and where it ends."""
    formed = [_formed(plane, workers, sizes, blocks, block_tokens) for plane in bundle.planes]
    strides: list[dict[str, int]] = []
    chunks = []
    for plane, before in zip(formed, bundle.planes, strict=True):
        own, size = _dense(plane, bundle.inner(before), plane.item_size)
        strides.append(own)
        chunks.append(size)
    shared, whole = _dense(formed[0], bundle.outer(), sum(chunks))
    placed, address = [], start
    for plane, own, chunk in zip(formed, strides, chunks, strict=True):
        of = own | shared
        placed.append(
            replace(
                plane,
                address=address,
                layer_stride=of["L"],
                block_stride=of["B"],
                head_stride=of["H"],
                token_stride=of["N"],
                content_stride=of["C"],
            )
        )
        address += chunk
    return placed, start + whole


def _dense(plane: Plane, axes: str, size: int) -> tuple[dict[str, int], int]:
    """Return the strides of ``axes``, outermost first, over items of ``size`` bytes without gaps, and the whole."""
    counts = (len(plane.layers), plane.blocks, plane.heads, plane.block_tokens, plane.content)
    strides = {}
    for axis in reversed(axes):
        strides[axis] = size
        size *= counts["LBHNC".index(axis)]
    return strides, size


def _formed(plane: Plane, workers: Sequence[WorkerGeometry], sizes: Sizes, blocks: int, block_tokens: int) -> Plane:
    """Return a plane with a decode engine's heads, blocks and tokens; its strides but the innermost are not set."""
    total = plane.total_heads or max(
        other.head_end
        for worker in workers
        for group in worker.groups
        for other in group.planes
        if other.part == plane.part and set(other.layers) & set(plane.layers)
    )
    first, end = held_heads(total, sizes.tensor_parallel, 0)
    kernel = block_tokens if sizes.block_tokens and not plane.packing else plane.block_tokens
    if block_tokens % kernel:
        raise ValueError(
            f"blocks of {block_tokens} tokens cannot be made of the kernel's {kernel}, whose packing {plane.packing!r} "
            "cannot be cut: choose a multiple of it"
        )
    return replace(
        plane,
        head_start=first,
        heads=end - first,
        block_tokens=kernel,
        blocks=blocks * (block_tokens // kernel),
    )
