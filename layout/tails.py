"""Which rows of a request's last blocks a pull leaves as they are: those behind the tokens that it brings."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from layout.geometry import CacheGroup, Plane, WorkerGeometry
from layout.plan import BlockTable


@dataclass(frozen=True, slots=True)
class Tail:
    """The rows of a kernel block from ``first_row`` to its end, in all layers and heads of a plane."""

    plane: Plane
    block: int
    first_row: int


def tails(geometry: WorkerGeometry, tables: Sequence[BlockTable], end_token: int) -> Iterator[Tail]:
    """Yield what a pull of a request's tokens before ``end_token`` does not write of the blocks that hold them.

    A pull may write some of these rows, too: it reads in units that may end behind the last token. States are written
    whole, and so are the kernel blocks of an opaque plane that have a token. Holes of a table are left out.

    Args:
        geometry: of the worker that pulls.
        tables: its blocks of the request, by cache group, from the first one on.
        end_token: at least 1.
    """
    for group, table in zip(geometry.groups, tables, strict=True):
        if group.states:
            continue
        last = (end_token - 1) // group.block_tokens
        for number, block in enumerate(table.block_ids[last - table.first_block :].tolist(), start=last):
            if block >= 0:
                for plane in group.planes:
                    yield from _tails_in(group, plane, number, block, end_token)


def _tails_in(group: CacheGroup, plane: Plane, number: int, block: int, end_token: int) -> Iterator[Tail]:
    """Yield the tails in one block of the block table, which is entry ``number`` of it."""
    rows, size = group.rows(plane), plane.block_tokens
    held = int(plane.tokens.before(np.array([end_token]))[0])
    first = min(max(-(-held // plane.tokens_per_row) - number * rows, 0), rows)
    if plane.packing:
        first = -(-first // size) * size
    for kernel_block in range(first // size, rows // size):
        yield Tail(plane, block * (rows // size) + kernel_block, max(first - kernel_block * size, 0))
