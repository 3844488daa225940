"""Values read from caches of every form against a second opinion that finds them one byte number at a time."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layout.copies import Int64Array
from layout.geometry import CacheGroup, Plane
from layout.plan import BlockTable, PlanError
from tests.support.layout.oracle import LAYOUTS, WHOLE_HEADS, Engine, Extra, Items, Model, Rank, Table
from tests.support.layout.ranks import a_rank, planes_of, reader_of
from tests.support.layout.strategies import engines, models, thorough
from transfer.copies.checksums import block_checksums
from transfer.copies.checksums.block_checksums import ReadableBlocks, in_place
from transfer.copies.checksums.device_reader import DeviceReader
from transfer.copies.checksums.values import PlaneValues, read_values

TOKENS = 75  # fill no number of blocks


def a_table(engine: Engine, group: int, seed: int, holes: int = 0) -> Table:
    ids = np.random.default_rng(seed).permutation(engine.blocks)[: -(-TOKENS // engine.tokens_of(group))]
    return Table(0, (-1,) * holes + tuple(ids.tolist()[holes:]))


def values_of(rank: Rank, group: CacheGroup, plane: Plane, table: Table, first: int, end: int) -> PlaneValues:
    block_table = BlockTable.of(table.ids, table.first_block)
    return read_values(plane, group.block_tokens, block_table, first, end, reader_of(rank))


def assert_as_the_oracle_says(rank: Rank, tables: Sequence[Table], first: int, end: int) -> None:
    rank.fill(tables)
    for group, plane, held in planes_of(rank):
        table = tables[held.group]
        read = values_of(rank, group, plane, table, first, end)
        present = [t for t in range(first, end) if table.id_at(t, rank.engine.tokens_of(held.group)) >= 0]
        expected = np.zeros_like(read.data)
        wanted = rank.wanted_values(held, present)  # [token, layer, head, content, byte]
        wanted = np.broadcast_to(wanted, (len(present), len(plane.layers), plane.heads, *wanted.shape[3:]))
        expected[:, [token - first for token in present]] = wanted.reshape(
            *wanted.shape[:3], read.data.shape[3]
        ).swapaxes(0, 1)
        assert (np.flatnonzero(read.held) + first).tolist() == present
        np.testing.assert_array_equal(read.data, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@thorough
@given(data=st.data())
def test_every_form_of_cache_is_read_by_its_logical_index(layout: str, data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(["fused", "views", "apart", "transposed"]))
    if form == "transposed" and layout not in WHOLE_HEADS:
        form = "views"
    model = data.draw(models((1, 2, 4)))
    rank = a_rank(model, data.draw(engines(model, layout, form)))
    tables = [a_table(rank.engine, group, group, holes=group) for group in range(len(model.groups))]
    first = data.draw(st.integers(0, TOKENS))
    assert_as_the_oracle_says(rank, tables, first, data.draw(st.integers(first, TOKENS)))


@pytest.mark.parametrize("layout", WHOLE_HEADS)
@pytest.mark.parametrize("kernel_blocks", [1, 2])
@pytest.mark.parametrize(("first", "end"), [(0, TOKENS), (10, 75), (32, 64), (33, 63), (70, 75)])
def test_an_opaque_plane_is_read_in_whole_blocks_as_they_lie(
    layout: str, kernel_blocks: int, first: int, end: int
) -> None:
    model = Model(4, (6, 10), 2, ((0, 2),), (0,))
    engine = Engine(layout, "packed", tp=2, block_tokens=32, kernel_blocks=kernel_blocks)
    rank, size = a_rank(model, engine), 32 // kernel_blocks
    table = a_table(engine, 0, 3)
    ((group, plane, held),) = planes_of(rank)
    read = values_of(rank, group, plane, table, first, end)
    whole = [start for start in range(0, TOKENS, size) if first <= start and start + size <= end]
    assert (np.flatnonzero(read.held) + first).tolist() == [start + i for start in whole for i in range(size)]
    for start, layer, head in product(whole, range(2), range(2)):
        places = np.sort(rank.positions(held, table, range(start, start + size))[:, layer, head].ravel())
        assert places.tolist() == list(range(places[0], places[0] + len(places)))
        block = read.data[layer, start - first : start - first + size, head]
        assert block.ravel().tolist() == rank.memory[places].tolist()


@pytest.mark.parametrize("strides", [(0, 1, 2, 3, 4), (1, 0, 3, 2, 4), (3, 1, 2, 0, 4), (0, 1, 2, 4, 3)])
def test_a_device_is_read_through_its_reader(strides: tuple[int, ...]) -> None:
    """``strides``: the axes (layer, block, head, token, content) as they lie in memory."""
    sizes = (3, 5, 2, 4, 6)
    cache = torch.arange(720, dtype=torch.int16, device="cpu").reshape([sizes[axis] for axis in strides])
    logical = cache.permute([strides.index(axis) for axis in range(5)])
    layer, block, head, token, content = (2 * stride for stride in logical.stride())
    plane = Plane(
        part="k", layers=("a", "b", "c"), head_start=0, heads=2, block_tokens=4, content=6, item_size=2, blocks=5,
        address=cache.data_ptr(), layer_stride=layer, block_stride=block, head_stride=head, token_stride=token,
        content_stride=content,
    )  # fmt: skip
    table = BlockTable.of([4, 0, -1, 2])
    here, there = (read_values(plane, 4, table, 1, 15, read) for read in (in_place, DeviceReader([cache])))
    np.testing.assert_array_equal(here.data, there.data)
    assert here.held.tolist() == there.held.tolist() == [not 8 <= token < 12 for token in range(1, 15)]
    expected = logical[:, 4, :, 1].contiguous().numpy().view(np.uint8)
    np.testing.assert_array_equal(here.data[:, 0], expected)


@pytest.fixture
def memory() -> Items:
    return np.random.default_rng(2).integers(0, 256, 4 * 32 * 4 * 2, np.uint8)


@pytest.fixture
def plane(memory: Items) -> Plane:
    return Plane(
        part="kv", layers=("l",), head_start=0, heads=1, block_tokens=32, content=4, item_size=2, blocks=4,
        address=memory.ctypes.data, layer_stride=0, block_stride=256, head_stride=0, token_stride=8, content_stride=2,
    )  # fmt: skip


def test_memory_is_read_in_pieces(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read_values(plane, 32, BlockTable.of([3, 1, 0, 2]), 5, 128)
    monkeypatch.setattr(block_checksums, "CHUNK_BYTES", 3 * plane.block_bytes)
    read: list[int] = []

    def reader(plane: Plane, blocks: Int64Array) -> ReadableBlocks:
        read.append(len(blocks))
        return in_place(plane, blocks)

    pieces = read_values(plane, 32, BlockTable.of([3, 1, 0, 2]), 5, 128, reader)
    np.testing.assert_array_equal(pieces.data, whole.data)
    assert read == [3, 1]


def test_what_was_read_does_not_change_with_the_cache(memory: Items, plane: Plane) -> None:
    read = read_values(plane, 32, BlockTable.of([3]), 0, 32)
    before = read.data.copy()
    memory[:] = 0
    np.testing.assert_array_equal(read.data, before)


@pytest.mark.parametrize("packing", ["", "amx"])
def test_nothing_has_no_values(plane: Plane, packing: str) -> None:
    read = read_values(replace(plane, packing=packing), 32, BlockTable.of([]), 0, 0)
    assert read.data.shape == (1, 0, 1, 8)
    assert read.held.tolist() == []


def test_a_rank_without_heads_has_no_values(plane: Plane) -> None:
    read = read_values(replace(plane, heads=0), 32, BlockTable.of([0]), 0, 32)
    assert read.data.shape == (1, 32, 0, 8)


@pytest.mark.parametrize(
    ("ids", "end", "words"),
    [
        ([0], 33, "block table of 1 blocks of 32 tokens has none for tokens 0 to 32"),
        ([0, 4], 64, "block 4 does not exist: part 'kv' has 4 blocks"),
    ],
)
def test_what_cannot_be_read_is_refused(plane: Plane, ids: list[int], end: int, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        read_values(plane, 32, BlockTable.of(ids), 0, end)


def test_extra_parts_are_read_as_their_own_planes() -> None:
    model = Model(4, (3, 2), 1, ((0, 1),), (0,), (Extra("k_scale", 1, 4), Extra("indexer", 3, 1, shared=True)))
    engine = Engine("LBNHC", "apart", tp=2, block_tokens=16)
    assert_as_the_oracle_says(a_rank(model, engine), [a_table(engine, 0, 7)], 3, TOKENS)
