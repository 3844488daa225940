"""A lease on its way from the device to host memory."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from layout.copies import Int64Array
from pd_connector.orders import BlockMoves, StoreEnds
from pd_connector.scheduler.host.loans import CopyLoan, HostLoans
from pd_connector.scheduler.prefill.leases import LeaseTable, MovableLease
from pd_connector.vllm.block_pools import Leased
from pd_connector.vllm.device_blocks import DeviceBlocks, HeldBlocks


@dataclass(frozen=True, slots=True, eq=False)
class MovingLease:
    """The blocks of a lease at both ends: references to those of the device, and host blocks that are lent for them."""

    lease: MovableLease[Leased]
    why: str  # it moves
    loan: CopyLoan
    ids: Int64Array  # of the blocks

    @property
    def lease_id(self) -> str:
        """Id of the lease."""
        return self.lease.lease_id

    @property
    def blocks(self) -> HeldBlocks:
        """Its blocks on the device."""
        return device_blocks(self.lease)

    @property
    def copied(self) -> int:
        """Number of blocks that host memory did not hold."""
        return len(self.loan.new)

    def end(self, leases: LeaseTable[Leased], device: DeviceBlocks, loans: HostLoans, ends: StoreEnds) -> bool:
        """Let the lease point to host memory; return False if it stays, because it was read or has ended meanwhile.

        What was copied can be found by others from now on.

        Args:
            leases: that it is one of.
            device: whose blocks are given back if it moves.
            loans: to which the host blocks are given back if it stays.
            ends: of the copies. If they have failed, it stays.
        """
        blocks, hosts = self.blocks, self.loan.hosts
        slots = dict(zip(self.ids.tolist(), self.loan.slots.tolist(), strict=True))
        if ends.failed or leases.move(self.lease_id, Leased(hosts=hosts), slots) is None:
            loans.take_back(hosts, self.loan.new if ends.unsettled else ())
            return False
        loans.publish(blocks, self.loan)
        device.release(blocks)  # those that the prompt ends with are evicted first
        return True

    def copies(self) -> Int64Array:
        """Return the cache group, id and slot of the blocks to copy: [3, blocks]."""
        ids, slots = self.ids, self.loan.slots
        if self.copied < len(ids):
            new = list(self.loan.new)
            ids, slots = ids[new], slots[new]
        groups = np.zeros_like(ids)
        for group, table in enumerate(self.lease.tables[1:], start=1):
            groups[np.isin(ids, table)] = group
        return np.array([groups, ids, slots])


def device_blocks(lease: MovableLease[Leased]) -> HeldBlocks:
    """Return the blocks of a lease that is on the device."""
    assert not lease.held.hosts, "the lease must stay where it is"
    return lease.held.blocks


def block_moves(moves: Sequence[MovingLease]) -> BlockMoves:
    """Return the copies of leases, in their order."""
    return BlockMoves(*np.concatenate([move.copies() for move in moves], axis=1))
