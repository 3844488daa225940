"""vLLM's cache groups as plain data: which layers share a block table, and what a token's content consists of."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from pd_connector.vllm import cache_groups as module
from pd_connector.vllm import cache_specs
from pd_connector.vllm.cache_groups import GroupSpec, Ranks, cache_groups, needs_zeroing, retentions, with_head_orders
from pd_connector.vllm.cache_specs import LayerSpec, Retention
from pd_connector.vllm.cpu.head_order import HeadOrder
from pd_connector.vllm.engine_config import UnsupportedError
from tests.support.connector.kept_blocks import groups_by_vllm
from tests.support.connector.stated import model_config, stated_groups
from tests.support.releases import INSTALLED, since

SIZES: dict[str, Any] = {"num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(block_size=32, **SIZES)
WINDOWED = SlidingWindowSpec(block_size=16, sliding_window=100, **SIZES)
K_AND_V = (("k", 64), ("v", 64))


def test_groups_are_in_vllms_order_with_their_own_block_sizes_and_windows() -> None:
    full, windowed = stated_groups((["a", "c"], FULL), (["b"], WINDOWED))
    assert (full.layer_names, full.block_tokens, full.window, full.blocks) == (("a", "c"), 32, 0, 8)
    assert (windowed.layer_names, windowed.block_tokens, windowed.window) == (("b",), 16, 100)
    assert full.layers == dict.fromkeys(("a", "c"), LayerSpec(2, 2, 256, 32 * 2 * 256, torch.bfloat16, K_AND_V))


def test_layers_of_one_group_may_differ() -> None:
    wide = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=128, dtype=torch.bfloat16, sliding_window=100)
    (group,) = stated_groups(
        (["a", "b"], UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": WINDOWED, "b": wide}))
    )
    assert (group.layer_names, group.window, group.seen_tokens) == (("a", "b"), 100, {"a": 100, "b": 100})
    assert {name: spec.parts for name, spec in group.layers.items()} == {"a": K_AND_V, "b": (("k", 128), ("v", 128))}


def a_config_with_layers(**windows: int | None) -> Any:
    """What vLLM knows of the layers that it has built: the window that each sees, None if it sees all."""
    return model_config(built={name: SimpleNamespace(sliding_window=window) for name, window in windows.items()})


@pytest.mark.parametrize("hybrid", [True, False])
def test_a_window_is_the_layers_and_what_is_kept_is_the_groups(hybrid: bool) -> None:
    """Without its hybrid cache manager, vLLM states one window for layers with and without it, and keeps all."""
    groups = groups_by_vllm({"a": 40, "b": 0, "c": 40}, 16, hybrid=hybrid)
    config = a_config_with_layers(a=40, b=None, c=40)
    found = cache_groups(config, KVCacheConfig(8, [], groups))
    assert {layer: seen for group in found for layer, seen in group.seen_tokens.items()} == {"a": 40, "b": 0, "c": 40}
    kept = {layer: group.window for group in found for layer in group.layer_names}
    assert kept == ({"a": 40, "b": 0, "c": 40} if hybrid else {"a": 0, "b": 0, "c": 0})
    assert [group.window for group in found] == [
        each.window for each in retentions(config, KVCacheConfig(8, [], groups))
    ]


def test_a_window_that_only_a_layer_knows_is_not_told_if_the_layer_does_not() -> None:
    groups = groups_by_vllm({"a": 40, "b": 0}, 16, hybrid=False)
    (group,) = cache_groups(a_config_with_layers(b=None), KVCacheConfig(8, [], groups))
    assert group.seen_tokens == {"b": 0}


def test_chunks_are_kept_as_vllm_keeps_them() -> None:
    chunked = ChunkedLocalAttentionSpec(block_size=16, attention_chunk_size=64, **SIZES)
    (group,) = stated_groups((["a"], chunked))
    assert (group.window, group.chunk, group.seen_tokens) == (0, 64, {})


def test_a_stage_without_layers_of_a_group_states_nothing_of_them() -> None:
    (group,) = stated_groups(([], UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"elsewhere": FULL})))
    assert (group.layer_names, group.layers) == ((), {})


@since((0, 30), "states of recurrent layers")
@pytest.mark.parametrize("layers", [["model.layers.3.mixer"], []])
def test_states_in_a_mode_that_is_not_known_are_refused_by_layer_and_kind(layers: list[str]) -> None:
    mamba = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode="all")
    named = "'model.layers.3.mixer'" if layers else "'layers of another pipeline stage'"
    with pytest.raises(UnsupportedError, match=f"KV cache of layer {named} is a MambaSpec, in mamba_cache_mode"):
        stated_groups((["a"], FULL), (layers, mamba))


def test_one_layer_of_a_group_that_is_not_served_is_enough_to_refuse_it() -> None:
    ratio: dict[str, Any] = {"tokens_per_state" if INSTALLED >= (0, 30) else "compress_ratio": 5}
    compressed = MLAAttentionSpec(block_size=32, num_kv_heads=1, head_size=512, dtype=torch.uint8, **ratio)
    specs = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"a": FULL, "b": compressed})
    with pytest.raises(UnsupportedError, match=r"'b' is a MLAAttentionSpec, whose blocks of 32 tokens have no whole"):
        stated_groups((["a", "b"], specs))


@pytest.mark.skipif(INSTALLED < (0, 30), reason="each backend has its own layout")
@pytest.mark.parametrize(("layout", "heads_first"), [("LBNHC", False), ("LBHNC", True), ("BHLNC", True), (None, False)])
def test_the_layout_says_whether_heads_come_before_tokens(layout: str | None, heads_first: bool) -> None:
    config = KVCacheConfig(8, [], [KVCacheGroupSpec(["a"], FULL)])
    config.kv_cache_layout = layout
    assert [group.heads_first for group in cache_groups(model_config(), config)] == [heads_first]


def test_what_is_kept_is_told_for_each_group() -> None:
    specs = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"b": WINDOWED})
    config = KVCacheConfig(8, [], [KVCacheGroupSpec(["a"], FULL), KVCacheGroupSpec(["b"], specs)])
    assert retentions(model_config(), config) == (Retention(32), Retention(16, window=100))


def test_workers_are_numbered_stage_by_stage() -> None:
    ranks = [Ranks(tp, 2, pp, 3) for pp in range(3) for tp in range(2)]
    assert [rank.index for rank in ranks] == list(range(6))
    assert {rank.world_size for rank in ranks} == {6}


def test_workers_that_share_the_computation_of_prompts_are_numbered_as_vllm_does() -> None:
    ranks = [Ranks(tp, 2, pp, 2, pcp, 3) for pp in range(2) for pcp in range(3) for tp in range(2)]
    assert [rank.index for rank in ranks] == list(range(12))
    assert {rank.world_size for rank in ranks} == {12}


# Caches of several precisions

LATENT = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
STATE = MambaSpec(block_size=64, shapes=((4, 8),), dtypes=(torch.float32,), mamba_type="mamba2")
CODES = replace(LATENT, head_size=132, dtype=torch.uint8)


def with_draft(number: int) -> Any:
    """A layer's latent vectors and the codes of its indexer, in one group: of two precisions."""
    name = f"model.layers.{number}.self_attn"
    return UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={name: LATENT, f"{name}.indexer": CODES})


@pytest.mark.parametrize(
    "specs", [[with_draft(8)], [LATENT], [FULL, WINDOWED], [FULL, replace(WINDOWED, dtype=torch.uint8)], [STATE]]
)
def test_blocks_are_zeroed_if_vllms_scheduler_orders_it(specs: Sequence[Any]) -> None:
    groups = [KVCacheGroupSpec(list(getattr(spec, "kv_cache_specs", "a")), spec) for spec in specs]
    config = KVCacheConfig(8, [], groups)
    if INSTALLED < (0, 30) and STATE in specs:
        pytest.skip("states are not served")
    assert needs_zeroing(config) is generate_scheduler_kv_cache_config([config]).needs_kv_cache_zeroing


def test_a_draft_may_be_missing_if_no_other_precision_takes_its_blocks() -> None:
    """Within a group, each layer has its own place in every block."""
    spec, drafting = with_draft(8), model_config(draft_heads=1)
    (alone,) = stated_groups((list(spec.kv_cache_specs), spec), config=drafting)
    assert {layer.optional for layer in alone.layers.values()} == {True}
    beside, _ = stated_groups((list(spec.kv_cache_specs), spec), (["a"], FULL), config=drafting)
    assert {layer.optional for layer in beside.layers.values()} == {False}


# Where ranks share the tokens of a request

SHARED: dict[str, Any] = {"decode_context_parallel_size": 4, "cp_kv_cache_interleave_size": 8}


class Indexer(MLAAttentionSpec):  # type: ignore[misc]
    """As vllm-ascend's, which keeps all tokens on every rank."""

    sfa_dcp_replicated_indexer_size = 4


def shared_groups(*groups: tuple[Sequence[str], Any]) -> tuple[GroupSpec, ...]:
    return stated_groups(*groups, config=model_config(8, 1, **SHARED))


@pytest.mark.skipif(INSTALLED < (0, 30), reason="not served before")
def test_a_block_stands_for_the_tokens_of_all_ranks_as_vllm_counts_them() -> None:
    from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size  # noqa: PLC0415

    full, latent = shared_groups((["a"], FULL), (["b"], LATENT))
    assert (full.block_tokens, latent.block_tokens) == (128, 64)
    assert [resolve_dcp_kv_block_size(spec, 4) for spec in (FULL, LATENT)] == [128, 64]
    shared = {(spec.token_ranks, spec.token_interleave) for each in (full, latent) for spec in each.layers.values()}
    assert shared == {(4, 8)}
    config = KVCacheConfig(8, [], [KVCacheGroupSpec(["a"], FULL), KVCacheGroupSpec(["b"], LATENT)])
    assert retentions(model_config(8, 1, **SHARED), config) == (Retention(128), Retention(64))


@pytest.mark.skipif(INSTALLED < (0, 30), reason="not served before")
def test_an_indexer_that_every_rank_has_is_in_a_group_of_shared_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_specs, "SERVED", (*cache_specs.SERVED, "Indexer"))
    indexer = Indexer(block_size=16, num_kv_heads=1, head_size=128, dtype=torch.bfloat16)
    specs = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": LATENT, "a.indexer": indexer})
    (group,) = shared_groups((["a", "a.indexer"], specs))
    assert group.block_tokens == 64
    assert {name: spec.token_ranks for name, spec in group.layers.items()} == {"a": 4, "a.indexer": 1}


@pytest.mark.skipif(INSTALLED < (0, 32), reason="vLLM shares the tokens of every attention layer")
def test_a_draft_whose_tokens_are_not_shared_has_blocks_of_its_own() -> None:
    (group,) = shared_groups((["a"], replace(FULL, dcp_sharded=False)))
    assert (group.block_tokens, group.layers["a"].token_ranks) == (32, 1)


@pytest.mark.skipif(INSTALLED < (0, 30), reason="not served before")
def test_states_are_on_every_rank() -> None:
    config = KVCacheConfig(8, [], [KVCacheGroupSpec(["a"], STATE)])
    assert retentions(model_config(8, 1, **SHARED), config) == (Retention(64, states=True),)


@pytest.mark.skipif(INSTALLED < (0, 30), reason="not served before")
def test_a_window_whose_tokens_would_be_shared_is_refused() -> None:
    message = r"'b' is a SlidingWindowSpec, of which ranks would share .*size = 4.* set decode_context_parallel_size"
    with pytest.raises(UnsupportedError, match=message):
        shared_groups((["b"], WINDOWED))


# How the CPU's kernels order a block


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, torch.dtype]]:
    """Block tokens, head size and dtype of the orders that were looked for; each is found."""
    forms: list[tuple[int, int, torch.dtype]] = []

    def find(_config: Any, block_tokens: int, head_size: int, dtype: torch.dtype) -> HeadOrder:
        forms.append((block_tokens, head_size, dtype))
        return an_order(head_size)

    monkeypatch.setattr(module, "head_order", find)
    return forms


def an_order(head_size: int) -> HeadOrder:
    return HeadOrder(f"of heads of {head_size}", None, None)


def caches(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {name: torch.empty(shape) for name, shape in shapes.items()}


def test_the_order_of_each_form_of_cache_is_looked_for_once(asked: list[tuple[int, int, torch.dtype]]) -> None:
    group = GroupSpec(("a", "b", "c"), 32, 0, 8)
    held = caches(a=(8, 2, 32, 128), b=(8, 2, 32, 128), c=(8, 2, 32, 256))
    found = with_head_orders(model_config(), group, held, on_cpu=True)
    assert found.orders == {"a": an_order(64), "b": an_order(64), "c": an_order(128)}
    assert sorted(asked, key=str) == [(32, 128, torch.float32), (32, 64, torch.float32)]


@pytest.mark.parametrize(("on_cpu", "use_mla"), [(False, False), (True, True)])
def test_kernels_whose_order_the_strides_tell_are_not_asked(
    asked: list[tuple[int, int, torch.dtype]], on_cpu: bool, use_mla: bool
) -> None:
    group = GroupSpec(("a",), 32, 0, 8)
    assert (
        with_head_orders(
            model_config(text={"kv_lora_rank": 512} if use_mla else {}), group, caches(a=(8, 2, 32, 128)), on_cpu=on_cpu
        )
        is group
    )
    assert asked == []
