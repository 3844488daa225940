"""What travels between the two sides: orders survive pickling, reports of ranks are added up in any order.

Covers: pd_connector.vllm.metadata.
"""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layout.checksums import PlaneSums
from layout.geometry import WorkerGeometry
from pd_connector.orders import (
    BlockMoves,
    Cause,
    ChecksumReport,
    LoadOrder,
    Orders,
    PoolOrder,
    RefuseOrder,
    Report,
    StoreEnds,
    StoreOrder,
    WorkerHandshake,
)
from pd_connector.vllm.metadata import ReportMetadata, StepMetadata

TRIPLES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1 << 40), st.integers(0, 1 << 40)), max_size=5)
ENDS = st.builds(StoreEnds, st.just(1), st.booleans(), st.booleans())
REPORTS = st.builds(Report, st.dictionaries(st.integers(0, 3), ENDS))


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
    orders = Orders(
        loads=(LoadOrder("r", BlockMoves.of(triples), 32),), stores=(StoreOrder(7, BlockMoves.of(triples)),)
    )
    arrived = pickle.loads(pickle.dumps(orders))
    [load], [store] = arrived.loads, arrived.stores
    assert (load.request_id, load.tokens, store.store_id) == ("r", 32, 7)
    for moves in (load.moves, store.moves):
        for name in ("groups", "blocks", "slots"):
            assert (getattr(moves, name) == getattr(orders.loads[0].moves, name)).all()


@pytest.mark.parametrize(
    "sent",
    [
        Orders(stores=(StoreOrder(7, BlockMoves.of([(0, 5, 6), (1, 7, 8)])),)),
        Orders(puts=(PoolOrder(7, "model", np.arange(2), np.arange(5, 7), (b"a", b"b"), 9.0),)),
        Report(checksums=(ChecksumReport("lease", 0, ((PlaneSums(16, 3, np.ones((4, 2, 2), np.uint64)),),)),)),
    ],
)
def test_what_arrives_keeps_no_memory_of_what_carried_it(sent: Orders | Report) -> None:
    """Ray hands out views of shared memory, and no step is carried in it while one of them is kept."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(sent, protocol=5, buffer_callback=buffers.append)
    carried = [bytearray(buffer) for buffer in buffers]
    arrived = pickle.loads(pickled, buffers=carried)
    for memory in carried:
        memory.clear()  # BufferError, if somebody has a view of it
    assert repr(arrived) == repr(sent)


@given(reports=st.lists(REPORTS, min_size=1, max_size=4), data=st.data())
def test_reports_are_added_up_whatever_the_order_of_the_ranks(reports: list[Report], data: st.DataObject) -> None:
    total = sum(reports, Report())
    shuffled = data.draw(st.permutations(reports))
    assert sum(shuffled, Report()).stores == total.stores
    for store_id in range(4):
        ends = [report.stores[store_id] for report in reports if store_id in report.stores]
        if ends:
            assert total.stores[store_id] == StoreEnds(
                len(ends), any(end.failed for end in ends), any(end.unsettled for end in ends)
            )
        else:
            assert store_id not in total.stores


def test_adding_up_changes_neither_report() -> None:
    one, other = Report({1: StoreEnds(1)}), Report({1: StoreEnds(1, failed=True), 2: StoreEnds(1)})
    assert (one + other).stores[1] == StoreEnds(2, failed=True)
    assert one.stores == {1: StoreEnds(1)}
    assert other.stores == {1: StoreEnds(1, failed=True), 2: StoreEnds(1)}


HANDSHAKES = [WorkerHandshake(WorkerGeometry(rank, 2, 0, 1, "10.0.0.5:15000", (), ())) for rank in range(2)]


def test_handshakes_of_several_ranks_are_those_of_one_report() -> None:
    one, other = ({(0, rank): HANDSHAKES[rank]} for rank in range(2))
    together = Report(handshakes=one) + Report({1: StoreEnds(1)}) + Report(handshakes=other)
    assert pickle.loads(pickle.dumps(together)).handshakes == {**one, **other}


@pytest.mark.parametrize(
    "report",
    [
        Report({1: StoreEnds(1)}),
        Report(checksums=(ChecksumReport("lease", 0, None),)),
        Report(handshakes={(0, 0): HANDSHAKES[0]}),
        Report(steps={3: 1}),
    ],
)
def test_a_report_of_either_kind_is_passed_on(report: Report) -> None:
    assert report
    assert not Report()


def test_orders_of_several_roles_are_those_of_one_step() -> None:
    refusal, store = RefuseOrder("r", Cause.PARAMS, "because"), StoreOrder(7, BlockMoves.of([]))
    orders = Orders(refusals=(refusal,)) + Orders() + Orders(stores=(store,))
    assert orders == Orders(refusals=(refusal,), stores=(store,))


def test_vllm_adds_up_what_workers_report_and_carries_both_ways() -> None:
    one, other = ReportMetadata(Report({1: StoreEnds(1)})), ReportMetadata(Report({1: StoreEnds(1, failed=True)}))
    assert one.aggregate(other).report.stores == {1: StoreEnds(2, failed=True)}
    orders = Orders(refusals=(RefuseOrder("r", Cause.PARAMS, "because"),))
    assert pickle.loads(pickle.dumps(StepMetadata(orders))).orders == orders


def test_to_add_nothing_makes_nothing_new() -> None:
    """Both sides add up what all roles say in every step, and most say nothing in most steps."""
    orders, report = Orders(model_changes=1), Report(steps={3: 1})
    assert orders + Orders() is orders
    assert report + Report() is report
    assert not (Report() + Report())
