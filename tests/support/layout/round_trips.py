"""Round trips through host memory: the only place where the oracle's bytes meet the layout of host slots.

The bytes of every element are numbered by the formula of ``Plane``, one logical index at a time; nothing of runs is
known here. A round trip stores blocks, overwrites them, loads their slots into other blocks, and compares all of the
device memory and all of the host pool.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from layout.copies import Int64Array
from layout.geometry import CacheGroup, Plane, Region, WorkerGeometry
from layout.host_blocks import BlockRuns, HostLayout, host_layout
from tests.support.memory import Bytes
from transfer.copies.reshape.reshape import run_copies

RoundTrip = tuple[int, int, int, int]  # cache group, block stored, slot, block loaded

SLOTS = 5


@dataclass(frozen=True)
class Device:
    """Memory that a geometry describes, byte 0 at the address ``base`` there."""

    geometry: WorkerGeometry
    base: int
    memory: Bytes

    def elements(self, group: int, block: int) -> list[Int64Array]:
        """Numbers of the bytes of a block, for each plane: [layer, kernel block, head, token, content, byte]."""
        of = self.geometry.groups[group]
        return [element_bytes(plane, block, of.block_tokens) - self.base for plane in of.planes]

    def block_bytes(self, group: int, block: int) -> Int64Array:
        """Numbers of the bytes of a block, each once, ascending."""
        found = [positions.ravel() for positions in self.elements(group, block)]
        return np.unique(np.concatenate([np.empty(0, np.int64), *found]))

    def here(self, addresses: Int64Array) -> Int64Array:
        """Addresses of the geometry as addresses of this process."""
        return addresses - self.base + self.memory.ctypes.data


def element_bytes(plane: Plane, block: int, group_tokens: int) -> Int64Array:
    kernel_blocks = group_tokens // plane.block_tokens
    positions = np.array(plane.address, np.int64)
    for count, stride, first in (
        (len(plane.layers), plane.layer_stride, 0),
        (kernel_blocks, plane.block_stride, block * kernel_blocks),
        (plane.heads, plane.head_stride, 0),
        (plane.block_tokens, plane.token_stride, 0),
        (plane.content, plane.content_stride, 0),
        (plane.item_size, 1, 0),
    ):
        positions = positions[..., None] + (first + np.arange(count)) * stride
    return positions


def held_blocks(group: CacheGroup) -> int:
    return min((plane.blocks * plane.block_tokens // group.block_tokens for plane in group.planes), default=0)


def maximal_runs(positions: Int64Array) -> int:
    """Runs of consecutive numbers: fewer copies cannot move these bytes and no others."""
    return int(np.count_nonzero(np.diff(positions) != 1)) + bool(len(positions))


@dataclass(frozen=True)
class Pool:
    """Host memory of ``SLOTS`` slots between two guards."""

    slot_bytes: int
    memory: Bytes

    @property
    def region(self) -> Region:
        return Region(self.memory.ctypes.data + 128, SLOTS * self.slot_bytes)

    def slot(self, number: int) -> slice:
        return slice(128 + number * self.slot_bytes, 128 + (number + 1) * self.slot_bytes)


def pool_for(layout: HostLayout, noise: np.random.Generator) -> Pool:
    memory = np.empty(SLOTS * layout.slot_bytes + 256, np.uint8)
    memory[:] = noise.integers(0, 256, len(memory), np.uint8)
    return Pool(layout.slot_bytes, memory)


def times_touched(first: Int64Array, sizes: Int64Array, length: int) -> Int64Array:
    """How many runs each of ``length`` bytes is in."""
    assert (sizes > 0).all(), "an empty descriptor"
    touched = np.zeros(length + 1, np.int64)
    np.add.at(touched, first, 1)
    np.add.at(touched, first + sizes, -1)
    return np.cumsum(touched[:-1])


def indicator(positions: Sequence[Int64Array], length: int) -> Int64Array:
    marked = np.zeros(length, np.int64)
    for some in positions:
        marked[some] += 1
    return marked


def check_round_trip(device: Device, seed: int, pairs: Sequence[RoundTrip]) -> HostLayout:
    """Store and load ``pairs``, no two of which share bytes."""
    noise = np.random.default_rng(seed)
    layout = host_layout(device.geometry)
    pool = pool_for(layout, noise)
    device.memory[:] = noise.integers(0, 256, len(device.memory), np.uint8)
    original, pool_before = device.memory.copy(), pool.memory.copy()
    groups, stored, slots, loaded = np.array(pairs, np.int64).reshape(-1, 4).T
    length = len(device.memory)

    copies = layout.stores(pool.region, groups, stored, slots)
    sources = [device.block_bytes(group, block) for group, block, _, _ in pairs]
    assert (times_touched(copies.sources - device.base, copies.sizes, length) == indicator(sources, length)).all()
    run_copies(replace(copies, sources=device.here(copies.sources)))
    assert (device.memory == original).all(), "a store writes to the device"
    check_slots(pool, pool_before, device, original, pairs)

    device.memory[np.concatenate([np.empty(0, np.int64), *sources])] ^= 0xFF
    expected = device.memory.copy()
    copies = layout.loads(pool.region, groups, loaded, slots)
    targets = [device.block_bytes(group, block) for group, _, _, block in pairs]
    assert (times_touched(copies.destinations - device.base, copies.sizes, length) == indicator(targets, length)).all()
    pool_before = pool.memory.copy()
    run_copies(replace(copies, destinations=device.here(copies.destinations)))
    assert (pool.memory == pool_before).all(), "a load writes to host memory"
    for group, block, _, to in pairs:
        for here, there in zip(device.elements(group, block), device.elements(group, to), strict=True):
            expected[there] = original[here]
    assert (device.memory == expected).all(), "an element is not what was stored, or a byte of nobody has changed"
    return layout


def check_slots(pool: Pool, before: Bytes, device: Device, original: Bytes, pairs: Sequence[RoundTrip]) -> None:
    """Each slot begins with the bytes of its block, in whichever order of runs; all else is as it was."""
    expected = before.copy()
    for group, block, slot, _ in pairs:
        held = device.block_bytes(group, block)
        dense = pool.memory[pool.slot(slot)][: len(held)]
        assert (np.bincount(dense, minlength=256) == np.bincount(original[held], minlength=256)).all()
        expected[pool.slot(slot)][: len(held)] = dense
    assert (pool.memory == expected).all(), "a store writes outside its slots"


def check_runs(device: Device, layout: HostLayout) -> None:
    """Runs are as few as the bytes allow, and dense in a slot that holds a block of any group."""
    assert layout.slot_bytes % 64 == 0
    for number, runs in enumerate(layout.groups):
        held = device.block_bytes(number, 0)
        assert runs.block_bytes == len(held) <= layout.slot_bytes
        assert len(runs) == maximal_runs(held)
        assert runs.offsets.tolist() == (np.cumsum(runs.sizes) - runs.sizes).tolist()
        assert runs.blocks == held_blocks(device.geometry.groups[number])
        assert {array.dtype for array in arrays(runs)} == {np.dtype(np.int64)}


def arrays(runs: BlockRuns) -> list[Int64Array]:
    return [runs.starts, runs.strides, runs.sizes, runs.offsets]
