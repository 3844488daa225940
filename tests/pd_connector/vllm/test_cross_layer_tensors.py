"""Caches that the connector allocates: aligned, with all layers of a block together."""

import ctypes
from collections.abc import Sequence
from itertools import product

import pytest
import torch

from pd_connector.vllm.cache_groups import GroupSpec, Ranks
from pd_connector.vllm.cross_layer_tensors import ALIGNMENT, allocate_cross_layer
from pd_connector.vllm.npu.cache_check import PartShape
from pd_connector.worker.caches import describe_caches
from tests.support.connector.tensors import stated_of

MLA = (PartShape((16, 1, 512), torch.bfloat16), PartShape((16, 1, 64), torch.bfloat16))
GQA = (PartShape((2, 2, 6), torch.float32), PartShape((2, 2, 4), torch.float16))
BLOCKS = 3


def layers(number: int) -> tuple[str, ...]:
    return tuple(f"l{index}" for index in range(number))


@pytest.mark.parametrize("parts", [MLA, GQA])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_every_element_of_every_view_has_memory_of_its_own(parts: Sequence[PartShape], number: int) -> None:
    caches = allocate_cross_layer(parts, layers(number), BLOCKS, "cpu")
    views = [(view, part) for tensors in caches.values() for view, part in zip(tensors, parts, strict=True)]
    for value, (view, part) in enumerate(views):
        assert view.shape == (BLOCKS, *part.block)
        assert view.dtype == part.dtype
        assert not view.any(), "another view has written here, or it was not zeroed"
        view.fill_(value + 1)
    assert [view.unique().tolist() for view, _ in views] == [[value + 1] for value in range(len(views))]


@pytest.mark.parametrize("parts", [MLA, GQA])
def test_each_part_begins_at_an_aligned_address_and_its_last_unit_is_its_own(parts: Sequence[PartShape]) -> None:
    first = allocate_cross_layer(parts, layers(2), BLOCKS, "cpu")["l0"]
    for view in first:
        storage = view.untyped_storage()
        assert view.data_ptr() % ALIGNMENT == 0
        size = 2 * view.numel() * view.element_size()
        end = view.data_ptr() - storage.data_ptr() + -(-size // ALIGNMENT) * ALIGNMENT
        assert end <= storage.nbytes()
    assert len({view.untyped_storage().data_ptr() for view in first}) == len(parts)


def test_a_worker_describes_a_part_as_one_plane_with_all_layers_of_a_block_together() -> None:
    caches = allocate_cross_layer(GQA, layers(2), BLOCKS, "cpu")
    content = tuple((name, part.block[2]) for name, part in zip(("k", "v"), GQA, strict=True))
    stated = stated_of(caches["l0"][0], content, heads_axis=2, page_bytes=sum(part.block_bytes for part in GQA))
    group = GroupSpec(layers(2), 2, 0, BLOCKS, dict.fromkeys(layers(2), stated))
    planes = describe_caches(caches, [group], Ranks(0, 1, 0, 1), "a").groups[0].planes
    assert [(plane.part, plane.layers) for plane in planes] == [("k", layers(2)), ("v", layers(2))]
    assert [(plane.layer_stride, plane.block_stride) for plane in planes] == [(96, 192), (32, 64)]
    for plane, (number, name) in product(planes, enumerate(layers(2))):
        view = caches[name][planes.index(plane)]
        view.copy_(torch.arange(view.numel()).view(view.shape) % 97 + number)
        for block, token, head in torch.cartesian_prod(*(torch.arange(size) for size in view.shape[:3])).tolist():
            address = plane.address + number * plane.layer_stride + block * plane.block_stride
            address += token * plane.token_stride + head * plane.head_stride
            stored = bytearray(ctypes.string_at(address, plane.content * plane.item_size))
            assert torch.equal(torch.frombuffer(stored, dtype=view.dtype), view[block, token, head])
