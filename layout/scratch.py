"""Scratch: some blocks of a worker's caches once more, dense, in memory that belongs to nobody's cache.

    [plane 0: block 1, block 2, ..][plane 1: block 1, block 2, ..]..      a block: [layer][head][token][content]

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
    return (-(-tokens // group.block_tokens) + 1 for group in geometry.groups)


def _plane_bytes(plane: Plane, group: CacheGroup, blocks: int) -> int:
    size = blocks * group.block_tokens // plane.block_tokens * plane.block_bytes
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _dense(plane: Plane, group: CacheGroup, blocks: int, address: int) -> Plane:
    ratio = group.block_tokens // plane.block_tokens
    token_stride = plane.content * plane.item_size
    head_stride = plane.block_tokens * token_stride
    layer_stride = plane.heads * head_stride
    block_stride = len(plane.layers) * layer_stride
    return replace(
        plane,
        blocks=(blocks + 1) * ratio,
        address=address - ratio * block_stride,
        layer_stride=layer_stride,
        block_stride=block_stride,
        head_stride=head_stride,
        token_stride=token_stride,
        content_stride=plane.item_size,
    )
