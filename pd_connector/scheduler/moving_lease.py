"""One lease on its way from the device to host memory, a portion of its blocks at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np

from layout.copies import Int64Array
from pd_connector.orders import BlockMoves, StoreEnds
from pd_connector.scheduler.host_loans import HostLoans
from pd_connector.scheduler.leases import MovableLease
from pd_connector.vllm.block_pools import HostBlocks, Leased, slots_of
from pd_connector.vllm.device_blocks import DeviceBlocks, HeldBlocks

if TYPE_CHECKING:
    from pd_connector.vllm.types import KVCacheBlock


@dataclass(frozen=True, slots=True, eq=False)
class Portion:
    """Neighbouring blocks of a lease for which host blocks were lent in one step."""

    lease: "MovingLease"
    blocks: int  # how many
    new: tuple[int, ...]  # indices of those that are to be copied: host memory did not hold them


class MovingLease:
    """The blocks of a lease at both ends.

    Host blocks are lent for all of them and filled by copies. Then the lease has moved, and lets go of its blocks on
    the device; or it stays, and lets go of the host blocks. Either takes several steps if it has many blocks.
    """

    def __init__(self, lease: MovableLease[Leased], why: str, loans: HostLoans) -> None:
        """Begin. ``why``: what it moves for."""
        self.lease = lease
        self.blocks = device_blocks(lease)
        #: What it moves for, or why it stays.
        self.event = why
        self.stays = False
        self.copied = 0  # blocks that were not in host memory
        self._loans = loans
        self._hosts: list[KVCacheBlock] = []  # lent for the first of the blocks
        self._slots: dict[int, int] = {}  # of each of those blocks, by its id
        self._new: set[int] = set()  # indices of blocks that were copied
        self._lost: set[int] = set()  # indices of those of which a copy that has failed may still be written
        self._copies = 0  # under way
        self._held: HostBlocks | None = None  # what the lease holds since it has moved
        self._left = 0  # blocks that it has not let go of, once it has moved, or stays
        self._group_of_block: dict[int, int] | None = None

    @property
    def lease_id(self) -> str:
        """Id of the lease."""
        return self.lease.lease_id

    @property
    def is_lent(self) -> bool:
        """Whether there is a host block for each of its blocks."""
        return len(self._hosts) == len(self.blocks)

    @property
    def has_arrived(self) -> bool:
        """Whether nothing is copied any more, and nothing is to be."""
        return not self._copies and (self.is_lent or self.stays)

    @property
    def leaves_device(self) -> int:
        """Number of blocks on the device that it holds, and will not."""
        if self._held is not None:
            return self._left
        return 0 if self.stays else len(self.blocks)

    def next_blocks(self, most: int) -> HeldBlocks:
        """Return the next blocks for which ``lend`` would lend host blocks."""
        lent = len(self._hosts)
        return self.blocks[lent : lent + most]

    def lend(self, most: int) -> Portion | None:
        """Lend host blocks for the next ``most`` blocks; None, and nothing is lent, if too few are free."""
        blocks, first = self.next_blocks(most), len(self._hosts)
        loan = self._loans.lend_for_copies(blocks)
        if loan is None:
            return None
        self._hosts += loan.hosts
        self._slots.update(zip([int(block.block_id) for block in blocks], slots_of(loan.hosts), strict=True))
        new = tuple(first + number for number in loan.new)
        self._new.update(new)
        self._copies += bool(new)
        return Portion(self, len(blocks), new)

    def copies(self, numbers: Sequence[int]) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
        """Return the cache group, id and slot of the blocks with these indices."""
        ids = [int(self.blocks[number].block_id) for number in numbers]
        if len(self.lease.tables) == 1:
            groups = [0] * len(ids)
        else:
            if self._group_of_block is None:
                self._group_of_block = {}
                for group, table in enumerate(self.lease.tables):
                    self._group_of_block.update(zip(table, repeat(group)))
            groups = [self._group_of_block[block] for block in ids]
        return groups, ids, [self._slots[block] for block in ids]

    def end_copy(self, portion: Portion, ends: StoreEnds) -> None:
        """Note how the copy of a portion has ended on all ranks."""
        self._copies -= 1
        if ends.unsettled:
            self._lost.update(portion.new)
        if ends.failed:
            self.stay("failed")

    def stay(self, event: str) -> None:
        """Give up, for the first reason that there is."""
        if not self.stays:
            self.stays, self.event = True, event
            self._left = len(self._hosts)

    # When it has arrived

    def host_blocks(self) -> tuple[HostBlocks, dict[int, int]]:
        """Return what the lease is to hold from now on, and the slot of each of its blocks by the block's id."""
        return HostBlocks(tuple(self._hosts)), self._slots

    def has_moved(self, held: HostBlocks) -> None:
        """Note that the lease holds ``held``, and its blocks on the device are ours."""
        self._held, self._left, self.copied = held, len(self.blocks), len(self._new)

    def has_ended(self, held: HostBlocks) -> None:
        """Note that the host blocks of a lease are given back: if it is this one, all that was copied is published."""
        if held is self._held:
            self._publish(0, self._left)
            self._new.clear()

    def forget_copies(self) -> None:
        """Let nobody else find what was copied: it is no longer valid."""
        self._new.clear()

    def let_go(self, device: DeviceBlocks, most: int) -> int:
        """Let go of at most so many blocks on the side where the lease is not; return how many they were.

        What was copied can be found by others from now on. Those that a prompt ends with are evicted first.
        """
        first, end = max(self._left - most, 0), self._left
        self._left = first
        if self._held is None:
            hosts = tuple(self._hosts[first:end])
            self._loans.take_back(hosts, [number - first for number in self._lost if first <= number < end])
            return end - first
        self._publish(first, end)
        device.release(self.blocks[first:end])
        return end - first

    @property
    def is_done(self) -> bool:
        """Whether it has let go of everything."""
        return self._left == 0

    def _publish(self, first: int, end: int) -> None:
        """Let others find the copies of blocks ``first`` to ``end`` (exclusive)."""
        if self._new:
            copied = [number for number in range(first, end) if number in self._new]
            self._loans.publish([(self.blocks[number], self._hosts[number]) for number in copied])


def device_blocks(lease: MovableLease[Leased]) -> HeldBlocks:
    """Return the blocks of a lease that is on the device."""
    assert isinstance(lease.held, tuple), "the lease must stay where it is"
    return lease.held


def block_moves(portions: Sequence[Portion]) -> BlockMoves:
    """Return the copies of portions, in their order."""
    columns: tuple[list[int], list[int], list[int]] = ([], [], [])
    for portion in portions:
        for column, values in zip(columns, portion.lease.copies(portion.new), strict=True):
            column.extend(values)
    arrays: list[Int64Array] = [np.array(column, np.int64) for column in columns]
    return BlockMoves(*arrays)
