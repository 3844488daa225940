"""Moves leases from the device to host memory, so that leases that nobody reads yet hold no device blocks.

    on the device --- chosen ---> being copied --- all ranks have reported, and nobody reads ---> in host memory
          ^                            '--- a rank has failed, a reader has come, or the lease has ended --.
          '------------------------------------------------------------------------------------------------'

A lease is chosen when requests wait for blocks, or when leases hold more than a share of the device's. Blocks that host
memory holds already are not copied: the lease takes references to their slots. While blocks are copied the lease holds
its device blocks, so that they do not change. Whether a reader has come is asked when the copy has ended
(``LeaseTable.move``), in one step with the move. Everything runs on the scheduler's thread, but for ``is_due``.

Leases are as large as prompts, and many copies may end at once. So a step begins moves until they have so many blocks
together, ends moves until they do, and leaves the others to the next.
"""

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat

import numpy as np

from pd_connector.orders import BlockMoves, Orders, Report, StoreEnds, StoreOrder
from pd_connector.scheduler.checksum_table import ChecksumTable
from pd_connector.scheduler.host_loans import CopyLoan
from pd_connector.scheduler.host_tier import HostTier
from pd_connector.scheduler.leases import LeaseTable, MovableLease, Tables
from pd_connector.scheduler.roles import SchedulerRole
from pd_connector.stats import StatsRecorder
from pd_connector.vllm.block_pools import DeviceBlocks, HeldBlocks, HostBlocks, Leased, slot_of
from transfer.control.limits import ThrottledWarnings

logger = logging.getLogger(__name__)

#: For which a lease is left to its reader before it moves, unless requests wait for blocks.
_GRACE_S = 0.25
#: After host memory had no room, or a copy failed, until leases are chosen again.
_REST_S = 0.5
#: Leases that are looked at in one step, which must not take long.
_CHOSEN_AT_ONCE = 64
#: Blocks after which a step begins no more moves, and ends no more. Each takes it one to two microseconds.
BLOCKS_A_STEP = 256
_LOG_INTERVAL_S = 10.0


@dataclass(slots=True)
class _Move:
    """A lease that is being copied to host memory."""

    lease: MovableLease[Leased]
    slots: Tables
    loan: CopyLoan
    why: str
    ends: StoreEnds = field(default_factory=lambda: StoreEnds(0))


class LeaseMoves(SchedulerRole):
    """Decides which leases move to host memory, and has them copied there."""

    def __init__(
        self,
        leases: LeaseTable[Leased],
        checksums: ChecksumTable,
        blocks: DeviceBlocks,
        is_short: Callable[[], bool],
        most_leased: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Move nothing yet.

        Args:
            leases: of this engine.
            checksums: of its leases, for which workers read the device's blocks.
            blocks: of the device.
            is_short: returns whether requests wait for blocks.
            most_leased: the share of the device's blocks above which leases move, 0 to 1.
            clock: a monotonic clock, in seconds.
        """
        self._leases = leases
        self._checksums = checksums
        self._blocks = blocks
        self._is_short = is_short
        self._most_leased = most_leased
        self._clock = clock
        self._tier: HostTier | None = None
        self._ranks = 1
        self._moves: dict[int, _Move] = {}  # under way, by the id of their store
        self._arrived: deque[_Move] = deque()  # those whose copies all ranks have reported, to be ended
        self._may_end = BLOCKS_A_STEP  # blocks, in this step
        self._next_store = -1
        self._rests_until = 0.0
        self._too_large = math.inf  # until then, leases of so many blocks and more stay where they are
        self._events: Counter[str] = Counter()
        self._copied = self._present = 0  # blocks, since the last update of the statistics
        #: Leases by what became of their move, and blocks ``copied`` and ``present``, all before the last such update.
        self.totals: Counter[str] = Counter()
        self._warnings = ThrottledWarnings(logger, _LOG_INTERVAL_S)

    def use(self, tier: HostTier, ranks: int) -> None:
        """Move leases to this host memory from now on, of an engine with so many workers."""
        self._tier, self._ranks = tier, ranks

    def release(self, held: HostBlocks) -> None:
        """Give back the slots of a lease that has ended."""
        assert self._tier is not None, "a lease has moved to host memory that nobody knows"
        self._tier.loans.take_back(held.blocks)

    def is_due(self) -> bool:
        """Return whether leases are to be moved now. Any thread."""
        return self._tier is not None and bool(self._chosen())

    def step_orders(self, scheduled: Mapping[str, int]) -> Orders:
        """End moves that earlier steps have left, choose leases, and order the copies of their blocks."""
        self._may_end = BLOCKS_A_STEP
        self._end_arrived()
        if self._tier is None:
            return Orders()
        stores: list[StoreOrder] = []
        left = BLOCKS_A_STEP
        for lease, why in self._chosen():
            if left <= 0:
                break
            if (blocks := len(_device_blocks(lease))) < self._least_too_large:
                self._start(self._tier, lease, why, stores)
                left -= blocks
        return Orders(stores=tuple(stores))

    def settled(self, request_ids: set[str], failed: set[str], report: Report) -> None:
        """End the moves whose copies all ranks have reported, as many as this step may."""
        for store_id, ends in report.stores.items():
            if (move := self._moves.get(store_id)) is not None:
                move.ends += ends
                if move.ends.ranks >= self._ranks:
                    self._arrived.append(move)
                    del self._moves[store_id]
        self._end_arrived()

    @property
    def wants_step(self) -> bool:
        """Whether the engine must step to order copies, or to learn of their end."""
        return self.frees_blocks_soon or self.is_due()

    @property
    def frees_blocks_soon(self) -> bool:
        """Whether leases are on their way off the device."""
        return bool(self._moves or self._arrived)

    def update_stats(self, stats: StatsRecorder) -> None:
        """Record which leases have moved and why, which have not, and how many lie in host memory."""
        for event, number in self._events.items():
            stats.count("lease_moves", number, event)
        self.totals.update(self._events)
        self._events.clear()
        blocks = {"copied": self._copied, "present": self._present}
        for event, number in blocks.items():
            stats.count("lease_blocks_moved", number, event)
        self.totals.update(blocks)
        self._copied = self._present = 0
        stats.gauge("leases_in_host", self._leases.in_host_memory)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        assert all(move.ends.ranks < self._ranks for move in self._moves.values()), "a move should have ended"
        assert all(move.ends.ranks >= self._ranks for move in self._arrived), "a move is to end before its copy has"
        moving = [move.lease.lease_id for move in self._under_way()]
        assert len(set(moving)) == len(moving), "a lease is moved twice"

    def _chosen(self) -> list[tuple[MovableLease[Leased], str]]:
        """Return the leases to move now, and why: the oldest first, until leases hold no more than their share."""
        is_short = self._is_short()
        above = self._blocks.leased - self._most_leased * self._blocks.total
        if not is_short and above <= 0:
            return []
        moving = {move.lease.lease_id: len(_device_blocks(move.lease)) for move in self._under_way()}
        above -= sum(moving.values())
        too_large = self._least_too_large
        chosen: list[tuple[MovableLease[Leased], str]] = []
        for lease in self._leases.movable(0.0 if is_short else _GRACE_S, _CHOSEN_AT_ONCE + len(moving)):
            if not is_short and above <= 0:
                break
            if lease.lease_id in moving or (blocks := len(_device_blocks(lease))) >= too_large:
                continue
            if self._checksums.are_taken(lease.lease_id):
                chosen.append((lease, "short" if is_short else "share"))
                above -= blocks
        return chosen

    def _under_way(self) -> "tuple[_Move, ...]":
        """Return the moves that have begun and not ended."""
        return (*self._arrived.copy(), *tuple(self._moves.values()))

    @property
    def _least_too_large(self) -> float:
        """Number of blocks of the leases that stay where they are for now, and of all larger ones."""
        return self._too_large if self._clock() < self._rests_until else math.inf

    def _rest(self, blocks: int) -> None:
        """Choose no leases of so many blocks, and no larger ones, for a while."""
        now = self._clock()
        if now >= self._rests_until:
            self._rests_until, self._too_large = now + _REST_S, math.inf
        self._too_large = min(self._too_large, blocks)

    def _start(self, tier: HostTier, lease: MovableLease[Leased], why: str, stores: list[StoreOrder]) -> None:
        """Begin to move a lease, unless its blocks are being stored, or host memory has no room for it."""
        blocks = _device_blocks(lease)
        if tier.is_storing(blocks):
            return
        loan = tier.loans.lend_for_copies(blocks)
        if loan is None:
            self._stays(len(blocks), tier.slots)
            return
        ids = [int(block.block_id) for block in blocks]
        slot_of_block = dict(zip(ids, map(slot_of, loan.hosts), strict=True))
        slots = tuple(tuple(map(slot_of_block.get, table, repeat(-1))) for table in lease.tables)
        move = _Move(lease, slots, loan, why)
        if not loan.new:
            self._end(move)
            return
        store_id, self._next_store = self._next_store, self._next_store - 1
        self._moves[store_id] = move
        stores.append(StoreOrder(store_id, _copies(lease.tables, [ids[number] for number in loan.new], slot_of_block)))

    def _stays(self, blocks: int, slots: int) -> None:
        """Note that a lease of so many blocks finds no room in host memory of so many slots."""
        self._events["full"] += 1
        self._rest(blocks)
        why = f"which has {slots} blocks in all" if blocks > slots else "because leases and loads use its blocks"
        self._warnings.warn(
            "full",
            f"PDConnector: a lease of {blocks} blocks stays on the device: host memory has no room for it, {why}. "
            "Raise cpu_bytes_to_use",
        )

    def _end_arrived(self) -> None:
        """End moves whose copies have arrived, until this step has ended enough."""
        while self._arrived and self._may_end > 0:
            move = self._arrived[0]
            self._may_end -= len(move.loan.hosts)
            self._end(move)
            self._arrived.popleft()

    def _end(self, move: _Move) -> None:
        """Let a lease point to host memory, if its blocks have arrived there and nobody reads it on the device."""
        assert self._tier is not None, "nothing is moved without host memory"
        lease, loan = move.lease, move.loan
        if move.ends.failed:
            self._give_up(move, "failed")
            self._rest(0)
            return
        before = self._leases.move(lease.lease_id, HostBlocks(loan.hosts), move.slots)
        if before is None:
            self._give_up(move, "read" if self._leases.still_valid([lease.lease_id]) else "ended")
            return
        assert isinstance(before, tuple), "a lease has moved that must stay where it is"
        self._tier.loans.publish(before, loan)
        self._blocks.release(before)
        self._events[move.why] += 1
        self._copied += len(loan.new)
        self._present += len(loan.hosts) - len(loan.new)

    def _give_up(self, move: _Move, event: str) -> None:
        assert self._tier is not None, "nothing is moved without host memory"
        lost: Sequence[int] = move.loan.new if move.ends.unsettled else ()
        self._tier.loans.take_back(move.loan.hosts, lost=lost)
        self._events[event] += 1


def _device_blocks(lease: MovableLease[Leased]) -> HeldBlocks:
    assert isinstance(lease.held, tuple), "the lease must stay where it is"
    return lease.held


def _copies(tables: Tables, blocks: Sequence[int], slot_of_block: Mapping[int, int]) -> BlockMoves:
    """Return the copies of device blocks, which are in these tables, to their slots."""
    if len(tables) == 1:
        groups = np.zeros(len(blocks), np.int64)
    else:
        group_of_block: dict[int, int] = {}
        for group, ids in enumerate(tables):
            group_of_block.update(zip(ids, repeat(group)))
        groups = np.array([group_of_block[block] for block in blocks], np.int64)
    slots = np.array([slot_of_block[block] for block in blocks], np.int64)
    return BlockMoves(groups, np.array(blocks, np.int64), slots)
