"""Cross-layer buffers: what is written through the layers' views is read where the plane says."""

from collections.abc import Callable, Iterable
from itertools import permutations, product
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from layout.cross_layer import (
    ALIGNMENT,
    CachePart,
    CrossLayerBuffer,
    CrossLayerError,
    CrossLayerShape,
    cross_layer_shapes,
)
from layout.geometry import CacheGroup, WorkerGeometry
from layout.plan import BlockTable
from tests.support.layout.oracle import LAYOUTS, Items
from tests.support.layout.pulls import plans_of

ORDERS = ["".join(order) for order in permutations("LBHNC")]
GUARD = 0xA5
BASES = (0, 8, 4096, ALIGNMENT - 8, ALIGNMENT, 3 * ALIGNMENT + 64)
KEYS = CachePart("k", 0, 2, 3, 2)
MLA = (CachePart("mla_latent", 0, 1, 512, 2), CachePart("mla_rope", 0, 1, 64, 2))


def shape_of(order: str, layers: int, blocks: int, tokens: int, part: CachePart = KEYS) -> CrossLayerShape:
    (shape,) = cross_layer_shapes([part], names(layers), blocks, tokens, order)
    return shape


def names(layers: int) -> list[str]:
    return [f"layer.{number}" for number in range(layers)]


def allocate(shape: CrossLayerShape, base: int) -> tuple[Items, CrossLayerBuffer]:
    """An allocation whose first byte counts as address ``base``."""
    return np.full(shape.allocation_bytes, GUARD, np.uint8), shape.at(base)


def view_of(raw: Items, buffer: CrossLayerBuffer, layer: str, axes: str = "BNHC") -> Items:
    """A layer's cache, made as with any tensor library: strides and offset in items."""
    view, item = buffer.layer_view(layer, axes), buffer.shape.part.item_size
    typed = raw.view(f"u{item}")
    last = view.offset + sum((size - 1) * step for size, step in zip(view.shape, view.strides, strict=True))
    assert last < len(typed), "the view reaches beyond the allocation"
    return as_strided(typed[view.offset :], view.shape, [step * item for step in view.strides])


def value(index: Iterable[int], item_size: int) -> int:
    """Of the element at (layer, block, head, token, content): all differ, but for small items' lost high bytes."""
    number = 1
    for position in index:
        number = number * 11 + position
    return number * 40503 % (1 << 8 * item_size)


def written(shape: CrossLayerShape, base: int, axes: str = "BNHC") -> tuple[Items, CrossLayerBuffer]:
    """A buffer whose elements were written one by one through the views of its layers."""
    raw, buffer = allocate(shape, base)
    for layer, name in enumerate(shape.layers):
        view = view_of(raw, buffer, name, axes)
        for index in np.ndindex(view.shape):
            at = dict(zip(axes, index, strict=True))
            view[index] = value((layer, *(at[axis] for axis in "BHNC")), shape.part.item_size)
    return raw, buffer


def check_plane(raw: Items, buffer: CrossLayerBuffer) -> None:
    """Every element is where the plane has it, no two share a byte, and nothing else was written."""
    plane, untouched = buffer.plane, np.ones(len(raw), bool)
    sizes = (len(plane.layers), plane.blocks, plane.heads, plane.block_tokens, plane.content)
    steps = (plane.layer_stride, plane.block_stride, plane.head_stride, plane.token_stride, plane.content_stride)
    for index in np.ndindex(sizes):
        start = plane.address - buffer.base_address + sum(i * step for i, step in zip(index, steps, strict=True))
        stored = raw[start : start + plane.item_size]
        assert int.from_bytes(stored.tobytes(), "little") == value(index, plane.item_size), index
        assert untouched[start : start + plane.item_size].all(), f"two elements share a byte at {index}"
        untouched[start : start + plane.item_size] = False
    assert (raw[untouched] == GUARD).all()
    inside = slice(buffer.aligned_offset, buffer.aligned_offset + buffer.shape.size)
    assert not untouched[inside].any(), "the buffer has gaps"


def check_order(raw: Items, buffer: CrossLayerBuffer) -> None:
    """The elements lie in the order of the axes, outermost first: a second opinion that uses no strides."""
    form, item = buffer.shape, buffer.shape.part.item_size
    counts = dict(
        zip(
            "LBHNC", (len(form.layers), form.blocks, form.part.heads, form.block_tokens, form.part.content), strict=True
        )
    )
    elements = raw[buffer.aligned_offset :][: prod(counts.values()) * item].view(f"u{item}")
    walk = product(*(range(counts[axis]) for axis in form.order))
    for stored, index in zip(elements.tolist(), walk, strict=True):
        at = dict(zip(form.order, index, strict=True))
        assert stored == value((at[axis] for axis in "LBHNC"), item)


@pytest.mark.parametrize("order", ORDERS)
def test_two_layers_two_blocks_two_heads_two_tokens_two_items(order: str) -> None:
    """Axes of equal size are told apart by name: the sizes say nothing about which axis is which."""
    raw, buffer = written(shape_of(order, 2, 2, 2, CachePart("k", 0, 2, 2, 2)), base=4096)
    check_plane(raw, buffer)
    check_order(raw, buffer)


few = st.sampled_from([1, 2, 2, 3])


@pytest.mark.thorough
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    order=st.sampled_from(ORDERS),
    axes=st.permutations("BNHC").map("".join),
    layers=few,
    blocks=few,
    tokens=few,
    heads=few,
    content=st.integers(1, 4),
    item_size=st.sampled_from([1, 2, 4, 8]),
    base=st.sampled_from(BASES),
)
def test_elements_written_through_any_view_are_where_the_plane_says(
    order: str, axes: str, layers: int, blocks: int, tokens: int, heads: int, content: int, item_size: int, base: int
) -> None:
    shape = shape_of(order, layers, blocks, tokens, CachePart("k", 3, heads, content, item_size))
    raw, buffer = written(shape, base, axes)
    check_plane(raw, buffer)
    check_order(raw, buffer)


@given(base=st.integers(0, 1 << 40).map(lambda number: number * 8), order=st.sampled_from(LAYOUTS))
def test_the_buffer_starts_at_the_next_aligned_address_and_fits(base: int, order: str) -> None:
    shape = shape_of(order, 3, 5, 16)
    buffer = shape.at(base)
    assert (base + buffer.aligned_offset) % ALIGNMENT == 0
    assert 0 <= buffer.aligned_offset < ALIGNMENT
    assert buffer.region.address == base + buffer.aligned_offset
    assert buffer.region.address % ALIGNMENT == buffer.region.size % ALIGNMENT == 0
    assert 0 <= buffer.region.size - shape.size < ALIGNMENT
    assert buffer.region.end <= base + shape.allocation_bytes
    assert shape.size == 3 * 5 * 2 * 16 * 3 * 2
    assert buffer.plane.address == buffer.region.address


def test_views_are_nhd_unless_told_otherwise() -> None:
    buffer = shape_of("BLNHC", 24, 100, 16, CachePart("v", 0, 2, 64, 2)).at(0)
    view = buffer.layer_view("layer.3")
    assert view.shape == (100, 16, 2, 64)
    assert view.strides == (24 * 16 * 2 * 64, 2 * 64, 64, 1)
    assert view.offset == 3 * 16 * 2 * 64
    assert buffer.layer_view("layer.3", "BHNC").shape == (100, 2, 16, 64)


def test_the_offset_of_a_view_counts_from_the_start_of_the_allocation() -> None:
    assert shape_of("BLNHC", 2, 2, 2).at(ALIGNMENT - 64).layer_view("layer.0").offset == 64 // 2


def test_parts_of_unequal_content_have_buffers_of_their_own_sizes() -> None:
    nope, rope = cross_layer_shapes(MLA, names(2), 10, 16)
    assert nope.size == 8 * rope.size == 2 * 10 * 16 * 512 * 2
    assert nope.at(0).layer_view("layer.1").shape == (10, 16, 1, 512)
    assert rope.at(0).layer_view("layer.1").shape == (10, 16, 1, 64)


def test_parts_may_differ_in_heads_and_item_size() -> None:
    parts = [CachePart("k", 4, 4, 128, 2), CachePart("v", 4, 4, 64, 2), CachePart("k_scale", 0, 1, 1, 4)]
    planes = [shape.at(0).plane for shape in cross_layer_shapes(parts, names(3), 7, 16, "BHLNC")]
    assert [plane.block_bytes * plane.blocks for plane in planes] == [
        3 * 7 * 16 * size for size in (4 * 128 * 2, 4 * 64 * 2, 4)
    ]
    assert [(plane.part, plane.head_start, plane.head_end) for plane in planes] == [
        ("k", 4, 8),
        ("v", 4, 8),
        ("k_scale", 0, 1),
    ]


def worker(buffers: list[CrossLayerBuffer]) -> WorkerGeometry:
    group = CacheGroup(buffers[0].shape.block_tokens, 0, tuple(buffer.plane for buffer in buffers))
    return WorkerGeometry(0, 1, 0, 1, "host:1", (group,), tuple(buffer.region for buffer in buffers))


def test_a_block_of_all_layers_is_one_descriptor_for_each_part() -> None:
    ours = worker([shape.at(5 * ALIGNMENT) for shape in cross_layer_shapes(MLA, names(61), 8, 16, "BLNHC")])
    theirs = worker([shape.at(1 << 40) for shape in cross_layer_shapes(MLA, names(61), 8, 16, "BLNHC")])
    copies = plans_of(ours, [theirs])[0].instantiate([BlockTable.of([5])], [BlockTable.of([2])], 0, 16)
    assert sorted(copies.sizes.tolist()) == [61 * 16 * 64 * 2, 61 * 16 * 512 * 2]


# Refusals: the message names the value and the rule.


def shapes(**changes: object) -> Callable[[], object]:
    """Asks for an acceptable cache with ``changes``."""
    of_part = {
        name: changes.pop(name) for name in [*changes] if name in ("heads", "head_start", "content", "item_size")
    }
    cache: dict[str, Any] = {"layers": names(2), "blocks": 2, "block_tokens": 16, "order": "BLHNC"} | changes
    part: dict[str, Any] = {"head_start": 0, "heads": 2, "content": 4, "item_size": 2} | of_part
    return lambda: cross_layer_shapes([CachePart("k", **part)], **cache)


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (shapes(blocks=0), "blocks is 0; it must be at least 1"),
        (shapes(block_tokens=0), "block_tokens is 0; it must be at least 1"),
        (shapes(heads=0), "heads of part 'k' is 0; it must be at least 1"),
        (shapes(content=-1), "content of part 'k' is -1; it must be at least 1"),
        (shapes(item_size=0), "item_size of part 'k' is 0; it must be at least 1"),
        (shapes(item_size=3), "item_size of part 'k' is 3 bytes; it must divide the alignment of 2097152 bytes"),
        (shapes(head_start=-1), "head_start of part 'k' is -1; it must not be negative"),
        (shapes(layers=[]), "no layers are given; a cross-layer cache needs at least one"),
        (shapes(layers=["a", "b", "a"]), "names of layers must differ: 'a' is given 2 times"),
        (shapes(order="BLHN"), "axis order 'BLHN' of a buffer must hold each letter of 'LBHNC' exactly once"),
        (shapes(order="BLHND"), "axis order 'BLHND' of a buffer must hold each letter of 'LBHNC' exactly once"),
        (shapes(order="BLHNN"), "axis order 'BLHNN' of a buffer must hold each letter of 'LBHNC' exactly once"),
        (lambda: cross_layer_shapes([], names(1), 1, 1), "no parts are given; a cross-layer cache needs at least one"),
        (lambda: cross_layer_shapes([MLA[0]] * 2, names(1), 1, 1), "'mla_latent' is given 2 times"),
        (lambda: shape_of("BLHNC", 2, 2, 2).at(4097), "base address 0x1001 must be a multiple of the item size 2"),
        (lambda: shape_of("BLHNC", 2, 2, 2).at(-2), "base address -0x2 must be .* not negative"),
        (
            lambda: shape_of("BLHNC", 2, 2, 2).at(0).layer_view("layer.2"),
            "part 'k' holds no layer 'layer.2'; it holds 2 layers, from 'layer.0' to 'layer.1'",
        ),
        (
            lambda: shape_of("BLHNC", 2, 2, 2).at(0).layer_view("layer.0", "LBNC"),
            "axis order 'LBNC' of a layer's view must hold each letter of 'BNHC' exactly once",
        ),
    ],
)
def test_what_cannot_be_laid_out_is_refused(refused: Callable[[], object], message: str) -> None:
    with pytest.raises(CrossLayerError, match=message):
        refused()
