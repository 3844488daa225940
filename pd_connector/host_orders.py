"""What the scheduler half tells the worker half about host memory, and how a store has ended. Imports no vLLM.

Plain frozen data that survives the way between processes. ``metadata`` carries it in what vLLM takes along.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from layout.copies import Int64Array


@dataclass(frozen=True, eq=False)
class BlockMoves:
    """Whole blocks between the device and host memory: block ``blocks[i]`` of its cache group and slot ``slots[i]``.

    Arrays of shape [n], int64.
    """

    groups: Int64Array  # number of each block's cache group
    blocks: Int64Array  # device block ids
    slots: Int64Array  # of the host pool

    @classmethod
    def of(cls, triples: Sequence[tuple[int, int, int]]) -> "BlockMoves":
        """Moves from (group, block, slot) triples."""
        groups, blocks, slots = np.array(triples, np.int64).reshape(-1, 3).T.copy()
        return cls(groups, blocks, slots)

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True)
class LoadOrder:
    """Copy a request's blocks from host memory to the device."""

    request_id: str
    moves: BlockMoves
    tokens: int


@dataclass(frozen=True)
class StoreOrder:
    """Copy blocks, which earlier steps have computed, from the device to host memory."""

    store_id: int
    moves: BlockMoves


@dataclass(frozen=True)
class StoreEnds:
    """How a store has ended on the ranks that have reported it."""

    ranks: int
    failed: bool = False
    #: The device may still write to the slots.
    unsettled: bool = False

    def __add__(self, other: "StoreEnds") -> "StoreEnds":
        return StoreEnds(self.ranks + other.ranks, self.failed or other.failed, self.unsettled or other.unsettled)
