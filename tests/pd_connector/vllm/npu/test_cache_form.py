"""Which caches of a model runner can be one tensor for each part: by their shapes, on the meta device."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pd_connector.vllm.npu.cache_form import LayersApartError, check_groups, common_form

BLOCKS, TOKENS = 5, 8


def pair(*content: int, heads: int = 2, dtype: torch.dtype = torch.bfloat16, blocks: int = BLOCKS) -> Any:
    return tuple(torch.empty(blocks, TOKENS, heads, items, dtype=dtype, device="meta") for items in content)


def caches(layers: int = 3, **others: Any) -> dict[str, Any]:
    return {f"l{number}": pair(16, 16) for number in range(layers)} | others


def form_of(given: dict[str, Any]) -> Any:
    return common_form(given, TOKENS, BLOCKS)


def test_equal_layers_have_a_form() -> None:
    form = form_of(caches())
    assert (form.layers, form.blocks, form.block_tokens) == (("l0", "l1", "l2"), BLOCKS, TOKENS)
    assert [part.block for part in form.parts] == [(8, 2, 16), (8, 2, 16)]
    assert form.block_bytes == 3 * 2 * TOKENS * 2 * 16 * 2


def test_the_parts_of_mla_have_sizes_of_their_own() -> None:
    form = form_of({name: pair(512, 64, heads=1) for name in ("l0", "l1")})
    assert [part.block for part in form.parts] == [(8, 1, 512), (8, 1, 64)]


def test_kernel_blocks_may_be_smaller_than_blocks() -> None:
    form = common_form({"l0": pair(4, 4), "l1": pair(4, 4)}, 5 * TOKENS, 1)
    assert (form.blocks, form.block_tokens) == (BLOCKS, TOKENS)


def test_a_pair_that_shares_its_pages_has_a_form() -> None:
    """As vllm-ascend 0.30 allocates a layer: a block's K, then its V."""
    memory = torch.empty(BLOCKS, 2, TOKENS, 2, 16, device="meta")
    shared = (memory[:, 0], memory[:, 1])
    assert form_of({"l0": shared, "l1": shared}).blocks == BLOCKS


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (caches(1), "this worker has 1 layer with a cache"),
        (caches(l3=pair(16, 32)), "the caches of layers 'l0' and 'l3' differ in shape or type"),
        (caches(l3=pair(16, 16, dtype=torch.float16)), "the caches of layers 'l0' and 'l3' differ in shape or type"),
        (caches(l3=torch.empty(5, 8, 2, 16, device="meta")), "the cache of layer 'l3' is not two tensors"),
        (caches(l3=(*pair(16, 16), pair(1)[0])), "the cache of layer 'l3' is not two tensors"),
        (caches(l3=pair(16, 16, dtype=torch.int8)), "the cache of layer 'l3' is quantized (torch.int8)"),
        (caches(l3=tuple(part.transpose(1, 2) for part in pair(16, 16))), "blocks of layer 'l3' are not dense"),
        ({name: pair(4, 4, blocks=4) for name in "ab"}, "layer 'a' does not hold 5 blocks in each of its parts"),
    ],
)
def test_others_stay_apart_for_a_reason(given: dict[str, Any], why: str) -> None:
    with pytest.raises(LayersApartError) as raised:
        form_of(given)
    assert str(raised.value).startswith(why)


def group(kind: str = "FullAttentionSpec", dtype: torch.dtype = torch.bfloat16) -> Any:
    return SimpleNamespace(kv_cache_spec=type(kind, (), {"dtype": dtype})())


@pytest.mark.parametrize("kind", ["FullAttentionSpec", "MLAAttentionSpec", "AscendMLAAttentionSpec"])
def test_one_group_of_attention_is_taken(kind: str) -> None:
    check_groups([group(kind)])


def uniform(**kinds: str) -> Any:
    specs = {name: group(kind).kv_cache_spec for name, kind in kinds.items()}
    return SimpleNamespace(kv_cache_spec=SimpleNamespace(kv_cache_specs=specs))


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        ([group(), group("SlidingWindowSpec")], "the model has 2 groups of layers with block tables of their own"),
        ([group("MambaSpec")], "the cache is of kind MambaSpec"),
        ([group("AscendSFAIndexerCacheSpec")], "the cache is of kind AscendSFAIndexerCacheSpec"),
        ([group(dtype=torch.int8)], "the cache is quantized (torch.int8)"),
        ([uniform(l0="FullAttentionSpec", l1="MambaSpec")], "the cache of layer 'l1' is of kind MambaSpec"),
    ],
)
def test_other_groups_stay_apart_for_a_reason(groups: list[Any], why: str) -> None:
    with pytest.raises(LayersApartError) as raised:
        check_groups(groups)
    assert str(raised.value) == why
