"""Which cache specifications are served, what they state of a layer, and what vLLM keeps of a request in them."""

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.releases import INSTALLED, module_needs, since

if INSTALLED < (0, 30):
    module_needs((0, 30), "the specifications that these tests name")
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import get_manager_for_kv_cache_spec
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    HiSparseHotSpec,
    HiSparseResidentSpec,
    KVCacheGroupSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    SparseCacheRole,
)

from pd_connector.vllm import cache_specs
from pd_connector.vllm.cache_specs import LayerSpec, Retention, check_served, layer_spec, retention
from pd_connector.vllm.engine_config import UnsupportedError
from pd_connector.vllm.releases.newest import VllmRelease
from pd_connector.vllm.releases.release_023 import Release023
from pd_connector.vllm.releases.release_032 import Release032
from tests.support.connector.stated import model_config

SIZES: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
LATENT: dict[str, Any] = {**SIZES, "num_kv_heads": 1, "head_size": 576}
FULL = FullAttentionSpec(**SIZES)
MLA = MLAAttentionSpec(**LATENT)
WINDOWED = SlidingWindowSpec(**SIZES, sliding_window=100)
WINDOWED_MLA = SlidingWindowMLASpec(**LATENT, sliding_window=100)
CHUNKED = ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=64)


def check(spec: Any, **group: Any) -> None:
    check_served(KVCacheGroupSpec(["l"], spec, **group), spec, "l")


@pytest.mark.parametrize(
    "spec",
    [FULL, MLA, WINDOWED, WINDOWED_MLA, CHUNKED, replace(MLA, tokens_per_state=4), CircularBufferSpec(**SIZES)],
)
def test_caches_of_blocks_with_the_keys_and_values_of_their_tokens_are_served(spec: Any) -> None:
    check(spec)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (CrossAttentionSpec(**SIZES), "states of the encoder"),
        (HiddenStateCacheSpec(**LATENT), "hidden states"),
        (HiSparseHotSpec(block_size=16, page_size=64, blocks_per_request=2), "in host memory"),
        (HiSparseResidentSpec(block_size=16, page_size=64), "in host memory"),
        (MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode="all"), "none and align"),
        (RSWASpec(**SIZES, rswa_window=64), "a window of generated tokens"),
        (SinkFullAttentionSpec(**SIZES, sink_len=16), "sink tokens"),
        (type("NewSpec", (FullAttentionSpec,), {})(**SIZES), "which it does not know"),
        (replace(MLA, tokens_per_state=6), "blocks of 16 tokens have no whole number of rows of 6 tokens"),
        (replace(FULL, tokens_per_state=Fraction(1, 4)), "no whole number of rows of 1/4 tokens"),
        pytest.param(
            *(
                replace(WINDOWED_MLA, **({"bounded_replay": True} if INSTALLED >= (0, 31) else {})),
                "--no-swa-bounded-replay",
            ),
            marks=since((0, 31), "windows that are computed again"),
        ),
        (replace(FULL, num_head_slots=2, state_content_bytes=512), "packs 2 KV heads into 2 slots.*attention-backend"),
    ],
)
def test_any_other_cache_is_refused_by_layer_kind_and_reason(spec: Any, why: str) -> None:
    with pytest.raises(UnsupportedError, match=f"layer 'l' is a {type(spec).__name__}, .*{why}"):
        check(spec)


def test_states_and_rows_of_several_tokens_are_refused_on_a_release_that_lays_them_out_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache_specs, "current", Release023)
    with pytest.raises(UnsupportedError, match=r"layer 'l' is a MambaSpec, .* served with vLLM 0\.30 and later only"):
        check(MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,)))
    with pytest.raises(UnsupportedError, match=r"MLAAttentionSpec, whose rows stand .* with vLLM 0\.30 and later only"):
        check(replace(MLA, tokens_per_state=4))
    check(MLA)


@pytest.mark.parametrize("group", [{"host_resident": True}, {"enable_kv_transfer": False}])
def test_blocks_of_another_pool_than_the_devices_are_refused(group: Mapping[str, bool]) -> None:
    with pytest.raises(UnsupportedError, match=r"not in the device's pool.*start without hisparse_config"):
        check(FULL, **group)


# What is stated of a layer


def test_a_layer_that_states_no_values_has_keys_only() -> None:
    """As Inkling's, which keep four streams of a token as keys."""
    assert layer_spec(model_config(), "l", replace(FULL, head_size_v=0)).parts == (("k", FULL.head_size),)


def test_keys_and_values_of_unequal_sizes_are_both_stated() -> None:
    stated = layer_spec(model_config(), "l", replace(FULL, head_size_v=16))
    assert stated == LayerSpec(2, 2, 160, 16 * 2 * 160, torch.bfloat16, (("k", 64), ("v", 16)))


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, (("mla_latent", 512), ("mla_rope", 64))),
        ({"kv_lora_rank": 512}, ()),  # a model that does not say: the tensors themselves must
    ],
)
def test_a_latent_cache_holds_the_latent_vector_and_the_rotary_key(
    sizes: dict[str, int], parts: tuple[tuple[str, int], ...]
) -> None:
    assert layer_spec(model_config(text=sizes), "l", MLA) == LayerSpec(1, 1, 1152, 16 * 1152, torch.bfloat16, parts)


def test_a_draft_with_keys_and_values_beside_a_latent_cache_has_its_own_parts() -> None:
    config = model_config(text={"kv_lora_rank": 512, "qk_rope_head_dim": 64})
    assert layer_spec(config, "l", FULL).parts == (("k", 64), ("v", 64))


def test_the_bytes_of_a_token_are_those_that_the_backend_packs_and_padding_is_only_in_the_page() -> None:
    packed = replace(
        FULL,
        dtype=torch.uint8,
        kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD,
        state_content_bytes=136,
        page_size_padded=8192,
    )
    stated = layer_spec(model_config(), "l", packed)
    assert (stated.token_bytes, stated.page_bytes, stated.parts) == (136, 8192, ())


def test_a_block_whose_scales_follow_the_values_of_all_tokens_is_packed() -> None:
    indexer = replace(MLA, head_size=132, dtype=torch.uint8, cache_role=SparseCacheRole.INDEXER)
    assert layer_spec(model_config(), "l", indexer).packing == "sparse_indexer"
    assert layer_spec(model_config(), "l", replace(WINDOWED_MLA, model_version="deepseek_v4")).packing == "deepseek_v4"
    assert layer_spec(model_config(), "l", MLA).packing == ""


class _OnSM100(VllmRelease):
    def scales_indexer_by_mx(self) -> bool:
        return True


class _Before033OnSM100(Release032):
    """There, too, vLLM 0.32 scales by a float32."""


@pytest.mark.parametrize(
    ("release", "indexer", "of_v4", "rows"),
    [
        (_OnSM100(), "mx_sparse_indexer", "mx_sparse_indexer", "deepseek_v4_by_token"),
        (_Before033OnSM100(), "sparse_indexer", "", "deepseek_v4"),
    ],
    ids=["0.33", "0.32"],
)
def test_what_vllm_033_orders_and_scales_in_another_way_has_another_name(
    monkeypatch: pytest.MonkeyPatch, release: VllmRelease, indexer: str, of_v4: str, rows: str
) -> None:
    monkeypatch.setattr(cache_specs, "current", lambda: release)
    key = replace(MLA, head_size=132, dtype=torch.uint8)
    assert layer_spec(model_config(), "l", replace(key, cache_role=SparseCacheRole.INDEXER)).packing == indexer
    assert layer_spec(model_config(), "l", key).packing == of_v4
    packed = replace(MLA, dtype=torch.uint8, model_version="deepseek_v4", state_content_bytes=528)
    assert layer_spec(model_config(), "l", packed).packing == rows
    assert layer_spec(model_config(), "l", replace(packed, state_content_bytes=584)).packing == "deepseek_v4"


@pytest.mark.parametrize(
    ("held", "tp_size", "config", "total"),
    [
        (2, 4, {}, 8),  # several heads are a rank's own
        (4, 1, {}, 4),
        (1, 1, {"kv_heads": 8}, 1),
        (1, 4, {"kv_heads": 2}, 2),  # two ranks hold the same
        (1, 4, {"kv_heads": 4}, 4),
        (1, 4, {"kv_heads": 2, "text": {"num_key_value_heads": 2, "num_attention_heads": 8}}, 2),
        (
            1,
            4,
            {"kv_heads": 2, "text": {"num_key_value_heads": 2, "swa_num_key_value_heads": 4}},
            4,
        ),  # which of the two?
        (1, 4, {"kv_heads": 2, "text": {"blocks": [{"attention": {"num_key_value_heads": [1, 2]}}]}}, 4),
        (1, 4, {"kv_heads": 2, "text": {"swa_num_key_value_heads": 8}}, 2),  # of eight, a rank would hold two
        (1, 4, {"kv_heads": 2, "draft_heads": 4}, 2),  # the model's own
        (1, 8, {"kv_heads": 4, "text": {"num_attention_heads": 32, "blocks": [{"n_heads_in_group": 8}]}}, 4),
        (1, 8, {"kv_heads": 4, "text": {"num_attention_heads": 32, "blocks": [{"n_heads_in_group": 16}]}}, 8),
    ],
)
def test_the_heads_of_all_ranks_are_those_that_the_configuration_leaves_no_doubt_about(
    held: int, tp_size: int, config: dict[str, Any], total: int
) -> None:
    stated = layer_spec(model_config(tp_size, **config), "l", replace(FULL, num_kv_heads=held))
    assert (stated.heads, stated.total_heads) == (held, total)


def test_the_heads_of_a_drafts_layer_are_those_of_the_draft() -> None:
    stated = layer_spec(model_config(4, kv_heads=4, draft_heads=2), "mtp.layers.0.attn", replace(FULL, num_kv_heads=1))
    assert stated.total_heads == 2


@pytest.mark.parametrize("tp_size", [1, 2, 16])
def test_a_latent_cache_is_held_by_every_rank(tp_size: int) -> None:
    assert layer_spec(model_config(tp_size, kv_heads=16), "l", MLA).total_heads == 1


@pytest.mark.parametrize(
    ("layer", "drafts"),
    [
        ("model.layers.7.self_attn.attn", False),
        ("model.layers.8.self_attn.attn", True),  # EAGLE, and MTP of DeepSeek
        ("mtp.layers.0.self_attn.attn", True),
        ("draft_model.model.layers.3.self_attn.attn", True),
        ("model.eagle_layers.7.self_attn.attn", False),
        ("model.eagle_layers.8.self_attn.attn", True),  # EAGLE of MiniCPM
        ("something.else", False),
    ],
)
def test_what_only_drafts_tokens_may_be_missing(layer: str, drafts: bool) -> None:
    assert layer_spec(model_config(draft_heads=2), layer, FULL).optional is drafts
    assert layer_spec(model_config(), layer, FULL).optional is False


def test_what_vllm_marks_as_a_drafts_may_be_missing_whatever_its_name() -> None:
    """As Gemma 4's draft, whose layers have the numbers of the model's."""
    draft, own = "model.layers.0.self_attn.attn", "language_model.model.layers.0.self_attn.attn"
    built = {name: SimpleNamespace(is_draft_layer=name == draft) for name in (draft, own)}
    drafting = model_config(4, kv_heads=4, draft_heads=2, built=built)
    stated = {name: layer_spec(drafting, name, replace(FULL, num_kv_heads=1)) for name in built}
    assert (stated[draft].optional, stated[draft].total_heads) == (True, 2)
    assert (stated[own].optional, stated[own].total_heads) == (False, 4)


def test_a_draft_must_be_complete_if_its_probabilities_count_or_its_blocks_may_hold_no_numbers() -> None:
    drafting, layer = model_config(draft_heads=2), "mtp.layers.0.self_attn.attn"
    assert layer_spec(drafting, layer, FULL).optional
    assert not layer_spec(drafting, layer, FULL, one_precision=False).optional
    assert not layer_spec(model_config(draft_heads=2, sampling="probabilistic"), layer, FULL).optional


@pytest.mark.parametrize(
    ("accepted", "may_be_missing"), [("standard", True), ("block", True), ("synthetic", True), ("fly", False)]
)
def test_a_draft_must_be_complete_if_what_the_model_would_not_say_is_accepted_of_it(
    accepted: str, may_be_missing: bool
) -> None:
    drafting = model_config(draft_heads=2)
    drafting.speculative_config.rejection_sample_method = accepted
    assert layer_spec(drafting, "mtp.layers.0.self_attn.attn", FULL).optional is may_be_missing


# What vLLM keeps


KEPT = [
    FULL,
    replace(FULL, sliding_window=40),  # the hybrid cache manager is off: only the kernels know the window
    replace(FULL, attention_chunk_size=64),
    MLA,
    WINDOWED,
    replace(WINDOWED, extra_retained_tokens=3),
    WINDOWED_MLA,
    CHUNKED,
    replace(CHUNKED, attention_chunk_size=40),
]


@pytest.mark.parametrize("spec", KEPT)
@given(computed=st.integers(0, 400))
def test_the_first_token_that_is_kept_is_vllms_own(spec: Any, computed: int) -> None:
    pool = BlockPool(4, enable_caching=False, hash_block_size=16)
    manager = get_manager_for_kv_cache_spec(
        spec, 512, 512, block_pool=pool, enable_caching=False, kv_cache_group_id=0, scheduler_block_size=16
    )
    assert retention(spec).first_token(computed) == manager.get_num_skipped_tokens(computed)


def test_what_is_kept_comes_in_blocks_of_the_group() -> None:
    assert retention(CHUNKED) == Retention(16, chunk=64)
    assert retention(replace(WINDOWED, extra_retained_tokens=3)) == Retention(16, window=103)
