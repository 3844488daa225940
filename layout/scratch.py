"""Scratch: some blocks of a worker's caches once more, dense, in memory that belongs to nobody's cache.

    [plane 0: block 1, block 2, ..][plane 1: block 1, block 2, ..]..

Planes that alternate inside a block, as K and V of every token do in some layouts, alternate here, too. What is read to
such blocks is planned as for any other geometry. Block 0, which stands for a hole, has no memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from layout.geometry import CacheGroup, Plane, Region, WorkerGeometry

_ALIGNMENT = 64  # bytes: whole cache lines
#: States of a prompt in each cache group that holds states.
STATES = 2


def scratch_bytes(geometry: WorkerGeometry, blocks: Sequence[int]) -> int:
    """Return the bytes that ``scratch_geometry`` needs for ``blocks[i]`` blocks of cache group i."""
    return sum(
        _bytes(planes, group, number)
        for group, number in zip(geometry.groups, blocks, strict=True)
        for planes in _alternating(group.planes)
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
        dense: dict[Plane, Plane] = {}
        for planes in _alternating(group.planes):
            dense.update(zip(planes, _dense(planes, group, number, address), strict=True))
            address += _bytes(planes, group, number)
        groups.append(replace(group, planes=tuple(dense[plane] for plane in group.planes)))
    assert address <= memory.end, "the scratch memory is too small"
    return replace(geometry, groups=tuple(groups), regions=(memory,))


def blocks_of_tokens(geometry: WorkerGeometry, tokens: int) -> Iterator[int]:
    """Yield for each cache group how many blocks hold what it keeps of ``tokens`` neighbouring tokens.

    Wherever they begin. Of states: that after all tokens, and one before.
    """
    return (
        STATES if group.states else blocks_holding(min(tokens, group.window or tokens), group.block_tokens)
        for group in geometry.groups
    )


def blocks_holding(tokens: int, block_tokens: int) -> int:
    """Return how many blocks of ``block_tokens`` hold ``tokens`` neighbouring tokens, wherever they begin."""
    return -(-tokens // block_tokens) + 1


def _alternating(planes: Sequence[Plane]) -> list[list[Plane]]:
    """Return the planes in sets that alternate inside a block at equal distances, in the order of their addresses."""
    sets: dict[tuple[object, ...], list[Plane]] = {}
    for plane in sorted(planes, key=lambda each: each.address):
        strides = plane.layer_stride, plane.block_stride, plane.head_stride, plane.token_stride, plane.content_stride
        shape = plane.layers, plane.heads, plane.block_tokens, plane.content, plane.item_size, plane.packing
        sets.setdefault((strides, shape), []).append(plane)
    return [part for each in sets.values() for part in ([each] if _alternate(each) else [[plane] for plane in each])]


def _alternate(planes: Sequence[Plane]) -> bool:
    distances = {after.address - before.address for before, after in pairwise(planes)}
    return len(distances) == 1 and 0 < max(distances) * len(planes) <= planes[0].block_stride


def _bytes(planes: Sequence[Plane], group: CacheGroup, blocks: int) -> int:
    size = blocks * group.rows(planes[0]) // planes[0].block_tokens * sum(plane.block_bytes for plane in planes)
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _dense(planes: Sequence[Plane], group: CacheGroup, blocks: int, address: int) -> Iterator[Plane]:
    """Yield the planes of scratch blocks, whose axes inside a block are in the order of ``planes``' strides.

    A prefill engine's are often in the same order, and runs are then long.
    """
    plane = planes[0]
    ratio = group.rows(plane) // plane.block_tokens
    axes = {
        "content": (plane.content_stride, plane.content),
        "token": (plane.token_stride, plane.block_tokens),
        "head": (plane.head_stride, plane.heads),
        "layer": (plane.layer_stride, len(plane.layers)),
        "plane": (planes[-1].address - planes[-2].address if planes[1:] else 0, len(planes)),
    }
    strides, size = {}, plane.item_size
    for name in sorted(axes, key=lambda axis: axes[axis][0] if axes[axis][1] > 1 else 0):
        strides[name] = size
        size *= axes[name][1]
    for number, each in enumerate(planes):
        yield replace(
            each,
            blocks=(blocks + 1) * ratio,
            address=address - ratio * size + number * strides["plane"],
            block_stride=size,
            layer_stride=strides["layer"],
            head_stride=strides["head"],
            token_stride=strides["token"],
            content_stride=strides["content"],
        )
