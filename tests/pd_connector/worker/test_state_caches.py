"""States of recurrent layers: what is read of them into other tensor parallel sizes, orders and block sizes.

Covers: layout.states, pd_connector.vllm.state_specs.
"""

import ctypes
import math
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.releases import INSTALLED, module_needs

if INSTALLED < (0, 30):
    module_needs((0, 30), "states of recurrent layers")

from dataclasses import replace

import torch

from layout.compatibility import IncompatibleCachesError
from layout.plan import BlockTable, PlanError, compile_plans
from layout.sharding import choose_sources
from pd_connector.orders import CanaryEnds, CanaryReference
from pd_connector.worker.canary import Comparison, Scratch
from tests.support.connector import state_caches
from tests.support.connector.state_caches import GDN, MAMBA2, MODELS, StateLayout, StateModel, fill, ranks, state_views
from tests.support.connector.state_pulls import STATE_TOKENS, pull_states, state_plans, state_table
from transfer.copies.checksums.block_checksums import in_place, sum_states

BASIC = StateLayout()
#: Equal sizes, sizes of which one divides the other, and others, each size on either side. The other pairs are slow.
ALWAYS = {(1, 1), (3, 3), (1, 4), (4, 1), (2, 8), (8, 2), (2, 3), (3, 2), (6, 4), (4, 6), (8, 6), (3, 8), (5, 7)}
pairs_of_sizes = [
    pytest.param(*pair, marks=() if pair in ALWAYS else pytest.mark.slow) for pair in product(range(1, 9), repeat=2)
]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("local", "remote"), pairs_of_sizes)
def test_every_pair_of_tensor_parallel_sizes(name: str, local: int, remote: int, monkeypatch: Any) -> None:
    model = with_heads_for(MODELS[name], math.lcm(local, remote))
    pull_states(model, StateLayout(tp=local), StateLayout(tp=remote), monkeypatch)


def with_heads_for(model: StateModel, ranks: int) -> StateModel:
    """The model, or one with other numbers of heads where ``ranks`` do not divide the 24 that all kinds have."""
    if 24 % ranks == 0:
        return model
    conv = tuple((part, heads if heads == 1 else heads // 24 * ranks, width) for part, heads, width in model.conv)
    return replace(model, conv=conv, heads=model.heads // 24 * ranks)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("local", "remote"),
    [
        (StateLayout(), StateLayout(tp=2, stages=(3, 2))),
        (StateLayout(tp=2, stages=(2, 3)), StateLayout(tp=3, is_column_first=True)),
        (StateLayout(tp=3, stages=(1, 4)), StateLayout(tp=2, stages=(2, 2, 1))),
    ],
    ids=["2 stages to 1", "1 to 2", "3 to 2"],
)
def test_pipeline_stages(name: str, local: StateLayout, remote: StateLayout, monkeypatch: Any) -> None:
    pull_states(replace(MODELS[name], layers=5), local, remote, monkeypatch)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (3, 2), (2, 2)])
def test_states_that_every_rank_has_whole(name: str, sizes: tuple[int, int], monkeypatch: Any) -> None:
    local, remote = (StateLayout(tp=tp, is_replicated=True) for tp in sizes)
    pull_states(MODELS[name], local, remote, monkeypatch)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1), (3, 2), (2, 4)])
def test_both_orders_of_a_convolution(name: str, local: bool, sizes: tuple[int, int], monkeypatch: Any) -> None:
    here = StateLayout(tp=sizes[0], is_column_first=local, padding=64, blocks_outermost=True)
    there = StateLayout(tp=sizes[1], is_column_first=not local, views=state_views)
    pull_states(MODELS[name], here, there, monkeypatch)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("column_first", [False, True])
def test_rows_for_drafts_are_left_as_they_are(name: str, column_first: bool, monkeypatch: Any) -> None:
    here = StateLayout(tp=2, drafts=3, is_column_first=column_first)
    there = StateLayout(tp=3, drafts=1, is_column_first=column_first)
    pull_states(MODELS[name], here, there, monkeypatch)
    pull_states(MODELS[name], there, replace(here, drafts=0), monkeypatch)


def test_states_are_found_by_the_number_of_their_tokens(monkeypatch: Any) -> None:
    here, there = StateLayout(tp=2, block_tokens=32), StateLayout(tp=3, block_tokens=16)
    pull_states(
        MAMBA2, here, there, monkeypatch, {64: 1, 96: 3, STATE_TOKENS: 2}, {48: 5, 64: 4, 80: 1, 96: 0, STATE_TOKENS: 2}
    )
    pull_states(MAMBA2, here, there, monkeypatch, {32: 1, 64: 3, STATE_TOKENS: 2}, {48: 5, 64: 4, STATE_TOKENS: 2})


def test_one_block_for_all_tokens_beside_blocks_by_position(monkeypatch: Any) -> None:
    one, many = StateLayout(block_tokens=4096), StateLayout(tp=2, block_tokens=16)
    pull_states(MAMBA2, one, many, monkeypatch, {STATE_TOKENS: 3}, {64: 1, STATE_TOKENS: 2})
    pull_states(MAMBA2, many, one, monkeypatch, {STATE_TOKENS: 2}, {STATE_TOKENS: 3})


def test_equal_engines_read_a_state_in_one_run(monkeypatch: Any) -> None:
    assert pull_states(MAMBA2, BASIC, BASIC, monkeypatch) == MAMBA2.layers
    together = StateLayout(blocks_outermost=True)
    assert pull_states(replace(GDN, conv_dtype=GDN.dtype), together, together, monkeypatch) <= GDN.layers


@pytest.mark.parametrize("column_first", [False, True])
def test_a_state_is_one_run_for_each_part_row_layer_and_rank(column_first: bool, monkeypatch: Any) -> None:
    here, there = (StateLayout(tp=tp, is_column_first=column_first) for tp in (1, 2))
    parts = 3 if column_first else 3 * 3  # rows lie apart if they are outside
    assert pull_states(GDN, here, there, monkeypatch) <= 2 * GDN.layers * (parts + 1)


def test_a_state_that_is_needed_and_not_there(monkeypatch: Any) -> None:
    with pytest.raises(PlanError, match=r"the remote block table has no state after 100 tokens, only after \[32\]"):
        pull_states(MAMBA2, BASIC, BASIC, monkeypatch, theirs={32: 1})
    with pytest.raises(PlanError, match="the local block table has no state after 100 tokens"):
        pull_states(MAMBA2, BASIC, BASIC, monkeypatch, ours={32: 1})
    (plan,) = state_plans(ranks(MAMBA2, BASIC, monkeypatch)[0], ranks(MAMBA2, BASIC, monkeypatch)).values()
    with pytest.raises(PlanError, match="remote block id 6 does not exist: the cache has 6 blocks"):
        plan.instantiate_states(
            [state_table({STATE_TOKENS: 1}, BASIC)], [state_table({STATE_TOKENS: 6}, BASIC)], STATE_TOKENS
        )


def test_states_at_borders_are_read_alone(monkeypatch: Any) -> None:
    (plan,) = state_plans(ranks(MAMBA2, BASIC, monkeypatch)[0], ranks(MAMBA2, BASIC, monkeypatch)).values()
    ours, theirs = [state_table({32: 1}, BASIC)], [state_table({32: 2, STATE_TOKENS: 3}, BASIC)]
    assert plan.instantiate_states(ours, theirs, STATE_TOKENS, wants_last=False).total_bytes == plan.state_bytes
    lacks = [state_table({STATE_TOKENS: 3}, BASIC)]
    assert not len(plan.instantiate_states(ours, lacks, STATE_TOKENS, wants_last=False))


def test_other_states_are_refused(monkeypatch: Any) -> None:
    here = ranks(MAMBA2, BASIC, monkeypatch)[0]
    wider = replace(MAMBA2, dtype=MAMBA2.conv_dtype)
    words = "'dtype' of part 'state'.* is 'float32' here and 'bfloat16' on the remote .* same --mamba-cache-dtype"
    with pytest.raises(IncompatibleCachesError, match=words):
        state_plans(here, ranks(wider, BASIC, monkeypatch))
    with pytest.raises(IncompatibleCachesError, match="holds no KV cache part 'conv_x'"):
        state_plans(here, ranks(GDN, BASIC, monkeypatch))
    half = replace(MAMBA2, conv_dtype=torch.float16)
    words = r"'dtype' of part 'conv_x'.* 'bfloat16' here and 'float16' on the remote .* same --mamba-cache-dtype"
    with pytest.raises(IncompatibleCachesError, match=words):
        state_plans(here, ranks(half, BASIC, monkeypatch))


def test_a_convolution_that_sees_more_tokens_is_refused(monkeypatch: Any) -> None:
    here = ranks(MAMBA2, BASIC, monkeypatch)[0]
    monkeypatch.setattr(state_caches, "KERNEL", 5)
    words = r"part 'conv_x' of layer .* has 3 rows here and 4 on the remote engine: .* different numbers of tokens"
    with pytest.raises(IncompatibleCachesError, match=words):
        state_plans(here, ranks(MAMBA2, BASIC, monkeypatch))


@pytest.mark.thorough
def test_checksums_of_a_state_are_the_same_in_any_order_and_entry(monkeypatch: Any) -> None:
    """Head by head, on whatever ranks."""
    sums: list[dict[tuple[str, str, int], int]] = []
    for layout, entry in ((StateLayout(tp=2), 0), (StateLayout(tp=3, is_column_first=True), 3)):
        engine = ranks(GDN, layout, monkeypatch)
        fill(engine, {STATE_TOKENS: 2}, GDN)
        found: dict[tuple[str, str, int], int] = {}
        for rank in engine:
            for plane in rank.geometry.groups[0].planes:
                totals = sum_states(plane, BlockTable.of([-1] * entry + [2])).between((entry, entry + 1))[0]
                heads = range(plane.head_start, plane.head_end)
                of_plane = zip(product([plane.part], plane.layers, heads), totals.ravel().tolist(), strict=True)
                found |= dict(of_plane)
        sums.append(found)
    assert sums[0] == sums[1]
    assert len(set(sums[0].values())) == len(sums[0]) == GDN.layers * (24 + 24 + 48 + 48)


class TestComparison:
    """What a worker says of a state that it has computed, beside one that it has pulled."""

    def compared(self, monkeypatch: Any, part: str = "", factor: float = 1.0, lacking: bool = False) -> CanaryEnds:
        """A pulled state that differs from the computed one by ``factor`` in the first layer's ``part``."""
        model = replace(GDN, conv_dtype=GDN.dtype)
        (rank,) = ranks(model, BASIC, monkeypatch)
        numbers = rank.memory.view(np.float32)
        numbers[:] = np.random.default_rng(3).normal(size=len(numbers))
        scratch = Scratch.allocate(rank.geometry, None)
        plan = compile_plans(scratch.geometry, [rank.geometry], choose_sources(scratch.geometry, [rank.geometry]))[0]
        pulled = state_table({STATE_TOKENS: 1}, BASIC)
        copies = plan.instantiate_states([pulled], [state_table({STATE_TOKENS: 4}, BASIC)], STATE_TOKENS)
        for to, source, size in zip(
            *map(np.ndarray.tolist, (copies.destinations, copies.sources, copies.sizes)), strict=True
        ):
            ctypes.memmove(to, source, size)
        for plane in scratch.geometry.groups[0].planes:
            if plane.part == part:
                first = (ctypes.c_float * plane.content * plane.heads).from_address(plane.address + plane.block_stride)
                values = np.ctypeslib.as_array(first)
                values *= factor
        comparison = Comparison(rank.geometry, in_place, scratch, {}, "float32")
        order: Any = SimpleNamespace(local_block_ids=((0, 0, 0, 1),), first_token=0, end_token=STATE_TOKENS)
        computed = CanaryReference("r", ((0, 0, 0, 4),))
        return comparison(order, computed, {(0, 3)} if lacking else ())

    def test_an_equal_state_agrees_in_every_part_of_every_layer(self, monkeypatch: Any) -> None:
        assert self.compared(monkeypatch) == CanaryEnds(1, samples=GDN.layers * 4)

    @pytest.mark.parametrize("part", ["state", "conv_k"])
    def test_a_state_of_another_model_does_not(self, part: str, monkeypatch: Any) -> None:
        ends = self.compared(monkeypatch, part, 1.5)
        assert f"layer 'model.layers.0.mixer', part '{part}' (float32)" in ends.difference

    def test_rounding_is_none(self, monkeypatch: Any) -> None:
        assert not self.compared(monkeypatch, "state", 1.001).difference

    def test_what_the_prefill_engine_lacks_is_not_compared(self, monkeypatch: Any) -> None:
        assert self.compared(monkeypatch, "state", 1.5, lacking=True) == CanaryEnds(1)
