"""Caches that the connector allocates: what a kernel writes through a layer's views is where the planes say."""

import ctypes
from dataclasses import replace

import pytest
import torch

from layout.cross_layer import ALIGNMENT, CachePart, CrossLayerError
from layout.geometry import WorkerGeometry
from pd_connector.vllm.cache_groups import GroupSpec, Ranks
from pd_connector.vllm.cross_layer_tensors import CrossLayerCaches, allocate_cross_layer
from pd_connector.worker.caches import describe_caches
from tests.support.connector.tensors import stated_of

MLA = [
    (CachePart("mla_latent", 0, 1, 512, 2), torch.bfloat16),
    (CachePart("mla_rope", 0, 1, 64, 2), torch.bfloat16),
]
GQA = [(CachePart("k", 0, 2, 6, 4), torch.float32), (CachePart("v", 0, 2, 4, 2), torch.float16)]
Parts = list[tuple[CachePart, torch.dtype]]


def allocate(parts: Parts, layers: int = 2, order: str = "BLHNC") -> CrossLayerCaches:
    return allocate_cross_layer(parts, [f"l{number}" for number in range(layers)], 3, 2, "cpu", order)


@pytest.mark.parametrize("order", ["BLHNC", "BHLNC", "BLNHC"])
@pytest.mark.parametrize("parts", [MLA, GQA])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_every_element_of_every_view_is_where_its_plane_says(parts: Parts, layers: int, order: str) -> None:
    caches = allocate(parts, layers, order)
    for number, (buffer, (part, dtype)) in enumerate(zip(caches.buffers, parts, strict=True)):
        plane = buffer.plane
        for layer, name in enumerate(plane.layers):
            view = caches.layers[name][number]
            assert view.shape == (3, 2, part.heads, part.content)
            view.copy_(torch.arange(view.numel()).view(view.shape) % 97 + layer)
            for block, token, head in torch.cartesian_prod(*(torch.arange(size) for size in view.shape[:3])).tolist():
                address = (
                    plane.address
                    + layer * plane.layer_stride
                    + block * plane.block_stride
                    + token * plane.token_stride
                    + head * plane.head_stride
                )
                stored = bytearray(ctypes.string_at(address, part.content * part.item_size))
                assert torch.equal(torch.frombuffer(stored, dtype=dtype), view[block, token, head])


def test_each_part_has_an_aligned_region_of_its_own() -> None:
    regions = [buffer.region for buffer in allocate(MLA).buffers]
    assert all(region.address % ALIGNMENT == region.size % ALIGNMENT == 0 for region in regions)
    first, second = sorted(regions, key=lambda region: region.address)
    assert first.end <= second.address


def test_a_worker_describes_the_views_as_the_planes_that_they_are() -> None:
    caches = allocate(GQA)
    parts = tuple((part.name, part.content) for part, _ in GQA)
    page_bytes = sum(part.heads * 2 * part.content * part.item_size for part, _ in GQA)
    stated = stated_of(caches.layers["l0"][0], parts, heads_axis=2, page_bytes=page_bytes)
    group = GroupSpec(("l0", "l1"), 2, 0, 3, dict.fromkeys(("l0", "l1"), stated))
    geometry: WorkerGeometry = describe_caches(caches.layers, [group], Ranks(0, 1, 0, 1), "a")
    assert geometry.groups[0].planes == tuple(replace(buffer.plane, total_heads=2) for buffer in caches.buffers)


def test_items_of_another_size_than_their_type_are_refused() -> None:
    with pytest.raises(CrossLayerError, match=r"'k' has items of 4 bytes; torch\.bfloat16 has 2"):
        allocate([(CachePart("k", 0, 2, 6, 4), torch.bfloat16)])
