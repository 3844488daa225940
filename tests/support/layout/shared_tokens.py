"""Engines whose ranks share the tokens of a request, as memory: a second opinion on which byte belongs to which token.

Everything is counted token by token, as vLLM's slot mapping does, and knows nothing of plans, splits or units. Must not
import ``layout.plan``, ``layout.sharding`` or ``layout.context_parallel``, except to state what a worker would.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import numpy.typing as npt

from layout.context_parallel import TokenSplit
from layout.copies import Copies
from layout.geometry import CacheGroup, Plane, WorkerGeometry

Words = npt.NDArray[np.uint32]
_AXES = "LBHNC"


@dataclass(frozen=True)
class Cached:
    """What is cached of each token: ``content`` items for each of ``heads`` over all ranks."""

    name: str
    heads: int
    content: int
    replicated: bool = False  # every rank holds all tokens
    packing: str = ""


KEYS_VALUES = (Cached("k", 2, 3), Cached("v", 2, 3))
LATENT = (Cached("mla_latent", 1, 4), Cached("mla_rope", 1, 2))
INDEXED = (*LATENT, Cached("index", 1, 3, replicated=True))


@dataclass(frozen=True)
class Shared:
    """How one engine keeps its caches."""

    tp: int = 1
    dcp: int = 1
    interleave: int = 1
    rows: int = 8  # tokens that a rank keeps of a block
    kernel_blocks: int = 1  # kernel blocks in these
    pcp: int = 1
    order: str = "LBHNC"
    packed: bool = False  # all that a rank keeps of a block lies together, part by part; no part may be replicated
    blocks: int = 0  # set by ``for_tokens``

    @property
    def block_tokens(self) -> int:
        """Tokens that a block of the block table stands for."""
        return self.rows * self.dcp

    def dcp_rank(self, pcp_rank: int, tp_rank: int) -> int:
        """The place of a rank in the group that shares tokens, as vLLM makes these groups."""
        world = np.arange(self.pcp * self.tp).reshape(self.pcp, self.tp)
        groups = (world.transpose() if self.dcp > 1 else world).reshape(-1, self.dcp)
        return int(np.argwhere(groups == pcp_rank * self.tp + tp_rank)[0][1])


def slot_of(token: int, block_ids: Sequence[int], side: Shared, dcp_rank: int, *, replicated: bool) -> int:
    """The row of a rank's cache that a token is written to, counted over all blocks; -1 if another rank keeps it."""
    block, inside = divmod(token, side.block_tokens)
    rows = side.block_tokens if replicated else side.rows
    if not replicated:
        turn, rest = divmod(inside, side.dcp * side.interleave)
        if rest // side.interleave != dcp_rank:
            return -1
        inside = turn * side.interleave + rest % side.interleave
    return block_ids[block] * rows + inside


def value_of(part: int, layer: int, head: int, token: int, content: int) -> int:
    """What is cached, the same on all engines."""
    number = (((part * 8 + layer) * 64 + head) * 4096 + token) * 16 + content
    return (number * 2654435761 + 97) % (1 << 32)


@dataclass
class SharedRank:
    """One worker."""

    parts: tuple[Cached, ...]
    side: Shared
    tp_rank: int
    pcp_rank: int = 0
    layers: int = 2
    caches: list[Words] = field(default_factory=list)  # of each part, in the order of axes of ``_AXES``

    def __post_init__(self) -> None:
        self.dcp_rank = self.side.dcp_rank(self.pcp_rank, self.tp_rank)
        noise = np.random.default_rng(self.tp_rank + 100 * self.pcp_rank)
        if self.side.packed:
            self._pack(noise)
            return
        for part in self.parts:
            rows = self.side.rows // self.side.kernel_blocks
            kernel_blocks = self.side.blocks * self.side.kernel_blocks * (self.side.dcp if part.replicated else 1)
            sizes = dict(
                zip(_AXES, (self.layers, kernel_blocks, len(self.heads(part)), rows, part.content), strict=True)
            )
            memory = noise.integers(0, 1 << 32, [sizes[axis] for axis in self.side.order], np.uint32)
            self.caches.append(memory.transpose([self.side.order.index(axis) for axis in _AXES]))

    def _pack(self, noise: np.random.Generator) -> None:
        rows, number = self.side.rows // self.side.kernel_blocks, self.side.blocks * self.side.kernel_blocks
        shapes = [(self.layers, len(self.heads(part)), rows, part.content) for part in self.parts]
        sizes = [int(np.prod(shape)) for shape in shapes]
        memory = noise.integers(0, 1 << 32, [number, sum(sizes)], np.uint32)
        for shape, size, end in zip(shapes, sizes, np.cumsum(sizes).tolist(), strict=True):
            self.caches.append(memory[:, end - size : end].reshape(number, *shape).transpose([1, 0, 2, 3, 4]))

    def heads(self, part: Cached) -> range:
        """The heads of a rank: an equal share, or one that an equal run of ranks has."""
        tp = self.side.tp
        if part.heads >= tp:
            return range(self.tp_rank * part.heads // tp, (self.tp_rank + 1) * part.heads // tp)
        head = self.tp_rank // (tp // part.heads)
        return range(head, head + 1)

    @property
    def geometry(self) -> WorkerGeometry:
        planes = tuple(self._plane(part, cache) for part, cache in zip(self.parts, self.caches, strict=True))
        group = CacheGroup(self.side.block_tokens, 0, planes)
        return WorkerGeometry(
            self.tp_rank, self.side.tp, 0, 1, f"host:{self.tp_rank}", (group,), (),
            pcp_rank=self.pcp_rank, pcp_size=self.side.pcp,
        )  # fmt: skip

    def _plane(self, part: Cached, cache: Words) -> Plane:
        shared = self.side.dcp > 1 and not part.replicated
        return Plane(
            part=part.name,
            layers=tuple(f"layers.{layer}" for layer in range(self.layers)),
            head_start=self.heads(part).start,
            heads=len(self.heads(part)),
            block_tokens=cache.shape[3],
            content=part.content,
            item_size=4,
            blocks=cache.shape[1],
            address=int(cache.ctypes.data),
            layer_stride=cache.strides[0],
            block_stride=cache.strides[1],
            head_stride=cache.strides[2],
            token_stride=cache.strides[3],
            content_stride=cache.strides[4],
            packing=part.packing,
            total_heads=part.heads,
            tokens=TokenSplit(self.side.interleave, self.side.dcp, self.dcp_rank) if shared else TokenSplit(),
        )

    def write(self, caches: Sequence[Words], block_ids: Sequence[int], tokens: range) -> int:
        """Write what this rank keeps of ``tokens`` into ``caches``; return the number of items."""
        written = 0
        for number, (part, cache) in enumerate(zip(self.parts, caches, strict=True)):
            for token in tokens:
                slot = slot_of(token, block_ids, self.side, self.dcp_rank, replicated=part.replicated)
                if slot < 0:
                    continue
                block, row = divmod(slot, cache.shape[3])
                for layer, (place, head) in product(range(self.layers), enumerate(self.heads(part))):
                    values = [value_of(number, layer, head, token, item) for item in range(part.content)]
                    cache[layer, block, place, row] = values
                    written += len(values)
        return written

    def check(self, before: Sequence[Words], block_ids: Sequence[int], tokens: range, copied_bytes: int) -> None:
        """Assert that ``tokens`` have arrived, each byte once, and that nothing else has changed since ``before``."""
        expected = [cache.copy() for cache in before]
        written = self.write(expected, block_ids, tokens)
        for part, right, cache in zip(self.parts, expected, self.caches, strict=True):
            wrong = np.argwhere(right != cache)
            assert not len(wrong), f"{part.name}: {len(wrong)} items are wrong, the first {wrong[0]} {_AXES}"
        assert copied_bytes == 4 * written, "some bytes were written twice, or none had to be"


def ranks_of(parts: tuple[Cached, ...], side: Shared) -> list[SharedRank]:
    """All workers of an engine."""
    return [SharedRank(parts, side, tp, pcp) for pcp, tp in product(range(side.pcp), range(side.tp))]


def execute(copies: Copies) -> None:
    """Copy in this process."""
    for to, source, size in zip(
        *(each.tolist() for each in (copies.destinations, copies.sources, copies.sizes)), strict=True
    ):
        ctypes.memmove(to, source, size)
