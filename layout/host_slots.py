"""Host slots as a worker's cache: what reads from them, or into them, plans as for any other geometry.

``HostLayout`` says which bytes of a block lie where in its slot. Here the same bytes are planes with strides, whose
block ids are slot numbers. So plans, staging and checksums take host memory as they take a
device's.
"""

from dataclasses import replace

import numpy as np

from layout.copies import Int64Array
from layout.geometry import CacheGroup, Plane, Region, WorkerGeometry, over_layers
from layout.host_blocks import BlockRuns, HostLayout


class SlotPlaneError(ValueError):
    """A plane's bytes lie in a slot in a way that no strides describe; the message names the plane and the rule."""


def slot_geometry(geometry: WorkerGeometry, layout: HostLayout, pool: Region) -> WorkerGeometry:
    """Return a worker's host slots as the cache of a worker that holds the same layers and heads.

    Every group has the block size that it has on the device, in blocks that are not divided further. A group's block id
    is a slot number; a slot holds a block of one group at a time.

    Args:
        geometry: of the worker's device cache.
        layout: ``host_layout`` of ``geometry``.
        pool: the host memory, with slot 0 at its start. It is the only region of the result.

    Raises:
        SlotPlaneError: blocks consist of several kernel blocks in which tokens do not come first.
    """
    slots = layout.slots_in(pool.size)
    groups = tuple(
        replace(group, planes=_slot_planes(group, runs, pool.address, slots, layout.slot_bytes))
        for group, runs in zip(geometry.groups, layout.groups, strict=True)
    )
    return replace(geometry, groups=groups, regions=(pool,))


def host_block_geometry(geometry: WorkerGeometry, layout: HostLayout, pool: Region) -> WorkerGeometry:
    """Return host memory as a cache whose block ids are those of a pool of host blocks: slot s is block s + 1.

    Block 0, which stands for a hole and is never read or written, would lie before the memory.

    Raises:
        SlotPlaneError: see ``slot_geometry``.
    """
    shifted = Region(pool.address - layout.slot_bytes, pool.size + layout.slot_bytes)
    return replace(slot_geometry(geometry, layout, shifted), regions=(pool,))


def _slot_planes(group: CacheGroup, runs: BlockRuns, address: int, slots: int, slot_bytes: int) -> tuple[Plane, ...]:
    of_layers = (
        (number, _in_slot(plane, layer, group.rows(plane), runs))
        for number, plane in enumerate(group.planes)
        for layer in range(len(plane.layers))
    )
    return tuple(
        replace(plane, address=address + plane.address, blocks=slots, block_stride=slot_bytes)
        for plane in over_layers(of_layers)
    )


def _in_slot(plane: Plane, layer: int, group_tokens: int, runs: BlockRuns) -> Plane:
    """Return a layer of a plane as it lies in a slot at address 0.

    Raises:
        SlotPlaneError: no strides say so.
    """
    ratio = group_tokens // plane.block_tokens
    # Of dense content only the first item is looked at: it lies in one run with the others.
    content = 1 if plane.content_stride == plane.item_size else plane.content
    sizes = (ratio, plane.heads, plane.block_tokens, content)
    strides = (plane.block_stride, plane.head_stride, plane.token_stride, plane.content_stride)
    addresses = np.array(plane.address + layer * plane.layer_stride, np.int64)
    for count, stride in zip(sizes, strides, strict=True):
        addresses = np.add.outer(addresses, np.arange(count, dtype=np.int64) * stride)
    offsets = _offsets(addresses, plane.block_stride * ratio, runs)
    by_token = np.moveaxis(offsets, 0, 1).reshape(plane.heads, group_tokens, content)
    first, head_stride, token_stride = int(by_token[0, 0, 0]), _step(by_token, 0), _step(by_token, 1)
    content_stride = plane.item_size if content == 1 else _step(by_token, 2)
    even = np.array(first, np.int64)
    for count, stride in zip(by_token.shape, (head_stride, token_stride, content_stride), strict=True):
        even = np.add.outer(even, np.arange(count, dtype=np.int64) * stride)
    if not np.array_equal(by_token, even) or (plane.packing and ratio > 1):
        raise SlotPlaneError(
            f"part {plane.part!r} of layer {plane.layers[layer]!r} has {ratio} kernel blocks of {plane.block_tokens} "
            f"tokens in a block of {group_tokens}, whose tokens are not equally far apart in host memory; use blocks "
            "of the kernel's size, which hybrids cannot: theirs are as large as a state"
        )
    return replace(
        plane,
        layers=plane.layers[layer : layer + 1],
        block_tokens=group_tokens,
        address=first,
        head_stride=head_stride,
        token_stride=token_stride,
        content_stride=content_stride,
    )


def _step(offsets: Int64Array, axis: int) -> int:
    """Return how far the second index of an axis is from the first; 0 if there is only one."""
    return int(np.diff(offsets.take([0, 1], axis), axis=axis).flat[0]) if offsets.shape[axis] > 1 else 0


def _offsets(addresses: Int64Array, block_stride: int, runs: BlockRuns) -> Int64Array:
    """Return the offsets in a slot of addresses in block 0 of memory whose blocks are ``block_stride`` apart."""
    alike = np.flatnonzero(runs.strides == block_stride) if runs.blocks > 1 else np.arange(len(runs))
    ordered = alike[np.argsort(runs.starts[alike])]
    at = ordered[np.searchsorted(runs.starts[ordered], addresses, side="right") - 1]
    return np.asarray(runs.offsets[at] + (addresses - runs.starts[at]), np.int64)
