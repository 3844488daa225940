"""What travels between the halves: orders survive pickling, reports of ranks are added up in any order."""

import functools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_connector.metadata import BlockMoves, Hashed, LoadOrder, StepOrders, StoreEnds, StoreOrder, WorkerReport

TRIPLES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1 << 40), st.integers(0, 1 << 40)), max_size=5)
ENDS = st.builds(StoreEnds, st.just(1), st.booleans(), st.booleans())
REPORTS = st.builds(WorkerReport, st.dictionaries(st.integers(0, 3), ENDS))


@given(triples=TRIPLES)
def test_moves_hold_what_they_are_made_of_in_order(triples: list[tuple[int, int, int]]) -> None:
    moves = BlockMoves.of(triples)
    assert len(moves) == len(triples)
    assert list(zip(moves.groups.tolist(), moves.blocks.tolist(), moves.slots.tolist(), strict=True)) == triples
    for array in (moves.groups, moves.blocks, moves.slots):
        assert array.dtype == np.int64
        assert array.flags.c_contiguous  # the view of a table would travel with the whole table


@given(triples=TRIPLES)
def test_orders_survive_the_way_to_the_workers(triples: list[tuple[int, int, int]]) -> None:
    orders = StepOrders(
        loads=(LoadOrder("r", BlockMoves.of(triples), 32),), stores=(StoreOrder(7, BlockMoves.of(triples)),)
    )
    arrived = pickle.loads(pickle.dumps(orders))
    [load], [store] = arrived.loads, arrived.stores
    assert (load.request_id, load.tokens, store.store_id) == ("r", 32, 7)
    for moves in (load.moves, store.moves):
        for name in ("groups", "blocks", "slots"):
            assert (getattr(moves, name) == getattr(orders.loads[0].moves, name)).all()


@given(reports=st.lists(REPORTS, min_size=1, max_size=4), data=st.data())
def test_reports_are_added_up_whatever_the_order_of_the_ranks(reports: list[WorkerReport], data: st.DataObject) -> None:
    total = functools.reduce(WorkerReport.aggregate, reports)
    shuffled = data.draw(st.permutations(reports))
    assert functools.reduce(WorkerReport.aggregate, shuffled).stores == total.stores
    for store_id in range(4):
        ends = [report.stores[store_id] for report in reports if store_id in report.stores]
        if ends:
            assert total.stores[store_id] == StoreEnds(
                len(ends), any(end.failed for end in ends), any(end.unsettled for end in ends)
            )
        else:
            assert store_id not in total.stores


def test_adding_up_changes_neither_report() -> None:
    one, other = WorkerReport({1: StoreEnds(1)}), WorkerReport({1: StoreEnds(1, failed=True), 2: StoreEnds(1)})
    one.aggregate(other)
    assert one.stores == {1: StoreEnds(1)}
    assert other.stores == {1: StoreEnds(1, failed=True), 2: StoreEnds(1)}


@pytest.mark.parametrize(
    "report", [WorkerReport({1: StoreEnds(1)}), WorkerReport(checksums=(Hashed("lease", 0, None),))]
)
def test_a_report_of_either_kind_is_passed_on(report: WorkerReport) -> None:
    """vLLM passes on what is true."""
    assert report
