"""The forms that a cache can have: K and V, MLA's parts, scales, kernel blocks, storages, windows, tables, layers.

Each test varies one form exhaustively over the layouts, of whose pairs most are slow; all forms at once are generated
in ``test_matrix``.
``pull`` compares all of the memory of every rank.
"""

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from layout.compatibility import IncompatibleCachesError
from tests.support.layout.layout_pairs import layout_pairs
from tests.support.layout.oracle import LAYOUTS, WHOLE_HEADS, Engine, Extra, Model, Table
from tests.support.layout.pulls import Request, plain, pull, table

GQA = Model(4, (2, 2), 2, ((0, 1),), (0,))
UNEQUAL = replace(GQA, contents=(3, 2))
SCALES = (Extra("k_scale", 1, 4), Extra("v_scale", 1, 4))
INDEXER = (Extra("indexer", 5, 1, shared=True), Extra("indexer_scale", 1, 4, shared=True))
HYBRID = Model(2, (2, 1), 2, ((0, 2), (1, 3)), (0, 40))

every_layout_pair = pytest.mark.parametrize(("here", "there"), layout_pairs())
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


# K and V, and what lies beside them.


@every_layout_pair
def test_k_and_v_of_unequal_content_apart_or_as_views(here: str, there: str, cases: Counter[str]) -> None:
    for forms in product(["views", "apart"], repeat=2):
        local = Engine(here, forms[0], tp=2, block_tokens=48, blocks=3)
        remote = Engine(there, forms[1], tp=4, blocks=5)
        pull(UNEQUAL, local, remote, plain(52, local, remote, "fragmented"))
        cases["k and v"] += 1


@every_layout_pair
def test_mla_parts_of_512_and_64_items_with_one_head_on_every_rank(here: str, there: str, cases: Counter[str]) -> None:
    """Two readers and four replicas; each part comes from one replica, and no replica has two readers."""
    model = Model(1, (512, 64), 2, ((0, 1),), (0,))
    local, remote = Engine(here, "apart", tp=2, blocks=3), Engine(there, "apart", tp=4, block_tokens=32, blocks=2)
    reads = pull(model, local, remote, plain(17, local, remote, "descending"))
    assert [read.local for read in reads] == [0, 1]
    assert len({read.remote for read in reads}) == 2
    cases["mla 512 and 64"] += 1


@every_layout_pair
def test_scales_of_each_head_and_a_sparse_indexer_of_one_shared_head(
    here: str, there: str, cases: Counter[str]
) -> None:
    model = replace(UNEQUAL, extras=SCALES + INDEXER)
    for forms, sizes in product([("fused", "fused"), ("views", "apart")], [(4, 2), (2, 8)]):
        local = Engine(here, forms[0], tp=sizes[0], block_tokens=32, blocks=3)
        remote = Engine(there, forms[1], tp=sizes[1], pp=2, blocks=4)
        pull(model, local, remote, plain(35, local, remote, "descending"))
        cases["scales and indexer"] += 1


@pytest.mark.parametrize(("here", "there"), [*product(WHOLE_HEADS, repeat=2)])
def test_k_transposed_by_the_kernel_beside_v(here: str, there: str, cases: Counter[str]) -> None:
    """Described as strides, it can be cut by token and come from, or become, any other form."""
    for number, sizes in enumerate(product([16, 32, 48, 64], repeat=2)):
        local = Engine(here, "transposed", tp=2, block_tokens=sizes[0], blocks=6)
        remote = Engine(there, "transposed", tp=1 + number % 2, block_tokens=sizes[1], blocks=6)
        pull(UNEQUAL, local, remote, plain(75, local, remote, "fragmented"))
        cases["k transposed"] += 1


@every_layout
@pytest.mark.parametrize("whole_heads", WHOLE_HEADS)
def test_k_transposed_on_one_side_only(layout: str, whole_heads: str, cases: Counter[str]) -> None:
    for form, tokens in product(["views", "apart"], [16, 32]):
        other = Engine(layout, form, tp=2, block_tokens=tokens, blocks=4)
        transposed = Engine(whole_heads, "transposed", blocks=4)
        pull(UNEQUAL, other, transposed, plain(40, other, transposed, "fragmented"))
        pull(UNEQUAL, transposed, other, plain(40, transposed, other, "fragmented"))
        cases["k transposed on one side"] += 2


@pytest.mark.parametrize(("here", "there"), [*product(WHOLE_HEADS, repeat=2)])
def test_scales_beside_heads_packed_by_the_kernel(here: str, there: str, cases: Counter[str]) -> None:
    local, remote = Engine(here, "packed", tp=2), Engine(there, "packed", tp=4)
    pull(replace(GQA, extras=SCALES), local, remote, plain(20, local, remote, "fragmented"))
    cases["scales beside packed heads"] += 1


def test_readers_of_a_shared_head_are_spread_over_all_ranks_that_hold_it() -> None:
    local, remote = Engine(tp=4, blocks=2), Engine(tp=2, blocks=2)
    reads = pull(replace(GQA, extras=INDEXER), local, remote, plain(16, local, remote))
    alone = pull(GQA, local, remote, plain(16, local, remote))
    total: Counter[int] = Counter()
    for read in reads:
        total[read.remote] += read.copies.total_bytes
    for read in alone:
        total[read.remote] -= read.copies.total_bytes
    indexer_bytes = 2 * 16 * (5 * 1 + 1 * 4)  # of a block: layers, tokens, contents of both planes
    assert total == {0: 2 * indexer_bytes, 1: 2 * indexer_bytes}


def test_a_part_that_only_the_remote_side_keeps_is_left_there() -> None:
    engine = Engine("BLHNC")
    pull(GQA, engine, engine, plain(20, engine, engine), remote_model=replace(GQA, extras=SCALES))


def test_a_part_that_the_remote_side_lacks_is_refused_by_name() -> None:
    engine = Engine()
    with pytest.raises(IncompatibleCachesError, match=r"no KV cache part 'k_scale' for head 0 of layer 'model\.layers"):
        pull(replace(GQA, extras=SCALES), engine, engine, plain(20, engine, engine), remote_model=GQA)


def test_scales_of_unequal_item_size_are_refused_with_both_sizes() -> None:
    engine = Engine()
    halves = replace(GQA, extras=(replace(SCALES[0], item_size=2),))
    with pytest.raises(IncompatibleCachesError, match=r"'item_size' of part 'k_scale', .* is 4 here and 2 on"):
        pull(replace(GQA, extras=SCALES[:1]), engine, engine, plain(20, engine, engine), remote_model=halves)


# Blocks and storages.


@every_layout_pair
def test_kernel_blocks_smaller_than_the_managers(here: str, there: str, cases: Counter[str]) -> None:
    """(tokens of a block, kernel blocks in it) on each side; kernel blocks of 16, 32, 64 and 24 tokens."""
    sizes = [(64, 4), (64, 2), (48, 3), (128, 2), (48, 2), (32, 1)]
    for number, ((ours, our_kernels), (theirs, their_kernels)) in enumerate(product(sizes, repeat=2)):
        local = Engine(here, block_tokens=ours, kernel_blocks=our_kernels, blocks=4)
        remote = Engine(there, block_tokens=theirs, kernel_blocks=their_kernels, blocks=4, tp=2)
        pull(GQA, local, remote, plain(70, local, remote, ("fragmented", "contiguous")[number % 2]))
        cases["kernel blocks"] += 1


@every_layout_pair
def test_planes_that_start_inside_their_region(here: str, there: str, cases: Counter[str]) -> None:
    for ours, theirs, apart in product([0, 7], [0, 3, 2048], [False, True]):
        local = Engine(here, "views", offset_items=ours, layers_apart=apart, blocks=3)
        remote = Engine(there, "apart", offset_items=theirs, layers_apart=not apart, blocks=3, tp=2)
        pull(UNEQUAL, local, remote, plain(20, local, remote))
        cases["offset storages"] += 1


# Block tables.


@every_layout_pair
def test_a_window_beside_full_attention_with_holes_in_its_table(here: str, there: str, cases: Counter[str]) -> None:
    """100 tokens in blocks of 16 and 32: a window of 40 needs them from block 3 (token 48) here, block 1 there."""
    for tp, pp, reverse in product([1, 2], [1, 2], [False, True]):
        local = Engine(here, tp=tp, groups_reversed=reverse)
        remote = Engine(there, block_tokens=32, tp=2, pp=pp)
        request = Request(
            0,
            100,
            (table("fragmented", 8, 7), table("descending", 8, 7, holes=3)),
            (table("descending", 8, 4), table("fragmented", 8, 4, holes=1)),
        )
        pull(HYBRID, local, remote, request)
        cases["windows with holes"] += 1


#: Layers 1 and 2 see 40 tokens. How many groups they are in, and with which others, depends on drafts and settings.
IN_GROUPS = {
    "together": Model(2, (2, 2), 2, ((0, 3), (1, 2)), (0, 40)),
    "each alone, in another order": Model(2, (2, 2), 2, ((2,), (0,), (1,), (3,)), (40, 0, 40, 0)),
    "all together, nothing let go of": Model(2, (2, 2), 2, ((0, 1, 2, 3),), (0,), seen=((1, 40), (2, 40))),
}


def tables_of(model: Model, engine: Engine, tokens: int, kind: str) -> tuple[Table, ...]:
    """A table for each group, with holes before what the last token of ``tokens`` sees."""
    return tuple(
        table(
            kind,
            engine.blocks,
            -(-tokens // engine.block_tokens),
            holes=max(tokens - window, 0) // engine.block_tokens if window else 0,
            seed=group,
        )
        for group, window in enumerate(model.windows)
    )


@every_layout_pair
def test_layers_may_be_in_other_groups_on_either_side(here: str, there: str, cases: Counter[str]) -> None:
    for (ours, theirs), tp in product(product(IN_GROUPS, repeat=2), [1, 2]):
        if ours == "all together, nothing let go of" != theirs:
            continue  # there is not all that is kept here
        for tokens in (30, 100):
            local, remote = Engine(here, tp=tp), Engine(there, tp=2, block_tokens=16)
            request = Request(
                0,
                tokens,
                tables_of(IN_GROUPS[ours], local, tokens, "fragmented"),
                tables_of(IN_GROUPS[theirs], remote, tokens, "descending"),
            )
            pull(IN_GROUPS[ours], local, remote, request, remote_model=IN_GROUPS[theirs])
            cases["other groups"] += 1


@every_layout
def test_groups_may_have_blocks_of_their_own_sizes(layout: str, cases: Counter[str]) -> None:
    for ours, theirs in product([(1, 2), (2, 1), (1, 3)], repeat=2):
        local, remote = Engine(layout, group_factors=ours), Engine("BLHNC", tp=2, group_factors=theirs)
        pull(HYBRID, local, remote, plain(75, local, remote, "fragmented", groups=2))
        cases["block sizes by group"] += 1


@pytest.mark.parametrize("kinds", [*product(["contiguous", "fragmented"], repeat=2)])
def test_requests_of_every_length_in_tables_of_every_kind(kinds: tuple[str, str], cases: Counter[str]) -> None:
    local, remote = Engine("BLNHC", block_tokens=32, blocks=4), Engine("BHLNC", block_tokens=48, blocks=4, tp=2)
    for tokens in range(1, 98):
        ours, theirs = plain(tokens, local, remote, kinds[0]), plain(tokens, local, remote, kinds[1])
        pull(GQA, local, remote, replace(ours, remote=theirs.remote))
        cases["lengths"] += 1


@every_layout_pair
def test_a_pull_that_starts_in_the_middle_of_the_remote_sides_block(here: str, there: str, cases: Counter[str]) -> None:
    local, remote = Engine(here), Engine(there, block_tokens=64, tp=2)
    pull(GQA, local, remote, Request(48, 90, (Table(3, (6, 2, 5)),), (Table(0, (4, 1)),)))
    cases["prefix hits"] += 1


# Layers that one side only has.


@every_layout_pair
def test_extra_layers_of_the_remote_side_are_left_there_in_every_layout(
    here: str, there: str, cases: Counter[str]
) -> None:
    """P serves draft layers before, between and after those of D, over pipeline stages."""
    ours, theirs = replace(GQA, groups=((1, 3),)), replace(GQA, groups=((0, 1, 2, 3, 4),))
    for pp, apart in product([1, 2, 4], [False, True]):
        local, remote = Engine(here, tp=2, blocks=3), Engine(there, pp=pp, layers_apart=apart, blocks=3)
        pull(ours, local, remote, plain(20, local, remote, "descending"), remote_model=theirs)
        cases["extra layers"] += 1


@pytest.mark.parametrize("pp", [1, 2])
def test_a_layer_that_no_stage_of_the_remote_side_holds_is_refused(pp: int) -> None:
    three = replace(GQA, groups=((0, 1, 2),))
    local, remote = Engine(tp=2), Engine(tp=4, pp=pp)
    with pytest.raises(IncompatibleCachesError, match=r"head 0 of layer 'model\.layers\.2'; both engines must"):
        pull(three, local, remote, plain(20, local, remote), remote_model=GQA)
