"""Scratch blocks: each element of each block has bytes of its own inside the memory, and pulls arrive there."""

from collections.abc import Sequence
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layout.copies import Int64Array
from layout.geometry import Plane, Region, WorkerGeometry
from layout.scratch import blocks_of_tokens, scratch_bytes, scratch_geometry
from tests.support.layout.oracle import LAYOUTS, WHOLE_HEADS, Engine, Model, build
from tests.support.layout.strategies import INDEXER, SCALE

MEMORY = 1 << 45
WINDOWS = Model(2, (3, 2), 2, ((0, 2), (1, 3)), (0, 8), (SCALE, INDEXER))


def elements(plane: Plane, blocks: range) -> Int64Array:
    """The address of every byte of kernel blocks."""
    axes = (
        (range(len(plane.layers)), plane.layer_stride),
        (blocks, plane.block_stride),
        (range(plane.heads), plane.head_stride),
        (range(plane.block_tokens), plane.token_stride),
        (range(plane.content), plane.content_stride),
        (range(plane.item_size), 1),
    )
    addresses = np.array([plane.address], np.int64)
    for indices, stride in axes:
        addresses = np.add.outer(addresses, np.array(indices, np.int64) * stride).ravel()
    return addresses


def scratch_of(geometry: WorkerGeometry, blocks: list[int]) -> WorkerGeometry:
    return scratch_geometry(geometry, Region(MEMORY, scratch_bytes(geometry, blocks)), blocks)


@given(
    layout=st.sampled_from(LAYOUTS),
    form=st.sampled_from(["fused", "views", "apart", "packed"]),
    tp=st.sampled_from([1, 2]),
    kernel_blocks=st.sampled_from([1, 2]),
    blocks=st.lists(st.integers(1, 3), min_size=2, max_size=2),
)
def test_every_byte_of_every_block_has_a_place_of_its_own(
    layout: str, form: str, tp: int, kernel_blocks: int, blocks: list[int]
) -> None:
    layout = layout if form != "packed" or layout in WHOLE_HEADS else "LBHNC"
    engine = Engine(layout=layout, form=form, tp=tp, kernel_blocks=kernel_blocks)
    for rank in build(WINDOWS, engine, seed=1, base=1 << 40):
        geometry = rank.geometry
        scratch = scratch_of(geometry, blocks)
        (memory,) = scratch.regions
        found = []
        for ours, theirs, number in zip(geometry.groups, scratch.groups, blocks, strict=True):
            assert (theirs.block_tokens, theirs.layers) == (ours.block_tokens, ours.layers)
            for plane in theirs.planes:
                ratio = ours.block_tokens // plane.block_tokens
                assert plane.blocks == (number + 1) * ratio
                found.append(elements(plane, range(ratio, plane.blocks)))
                assert len(found[-1]) == prod((number * ratio, plane.block_bytes))
        addresses = np.concatenate(found)
        assert len(np.unique(addresses)) == len(addresses)
        assert memory.address <= addresses.min()
        assert addresses.max() < memory.end


@pytest.mark.parametrize("layout", ["BHLNC", "BLHNC", "BLNHC"])
@pytest.mark.parametrize("form", ["fused", "views"])
def test_a_block_whose_planes_alternate_is_the_same_bytes_in_a_row(layout: str, form: str) -> None:
    """So that it is read in one descriptor, and not token by token."""
    (rank,) = build(Model(4, (6, 6), 2, ((0, 1, 2),), (0,)), Engine(layout=layout, form=form), seed=1, base=1 << 40)
    geometry = rank.geometry
    (ours,), (theirs,) = geometry.groups, scratch_of(geometry, [3]).groups

    def of_block(planes: Sequence[Plane], number: int) -> Int64Array:
        addresses = np.concatenate([elements(plane, range(number, number + 1)) for plane in planes])
        addresses -= addresses.min()
        return addresses

    assert (of_block(theirs.planes, 1) == of_block(ours.planes, 0)).all()
    assert of_block(theirs.planes, 2).max() + 1 == sum(plane.block_bytes for plane in theirs.planes)


def test_a_hole_has_no_memory() -> None:
    scratch = scratch_of(build(WINDOWS, Engine(), seed=1, base=1 << 40)[0].geometry, [1, 1])
    first = scratch.groups[0].planes[0]
    assert elements(first, range(1)).max() < scratch.regions[0].address


def test_memory_that_is_too_small_is_not_used() -> None:
    geometry = build(WINDOWS, Engine(), seed=1, base=1 << 40)[0].geometry
    with pytest.raises(AssertionError, match="too small"):
        scratch_geometry(geometry, Region(MEMORY, scratch_bytes(geometry, [2, 2]) - 1), [2, 2])


def test_wherever_tokens_begin_there_are_blocks_for_them() -> None:
    geometry = build(WINDOWS, Engine(block_tokens=16, group_factors=(1, 2)), seed=1, base=1 << 40)[0].geometry
    sizes = [group.block_tokens for group in geometry.groups]
    for tokens in (1, 16, 33):
        needed = list(blocks_of_tokens(geometry, tokens))
        for first in range(40):
            held = [-(-(first + tokens) // size) - first // size for size in sizes]
            assert all(blocks <= enough for blocks, enough in zip(held, needed, strict=True))
