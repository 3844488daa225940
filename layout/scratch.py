"""Scratch: some blocks of a worker's caches once more, dense, in memory that belongs to nobody's cache.

    [plane 0: block 1, block 2, ..][plane 1: block 1, block 2, ..]..

What is read to such blocks is planned as for any other geometry. Block 0, which stands for a hole, has no memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from layout.geometry import CacheGroup, Plane, Region, WorkerGeometry

_ALIGNMENT = 64  # bytes: whole cache lines


def scratch_bytes(geometry: WorkerGeometry, blocks: Sequence[int]) -> int:
    """Return the bytes that ``scratch_geometry`` needs for ``blocks[i]`` blocks of cache group i."""
    return sum(
        _plane_bytes(plane, group, number)
        for group, number in zip(geometry.groups, blocks, strict=True)
        for plane in group.planes
    )


def scratch_geometry(geometry: WorkerGeometry, memory: Region, blocks: Sequence[int]) -> WorkerGeometry:
    """Return the geometry of scratch blocks of the same layers, heads and block sizes as ``geometry``.

    Args:
        geometry: of the worker's caches.
        memory: at least ``scratch_bytes``, the only region of the result.
        blocks: of each cache group; their ids are 1 to ``blocks[i]``.
    """
    address = memory.address
    groups: list[CacheGroup] = []
    for group, number in zip(geometry.groups, blocks, strict=True):
        planes: list[Plane] = []
        for plane in group.planes:
            planes.append(_dense(plane, group, number, address))
            address += _plane_bytes(plane, group, number)
        groups.append(replace(group, planes=tuple(planes)))
    assert address <= memory.end, "the scratch memory is too small"
    return replace(geometry, groups=tuple(groups), regions=(memory,))


def blocks_of_tokens(geometry: WorkerGeometry, tokens: int) -> Iterator[int]:
    """Yield for each cache group how many blocks hold ``tokens`` neighbouring tokens, wherever they begin."""
    return (blocks_holding(tokens, group.block_tokens) for group in geometry.groups)


def blocks_holding(tokens: int, block_tokens: int) -> int:
    """Return how many blocks of ``block_tokens`` hold ``tokens`` neighbouring tokens, wherever they begin."""
    return -(-tokens // block_tokens) + 1


def _plane_bytes(plane: Plane, group: CacheGroup, blocks: int) -> int:
    size = blocks * group.block_tokens // plane.block_tokens * plane.block_bytes
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _dense(plane: Plane, group: CacheGroup, blocks: int, address: int) -> Plane:
    """Return the plane of scratch blocks, whose axes inside a block are in the order of ``plane``'s strides.

    A prefill engine's are often in the same order, and runs are then long.
    """
    ratio = group.block_tokens // plane.block_tokens
    axes = {
        "content": (plane.content_stride, plane.content),
        "token": (plane.token_stride, plane.block_tokens),
        "head": (plane.head_stride, plane.heads),
        "layer": (plane.layer_stride, len(plane.layers)),
    }
    strides, size = {}, plane.item_size
    for name in sorted(axes, key=lambda axis: axes[axis][0] if axes[axis][1] > 1 else 0):
        strides[name] = size
        size *= axes[name][1]
    return replace(
        plane,
        blocks=(blocks + 1) * ratio,
        address=address - ratio * size,
        block_stride=size,
        layer_stride=strides["layer"],
        head_stride=strides["head"],
        token_stride=strides["token"],
        content_stride=strides["content"],
    )
