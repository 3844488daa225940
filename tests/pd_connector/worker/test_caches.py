"""Caches as vLLM allocates them, described: every element is where the geometry says."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.releases import INSTALLED, module_needs

if INSTALLED < (0, 30):
    module_needs((0, 30), "one tensor for a layer's K and V in every layout")
import torch
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheTensor,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
    compute_layout_strides,
)
from vllm.v1.worker.utils import allocate_kv_cache

from layout.context_parallel import TokenSplit
from layout.geometry import Plane, Region, WorkerGeometry
from layout.states import running_entry
from pd_connector.vllm.cache_groups import GroupSpec, Ranks
from pd_connector.vllm.cpu.head_order import HeadOrder, StridedPart
from pd_connector.worker.caches import UnknownCacheError, describe_caches
from tests.support.connector.stated import model_config, stated_groups
from tests.support.connector.tensors import stated_of

BLOCKS, TOKENS = 5, 16
LAYOUTS = [layout.name for layout in KVCacheLayout]
ALONE = Ranks(0, 1, 0, 1)

Caches = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Group:
    layers: tuple[str, ...]
    spec: Any


def attention(heads: int = 2, dtype: torch.dtype = torch.bfloat16, head_size: int = 8) -> Any:
    return FullAttentionSpec(block_size=TOKENS, num_kv_heads=heads, head_size=head_size, dtype=dtype)


def allocate(layout: str, groups: Sequence[Group], kernel_tokens: int | None = None) -> Caches:
    """What vLLM's model runner would hand over."""
    order = KVCacheLayout[layout]
    page = {group.layers: group.spec.page_size_bytes * len(group.layers) for group in groups}
    block_bytes = max(page.values())
    outer = block_bytes if order.is_block_outermost else None
    tensors = []
    for group in groups:
        strides = compute_layout_strides(
            group.spec, BLOCKS, len(group.layers), order, fixed_strides=(None, outer, None, None, None)
        )
        tensors.append(KVCacheTensor(block_bytes * BLOCKS, list(group.layers), strides[0], strides[1]))
    config = KVCacheConfig(BLOCKS, tensors, [KVCacheGroupSpec(list(group.layers), group.spec) for group in groups])
    kernel_sizes = [kernel_tokens] * len(groups) if kernel_tokens else None
    caches: Caches = allocate_kv_cache(config, torch.device("cpu"), order, kernel_sizes)
    return caches


def describe(caches: Caches, groups: Sequence[Group], ranks: Ranks = ALONE, kv_heads: int = 2) -> WorkerGeometry:
    config = model_config(ranks.tp_size, kv_heads)
    stated = stated_groups(*((group.layers, group.spec) for group in groups), blocks=BLOCKS, config=config)
    return describe_caches(caches, stated, ranks, "10.0.0.5:15000")


def check_addresses(geometry: WorkerGeometry, caches: Caches) -> None:
    """Every element of every layer: where the geometry says, and inside the regions."""
    for group in geometry.groups:
        assert len({(plane.part, name) for plane in group.planes for name in plane.layers}) == sum(
            len(plane.layers) for plane in group.planes
        )
        for plane in group.planes:
            for number, name in enumerate(plane.layers):
                half = caches[name].shape[3] // 2
                part = {"k": slice(0, half), "v": slice(half, None), "kv": slice(None)}[plane.part]
                check_layer(plane, number, caches[name][..., part], geometry.regions)


def check_layer(plane: Plane, number: int, cache: torch.Tensor, regions: Sequence[Region]) -> None:
    """Every element of one layer's ``cache``, logical [blocks, heads, tokens, content], is where ``plane`` says."""
    shape = (plane.blocks, plane.heads, plane.block_tokens, plane.content)
    assert (shape, plane.item_size) == (tuple(cache.shape), cache.element_size())
    strides = (plane.block_stride, plane.head_stride, plane.token_stride, plane.content_stride)
    generator = torch.Generator().manual_seed(number)
    corners = list(product(*((0, size - 1) for size in shape)))
    inside = [[int(torch.randint(size, (), generator=generator)) for size in shape] for _ in range(50)]
    for index in (*corners, *inside):
        place = zip(index, strides, strict=True)
        address = plane.address + number * plane.layer_stride + sum(at * stride for at, stride in place)
        block, head, token, content = index
        assert address == cache[block, head, token, content].data_ptr()
        assert any(region.address <= address <= region.end - plane.item_size for region in regions)


def test_ranks_that_share_tokens_have_blocks_of_their_share() -> None:
    spec = MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
    caches = allocate("LBHNC", [Group(("l0", "l1"), spec)])
    config = model_config(8, 1, decode_context_parallel_size=4, cp_kv_cache_interleave_size=8)
    stated = stated_groups((["l0", "l1"], spec), blocks=BLOCKS, config=config)
    geometry = describe_caches(caches, stated, Ranks(6, 8, 0, 1, 1, 2, dcp_rank=2), "")
    check_addresses(geometry, caches)
    (group,) = geometry.groups
    (plane,) = group.planes
    assert (geometry.pcp_rank, geometry.pcp_size, group.block_tokens, group.rows(plane)) == (1, 2, 64, TOKENS)
    assert plane.tokens == TokenSplit(8, 4, 2)


def test_a_cache_of_all_tokens_where_ranks_share_them_is_refused() -> None:
    config = model_config(8, 1, decode_context_parallel_size=4, cp_kv_cache_interleave_size=8)
    spec = attention(1)
    (group,) = stated_groups((["l0"], spec), blocks=BLOCKS, config=config)
    whole = {"l0": torch.zeros(4 * BLOCKS, 1, TOKENS, 16, dtype=torch.bfloat16)}
    with pytest.raises(UnknownCacheError, match=f"{BLOCKS} blocks of {TOKENS} tokens"):
        describe_caches(whole, [group], ALONE, "")
    every = {"l0": replace(group.layers["l0"], token_ranks=1)}
    geometry = describe_caches(whole, [replace(group, layers=every)], ALONE, "")
    plane = geometry.groups[0].planes[0]
    assert (plane.blocks, geometry.groups[0].rows(plane), plane.tokens) == (4 * BLOCKS, 4 * TOKENS, TokenSplit())


ONE_GROUP = [Group(("l0", "l1", "l2"), attention())]
FLOATS = [Group(("l0", "l1", "l2"), attention(dtype=torch.float32, head_size=4))]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_every_layout_is_one_plane_for_k_and_one_for_v_whose_addresses_are_the_tensors_own(
    layout: str, dtype: torch.dtype
) -> None:
    groups = [Group(("l0", "l1", "l2"), attention(dtype=dtype))]
    caches = allocate(layout, groups)
    geometry = describe(caches, groups)
    check_addresses(geometry, caches)
    planes = geometry.groups[0].planes
    assert [plane.part for plane in planes] == ["k", "v"]
    assert {(plane.layers, plane.content) for plane in planes} == {(("l0", "l1", "l2"), 8)}
    storage = caches["l0"].untyped_storage()
    assert geometry.regions == (Region(storage.data_ptr(), storage.nbytes()),)
    assert geometry.block_bytes * BLOCKS == storage.nbytes()


def test_what_else_a_peer_must_know_is_passed_on() -> None:
    geometry = describe(allocate("LBHNC", ONE_GROUP), ONE_GROUP, Ranks(1, 2, 1, 3))
    assert (geometry.tp_rank, geometry.tp_size, geometry.pp_rank, geometry.pp_size) == (1, 2, 1, 3)
    assert geometry.engine_address == "10.0.0.5:15000"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_are_ordered_by_address_however_they_are_named(layout: str) -> None:
    caches = allocate(layout, [Group(("l2", "l0", "l1"), attention())])
    geometry = describe(caches, ONE_GROUP)
    check_addresses(geometry, caches)
    assert geometry.groups[0].planes[0].layers == ("l2", "l0", "l1")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_that_overlay_each_other_are_described_apart_and_registered_once(layout: str) -> None:
    window = SlidingWindowSpec(block_size=TOKENS, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, sliding_window=64)
    groups = [Group(("l0", "l2"), attention()), Group(("l1", "l3"), window)]
    caches = allocate(layout, groups)
    geometry = describe(caches, groups)
    check_addresses(geometry, caches)
    assert [(group.window, group.block_tokens) for group in geometry.groups] == [(0, TOKENS), (64, TOKENS)]
    assert [sorted(group.layers) for group in geometry.groups] == [["l0", "l2"], ["l1", "l3"]]
    assert len(geometry.regions) == 1


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
def test_kernel_blocks_smaller_than_the_managers_are_described_as_they_are(layout: str) -> None:
    caches = allocate(layout, ONE_GROUP, kernel_tokens=4)
    geometry = describe(caches, ONE_GROUP)
    check_addresses(geometry, caches)
    plane = geometry.groups[0].planes[0]
    assert (geometry.groups[0].block_tokens, plane.block_tokens, plane.blocks) == (TOKENS, 4, 4 * BLOCKS)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tp_rank", [0, 3])
def test_mla_has_one_head_that_every_rank_holds(layout: str, tp_rank: int) -> None:
    spec = MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    groups = [Group(("l0", "l1"), spec)]
    caches = allocate(layout, groups)
    geometry = describe(caches, groups, Ranks(tp_rank, 4, 0, 1), kv_heads=1)
    check_addresses(geometry, caches)
    (plane,) = geometry.groups[0].planes
    assert (plane.head_start, plane.heads, plane.content) == (0, 1, 576)


@pytest.mark.parametrize(
    ("kv_heads", "ranks", "held"),
    [(8, (0, 4), (0, 2)), (8, (3, 4), (6, 2)), (2, (0, 1), (0, 2)), (1, (5, 8), (0, 1)), (2, (5, 8), (1, 1))],
)
def test_a_rank_holds_its_share_of_the_heads(kv_heads: int, ranks: tuple[int, int], held: tuple[int, int]) -> None:
    groups = [Group(("l0",), attention(heads=held[1]))]
    geometry = describe(allocate("LBHNC", groups), groups, Ranks(*ranks, 0, 1), kv_heads)
    plane = geometry.groups[0].planes[0]
    assert (plane.head_start, plane.heads) == held


def test_layers_whose_heads_differ_are_described_each_with_its_own() -> None:
    """Eight heads, and four: rank 3 of 4."""
    heads = {"l0": 2, "l1": 1, "l2": 2}
    specs = {name: attention(number) for name, number in heads.items()}
    spec = UniformTypeKVCacheSpecs(block_size=TOKENS, kv_cache_specs=specs)
    caches = {name: torch.zeros(BLOCKS, number, TOKENS, 16, dtype=torch.bfloat16) for name, number in heads.items()}
    geometry = describe(caches, [Group(tuple(heads), spec)], Ranks(3, 4, 0, 1), kv_heads=8)
    check_addresses(geometry, caches)
    planes = geometry.groups[0].planes
    held = {(*sorted(plane.layers), plane.head_start, plane.head_end, plane.total_heads) for plane in planes}
    assert held == {("l0", "l2", 6, 8, 8), ("l1", 3, 4, 4)}


def test_layers_that_draft_are_in_planes_of_their_own() -> None:
    groups = [Group(("model.layers.0", "model.layers.1"), attention())]
    stated = stated_groups(
        *((group.layers, group.spec) for group in groups), blocks=BLOCKS, config=model_config(draft_heads=2, layers=1)
    )
    geometry = describe_caches(allocate("LBHNC", groups), stated, ALONE, "a")
    described = [(plane.part, plane.layers, plane.optional) for plane in geometry.groups[0].planes]
    assert described == [
        ("k", ("model.layers.0",), False),
        ("v", ("model.layers.0",), False),
        ("k", ("model.layers.1",), True),
        ("v", ("model.layers.1",), True),
    ]


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_the_padding_of_a_page_lies_between_blocks_and_belongs_to_none(layout: str) -> None:
    """vLLM pads the pages of layers with fewer bytes, so that all caches have pages of one size."""
    spec = attention(head_size=6)
    groups = [Group(("l0", "l1"), replace(spec, page_size_padded=spec.page_size_bytes + 128))]
    caches = allocate(layout, groups)
    geometry = describe(caches, groups)
    check_addresses(geometry, caches)
    assert geometry.block_bytes == 2 * spec.page_size_bytes


@pytest.mark.parametrize("layout", ["LBNHC", "BLHNC"])
def test_the_padding_of_a_token_belongs_to_no_plane(layout: str) -> None:
    """As of Inkling's convolutions, which use so much of the 2048 items: the rest is of what had the block before."""
    spec = SlidingWindowSpec(
        block_size=4, num_kv_heads=2, head_size=2048, head_size_v=0, dtype=torch.bfloat16, sliding_window=4
    )
    groups, ranges = [Group(("l0", "l1"), spec)], ((0, 128), (128, 128), (256, 768), (1024, 768))
    caches = allocate(layout, groups)
    built = dict.fromkeys(caches, SimpleNamespace(stream_ranges=ranges))
    stated = stated_groups((groups[0].layers, spec), blocks=BLOCKS, config=model_config(built=built))
    geometry = describe_caches(caches, stated, ALONE, "a")
    (plane,) = geometry.groups[0].planes
    assert (plane.part, plane.content) == ("k", 1792)
    for number, name in enumerate(plane.layers):
        check_layer(plane, number, caches[name][..., :1792], geometry.regions)


@pytest.mark.parametrize("layout", ["LBNHC", "BLHNC"])
def test_the_rows_of_a_compressed_cache_are_not_its_tokens(layout: str) -> None:
    """Four tokens to a row: a block has a quarter of its tokens' rows, which are not smaller blocks."""
    token_by_token = MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    groups = [Group(("l0", "l1"), replace(token_by_token, tokens_per_state=4))]
    caches = allocate(layout, groups)
    assert caches["l0"].shape == (BLOCKS, 1, TOKENS // 4, 576)
    geometry = describe(caches, groups, kv_heads=1)
    (group,) = geometry.groups
    (plane,) = group.planes
    assert (group.block_tokens, plane.block_tokens, plane.tokens_per_row, group.rows(plane)) == (TOKENS, 4, 4, 4)
    for number, name in enumerate(plane.layers):
        check_layer(plane, number, caches[name], geometry.regions)
    with pytest.raises(UnknownCacheError, match=r"'l0' has shape .* of 5 blocks of 16 tokens"):
        describe(caches, [Group(("l0", "l1"), token_by_token)], kv_heads=1)


def test_a_sparse_indexers_block_is_opaque() -> None:
    """Its block has the values of all tokens first, then their scales, whatever the strides of its tensor say."""
    spec = MLAAttentionSpec(
        block_size=TOKENS, num_kv_heads=1, head_size=132, dtype=torch.uint8, cache_role=SparseCacheRole.INDEXER
    )
    groups = [Group(("l0", "l1"), spec)]
    (plane,) = describe(allocate("LBNHC", groups), groups, kv_heads=1).groups[0].planes
    assert (plane.part, plane.packing, plane.content, plane.token_stride) == ("kv", "sparse_indexer", 132, 132)


@pytest.mark.parametrize("layout", ["LBNHC", "BLHNC"])
def test_a_ring_is_one_state_of_a_request(layout: str) -> None:
    groups = [Group(("l0", "l1"), CircularBufferSpec(block_size=8, num_kv_heads=1, head_size=4, dtype=torch.float32))]
    caches = allocate(layout, groups)
    geometry = describe(caches, groups, kv_heads=1)
    (group,) = geometry.groups
    (plane,) = group.planes
    assert group.states
    assert running_entry(1_000_000, group.block_tokens) == 0
    for number, name in enumerate(plane.layers):
        check_layer(plane, number, caches[name].reshape(BLOCKS, 1, 1, -1), geometry.regions)


def test_a_view_that_does_not_start_with_its_storage_keeps_its_own_address() -> None:
    storage = torch.zeros(64 + 3 * BLOCKS * 2 * TOKENS * 8, dtype=torch.float32)
    grid = storage[64:].view(3, BLOCKS, 2, TOKENS, 8)
    caches = {f"l{number}": grid[number] for number in range(3)}
    geometry = describe(caches, FLOATS)
    check_addresses(geometry, caches)
    assert geometry.groups[0].planes[0].address == storage.data_ptr() + 256
    assert geometry.regions == (Region(storage.data_ptr() + 256, storage.nbytes - 256),)


def test_layers_of_their_own_allocations_are_all_found_and_registered() -> None:
    caches = {f"l{number}": torch.zeros(BLOCKS, 2, TOKENS, 8) for number in range(3)}
    geometry = describe(caches, FLOATS)
    check_addresses(geometry, caches)
    assert sum(region.size for region in geometry.regions) == 3 * caches["l0"].nbytes


def test_layers_of_two_shapes_become_two_planes() -> None:
    caches = {
        "l0": torch.zeros(BLOCKS, 2, TOKENS, 8),
        "l1": torch.zeros(BLOCKS, 2, TOKENS, 12),
        "l2": torch.zeros(BLOCKS, 2, TOKENS, 8),
    }
    specs = {name: attention(dtype=torch.float32, head_size=cache.shape[3] // 2) for name, cache in caches.items()}
    groups = [Group(tuple(caches), UniformTypeKVCacheSpecs(block_size=TOKENS, kv_cache_specs=specs))]
    geometry = describe(caches, groups)
    check_addresses(geometry, caches)
    described = [(plane.part, set(plane.layers), plane.content) for plane in geometry.groups[0].planes]
    assert described == [("k", {"l0", "l2"}, 4), ("v", {"l0", "l2"}, 4), ("k", {"l1"}, 6), ("v", {"l1"}, 6)]


def test_layers_at_uneven_distances_are_cut_into_even_runs() -> None:
    item = BLOCKS * 2 * TOKENS * 8
    storage = torch.zeros(8 * item)
    caches = {
        f"l{number}": storage[start * item : (start + 1) * item].view(BLOCKS, 2, TOKENS, 8)
        for number, start in enumerate((0, 1, 2, 5, 7))
    }
    groups = [Group(tuple(caches), attention(dtype=torch.float32, head_size=4))]
    geometry = describe(caches, groups)
    check_addresses(geometry, caches)
    assert [plane.layers for plane in geometry.groups[0].planes] == 2 * [("l0", "l1", "l2"), ("l3", "l4")]


def test_a_cache_that_belongs_to_no_group_is_left_out() -> None:
    caches = allocate("LBHNC", ONE_GROUP)
    geometry = describe({**caches, "l9.shares_l0": caches["l0"], "odd": torch.zeros(3)}, ONE_GROUP)
    assert geometry == describe(caches, ONE_GROUP)


def test_a_stage_without_layers_of_a_group_has_no_planes_in_it() -> None:
    groups = [*ONE_GROUP, Group((), attention())]
    geometry = describe(allocate("LBHNC", ONE_GROUP), groups)
    assert geometry.groups[1].planes == ()


BF16 = {"dtype": torch.bfloat16}
PART = torch.zeros(BLOCKS, TOKENS, 2, 8, **BF16)


@pytest.mark.parametrize(
    ("cache", "words"),
    [
        (torch.zeros(2, BLOCKS, TOKENS, 2, 8, **BF16), r"shape \(2, 5, 16, 2, 8\), strides"),
        (torch.zeros(BLOCKS, 2, TOKENS, **BF16), r"shape \(5, 2, 16\)"),
        (torch.zeros(BLOCKS, 2, 12, 16, **BF16), "5 blocks of 16 tokens"),
        (torch.zeros(BLOCKS + 1, 2, TOKENS, 16, **BF16), "5 blocks of 16 tokens"),
        (torch.zeros(BLOCKS, 2, TOKENS // 4, 16, **BF16), "5 blocks of 16 tokens"),
        (torch.zeros(2 * BLOCKS, 2, TOKENS, 16, **BF16), "5 blocks of 16 tokens"),
        (torch.zeros(BLOCKS, 4, TOKENS, 16, **BF16), "2 heads of 32 bytes"),
        (torch.zeros(BLOCKS, 2, TOKENS, 12, **BF16), "2 heads of 32 bytes"),
        (torch.zeros(BLOCKS, 2, TOKENS, 16, dtype=torch.float16), r"torch.float16; .*, torch.bfloat16"),
        ([torch.zeros(3), torch.zeros(4)], r"a part of shape \(3,\); expected \[blocks, tokens, heads, content\]"),
        (2 * (torch.zeros(BLOCKS, 12, 2, 8, **BF16),), "a part of .* 5 blocks of 16 tokens"),
        (2 * (torch.zeros(BLOCKS, TOKENS // 2, 2, 8, **BF16),), "a part of .* 5 blocks of 16 tokens"),
        (2 * (torch.zeros(BLOCKS, TOKENS, 3, 8, **BF16),), "a part of .* 2 heads, 8 items"),
        (2 * (torch.zeros(BLOCKS, TOKENS, 2, 9, **BF16),), "a part of .* 2 heads, 8 items"),
        ((PART,), r"1 tensors; expected one for each part \(k, v\)"),
        ((PART, PART, PART), "3 tensors with 1536 bytes of each block; vLLM states 1024"),
        ((), "0 tensors; expected one for each part"),
        (("no", "tensors"), "a part of <class 'str'>"),
    ],
)
def test_a_form_that_is_not_what_vllm_states_is_refused_by_layer(cache: Any, words: str) -> None:
    groups = [Group(("l0",), attention())]
    with pytest.raises(UnknownCacheError, match=f"'l0' has .*{words}"):
        describe({"l0": cache}, groups)


def test_parts_in_tensors_of_their_own_keep_their_names_sizes_and_strides() -> None:
    """As vllm-ascend allocates them: [blocks, tokens, heads, content]; MLA's two parts differ in size."""
    latent = torch.zeros(BLOCKS, TOKENS, 1, 512, dtype=torch.bfloat16)
    rope = torch.zeros(BLOCKS, TOKENS, 1, 64, dtype=torch.bfloat16)
    scale = torch.zeros(BLOCKS, TOKENS, 1, 1)
    stated = stated_of(latent, (("mla_latent", 512), ("mla_rope", 64)), heads_axis=2, page_bytes=TOKENS * 1156)
    group = GroupSpec(("l0",), TOKENS, 0, BLOCKS, {"l0": stated})
    geometry = describe_caches({"l0": (latent, rope, scale)}, [group], ALONE, "a")
    planes = geometry.groups[0].planes
    assert [(plane.part, plane.content) for plane in planes] == [("mla_latent", 512), ("mla_rope", 64), ("part2", 1)]
    for plane, tensor in zip(planes, (latent, rope, scale), strict=True):
        check_layer(plane, 0, tensor.transpose(1, 2), geometry.regions)


@pytest.mark.parametrize("heads", [2, TOKENS])
@pytest.mark.parametrize("heads_first", [False, True])
def test_parts_may_have_their_heads_before_their_tokens(heads: int, heads_first: bool) -> None:
    """As vllm-ascend allocates them with VLLM_KV_CACHE_LAYOUT=LBHNC: where shapes leave it open, the layout decides."""
    shape = (BLOCKS, heads, TOKENS, 8) if heads_first else (BLOCKS, TOKENS, heads, 8)
    key, value = (torch.zeros(shape, dtype=torch.bfloat16) for _ in "kv")
    parts, page = (("k", 8), ("v", 8)), TOKENS * heads * 2 * 8 * 2
    stated = stated_of(key, parts, heads_axis=1 if heads_first else 2, page_bytes=page)
    group = GroupSpec(("l0",), TOKENS, 0, BLOCKS, {"l0": stated}, heads_first=heads_first)
    geometry = describe_caches({"l0": (key, value)}, [group], ALONE, "a")
    for plane, tensor in zip(geometry.groups[0].planes, (key, value), strict=True):
        check_layer(plane, 0, tensor if heads_first else tensor.transpose(1, 2), geometry.regions)


def test_parts_in_one_tensor_are_described_like_those_in_tensors_of_their_own() -> None:
    """What one engine keeps fused and the other apart has equal names and sizes, so that it can be converted."""
    fused = torch.zeros(BLOCKS, 2, TOKENS, 10)
    apart = torch.zeros(BLOCKS, TOKENS, 2, 6), torch.zeros(BLOCKS, TOKENS, 2, 4)
    group = GroupSpec(("l0",), TOKENS, 0, BLOCKS, {"l0": stated_of(fused, (("k", 6), ("v", 4)))})
    described = [
        [(plane.part, plane.content, plane.heads) for plane in geometry.groups[0].planes]
        for geometry in (describe_caches({"l0": cache}, [group], ALONE, "a") for cache in (fused, apart))
    ]
    assert described == 2 * [[("k", 6, 2), ("v", 4, 2)]]


# What CPU kernels order in their own way

TRANSPOSED = HeadOrder("cpu-1", StridedPart(0, 1, TOKENS), StridedPart(8 * TOKENS, 8, 1))
OPAQUE = HeadOrder("cpu-2", None, None)


def described_as(order: HeadOrder, layout: str) -> tuple[Caches, WorkerGeometry]:
    caches = allocate(layout, ONE_GROUP)
    (stated,) = stated_groups((ONE_GROUP[0].layers, ONE_GROUP[0].spec), blocks=BLOCKS)
    group = replace(stated, orders=dict.fromkeys(caches, order))
    return caches, describe_caches(caches, [group], ALONE, "a")


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC", "BHLNC", "LHBNC"])
def test_heads_in_an_order_without_strides_are_opaque_and_keep_its_name(layout: str) -> None:
    (plane,) = described_as(OPAQUE, layout)[1].groups[0].planes
    assert (plane.part, plane.packing) == ("kv", "cpu-2")
    assert (plane.content_stride, plane.token_stride) == (2, 32)


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC", "BHLNC", "LHBNC"])
def test_heads_in_an_order_with_strides_are_described_by_them(layout: str) -> None:
    caches, geometry = described_as(TRANSPOSED, layout)
    key, value = geometry.groups[0].planes
    for number, name in enumerate(key.layers):
        heads = caches[name].flatten(2).unflatten(2, (2, -1))  # [blocks, heads, K or V, items]
        check_layer(key, number, heads[:, :, 0].unflatten(2, (8, TOKENS)).transpose(2, 3), geometry.regions)
        check_layer(value, number, heads[:, :, 1].unflatten(2, (TOKENS, 8)), geometry.regions)
    assert (key.packing, value.packing) == ("", "")


@pytest.mark.parametrize("layout", ["LBNHC", "BLNHC"])
@pytest.mark.parametrize("order", [OPAQUE, TRANSPOSED])
def test_heads_in_a_kernels_order_that_are_interleaved_are_refused(layout: str, order: HeadOrder) -> None:
    with pytest.raises(UnknownCacheError, match="written by a kernel with an order of its own, but not dense inside"):
        described_as(order, layout)
