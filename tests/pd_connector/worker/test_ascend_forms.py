"""Caches in the forms in which vllm-ascend passes them: a tensor for each part, of which some are of several numbers.

Its specifications are known by name. Those here have the names and the fields that are read; ``tests/ascend_sim`` has
the real ones.
"""

from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.releases import INSTALLED, module_needs

if INSTALLED < (0, 30):
    module_needs((0, 30), "caches that rows of several tokens make up")

import torch
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from layout.geometry import Plane, Region
from pd_connector.vllm.cache_groups import Ranks
from pd_connector.worker.caches import UnknownCacheError, describe_caches
from pd_connector.worker.canary import plane_formats
from tests.support.connector.stated import model_config, stated_groups

BLOCKS, TOKENS = 5, 16
SIZES: dict[str, Any] = {"block_size": TOKENS, "num_kv_heads": 1}


@dataclass(frozen=True, kw_only=True)
class AscendMLAAttentionSpec(MLAAttentionSpec):  # type: ignore[misc]  # vLLM is untyped here
    cache_sparse_sfa_c8: bool = False


class AscendSFAIndexerCacheSpec(MLAAttentionSpec):  # type: ignore[misc]
    pass


def planes_of(cache: Any, spec: Any, **text: int) -> tuple[tuple[Plane, ...], dict[Plane, str]]:
    """The planes of one layer on a second rank, and the formats in which canaries compare them."""
    groups = stated_groups((["l0"], spec), blocks=BLOCKS, config=model_config(2, 1, text=text))
    geometry = describe_caches({"l0": cache}, groups, Ranks(1, 2, 0, 1), "a")
    return geometry.groups[0].planes, plane_formats(geometry, {"l0": cache}, "int8")


def test_a_packed_row_is_latent_vector_rotary_key_and_scales() -> None:
    spec = AscendMLAAttentionSpec(**SIZES, head_size=656, dtype=torch.int8, cache_sparse_sfa_c8=True)
    rows = torch.zeros(BLOCKS, TOKENS, 1, 656, dtype=torch.int8)
    planes, formats = planes_of((rows,), spec, kv_lora_rank=512, qk_rope_head_dim=64)
    assert [(plane.part, plane.content, plane.item_size, plane.address - rows.data_ptr()) for plane in planes] == [
        ("mla_latent", 512, 1, 0), ("mla_rope", 64, 2, 512), ("mla_scale", 4, 4, 640),
    ]  # fmt: skip
    assert {plane.token_stride for plane in planes} == {656}
    assert {plane.head_start for plane in planes} == {0}
    assert [formats[plane] for plane in planes] == ["int8", "bfloat16", "float32"]


def test_a_packed_row_of_other_sizes_is_one_part() -> None:
    spec = AscendMLAAttentionSpec(**SIZES, head_size=600, dtype=torch.int8, cache_sparse_sfa_c8=True)
    planes, _ = planes_of((torch.zeros(BLOCKS, TOKENS, 1, 600, dtype=torch.int8),), spec, kv_lora_rank=512)
    assert [(plane.part, plane.content) for plane in planes] == [("part0", 600)]


def test_an_indexer_may_have_no_axis_for_its_head_and_scales_of_its_own() -> None:
    spec = AscendSFAIndexerCacheSpec(**SIZES, head_size=136, dtype=torch.int8)
    keys = torch.zeros(BLOCKS, TOKENS, 128, dtype=torch.int8)
    with pytest.raises(UnknownCacheError, match=r"a part of shape \(5, 16, 1, 128\); .* 136 items"):
        planes_of((keys,), spec)
    spec = AscendSFAIndexerCacheSpec(**SIZES, head_size=128, dtype=torch.int8, page_size_padded=TOKENS * 130)
    scales = torch.zeros(BLOCKS, TOKENS, 1, 1, dtype=torch.float16)
    planes, _ = planes_of((keys, scales), spec)
    assert [(plane.part, plane.content, plane.item_size) for plane in planes] == [("index", 128, 1), ("part1", 1, 2)]


def test_views_without_bytes_of_their_own_are_left_out() -> None:
    """A rotary key of no items, and a view of an indexer's values and scales together."""
    spec = AscendMLAAttentionSpec(**SIZES, head_size=128, dtype=torch.int8, tokens_per_state=4, page_size_padded=520)
    pages = torch.zeros(BLOCKS, 520, dtype=torch.int8)
    keys = pages[:, :512].view(BLOCKS, 4, 1, 128)
    scales = pages[:, 512:].view(torch.float16).view(BLOCKS, 4, 1, 1)
    whole = pages.view(BLOCKS, 4, 1, 130)
    planes, _ = planes_of([keys, keys[..., :0], scales, whole], spec)
    assert [(plane.content, plane.block_tokens, plane.tokens_per_row) for plane in planes] == [(128, 4, 4), (1, 4, 4)]
    assert {plane.block_stride for plane in planes} == {520}


def test_an_empty_tensor_of_a_part_that_the_model_lacks_is_nowhere() -> None:
    """GLM-5.3-Flash has no rotary key: its tensor is an empty view of the latent vectors', without an address."""
    spec = AscendMLAAttentionSpec(**SIZES, head_size=512, dtype=torch.bfloat16)
    latent = torch.zeros(BLOCKS, TOKENS, 1, 512, dtype=torch.bfloat16)
    cache = (latent, latent[..., :0])
    assert not cache[1].data_ptr()
    groups = stated_groups((["l0"], spec), blocks=BLOCKS, config=model_config(2, 1, text={"kv_lora_rank": 512}))
    geometry = describe_caches({"l0": cache}, groups, Ranks(1, 2, 0, 1), "a")
    assert geometry.regions == (Region(latent.data_ptr(), latent.nbytes),)
