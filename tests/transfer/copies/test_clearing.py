"""What a pull leaves of a request's last blocks is cleared, and no other byte.

Covers: layout.tails.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layout.geometry import Region
from layout.plan import BlockTable
from tests.support.connector.engines import placed
from tests.support.layout.oracle import LAYOUTS, WHOLE_HEADS, Engine, Held, Model, Rank, Table, build
from tests.support.layout.ranks import planes_of
from tests.support.layout.strategies import engines, models, thorough
from transfer.copies.clearing import TailCleaner
from transfer.memory import bytes_of

TOKENS = 75


def cleared(rank: Rank, held: Held, table: Table, end: int, *, opaque: bool) -> Iterator[int]:
    """The tokens whose places in the last blocks of a table are to be zero."""
    size, kernel = rank.engine.tokens_of(held.group), rank.engine.kernel_tokens_of(held.group)
    for token in range(end, len(table.ids) * size):
        is_moved_whole = opaque and token // kernel * kernel < end
        if token >= (end - 1) // size * size and table.id_at(token, size) >= 0 and not is_moved_whole:
            yield token


def assert_cleared(rank: Rank, tables: Sequence[Table], end: int) -> None:
    """Of the model's cache groups."""
    expected = rank.memory.copy()
    for _, plane, held in planes_of(rank):
        tokens = [*cleared(rank, held, tables[held.group], end, opaque=bool(plane.packing))]
        expected[rank.positions(held, tables[held.group], tokens)] = 0
    in_order = [BlockTable.of(tables[group].ids) for group in rank.group_order]
    TailCleaner(rank.geometry, [torch.from_numpy(rank.memory)])(in_order, end)
    assert np.array_equal(rank.memory, expected)


def a_table(engine: Engine, group: int, holes: Collection[int]) -> Table:
    blocks = min(-(-TOKENS // engine.tokens_of(group)), engine.blocks)
    ids = np.random.default_rng(group).permutation(engine.blocks)[:blocks].tolist()
    return Table(0, tuple(-1 if number in holes else block for number, block in enumerate(ids)))


@pytest.mark.parametrize("layout", LAYOUTS)
@thorough
@given(data=st.data())
def test_the_rows_behind_the_last_token_are_cleared_and_nothing_else(layout: str, data: st.DataObject) -> None:
    model = data.draw(models((1, 2)))
    engine = data.draw(engines(model, layout, data.draw(st.sampled_from(["fused", "views", "apart"]))))
    rank = placed(build(model, engine, 1, 1 << 40))[0]
    tables = [a_table(engine, group, data.draw(st.sets(st.integers(0, 9)))) for group in range(len(model.groups))]
    held = min(len(table.ids) * engine.tokens_of(group) for group, table in enumerate(tables))
    assert_cleared(rank, tables, data.draw(st.integers(1, min(TOKENS, held))))


@pytest.mark.parametrize(("layout", "form"), [*product(WHOLE_HEADS, ["packed", "transposed"])])
@pytest.mark.parametrize("end", [1, 15, 16, 17, 40, 64])
def test_a_kernel_block_that_is_moved_whole_is_not_cut(layout: str, form: str, end: int) -> None:
    engine = Engine(layout, form, tp=2, block_tokens=32, kernel_blocks=2)
    model = Model(4, (6, 10), 2, ((0, 2), (1,)), (0, 0))
    assert_cleared(placed(build(model, engine, 1, 1 << 40))[0], [a_table(engine, group, ()) for group in range(2)], end)


def test_host_memory_is_cleared_where_it_lies() -> None:
    memory = np.full(64, 7, np.uint8)
    torch.from_numpy(bytes_of(Region(memory.ctypes.data + 16, 32))).zero_()
    assert memory.tolist() == [7] * 16 + [0] * 32 + [7] * 16
