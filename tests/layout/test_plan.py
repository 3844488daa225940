"""What a plan promises: how many descriptors, which bytes, and what it refuses."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from layout.copies import Copies
from layout.geometry import CacheGroup, Plane, WorkerGeometry
from layout.plan import BlockTable, Plan, PlanError, compile_plans
from layout.sharding import Share, Source
from tests.support.layout.oracle import LAYOUTS, Engine, Model, Table, build
from tests.support.layout.pulls import LOCAL_BASE, REMOTE_BASE, Request, in_order, plain, plans_of, pull

SMALL = Model(kv_heads=4, contents=(2, 2), item_size=2, groups=((0, 1, 2),), windows=(0,))
TWENTY_FOUR_LAYERS = Model(kv_heads=2, contents=(2, 2), item_size=2, groups=(tuple(range(24)),), windows=(0,))
HYBRID = Model(kv_heads=2, contents=(2, 2), item_size=2, groups=((0, 2), (1, 3)), windows=(0, 32))


def the_plan(model: Model, local: Engine, remote: Engine) -> Plan:
    """The plan of the first local rank for the first remote rank."""
    ours = build(model, local, 1, LOCAL_BASE)[0].geometry
    return plans_of(ours, [rank.geometry for rank in build(model, remote, 2, REMOTE_BASE)])[0]


# Descriptors: the fewer, the faster.


def test_a_block_of_all_layers_is_one_descriptor_in_bhlnc() -> None:
    engine = Engine("BHLNC", tp=2, block_tokens=32, blocks=120)
    reads = pull(TWENTY_FOUR_LAYERS, engine, engine, plain(3500, engine, engine, "fragmented"))
    assert [(read.local, read.remote) for read in reads] == [(0, 0), (1, 1)]
    assert all(len(read.copies) <= 110 for read in reads)


def test_a_head_slice_of_a_block_is_one_descriptor_in_bhlnc() -> None:
    local, remote = (
        Engine("BHLNC", tp=1, block_tokens=32, blocks=120),
        Engine("BHLNC", tp=2, block_tokens=32, blocks=120),
    )
    reads = pull(TWENTY_FOUR_LAYERS, local, remote, plain(3500, local, remote))
    assert [len(read.copies) for read in reads] == [110, 110]


@pytest.mark.parametrize("layout", ["BHLNC", "BLHNC", "BLNHC"])
def test_adjacent_whole_blocks_are_one_descriptor_when_the_block_is_outermost(layout: str) -> None:
    engine = Engine(layout)
    (read,) = pull(SMALL, engine, engine, plain(100, engine, engine))
    assert len(read.copies) == 1


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
def test_adjacent_blocks_are_one_descriptor_for_each_layer_when_the_layer_is_outermost(layout: str) -> None:
    engine = Engine(layout)
    (read,) = pull(SMALL, engine, engine, plain(100, engine, engine))
    assert len(read.copies) == 3


def test_adjacent_blocks_are_one_descriptor_for_each_layer_and_head_in_lhbnc() -> None:
    engine = Engine("LHBNC")
    (read,) = pull(SMALL, engine, engine, plain(100, engine, engine))
    assert len(read.copies) == 3 * 4


def test_blocks_that_are_adjacent_on_one_side_only_stay_apart() -> None:
    engine = Engine("BLHNC")
    request = Request(0, 48, (Table(0, (2, 3, 4)),), (Table(0, (2, 5, 6)),))
    (read,) = pull(SMALL, engine, engine, request)
    assert sorted((read.copies.sizes // (SMALL.layers * 4 * 16 * 4 * 2)).tolist()) == [1, 2]


def test_small_blocks_join_inside_a_larger_block() -> None:
    local, remote = Engine("LBNHC", block_tokens=64), Engine("LBNHC", block_tokens=16, blocks=16)
    request = Request(0, 128, (Table(0, (5, 1)),), (Table(0, tuple(range(3, 11))),))
    (read,) = pull(SMALL, local, remote, request)
    assert len(read.copies) == 3 * 2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("local_tp", "remote_tp"), [(1, 1), (1, 2), (2, 1)])
def test_runs_come_in_the_order_of_the_peers_memory(layout: str, local_tp: int, remote_tp: int) -> None:
    local, remote = Engine(layout, tp=local_tp), Engine(layout, tp=remote_tp)
    for read in pull(SMALL, local, remote, plain(100, local, remote, "fragmented")):
        assert (np.diff(read.copies.sources) > 0).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("groups", [((0, 2), (1, 3)), ((3, 1, 0, 2),), ((0, 1, 3), (2,))])
def test_layers_that_are_neighbours_on_one_side_only_are_not_taken_for_a_run(
    layout: str, groups: tuple[tuple[int, ...], ...]
) -> None:
    local_model = Model(kv_heads=2, contents=(2, 2), item_size=2, groups=((0, 1, 2, 3),), windows=(0, 0))
    engine = Engine(layout)
    request = Request(0, 33, (Table(0, (1, 2, 3)),), (Table(0, (2, 3, 4)), Table(0, (6, 5, 1)))[: len(groups)])
    pull(local_model, engine, engine, request, remote_model=replace(local_model, groups=groups))


# Tokens: what is read, and what is left alone. ``pull`` compares all of the memory.


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 31, 32])
def test_a_request_of_any_length_arrives(tokens: int) -> None:
    local, remote = Engine("LBNHC", block_tokens=32), Engine("BHLNC", block_tokens=16)
    pull(SMALL, local, remote, plain(tokens, local, remote, "fragmented"))


def test_a_pull_of_no_tokens_reads_nothing() -> None:
    engine = Engine()
    assert [len(read.copies) for read in pull(SMALL, engine, engine, plain(0, engine, engine))] == [0]


def test_tokens_before_a_prefix_hit_are_not_read() -> None:
    engine = Engine("BLHNC")
    request = Request(32, 50, (Table(2, (7, 1)),), (Table(0, (4, 5, 6, 3)),))
    (read,) = pull(SMALL, engine, engine, request)
    assert read.copies.total_bytes == 2 * SMALL.layers * 4 * 16 * 4 * 2


def test_the_last_unit_is_read_whole() -> None:
    local, remote = Engine("LBNHC", block_tokens=64), Engine("LBNHC", block_tokens=32)
    (read,) = pull(SMALL, local, remote, plain(33, local, remote))
    assert read.copies.total_bytes == 64 * SMALL.layers * 4 * 4 * 2


def test_a_hole_here_is_not_read() -> None:
    engine = Engine("LBHNC")
    full, windowed = Table(0, (1, 2, 3)), Table(0, (-1, 6, 5))
    (read,) = pull(HYBRID, engine, engine, Request(0, 48, (full, windowed), (full, windowed)))
    assert read.copies.total_bytes == (3 + 2) * 2 * 2 * 16 * 4 * 2


def test_a_block_here_that_is_a_hole_there_is_refused() -> None:
    plan = the_plan(SMALL, Engine(), Engine())
    with pytest.raises(PlanError, match="remote side holds no block for token 16,"):
        plan.instantiate([BlockTable.of([1, 2])], [BlockTable.of([1, -1])], 0, 32)


def test_a_larger_block_here_that_begins_in_a_hole_there_is_refused() -> None:
    """A block of 64 tokens would be cached here as whole, although P let go of its first part."""
    plan = the_plan(SMALL, Engine(block_tokens=64), Engine(block_tokens=16))
    with pytest.raises(PlanError, match="no block for token 0,"):
        plan.instantiate([BlockTable.of([1])], [BlockTable.of([-1, -1, 4, 5])], 0, 64)


def test_cache_groups_are_matched_by_their_layers_not_by_their_number() -> None:
    local, remote = Engine("BLHNC", groups_reversed=True), Engine("BLHNC")
    full, windowed = Table(0, (1, 2, 3)), Table(0, (-1, 6, 5))
    pull(HYBRID, local, remote, Request(0, 48, (full, windowed), (full, windowed)))


def test_kernel_blocks_are_counted_inside_manager_blocks() -> None:
    local, remote = Engine("LBNHC", block_tokens=64, kernel_blocks=4), Engine("LHBNC", block_tokens=32, kernel_blocks=2)
    pull(SMALL, local, remote, plain(100, local, remote, "descending"))


@pytest.mark.parametrize(("local", "remote"), [*product(["views", "apart"], repeat=2)])
def test_k_and_v_may_be_views_of_one_allocation_or_allocations_of_their_own(local: str, remote: str) -> None:
    model = replace(SMALL, contents=(3, 2))
    ours, theirs = Engine("BLNHC", local, tp=2), Engine("LBHNC", remote, tp=4, offset_items=7)
    pull(model, ours, theirs, plain(40, ours, theirs))


@pytest.mark.parametrize(("here", "there"), [*product(LAYOUTS, LAYOUTS)])
@pytest.mark.parametrize("sizes", [(16, 16), (32, 16), (16, 48)])
def test_k_and_v_of_one_allocation_cost_no_more_descriptors_as_two_planes_than_as_one(
    here: str, there: str, sizes: tuple[int, int]
) -> None:
    counts = {}
    for form in ("views", "fused"):
        ours = Engine(here, form, tp=2, block_tokens=sizes[0], blocks=6)
        theirs = Engine(there, form, tp=1, block_tokens=sizes[1], blocks=6)
        reads = pull(SMALL, ours, theirs, plain(40, ours, theirs, "fragmented"))
        counts[form] = [len(read.copies) for read in reads]
    assert counts["views"] == counts["fused"]


@pytest.mark.parametrize("layout", ["LBHNC", "LHBNC", "BLHNC", "BHLNC"])
def test_k_transposed_beside_v_comes_in_as_few_descriptors_as_an_opaque_head(layout: str) -> None:
    counts = []
    for form in ("transposed", "packed"):
        ours, theirs = Engine(layout, form, tp=2), Engine(layout, form, tp=1)
        counts.append([len(read.copies) for read in pull(SMALL, ours, theirs, plain(40, ours, theirs, "fragmented"))])
    assert counts[0] == counts[1]


def test_planes_that_do_not_touch_keep_joining_neighbouring_blocks() -> None:
    """MLA's unequal parts in contiguous blocks: one run each, whatever the number of blocks."""
    model = Model(kv_heads=1, contents=(512, 64), item_size=2, groups=((0,),), windows=(0,))
    engine = Engine("LBNHC", "apart")
    (read,) = pull(model, engine, engine, plain(64, engine, engine, "contiguous"))
    assert len(read.copies) == 2


def test_mla_parts_of_512_and_64_items_come_whole() -> None:
    model = Model(kv_heads=1, contents=(512, 64), item_size=2, groups=((0, 1),), windows=(0,))
    local, remote = Engine("LBNHC", "apart", tp=2), Engine("LBNHC", "apart", tp=4)
    reads = pull(model, local, remote, plain(33, local, remote))
    assert [len(read.copies) for read in reads] == [4, 4]
    assert len({read.remote for read in reads}) == 2


def test_packed_heads_of_unequal_manager_blocks_come_whole() -> None:
    local = Engine("BHLNC", "packed", block_tokens=64, kernel_blocks=4)
    remote = Engine("LBHNC", "packed", tp=2, block_tokens=32, kernel_blocks=2)
    pull(SMALL, local, remote, plain(70, local, remote, "fragmented"))


@pytest.mark.parametrize(("local", "remote"), [(0, 5), (64, 0), (3, 3)])
def test_a_view_that_starts_inside_its_storage_is_read_from_its_own_start(local: int, remote: int) -> None:
    ours, theirs = Engine("BHLNC", offset_items=local), Engine("BHLNC", offset_items=remote)
    pull(SMALL, ours, theirs, plain(40, ours, theirs))


# Refusals: the message names the values.


@pytest.mark.parametrize(
    ("local", "remote", "tokens", "message"),
    [
        ([1, 8], [1, 2], (0, 32), r"local block id 8 does not exist: the cache has 8 blocks"),
        ([1, 2], [99, 2], (0, 32), r"remote block id 99 does not exist: the cache has 8 blocks"),
        (
            [1],
            [1, 2],
            (0, 32),
            r"the local block table holds 1 blocks from block 0 on; tokens 0 to 16 need blocks 0 to 1",
        ),
        ([1, 2, 3], [1, 2], (0, 33), r"the remote block table holds 2 blocks .* need blocks 0 to 2 of 16 tokens"),
        ([1, 2], [1, 2], (8, 32), r"must start at a multiple of 16 tokens, not at token 8"),
        ([1, 2], [1, 2], (-16, 16), r"the local block table holds 2 blocks .* need blocks -1 to 0"),
    ],
)
def test_a_table_that_cannot_hold_the_request_is_refused(
    local: list[int], remote: list[int], tokens: tuple[int, int], message: str
) -> None:
    plan = the_plan(SMALL, Engine(), Engine())
    with pytest.raises(PlanError, match=message):
        plan.instantiate([BlockTable.of(local)], [BlockTable.of(remote)], *tokens)


@pytest.mark.parametrize(("ours", "theirs"), [([5, 2, 7], [1, 3]), ([5, 2], [1, 3, 4, 6]), ([5, 2, 7], [1, 3, 4])])
def test_blocks_behind_the_wanted_tokens_are_not_touched(ours: list[int], theirs: list[int]) -> None:
    """Either side may hold more of them, as for tokens that it drafts ahead."""
    plan = the_plan(SMALL, Engine(), Engine())
    read = plan.instantiate([BlockTable.of(ours)], [BlockTable.of(theirs)], 0, 20)
    alone = plan.instantiate([BlockTable.of([5, 2])], [BlockTable.of([1, 3])], 0, 20)
    assert np.array_equal(read.destinations, alone.destinations)
    assert np.array_equal(read.sources, alone.sources)
    assert np.array_equal(read.sizes, alone.sizes)


def test_block_ids_are_counted_in_manager_blocks_not_in_kernel_blocks() -> None:
    plan = the_plan(SMALL, Engine(block_tokens=64, kernel_blocks=4), Engine(block_tokens=64, kernel_blocks=4))
    with pytest.raises(PlanError, match="local block id 8 does not exist: the cache has 8 blocks"):
        plan.instantiate([BlockTable.of([8])], [BlockTable.of([1])], 0, 64)


def test_a_table_that_starts_after_the_wanted_tokens_is_refused() -> None:
    plan = the_plan(SMALL, Engine(), Engine())
    with pytest.raises(PlanError, match="the remote block table holds 2 blocks from block 1 on"):
        plan.instantiate([BlockTable.of([1, 2])], [BlockTable.of([1, 2], first_block=1)], 0, 32)


def one_worker(*planes: Plane, block_tokens: int = 16) -> WorkerGeometry:
    return WorkerGeometry(0, 1, 0, 1, "host:1", (CacheGroup(block_tokens, 0, planes),), ())


def share(head_start: int, head_end: int, *layers: int) -> Share:
    return Share(0, 0, 0, 0, tuple(f"model.layers.{layer}" for layer in layers), head_start, head_end)


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ([share(0, 2, 0, 1, 2)], "768 of 1536 bytes of a block would be written"),
        ([share(0, 4, 0, 1)], "1024 of 1536 bytes of a block would be written"),
        ([share(0, 3, 0, 1, 2), share(2, 4, 0, 1, 2)], "some bytes of a block would be written twice"),
        ([share(0, 3, 0, 1, 2), share(2, 3, 0, 1, 2)], "some bytes of a block would be written twice"),
        ([], "0 of 1536 bytes of a block would be written"),
    ],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shares_that_do_not_cover_a_block_exactly_once_are_refused(
    layout: str, shares: list[Share], message: str
) -> None:
    geometry = build(SMALL, Engine(layout), 1, LOCAL_BASE)[0].geometry
    with pytest.raises(PlanError, match=f"part 'kv': {message}"):
        compile_plans(geometry, [geometry], [Source(0, tuple(shares))])


def test_kernel_blocks_that_do_not_divide_a_block_are_refused() -> None:
    plane = build(SMALL, Engine(), 1, LOCAL_BASE)[0].geometry.groups[0].planes[0]
    with pytest.raises(PlanError, match="kernel blocks of 16 tokens do not divide blocks of 24 tokens"):
        plans_of(one_worker(plane, block_tokens=24), [one_worker(plane)])


# What a plan reads from.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", [(16, 16), (16, 48), (32, 16)])
def test_the_blocks_that_a_plan_reads_from_are_those_of_its_descriptors(layout: str, sizes: tuple[int, int]) -> None:
    local, remote = (Engine(layout, block_tokens=size, blocks=12, groups_reversed=size == 16) for size in sizes)
    ours, theirs = (build(HYBRID, engine, 1, LOCAL_BASE)[0] for engine in (local, remote))
    plan = plans_of(ours.geometry, [theirs.geometry])[0]
    request = plain(150, local, remote, "fragmented", groups=2)
    windowed = Table(0, (-1,) * 2 + request.local[1].ids[2:])
    tables = [in_order(side, rank) for side, rank in (((request.local[0], windowed), ours), (request.remote, theirs))]
    first, end = 96, 144
    read: dict[int, list[int]] = {0: [], 1: []}
    for group, numbers in plan.remote_blocks(tables[0], first, end):
        read[group] += numbers.tolist()
    for group, table in enumerate(tables[1]):
        for number, block in enumerate(table.block_ids.tolist()):
            lost = list(tables[1])
            lost[group] = BlockTable.of([-1 if other == block else other for other in table.block_ids.tolist()])
            if number in read[group]:
                with pytest.raises(PlanError, match="the remote side holds no block"):
                    plan.instantiate(tables[0], lost, first, end)
            else:
                plan.instantiate(tables[0], lost, first, end)
    assert any(read.values())


def test_blocks_that_are_holes_here_are_not_read_from() -> None:
    plan = the_plan(SMALL, Engine(blocks=8), Engine(blocks=8))
    local = BlockTable.of([-1, 4, -1, 2])
    ((group, numbers),) = plan.remote_blocks([local], 0, 64)
    assert (group, numbers.tolist()) == (0, [1, 3])
    with pytest.raises(PlanError, match="must start at a multiple of 16 tokens"):
        plan.remote_blocks([local], 8, 64)


def test_a_token_takes_as_many_bytes_as_are_read_for_it() -> None:
    local, remote = Engine(block_tokens=16, blocks=8), Engine("BHLNC", block_tokens=32, blocks=8)
    (read,) = pull(SMALL, local, remote, plain(96, local, remote))
    assert 96 * the_plan(SMALL, local, remote).token_bytes == read.copies.total_bytes


def test_the_bytes_of_descriptors_are_counted() -> None:
    three = np.array([1, 2, 3], np.int64)
    copies = Copies(three, three, three)
    assert (len(copies), copies.total_bytes, copies[1:].total_bytes) == (3, 6, 5)
    with pytest.raises(ValueError, match="differ in length"):
        Copies(three, three, three[:2])
