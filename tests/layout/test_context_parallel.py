"""Ranks that share the tokens of a request: which token lies where, and every byte between any two such engines."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import lcm

import pytest
from _pytest.mark.structures import ParameterSet
from hypothesis import given, settings
from hypothesis import strategies as st

from layout.compatibility import IncompatibleCachesError
from layout.context_parallel import TokenSplit, share_tokens, unit_of
from layout.plan import BlockTable, PlanError, compile_plans
from layout.sharding import choose_sources
from tests.support.layout.shared_tokens import (
    INDEXED,
    KEYS_VALUES,
    LATENT,
    Cached,
    Shared,
    execute,
    ranks_of,
)

#: Tensor parallel and context parallel sizes.
MLA_SIZES = [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (6, 3), (8, 4), (5, 5), (16, 16)]
GQA_SIZES = [(1, 1), (2, 1), (4, 2), (6, 3), (8, 4), (8, 2)]
ORDERS = ["LBHNC", "BLHNC", "LBNHC", "BHLNC"]
#: Context parallel sizes, and rows of a block. The pairs of them that are not slow.
RANKS = [(1, 4), (4, 1), (2, 4), (3, 2), (2, 3), (4, 4)]
ROWS = [(4, 8), (8, 4), (12, 8), (8, 12)]
UNEQUAL = {
    *(((1, 4), (4, 8)), ((1, 4), (12, 8)), ((4, 1), (8, 12)), ((4, 1), (8, 4)), ((2, 4), (12, 8))),
    *(((3, 2), (8, 4)), ((2, 3), (8, 12)), ((4, 4), (4, 8))),
}
slow = partial(pytest.param, marks=pytest.mark.slow)


def pairs_of(sizes: Sequence[tuple[int, int]]) -> list[ParameterSet]:
    """All pairs of sizes, as parameters: each size on either side with itself and some others, the other pairs slow."""
    apart = (0, 1, len(sizes) // 2)  # in the list
    return [
        (pytest.param if (j - i) % len(sizes) in apart else slow)(here, there)
        for (i, here), (j, there) in product(enumerate(sizes), repeat=2)
    ]


def blocks_for(tokens: int, side: Shared) -> int:
    return -(-tokens // side.block_tokens)


def pull(
    parts: tuple[Cached, ...],
    here: Shared,
    there: Shared,
    first: int,
    end: int,
    cuts: int = 0,
    turn: int = 0,
) -> dict[int, set[int]]:
    """Pull tokens ``first`` to ``end`` into every rank of ``here`` and check all memory; return who read from whom."""
    here, there = (replace(side, blocks=blocks_for(end, side) + 2) for side in (here, there))
    tables = [random.Random(side.tp).sample(range(side.blocks), blocks_for(end, side)) for side in (here, there)]
    ours, theirs = ranks_of(parts, here), ranks_of(parts, there)
    for rank in theirs:
        rank.write(rank.caches, tables[1], range(blocks_for(end, there) * there.block_tokens))
    remotes = [rank.geometry for rank in theirs]
    read: dict[int, set[int]] = {}
    for number, rank in enumerate(ours):
        before = [cache.copy() for cache in rank.caches]
        sources = choose_sources(rank.geometry, remotes)
        plans = compile_plans(rank.geometry, remotes, sources)
        border = lcm(*(unit for plan in plans.values() for unit in plan.unit_tokens))
        inside = range(-(-(first + 1) // border) * border, end, border)
        borders = [first, *random.Random(cuts).sample(inside, min(cuts, len(inside))), end]
        copied = 0
        for start, stop in zip(sorted(borders), sorted(borders)[1:], strict=False):
            for plan in plans.values():
                copies = plan.instantiate([BlockTable.of(tables[0])], [BlockTable.of(tables[1])], start, stop)
                execute(copies)
                copied += copies.total_bytes
        rank.check(before, tables[0], range(first, end), copied)
        read[number] = set(plans)
    return read


def common(here: Shared, there: Shared) -> int:
    """A number of tokens that both sides' blocks divide."""
    return lcm(here.block_tokens, there.block_tokens)


@pytest.mark.parametrize("interleave", [1, 8])
@pytest.mark.parametrize(("here", "there"), pairs_of(MLA_SIZES), ids=str)
def test_every_byte_of_mla_arrives_between_any_two_sizes(
    here: tuple[int, int], there: tuple[int, int], interleave: int
) -> None:
    local = Shared(*here, interleave, order=ORDERS[here[0] % 4])
    remote = Shared(*there, interleave, order=ORDERS[there[0] % 4])
    end = local.block_tokens * -(-(2 * remote.block_tokens) // local.block_tokens)
    pull(
        INDEXED if interleave == 8 else LATENT,
        local,
        remote,
        0,
        -(-end // common(local, remote)) * common(local, remote),
    )


@pytest.mark.parametrize("interleave", [(1, 1), (1, 8), (8, 2), (8, 8)], ids=str)
@pytest.mark.parametrize(("here", "there"), pairs_of(GQA_SIZES), ids=str)
def test_every_byte_of_grouped_heads_arrives_between_any_two_sizes(
    here: tuple[int, int], there: tuple[int, int], interleave: tuple[int, int]
) -> None:
    local, remote = Shared(*here, interleave[0]), Shared(*there, interleave[1], order="BHLNC")
    pull(KEYS_VALUES, local, remote, 0, common(local, remote))


@pytest.mark.parametrize(
    ("sizes", "rows"), [(pytest.param if case in UNEQUAL else slow)(*case) for case in product(RANKS, ROWS)], ids=str
)
def test_every_byte_arrives_between_blocks_of_unequal_sizes(sizes: tuple[int, int], rows: tuple[int, int]) -> None:
    """Those of MLA, and those of an indexer that all ranks hold."""
    for interleaves in product(*([1, size // 2, size] for size in rows)):
        local, remote = (
            Shared(size, size, interleave, row) for size, interleave, row in zip(sizes, interleaves, rows, strict=True)
        )
        pull(INDEXED, local, remote, 0, common(local, remote))


@pytest.mark.thorough
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_ranges_of_any_engines_arrive(data: st.DataObject) -> None:
    sides = []
    packed = data.draw(st.booleans())
    for name in ("local", "remote"):
        dcp = data.draw(st.sampled_from([1, 2, 3, 4, 5]), name)
        kernel_blocks = data.draw(st.sampled_from([1, 2]))
        rows = data.draw(st.sampled_from([4, 8, 12])) * kernel_blocks
        interleave = data.draw(st.sampled_from([each for each in (1, 2, 3, 4, 6, 8, rows) if rows % each == 0]))
        order = data.draw(st.sampled_from(ORDERS))
        pcp = data.draw(st.sampled_from([1, 2])) if name == "remote" and dcp in (1, 2) else 1
        tp = dcp // pcp if dcp > 1 else 2
        sides.append(Shared(max(tp, 1), dcp, interleave, rows, kernel_blocks, pcp, order, packed))
    local, remote = sides
    blocks = data.draw(st.integers(1, 3))
    first = local.block_tokens * remote.block_tokens * data.draw(st.integers(0, 1))
    end = first + blocks * common(local, remote)
    parts = LATENT if packed else data.draw(st.sampled_from([LATENT, INDEXED]))
    pull(parts, local, remote, first, end, data.draw(st.integers(0, 1)))


@pytest.mark.parametrize("interleave", [1, 4, 8])
@pytest.mark.parametrize("dcp", [(1, 2), (2, 1), (2, 4), (2, 2), (3, 3)], ids=str)
def test_parts_that_lie_together_in_a_block_and_have_tokens_of_unequal_sizes_arrive(
    dcp: tuple[int, int], interleave: int
) -> None:
    """They begin equally far apart in all blocks, but not at all tokens, where a unit begins inside a block."""
    local, remote = (Shared(size, size, interleave, packed=True) for size in dcp)
    pull(LATENT, local, remote, 0, 2 * common(local, remote))


@pytest.mark.parametrize("interleave", [1, 8])
def test_of_the_last_block_only_whole_units_are_read(interleave: int) -> None:
    """Two ranks of 8 rows and three make units of gcd(16, 24) tokens, of the block that has the last token."""
    local, remote = Shared(2, 2, interleave), Shared(3, 3, interleave)
    assert unit_of(TokenSplit(interleave, 2), 8, TokenSplit(interleave, 3), 8)[0] == 8
    here, there = (replace(side, blocks=4) for side in (local, remote))
    for rank in ranks_of(LATENT, here):
        theirs = ranks_of(LATENT, there)
        for each in theirs:
            each.write(each.caches, [2, 0], range(48))
        before = [cache.copy() for cache in rank.caches]
        remotes = [each.geometry for each in theirs]
        copied = 0
        for plan in compile_plans(rank.geometry, remotes, choose_sources(rank.geometry, remotes)).values():
            copies = plan.instantiate([BlockTable.of([3, 1, 0])], [BlockTable.of([2, 0])], 0, 33)
            execute(copies)
            copied += copies.total_bytes
        rank.check(before, [3, 1, 0], range(40), copied)


def test_prefill_ranks_that_share_the_computation_hold_replicas_or_share_tokens_too() -> None:
    """With pcp 2, tp 2: all tokens on every rank; on the two of a pcp group; on all four."""
    for dcp in (1, 2, 4):
        read = pull(LATENT, Shared(4, 2, 8), Shared(2, dcp, 8, pcp=2), 0, 64)
        assert set().union(*read.values()) == {0, 1, 2, 3}


def test_ranks_take_turns_among_those_that_hold_the_same_tokens() -> None:
    read = pull(LATENT, Shared(8, 2, 8), Shared(8, 2, 8), 0, 32)
    assert read == {0: {0}, 2: {2}, 4: {4}, 6: {6}, 1: {1}, 3: {3}, 5: {5}, 7: {7}}
    read = pull(LATENT, Shared(4, 1), Shared(8, 2, 8), 0, 32)
    assert sorted(rank for ranks in read.values() for rank in ranks) == [*range(8)]


def test_equal_engines_read_whole_blocks_whatever_the_interleave() -> None:
    side = replace(Shared(4, 4, 1, rows=16, order="LBHNC"), blocks=3)
    ours, theirs = (ranks_of(LATENT, side)[1].geometry, [rank.geometry for rank in ranks_of(LATENT, side)])
    plans = compile_plans(ours, theirs, choose_sources(ours, theirs))
    (plan,) = plans.values()
    assert [*plans] == [1]
    assert plan.unit_tokens == plan.period_tokens == (64,)
    copies = plan.instantiate([BlockTable.of([2])], [BlockTable.of([1])], 0, 64)
    assert len(copies) == 4, "a run for each part and layer"


# What cannot be


PACKED = (Cached("index", 1, 3, packing="sparse_indexer"),)


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (Shared(2, 2, 8), Shared(3, 3, 8)),
        (Shared(2, 2, 2), Shared(2, 2, 2)),
        (Shared(1), Shared(4, 4, 8)),
    ],
    ids=["interleave of a block", "equal splits", "one side"],
)
def test_opaque_blocks_move_whole(here: Shared, there: Shared) -> None:
    pull(PACKED, here, there, 0, common(here, there))


@pytest.mark.parametrize(("here", "there"), [(Shared(2, 2, 4), Shared(3, 3, 4)), (Shared(1), Shared(4, 4, 1))])
def test_opaque_blocks_that_would_be_cut_are_refused(here: Shared, there: Shared) -> None:
    message = "packing 'sparse_indexer' cannot be cut by token; .* --cp-kv-cache-interleave-size 8"
    with pytest.raises(IncompatibleCachesError, match=message):
        pull(PACKED, here, there, 0, common(here, there))


def test_tokens_that_no_rank_holds_are_missed() -> None:
    side = replace(Shared(4, 4, 8), blocks=2)
    ours, theirs = ranks_of(LATENT, replace(side, tp=1, dcp=1))[0].geometry, ranks_of(LATENT, side)
    with pytest.raises(IncompatibleCachesError, match="only for other heads or tokens"):
        choose_sources(ours, [rank.geometry for rank in theirs[:3]])


def test_ranks_that_share_tokens_in_several_ways_are_refused() -> None:
    remotes = [
        ranks_of(LATENT, replace(Shared(2, 2, size), blocks=2))[rank].geometry for rank, size in enumerate((4, 8))
    ]
    with pytest.raises(IncompatibleCachesError, match=r"share the tokens of layer 'layers\.0' in several ways"):
        choose_sources(remotes[0], remotes)


def test_shares_that_leave_tokens_out_do_not_compile() -> None:
    side = replace(Shared(4, 4, 8), blocks=2)
    ours = ranks_of(LATENT, replace(side, tp=1, dcp=1))[0].geometry
    remotes = [rank.geometry for rank in ranks_of(LATENT, side)]
    sources = choose_sources(ours, remotes)
    with pytest.raises(PlanError, match="'mla_latent': 768 of 1024 bytes of a block would be written"):
        compile_plans(ours, remotes, sources[1:])
    with pytest.raises(PlanError, match="written twice"):
        compile_plans(ours, remotes, (*sources, sources[2]))


def test_a_pull_that_begins_inside_a_unit_is_refused() -> None:
    side = replace(Shared(2, 2, 8), blocks=4)
    remotes = [rank.geometry for rank in ranks_of(LATENT, side)]
    (plan,) = compile_plans(remotes[1], remotes, choose_sources(remotes[1], remotes)).values()
    with pytest.raises(PlanError, match="a pull must start at a multiple of 16 tokens, not at token 8"):
        plan.instantiate([BlockTable.of([0, 1])], [BlockTable.of([0, 1])], 8, 32)


@pytest.mark.parametrize("split", [(0, 2, 0), (1, 0, 0), (1, 2, 2), (1, 2, -1), (-8, 2, 0)])
def test_a_split_that_cannot_be_is_refused(split: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=f"rank {split[2]} of {split[1]} cannot hold {split[0]} tokens in a row"):
        share_tokens(TokenSplit(), TokenSplit(*split))


def test_what_a_peer_states_takes_no_more_memory_than_sizes_of_engines_need() -> None:
    here, there = TokenSplit(65_536, 64), TokenSplit(65_535, 63)
    for ask in (lambda: share_tokens(here, there), lambda: unit_of(here, 65_536, there, 65_535)):
        with pytest.raises(ValueError, match=r"recurs after .* choose parallel sizes, .* of which one divides"):
            ask()


# Which token lies where


splits = st.builds(
    lambda interleave, ranks, rank: TokenSplit(interleave, ranks, rank % ranks),
    st.sampled_from([1, 2, 3, 8]),
    st.integers(1, 6),
    st.integers(0, 5),
)


@given(splits, splits)
def test_two_ranks_share_tokens_if_there_is_one_that_both_hold(here: TokenSplit, there: TokenSplit) -> None:
    def held(split: TokenSplit) -> set[int]:
        return {token for token in range(3000) if token // split.interleave % split.ranks == split.rank}

    assert share_tokens(here, there) == bool(held(here) & held(there))
