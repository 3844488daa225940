"""Blocks in host memory: every byte of a block, once, in a slot of its own, and back into any other block.

``check_round_trip`` compares all of the device memory and all of the host pool, ``check_runs`` the runs with the fewest
that the bytes allow.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from layout.copies import Copies
from layout.geometry import CacheGroup, Plane, Region, WorkerGeometry
from layout.host_blocks import host_layout
from tests.support.layout.oracle import LAYOUTS, WHOLE_HEADS, Engine, Model, build
from tests.support.layout.round_trips import (
    SLOTS,
    Device,
    RoundTrip,
    check_round_trip,
    check_runs,
    element_bytes,
    held_blocks,
)
from tests.support.layout.strategies import INDEXER, SCALE

GQA = Model(4, (2, 2), 2, ((0, 1, 2),), (0,))
BASE = 1 << 40  # address of byte 0 in the geometry of a device


def devices_of(model: Model, engine: Engine) -> list[Device]:
    return [Device(rank.geometry, rank.base, rank.memory) for rank in build(model, engine, 3, BASE)]


# Every form of cache.


@st.composite
def models_and_engines(draw: st.DrawFn) -> tuple[Model, Engine]:
    form = draw(st.sampled_from(["fused", "views", "apart", "packed", "transposed"]))
    groups = draw(st.sampled_from([((0,),), ((0, 1),), ((0, 1, 2),), ((0, 2), (1, 3)), ((3,), (0, 1, 2))]))
    model = Model(
        kv_heads=draw(st.sampled_from([1, 2, 4])),
        contents=draw(st.sampled_from([(1, 1), (2, 2), (3, 2), (8, 1)])),
        item_size=draw(st.sampled_from([1, 2, 4])),
        groups=groups,
        windows=(0,) * len(groups),
        extras=draw(st.sampled_from([(), (), (SCALE,), (SCALE, INDEXER)])),
    )
    kernel_blocks = draw(st.sampled_from([1, 1, 2, 3]))
    engine = Engine(
        layout=draw(st.sampled_from(WHOLE_HEADS if form in ("packed", "transposed") else LAYOUTS)),
        form=form,
        tp=draw(st.sampled_from([1, 2, 4])),
        pp=draw(st.sampled_from([size for size in (1, 2, 4) if size <= model.layers])),
        block_tokens=draw(st.sampled_from([1, 4, 8])) * kernel_blocks,
        kernel_blocks=kernel_blocks,
        blocks=draw(st.integers(1, 6)),
        offset_items=draw(st.sampled_from([0, 0, 3, 64])),
        layers_apart=draw(st.booleans()),
        groups_reversed=draw(st.booleans()),
        group_factors=draw(st.sampled_from([(), (1, 2), (2, 1)])) if len(groups) == 2 else (),
    )
    return model, engine


def draw_pairs(draw: st.DrawFn, geometry: WorkerGeometry) -> list[RoundTrip]:
    """Up to ``SLOTS`` blocks of all groups; none is stored twice, none is loaded into twice."""
    ids = [(number, block) for number, group in enumerate(geometry.groups) for block in range(held_blocks(group))]
    stored = draw(st.permutations(ids))[:SLOTS]
    slots = draw(st.permutations(range(SLOTS)))
    targets = draw(st.permutations(ids))
    pairs = []
    for (group, block), slot in zip(stored, slots, strict=False):
        to = next(target for target in targets if target[0] == group)
        targets.remove(to)
        pairs.append((group, block, slot, to[1]))
    return pairs


@st.composite
def trips(draw: st.DrawFn) -> tuple[Device, list[RoundTrip]]:
    model, engine = draw(models_and_engines())
    device = draw(st.sampled_from(devices_of(model, engine)))
    return device, draw_pairs(draw, device.geometry)


@pytest.mark.thorough
@settings(max_examples=100, deadline=None, derandomize=True, database=None, suppress_health_check=[*HealthCheck])
@given(trips(), st.integers(0, 9))
def test_a_block_comes_back_from_its_slot_into_any_other_block(trip: tuple[Device, list[RoundTrip]], seed: int) -> None:
    device, pairs = trip
    check_runs(device, check_round_trip(device, seed, pairs))


@pytest.mark.parametrize(("layout", "kernel_blocks"), [*product(LAYOUTS, [1, 3])])
def test_the_formula_of_planes_agrees_with_the_elements_of_the_engine(layout: str, kernel_blocks: int) -> None:
    """The oracle of this file against the index from which the geometry was described."""
    engine = Engine(layout, "views", block_tokens=12, kernel_blocks=kernel_blocks, blocks=3)
    (rank,) = build(GQA, engine, 3, BASE)
    device = Device(rank.geometry, rank.base, rank.memory)
    for block in range(3):
        kernels = slice(block * kernel_blocks, (block + 1) * kernel_blocks)
        for held, elements in zip(rank.planes, device.elements(0, block), strict=True):
            assert (held.index[:, kernels] == elements[..., 0]).all()


LAYERS, HEADS = 3, 4
RUNS = {"BHLNC": 1, "BLHNC": 1, "BLNHC": 1, "LBHNC": LAYERS, "LBNHC": LAYERS, "LHBNC": LAYERS * HEADS}


@pytest.mark.parametrize(("layout", "form"), [*product(LAYOUTS, ["fused", "views", "apart"])])
@pytest.mark.parametrize("kernel_blocks", [1, 4])
def test_a_block_is_one_run_where_all_layers_of_it_lie_together(layout: str, form: str, kernel_blocks: int) -> None:
    """K and V in one allocation are one run however they are described; apart, they are one each."""
    engine = Engine(layout, form, block_tokens=16, kernel_blocks=kernel_blocks, blocks=5)
    (device,) = devices_of(GQA, engine)
    runs = host_layout(device.geometry).groups[0]
    assert len(runs) == RUNS[layout] * (2 if form == "apart" else 1)


@pytest.mark.parametrize("form", ["packed", "transposed"])
@pytest.mark.parametrize("layout", WHOLE_HEADS)
def test_heads_that_a_kernel_orders_its_own_way_are_moved_whole(layout: str, form: str) -> None:
    (device,) = devices_of(GQA, Engine(layout, form, block_tokens=16, kernel_blocks=2, blocks=5))
    assert len(host_layout(device.geometry).groups[0]) == RUNS[layout]


def test_the_parts_of_mla_are_one_run_each_per_layer() -> None:
    model = Model(1, (512, 64), 2, ((0, 1),), (0,))
    (device,) = devices_of(model, Engine("LBHNC", "apart", block_tokens=16, blocks=3))
    runs = host_layout(device.geometry).groups[0]
    assert sorted(runs.sizes.tolist()) == [16 * 64 * 2] * 2 + [16 * 512 * 2] * 2


# Geometries made by hand.


def plane(address: int = BASE, **changes: object) -> Plane:
    """Four blocks of one layer of [2 heads, 4 tokens, 8 items] of 2 bytes, dense: 128 bytes a block."""
    dense = Plane("kv", ("a",), 0, 2, 4, 8, 2, 4, address, 0, 128, 64, 16, 2)
    return replace(dense, **changes)  # type: ignore[arg-type]


def worker(*groups: Sequence[Plane], block_tokens: int = 4) -> WorkerGeometry:
    return WorkerGeometry(0, 1, 0, 1, "", tuple(CacheGroup(block_tokens, 0, tuple(group)) for group in groups), ())


def device_of(geometry: WorkerGeometry) -> Device:
    ends = []
    for group in geometry.groups:
        for of in group.planes:
            last = element_bytes(of, held_blocks(CacheGroup(group.block_tokens, 0, (of,))) - 1, group.block_tokens)
            ends.append(int(last.max()) + 1)
    return Device(geometry, BASE - 64, np.zeros(max(ends) - BASE + 128, np.uint8))


def test_groups_that_share_their_storage_use_slots_of_one_size() -> None:
    """Two windows over the memory of full attention, as vLLM's hybrid allocator deals it out."""
    full = [plane(part="kv", layers=("a", "b"), layer_stride=4 * 128)]
    window = [plane(layers=("c",)), plane(BASE + 4 * 128, layers=("d",))]
    half = [plane(layers=("e",))]
    device = device_of(worker(full, window, half))
    layout = check_round_trip(device, 1, [(0, 0, 3, 1), (1, 2, 0, 0), (2, 1, 4, 3), (0, 3, 1, 2)])
    check_runs(device, layout)
    assert layout.slot_bytes == 256
    assert [runs.block_bytes for runs in layout.groups] == [256, 256, 128]


@pytest.mark.parametrize(
    "planes",
    [
        [plane(layers=("a", "b"), layer_stride=0)],
        [plane(), plane(layers=("b",))],
        [
            plane(),
            plane(part="latent", heads=1, block_tokens=2, content=16, block_stride=64, token_stride=32, blocks=8),
        ],
    ],
    ids=["layers of a plane", "planes", "planes of other heads and kernel blocks"],
)
def test_views_of_the_same_bytes_are_moved_once(planes: list[Plane]) -> None:
    device = device_of(worker(planes))
    layout = check_round_trip(device, 2, [(0, 0, 0, 2), (0, 1, 4, 3)])
    check_runs(device, layout)
    assert layout.groups[0].block_bytes == 128


def test_heads_that_are_views_of_one_head_are_moved_once() -> None:
    device = device_of(worker([plane(head_stride=0)]))
    layout = check_round_trip(device, 2, [(0, 0, 0, 2)])
    assert layout.groups[0].block_bytes == 64


def test_gaps_that_belong_to_nobody_are_not_moved() -> None:
    """Blocks padded to 160 bytes, tokens to 20: the round trip compares every byte between them."""
    device = device_of(worker([plane(block_stride=160, head_stride=80, token_stride=20)]))
    layout = check_round_trip(device, 3, [(0, 0, 0, 2), (0, 1, 4, 3)])
    check_runs(device, layout)
    assert len(layout.groups[0]) == 8


def test_planes_whose_bytes_alternate_become_one_run() -> None:
    """K and V item by item."""
    apart = {"content": 4, "content_stride": 4}
    device = device_of(worker([plane(part="k", **apart), plane(BASE + 2, part="v", **apart)]))
    layout = check_round_trip(device, 4, [(0, 0, 0, 2), (0, 1, 4, 3)])
    check_runs(device, layout)
    assert len(layout.groups[0]) == 1


def test_axes_may_reach_into_each_others_gaps() -> None:
    """Tokens 4 bytes apart, heads 6: elements at 0, 4, 8 and at 6, 10, 14."""
    woven = plane(content=1, block_tokens=3, token_stride=4, head_stride=6)
    device = device_of(worker([woven], block_tokens=3))
    check_runs(device, check_round_trip(device, 4, [(0, 0, 0, 2), (0, 1, 4, 3)]))


def test_kernel_blocks_of_unequal_sizes_in_one_group() -> None:
    """K in kernel blocks of 2 tokens, V in one of 4, each in an allocation of its own."""
    small = plane(part="k", block_tokens=2, blocks=8, block_stride=64, head_stride=32)
    device = device_of(worker([small, plane(BASE + 1024, part="v")]))
    check_runs(device, check_round_trip(device, 5, [(0, 0, 0, 2), (0, 3, 1, 0)]))


def test_kernel_blocks_left_over_are_of_no_block() -> None:
    device = device_of(worker([plane(block_tokens=2, head_stride=32, block_stride=64, blocks=7)]))
    assert host_layout(device.geometry).groups[0].blocks == 3
    check_round_trip(device, 5, [(0, 2, 0, 0)])


def test_a_block_that_only_some_planes_hold_does_not_exist() -> None:
    layout = host_layout(worker([plane(part="k"), plane(BASE + 1024, part="v", blocks=3)]))
    with pytest.raises(IndexError, match="block 3 does not exist: there are 3"):
        layout.loads(POOL, 0, [3], [0])


def test_strides_of_axes_with_one_index_do_not_matter() -> None:
    odd = plane(blocks=1, heads=1, head_stride=3, block_stride=5, layer_stride=1)
    device = device_of(worker([odd, plane(BASE + 64, part="v", blocks=1, heads=1, block_stride=77)]))
    layout = check_round_trip(device, 6, [(0, 0, 2, 0)])
    check_runs(device, layout)
    assert len(layout.groups[0]) == 1


def test_blocks_that_alternate_with_those_of_a_later_plane_are_told_apart() -> None:
    """Blocks of K fill the even pages from the first on, those of V the odd ones from the fourth on."""
    device = device_of(worker([plane(block_stride=256), plane(BASE + 3 * 128, part="v", block_stride=256)]))
    layout = check_round_trip(device, 7, [(0, 0, 0, 1), (0, 2, 1, 3)])
    check_runs(device, layout)


def test_planes_of_unequal_strides_may_lie_in_each_others_gaps() -> None:
    sparse = plane(BASE + 64, part="v", heads=1, block_stride=384, blocks=3)
    device = device_of(worker([plane(heads=1, block_stride=192, blocks=3), sparse]))
    layout = check_round_trip(device, 8, [(0, 0, 0, 1), (0, 2, 1, 0)])
    assert sorted(layout.groups[0].strides.tolist()) == [192, 384]


def test_runs_of_whole_lines_come_first_so_that_they_are_copied_fastest() -> None:
    scale = plane(part="scale", heads=1, content=1, item_size=1, content_stride=1, token_stride=1, block_stride=4)
    device = device_of(worker([scale, plane(BASE + 64)]))
    runs = host_layout(device.geometry).groups[0]
    assert (runs.sizes.tolist(), runs.offsets.tolist()) == ([128, 4], [0, 128])


def test_a_worker_may_hold_no_layer_of_a_group() -> None:
    """A pipeline stage: blocks of the group are stored elsewhere, and nothing is to be done here."""
    device = device_of(worker([], [plane()]))
    layout = check_round_trip(device, 9, [(1, 2, 0, 3)])
    empty = layout.stores(Region(1 << 20, 1 << 20), [0, 0], [7, 123], [1, 2])
    assert len(empty) == 0


def test_a_worker_that_holds_nothing_has_slots_too() -> None:
    layout = host_layout(worker([]))
    assert layout.slots_in(640) == 640 // layout.slot_bytes
    assert len(layout.loads(Region(64, 640), 0, [3], [0])) == 0


# Descriptors.

POOL = Region(1 << 30, 1000)  # seven slots of 128 bytes, and 104 bytes


def described(copies: Copies) -> list[tuple[int, int, int]]:
    return [*zip(copies.destinations.tolist(), copies.sources.tolist(), copies.sizes.tolist(), strict=True)]


def test_neighbouring_blocks_in_neighbouring_slots_are_one_descriptor() -> None:
    layout = host_layout(worker([plane(blocks=9)]))
    copies = layout.stores(POOL, 0, [5, 6, 7, 2, 1, 3], [1, 2, 3, 4, 5, 0])
    host = POOL.address
    assert described(copies) == [
        (host + 128, BASE + 5 * 128, 3 * 128),
        (host + 4 * 128, BASE + 2 * 128, 128),
        (host + 5 * 128, BASE + 1 * 128, 128),
        (host, BASE + 3 * 128, 128),
    ]


def test_blocks_that_are_moved_together_come_back_apart_or_together() -> None:
    device = device_of(worker([plane(blocks=9)]))
    check_round_trip(device, 10, [(0, 5, 1, 3), (0, 6, 2, 4), (0, 7, 3, 5), (0, 0, 4, 8), (0, 1, 0, 0)])


def test_blocks_that_do_not_fill_their_slots_stay_apart() -> None:
    """Neighbours on the device, but not in host memory."""
    layout = host_layout(worker([plane(heads=1, block_tokens=2, block_stride=32, head_stride=0)], block_tokens=2))
    assert described(layout.loads(POOL, 0, [1, 2], [1, 2])) == [
        (BASE + 32, POOL.address + 64, 32),
        (BASE + 64, POOL.address + 128, 32),
    ]


def test_blocks_with_gaps_between_them_stay_apart() -> None:
    layout = host_layout(worker([plane(block_stride=160)]))
    assert described(layout.loads(POOL, 0, [1, 2], [1, 2])) == [
        (BASE + 160, POOL.address + 128, 128),
        (BASE + 320, POOL.address + 256, 128),
    ]


def test_neighbouring_blocks_of_many_runs_stay_apart() -> None:
    layout = host_layout(worker([plane(layers=("a", "b"), layer_stride=prod([4, 128]))]))
    assert len(layout.loads(POOL, 0, [1, 2], [1, 2])) == 4


def test_one_group_may_be_given_for_all_pairs() -> None:
    layout = host_layout(worker([plane()], [plane(heads=1)]))
    one, each = (layout.stores(POOL, group, np.array([0, 2]), np.array([4, 1])) for group in (1, np.array([1, 1])))
    assert described(one) == described(each)


def test_descriptors_are_of_64_bits() -> None:
    copies = host_layout(worker([plane()])).loads(POOL, 0, np.array([0, 2], np.int32), np.array([4, 1], np.uint8))
    assert {a.dtype for a in (copies.destinations, copies.sources, copies.sizes)} == {np.dtype(np.int64)}


def test_a_batch_of_nothing_is_empty() -> None:
    layout = host_layout(worker([plane()], [plane()]))
    assert len(layout.stores(POOL, 1, [], [])) == len(layout.loads(POOL, [], [], [])) == 0


@pytest.mark.parametrize(
    ("groups", "blocks", "slots", "message"),
    [
        (0, [0, 4], [0, 1], "cache group 0: block 4 does not exist: there are 4, counted from 0"),
        ([0, 1], [3, -1], [0, 1], "cache group 1: block -1 does not exist: there are 4"),
        (0, [0, 1], [0, 7], "host slot 7 does not exist: there are 7, counted from 0"),
        (0, [0], [-3], "host slot -3 does not exist"),
        (2, [0], [0], "cache group 2 does not exist: there are 2"),
        ([0, -1], [0, 1], [0, 1], "cache group -1 does not exist"),
    ],
)
def test_what_does_not_exist_is_refused_by_number(
    groups: int | list[int], blocks: list[int], slots: list[int], message: str
) -> None:
    layout = host_layout(worker([plane()], [plane()]))
    for pairs in (layout.stores, layout.loads):
        with pytest.raises(IndexError, match=message):
            pairs(POOL, groups, blocks, slots)


@pytest.mark.parametrize(("groups", "slots"), [(0, [1]), ([0], [1, 2]), ([0, 0, 0], [1, 2])])
def test_lists_of_unequal_length_are_refused(groups: int | list[int], slots: list[int]) -> None:
    with pytest.raises(ValueError, match=r"2 blocks, . slots and . cache groups are given; their numbers must be"):
        host_layout(worker([plane()])).stores(POOL, groups, [1, 2], slots)


# Geometries that are refused.


def test_views_that_share_some_of_their_bytes_are_refused_by_name() -> None:
    planes = [plane(part="k", layers=("a", "b"), layer_stride=1024), plane(BASE + 1024 + 64, part="v", layers=("c",))]
    message = (
        rf"cache group 1: part 'k' of layer 'b' and part 'v' of layer 'c' share 64 bytes from {BASE + 1024 + 64:#x} on"
    )
    with pytest.raises(ValueError, match=message):
        host_layout(worker([plane()], planes))


def test_a_view_inside_another_is_refused() -> None:
    with pytest.raises(ValueError, match="part 'kv' of layer 'a' and part 'k' of layer 'a' share 64 bytes"):
        host_layout(worker([plane(), plane(BASE + 32, part="k", heads=1)]))


def test_a_plane_whose_elements_share_bytes_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"elements of part 'kv' of layer 'a' share some of their bytes: .* 56, 16 and 2"
    ):
        host_layout(worker([plane(head_stride=56)]))


def test_blocks_that_share_bytes_are_refused_by_id_and_name() -> None:
    with pytest.raises(
        ValueError, match="block 0 of part 'kv' of layer 'a' and block 1 of part 'kv' of layer 'a' share"
    ):
        host_layout(worker([plane(block_stride=120)]))


def test_blocks_at_one_place_are_refused() -> None:
    with pytest.raises(ValueError, match=r"block 0 of .* and block 1 of .* share the byte at 0x10000000000;"):
        host_layout(worker([plane(block_stride=0)]))


def test_a_block_that_shares_bytes_with_another_of_another_layer_is_refused() -> None:
    """Layers one block apart: block 1 of the first is block 0 of the second."""
    with pytest.raises(ValueError, match="share the byte") as caught:
        host_layout(worker([plane(layers=("a", "b", "c"), layer_stride=128)]))
    assert "block 0 of part 'kv' of layer 'b'" in str(caught.value)
    assert "block 1 of part 'kv' of layer 'a'" in str(caught.value)


def test_blocks_that_meet_late_are_refused() -> None:
    """Strides of 128 and 192 from places 2,048 bytes apart meet many blocks on."""
    early, late = plane(part="k", blocks=100), plane(BASE + 2048, part="v", block_stride=192, blocks=100)
    message = "block 0 of part 'v' of layer 'a' and block 16 of part 'k' of layer 'a' share the byte"
    with pytest.raises(ValueError, match=message):
        host_layout(worker([early, late]))


def test_kernel_blocks_that_do_not_divide_a_block_are_refused() -> None:
    message = r"cache group 0: kernel blocks of 4 tokens \(part 'kv'\) do not divide blocks of 6 tokens"
    with pytest.raises(ValueError, match=message):
        host_layout(worker([plane()], block_tokens=6))


@given(
    starts=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    strides=st.lists(st.integers(0, 12), min_size=4, max_size=4),
    sizes=st.lists(st.integers(1, 6), min_size=4, max_size=4),
    blocks=st.integers(1, 6),
)
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
def test_a_geometry_is_refused_if_and_only_if_a_byte_has_two_owners(
    starts: list[int], strides: list[int], sizes: list[int], blocks: int
) -> None:
    """Up to four planes of one run each, at random: compared with a look at every byte of every block."""
    planes = [
        Plane(f"p{number}", ("a",), 0, 1, 1, size, 1, blocks, BASE + start, 0, stride, 0, size, 1)
        for number, (start, stride, size) in enumerate(zip(starts, strides, sizes, strict=False))
    ]
    views = {(of.address, of.block_stride if blocks > 1 else 0, of.content) for of in planes}
    owners = np.zeros(200, np.int64)
    for address, stride, size in views:
        for block in range(blocks):
            first = address - BASE + block * stride
            owners[first : first + size] += 1
    geometry = worker(planes, block_tokens=1)
    if owners.max() > 1:
        with pytest.raises(ValueError, match="share"):
            host_layout(geometry)
    else:
        assert host_layout(geometry).groups[0].block_bytes == sum(size for _, _, size in views)
