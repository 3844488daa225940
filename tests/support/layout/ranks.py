"""A rank of the oracle, as what reads blocks finds it."""

from dataclasses import replace

from layout.copies import Int64Array
from layout.geometry import CacheGroup, Plane, WorkerGeometry
from tests.support.layout.oracle import Engine, Held, Model, Rank, build
from transfer.copies.checksums.block_checksums import BlockReader, ReadableBlocks, in_place

BASE = 1 << 44


def a_rank(model: Model, engine: Engine, seed: int = 0) -> Rank:
    return build(model, engine, seed, BASE)[-1]


def reader_of(rank: Rank) -> BlockReader:
    """A rank's addresses are of a space of its own; its memory lies elsewhere."""
    shift = rank.memory.ctypes.data - rank.base

    def read(plane: Plane, blocks: Int64Array) -> ReadableBlocks:
        return in_place(replace(plane, address=plane.address + shift), blocks)

    return read


def planes_of(rank: Rank) -> list[tuple[CacheGroup, Plane, Held]]:
    """A rank's planes as planning sees them and as the oracle does."""
    described = [(group, plane) for group in rank.geometry.groups for plane in group.planes]
    return [(group, plane, held) for (group, plane), held in zip(described, rank.planes, strict=True)]


def compressed(rank: Rank, tokens_per_row: int) -> WorkerGeometry:
    """The cache of a rank as if each of its tokens were a row of several."""
    groups = tuple(
        replace(
            group,
            block_tokens=group.block_tokens * tokens_per_row,
            planes=tuple(replace(plane, tokens_per_row=tokens_per_row) for plane in group.planes),
        )
        for group in rank.geometry.groups
    )
    return replace(rank.geometry, groups=groups)
