"""Checksums against a second opinion that adds them up one byte number at a time, over all forms of caches.

Covers: layout.checksums.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layout.checksums import RUN_TOKENS, PlaneSums, item_weights, run_tokens
from layout.copies import Int64Array
from layout.geometry import CacheGroup, Plane
from layout.plan import BlockTable, PlanError
from tests.support.layout.oracle import LAYOUTS, WHOLE_HEADS, Engine, Extra, Held, Items, Model, Rank, Table
from tests.support.layout.ranks import a_rank, planes_of, reader_of
from tests.support.layout.strategies import engines, models, thorough
from transfer.copies.checksums import block_checksums as checksums
from transfer.copies.checksums.block_checksums import ReadableBlocks, in_place, sum_plane, sum_states

TOKENS = 75  # fill no number of blocks


def mixed(number: int) -> int:
    """SplitMix64, by its definition."""
    number = (number + 1) * 0x9E3779B97F4A7C15 % 2**64
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    number = (number ^ number >> 27) * 0x94D049BB133111EB % 2**64
    return number ^ number >> 31


def expected_sums(rank: Rank, plane: Plane, held: Held, table: Table, first: int, end: int) -> list[list[list[int]]]:
    """Of each run, layer and head, added up from the bytes that the oracle's index names."""
    run = plane.block_tokens if plane.packing else int(np.gcd(plane.block_tokens, 16))
    if plane.packing:
        end = -(-end // run) * run
    expected = []
    for start in range(first, end, run):
        tokens = [token for token in range(start, min(start + run, end)) if is_held(rank, held, table, token)]
        positions = rank.positions(held, table, tokens)  # [token, layer, head, content, byte]
        if plane.packing:  # as it lies: the bytes of a head of a block in the order of their addresses
            flat = np.sort(np.moveaxis(positions, 0, 2).reshape(*positions.shape[1:3], -1))
            positions = np.moveaxis(flat.reshape(*flat.shape[:2], len(tokens), *positions.shape[3:]), 2, 0)
        word = next(size for size in (4, 2, 1) if plane.item_size % size == 0)
        words_of_token = positions.shape[3] * plane.item_size // word
        memory = rank.memory[positions.reshape(*positions.shape[:3], words_of_token, word)].astype(object)
        words: Any = sum(memory[..., byte] << 8 * byte for byte in range(word))
        weights = np.array([mixed(2**32 + i) >> 32 | 1 for i in range(words.shape[3])], "O")
        by_token = np.array([mixed(token) | 1 for token in tokens], "O")
        totals = ((words * weights).sum(axis=3) * by_token[:, None, None]).sum(axis=0) % 2**64
        expected.append(np.broadcast_to(totals, (len(plane.layers), plane.heads)).tolist())
    return expected


def is_held(rank: Rank, held: Held, table: Table, token: int) -> bool:
    return table.id_at(token, rank.engine.tokens_of(held.group)) >= 0


def sums_of(rank: Rank, group: CacheGroup, plane: Plane, table: Table, first: int, end: int) -> PlaneSums:
    return sum_plane(
        plane, group.block_tokens, BlockTable.of(table.ids, table.first_block), first, end, reader_of(rank)
    )


def assert_as_expected(rank: Rank, tables: Sequence[Table], first: int, end: int) -> None:
    for group, plane, held in planes_of(rank):
        table = tables[held.group]
        sums = sums_of(rank, group, plane, table, first, end)
        assert (np.diff(sums.totals, axis=0)).tolist() == expected_sums(rank, plane, held, table, first, end)


def a_table(engine: Engine, group: int, seed: int, holes: int = 0) -> Table:
    ids = np.random.default_rng(seed).permutation(engine.blocks)[: -(-TOKENS // engine.tokens_of(group))]
    return Table(0, (-1,) * holes + tuple(ids.tolist()[holes:]))


@pytest.mark.thorough
@pytest.mark.parametrize("layout", LAYOUTS)
@thorough
@given(data=st.data())
def test_every_form_of_cache_is_summed_by_its_logical_index(layout: str, data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(["fused", "views", "apart"]))
    model = data.draw(models((1, 2, 4)))
    engine = data.draw(engines(model, layout, form))
    rank = a_rank(model, engine)
    tables = [a_table(engine, group, group, holes=group) for group in range(len(model.groups))]
    first = 2 * max(engine.tokens_of(group) for group in range(len(model.groups))) * data.draw(st.integers(0, 1))
    assert_as_expected(rank, tables, min(first, 64), TOKENS)


@pytest.mark.parametrize(("layout", "form"), [*product(WHOLE_HEADS, ["packed", "transposed"])])
@pytest.mark.parametrize("kernel_blocks", [1, 2])
def test_what_a_kernel_orders_in_its_own_way_is_summed(layout: str, form: str, kernel_blocks: int) -> None:
    scale = Extra("k_scale", 1, 4)
    model = Model(4, (6, 10), 2, ((0, 2), (1,)), (0, 0), (scale,))
    engine = Engine(layout, form, tp=2, block_tokens=32, kernel_blocks=kernel_blocks)
    tables = [a_table(engine, group, group) for group in range(2)]
    assert_as_expected(a_rank(model, engine), tables, 32, TOKENS)


@pytest.mark.parametrize("item_size", [1, 2, 4, 8])
@pytest.mark.parametrize(("layout", "form"), [("LBNHC", "fused"), ("BHLNC", "transposed"), ("LBHNC", "packed")])
def test_any_size_of_item_is_summed(layout: str, form: str, item_size: int) -> None:
    model = Model(2, (3, 2), item_size, ((0, 1),), (0,))
    engine = Engine(layout, form)
    assert_as_expected(a_rank(model, engine), [a_table(engine, 0, 7)], 16, TOKENS)


def test_items_of_a_size_that_no_word_has_are_summed_by_the_byte() -> None:
    memory = np.random.default_rng(0).integers(0, 256, 2 * 16 * 5 * 3, np.uint8)
    plane = dense_plane(memory, blocks=2, block_tokens=16, content=5, item_size=3)
    bytewise = replace(plane, content=15, item_size=1, content_stride=1)
    three, one = (sum_plane(each, 16, BlockTable.of([1, 0]), 0, 32) for each in (plane, bytewise))
    assert three.totals.tolist() == one.totals.tolist()
    assert three.totals.any()


# One changed byte


SENSITIVE = [("LBNHC", "fused"), ("LHBNC", "views"), ("BHLNC", "transposed"), ("BLHNC", "packed")]


@pytest.mark.parametrize(("layout", "form"), SENSITIVE)
@pytest.mark.parametrize("item_size", [1, 2, 4, 8])
@thorough
@given(data=st.data())
def test_one_changed_byte_changes_the_sum_of_its_place_and_no_other(
    layout: str, form: str, item_size: int, data: st.DataObject
) -> None:
    rank = a_rank(Model(2, (2, 3), item_size, ((0, 1),), (0,)), Engine(layout, form))
    table = a_table(rank.engine, 0, 3)
    number = data.draw(st.integers(0, len(rank.planes) - 1))
    group, plane, held = planes_of(rank)[number]
    layer, head = data.draw(st.integers(0, 1)), data.draw(st.integers(0, 1))
    token = data.draw(st.integers(0, TOKENS - 1))
    byte = data.draw(st.sampled_from(rank.positions(held, table, [token])[0, layer, head].ravel().tolist()))
    before = sums_of(rank, group, plane, table, 0, TOKENS)
    rank.memory[byte] ^= data.draw(st.integers(1, 255))
    after = sums_of(rank, group, plane, table, 0, TOKENS)
    runs = [*range(0, TOKENS, 16), TOKENS]
    changed = np.argwhere(before.between(runs) != after.between(runs)).tolist()
    assert changed == [[token // 16, layer, head]]


def test_two_flipped_sign_bits_do_not_cancel_each_other() -> None:
    """As they would with odd weights modulo a power of two, if items of eight bytes were not cut in two."""
    memory = np.zeros(16 * 4 * 8, np.uint8)
    plane = dense_plane(memory, blocks=1, block_tokens=16, content=4, item_size=8)
    memory[[7, 15]] = 0x80
    assert sum_plane(plane, 16, BlockTable.of([0]), 0, 16).totals[1] != 0


@pytest.mark.parametrize("axis", ["blocks", "tokens", "items"])
def test_an_exchange_of_equal_parts_is_seen(axis: str) -> None:
    memory = np.random.default_rng(1).integers(0, 256, 4 * 16 * 8 * 2, np.uint8)
    view = memory.reshape(4, 16, 8, 2)
    plane = dense_plane(memory, blocks=4, block_tokens=16, content=8, item_size=2)
    before = sum_plane(plane, 16, BlockTable.of(range(4)), 0, 64)
    if axis == "blocks":
        view[[1, 2]] = view[[2, 1]]
    elif axis == "tokens":
        view[1][[4, 5]] = view[1][[5, 4]]
    else:
        view[1, :, [0, 1]] = view[1, :, [1, 0]]
    after = sum_plane(plane, 16, BlockTable.of(range(4)), 0, 64)
    assert before.totals[-1] != after.totals[-1]
    assert (before.between([0, 64]) != after.between([0, 64])).all()


def test_weights_of_items_are_odd_and_no_two_are_equal() -> None:
    weights = item_weights(4096).tolist()
    assert all(weight % 2 for weight in weights)
    assert len(set(weights)) == 4096


# What counts, and what does not


def dense_plane(memory: Items, blocks: int, block_tokens: int, content: int, item_size: int) -> Plane:
    token = content * item_size
    return Plane(
        part="kv", layers=("l",), head_start=0, heads=1, block_tokens=block_tokens, content=content,
        item_size=item_size, blocks=blocks, address=memory.ctypes.data, layer_stride=0,
        block_stride=block_tokens * token, head_stride=0, token_stride=token, content_stride=item_size,
    )  # fmt: skip


@pytest.fixture
def memory() -> Items:
    return np.random.default_rng(2).integers(0, 256, 4 * 32 * 4 * 2, np.uint8)


@pytest.fixture
def plane(memory: Items) -> Plane:
    return dense_plane(memory, blocks=4, block_tokens=32, content=4, item_size=2)


def test_tokens_after_the_end_do_not_count(memory: Items, plane: Plane) -> None:
    before = sum_plane(plane, 32, BlockTable.of([0, 1]), 0, 37)
    memory.reshape(4, 32, 8)[1, 5:] = 0
    after = sum_plane(plane, 32, BlockTable.of([0, 1]), 0, 37)
    assert before.totals.tolist() == after.totals.tolist()


def test_the_whole_last_block_counts_where_it_is_opaque(memory: Items, plane: Plane) -> None:
    opaque = replace(plane, packing="amx")
    before = sum_plane(opaque, 32, BlockTable.of([0, 1]), 0, 37)
    memory.reshape(4, 32, 8)[1, 31] += 1
    after = sum_plane(opaque, 32, BlockTable.of([0, 1]), 0, 37)
    assert run_tokens(opaque) == 32
    assert (before.between([0, 32, 37]) != after.between([0, 32, 37])).ravel().tolist() == [False, True]


def test_runs_in_holes_count_as_nothing(plane: Plane) -> None:
    sums = sum_plane(plane, 32, BlockTable.of([-1, 2, -1]), 0, 96)
    assert (sums.between([0, 32, 64, 96]) == 0).ravel().tolist() == [True, False, True]


def test_the_entries_of_a_table_without_states_take_no_memory(plane: Plane) -> None:
    alone = sum_states(plane, BlockTable.of([1])).between((0, 1))
    found = sum_states(plane, BlockTable.of([-1] * 900 + [1] + [-1] * 100))
    assert len(found.totals) == 2
    assert np.array_equal(found.between((900, 901)), alone)
    assert alone.any()


def test_sums_of_neighbours_add_up_to_the_sum_of_both(plane: Plane) -> None:
    sums = sum_plane(plane, 32, BlockTable.of([3, 1, 0]), 32, 90)
    parts = sums.between([32, 48, 64, 80, 90])
    assert sums.between([32, 90]).tolist() == [np.sum(parts, axis=0, dtype=np.uint64).tolist()]
    assert sums.between([0, 32, 90, 4096])[[0, 2]].tolist() == [[[0]], [[0]]]


def test_a_run_counts_where_it_begins(plane: Plane) -> None:
    sums = sum_plane(plane, 32, BlockTable.of([3, 1]), 0, 64)
    assert sums.between([0, 17, 64]).tolist() == sums.between([0, 32, 64]).tolist()


def test_a_run_is_16_tokens_or_what_divides_a_block_and_them(plane: Plane) -> None:
    assert RUN_TOKENS == 16
    assert [run_tokens(replace(plane, block_tokens=size)) for size in (16, 48, 24, 20, 4)] == [16, 16, 8, 4, 4]


@pytest.mark.parametrize(("of_row", "first"), [(4, 0), (4, 16 * 4), (128, 8 * 128)])
def test_a_changed_row_of_a_compressed_cache_is_seen_at_its_tokens_and_nowhere_else(
    memory: Items, of_row: int, first: int
) -> None:
    """However many rows a block has. Equal rows have equal sums, wherever blocks begin."""
    rows = 128
    ends = {plane_rows: dense_plane(memory, rows // plane_rows, plane_rows, 4, 2) for plane_rows in (8, 32, 64, 128)}
    run = max(run_tokens(replace(each, tokens_per_row=of_row)) for each in ends.values())
    borders = range(first, rows * of_row + 1, max(run, 8 * of_row))

    def sums(plane_rows: int) -> list[int]:
        plane = replace(ends[plane_rows], tokens_per_row=of_row)
        table = BlockTable.of(range(plane.blocks))
        found = sum_plane(plane, plane_rows * of_row, table, first, rows * of_row)
        return found.between(borders).ravel().tolist()

    before = {each: sums(each) for each in ends}
    assert len({tuple(each) for each in before.values()}) == 1
    assert 0 not in before[8]
    for row in range(first // of_row, rows, 5):
        memory.reshape(rows, 8)[row, 3] ^= 255
        for each in ends:
            changed = [
                number for number, pair in enumerate(zip(before[each], sums(each), strict=True)) if len({*pair}) > 1
            ]
            assert changed == [(row * of_row - first) // borders.step]
        memory.reshape(rows, 8)[row, 3] ^= 255


def test_memory_is_read_in_pieces(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sum_plane(plane, 32, BlockTable.of([3, 1, 0, 2]), 0, 128)
    monkeypatch.setattr(checksums, "CHUNK_BYTES", 3 * plane.block_bytes)
    read: list[int] = []

    def reader(plane: Plane, blocks: Int64Array) -> ReadableBlocks:
        read.append(len(blocks))
        return in_place(plane, blocks)

    assert sum_plane(plane, 32, BlockTable.of([3, 1, 0, 2]), 0, 128, reader).totals.tolist() == whole.totals.tolist()
    assert read == [3, 1]


def test_nothing_has_no_sums(plane: Plane) -> None:
    assert sum_plane(plane, 32, BlockTable.of([]), 0, 0).totals.tolist() == [[[0]]]


def test_nor_have_no_tokens_wherever_they_begin(plane: Plane) -> None:
    assert not sum_plane(plane, 32, BlockTable.of([-1]), 21, 21).totals.any()


@pytest.mark.parametrize(
    ("ids", "first", "end", "words"),
    [
        ([0, 1], 8, 40, "checksums cover runs of 16 tokens and cannot start at token 8"),
        ([0], 0, 33, "block table of 1 blocks of 32 tokens has none for tokens 0 to 32"),
        ([0, 4], 0, 64, "block 4 does not exist: part 'kv' has 4 blocks"),
    ],
)
def test_what_cannot_be_read_is_refused(plane: Plane, ids: list[int], first: int, end: int, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        sum_plane(plane, 32, BlockTable.of(ids), first, end)
