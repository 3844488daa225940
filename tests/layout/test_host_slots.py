"""Host slots as planes: the byte of every element is where a store puts it."""

from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from layout.copies import Copies
from layout.geometry import Plane, Region, WorkerGeometry
from layout.host_blocks import host_layout
from layout.host_slots import SlotPlaneError, slot_geometry
from tests.support.layout.oracle import LAYOUTS, WHOLE_HEADS, Engine, Model, build
from tests.support.layout.round_trips import element_bytes, held_blocks
from tests.support.layout.strategies import INDEXER, SCALE

BASE, POOL = 1 << 40, 1 << 45
SLOTS = 5
WINDOWS = Model(2, (3, 2), 2, ((0, 2), (1, 3)), (0, 8), (SCALE, INDEXER))


def pool_of(geometry: WorkerGeometry) -> Region:
    return Region(POOL, SLOTS * host_layout(geometry).slot_bytes + 7)


def stored(copies: Copies, addresses: np.ndarray) -> np.ndarray:
    """Where a store puts the bytes at ``addresses``."""
    order = np.argsort(copies.sources)
    sources, destinations, sizes = copies.sources[order], copies.destinations[order], copies.sizes[order]
    at = np.searchsorted(sources, addresses, side="right") - 1
    assert (addresses < sources[at] + sizes[at]).all(), "a byte of the block is not stored"
    moved: np.ndarray = destinations[at] + (addresses - sources[at])
    return moved


def bytes_by_layer(planes: tuple[Plane, ...], block: int, group_tokens: int) -> dict[tuple[str, ...], np.ndarray]:
    """The bytes of each part and layer of a block: [head, token, content, byte]."""
    found: dict[tuple[str, ...], np.ndarray] = {}
    for plane in planes:
        elements = np.moveaxis(element_bytes(plane, block, group_tokens), 1, 2)
        for layer, of_layer in zip(plane.layers, elements, strict=True):
            shape = (plane.heads, group_tokens, plane.content, plane.item_size)
            found[plane.part, layer, str(plane.head_start), plane.packing] = of_layer.reshape(shape)
    return found


def check_slots(geometry: WorkerGeometry, block: int, slot: int) -> None:
    layout, pool = host_layout(geometry), pool_of(geometry)
    slots = slot_geometry(geometry, layout, pool)
    assert slots.regions == (pool,)
    assert [group.window for group in slots.groups] == [group.window for group in geometry.groups]
    for number, (ours, theirs) in enumerate(zip(geometry.groups, slots.groups, strict=True)):
        assert ours.block_tokens == theirs.block_tokens
        assert {held_blocks(theirs)} <= {0 if not ours.planes else SLOTS}
        if not ours.planes or block >= held_blocks(ours):
            continue
        copies = layout.stores(pool, number, [block], [slot])
        device = bytes_by_layer(ours.planes, block, ours.block_tokens)
        host = bytes_by_layer(theirs.planes, slot, theirs.block_tokens)
        assert device.keys() == host.keys()
        for key, addresses in device.items():
            assert (stored(copies, addresses) == host[key]).all()


@st.composite
def geometries(draw: st.DrawFn) -> WorkerGeometry:
    form = draw(st.sampled_from(["fused", "views", "apart", "packed", "transposed"]))
    groups = draw(st.sampled_from([((0,),), ((0, 1, 2),), ((0, 2), (1, 3)), ((3,), (0, 1, 2))]))
    model = Model(
        kv_heads=draw(st.sampled_from([1, 2, 4])),
        contents=draw(st.sampled_from([(1, 1), (2, 2), (3, 2), (8, 1)])),
        item_size=draw(st.sampled_from([1, 2, 4])),
        groups=groups,
        windows=(0,) * len(groups),
        extras=draw(st.sampled_from([(), (SCALE,), (SCALE, INDEXER)])),
    )
    engine = Engine(
        layout=draw(st.sampled_from(WHOLE_HEADS if form in ("packed", "transposed") else LAYOUTS)),
        form=form,
        tp=draw(st.sampled_from([1, 2, 4])),
        pp=draw(st.sampled_from([size for size in (1, 2) if size <= model.layers])),
        block_tokens=draw(st.sampled_from([1, 4, 8, 64])),
        blocks=draw(st.integers(1, 6)),
        offset_items=draw(st.sampled_from([0, 3, 64])),
        layers_apart=draw(st.booleans()),
        groups_reversed=draw(st.booleans()),
        group_factors=draw(st.sampled_from([(), (1, 2), (2, 1)])) if len(groups) == 2 else (),
    )
    return draw(st.sampled_from(build(model, engine, 3, BASE))).geometry


@settings(max_examples=100, deadline=None, derandomize=True, database=None, suppress_health_check=[*HealthCheck])
@given(geometries(), st.integers(0, 5), st.integers(0, SLOTS - 1))
def test_every_byte_is_where_a_store_puts_it(geometry: WorkerGeometry, block: int, slot: int) -> None:
    check_slots(geometry, block, slot)


@pytest.mark.parametrize(("layout", "form"), [*product(LAYOUTS, ["fused", "views", "apart"])])
def test_blocks_of_several_kernel_blocks_are_described_or_refused(layout: str, form: str) -> None:
    engine = Engine(layout, form, block_tokens=12, kernel_blocks=3, blocks=4)
    (rank,) = build(Model(2, (2, 2), 2, ((0, 1),), (0,)), engine, 3, BASE)
    refused = refusal(rank.geometry)
    assert not refused or "3 kernel blocks of 4 tokens in a block of 12" in refused
    assert not refused if layout in ("LBNHC", "LHBNC") else refused or layout == "BLNHC"
    if not refused:
        check_slots(rank.geometry, 2, 3)


def refusal(geometry: WorkerGeometry) -> str:
    try:
        slot_geometry(geometry, host_layout(geometry), pool_of(geometry))
    except SlotPlaneError as error:
        return str(error)
    return ""


def test_one_plane_holds_all_layers_that_lie_equally_far_apart() -> None:
    (rank,) = build(WINDOWS, Engine("LBHNC", "fused", blocks=4), 3, BASE)
    slots = slot_geometry(rank.geometry, host_layout(rank.geometry), pool_of(rank.geometry))
    for ours, theirs in zip(rank.geometry.groups, slots.groups, strict=True):
        assert len(theirs.planes) == len(ours.planes)
