"""Moves leases from the device to host memory, so that leases that nobody reads yet hold no device blocks.

    on the device --- chosen ---> being copied --- all ranks have reported, and nobody reads ---> in host memory
          ^                            '--- a rank has failed, a reader has come, or the lease has ended --.
          '------------------------------------------------------------------------------------------------'

A lease is chosen when requests wait for blocks, or when leases hold more than a share of the device's. Blocks that host
memory holds already are not copied: the lease takes references to their slots. While blocks are copied the lease holds
its device blocks, so that they do not change. Whether a reader has come is asked when the copy has ended
(``LeaseTable.move``), in one step with the move. Everything runs on the scheduler's thread, but for ``is_due``.

A step begins moves of a bounded number of blocks, and of a whole lease at least: a lease is as large as a prompt, and
many may be due at once.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from layout.copies import Int64Array
from pd_connector.orders import BlockMoves, Orders, Report, StoreEnds, StoreOrder
from pd_connector.scheduler.host.loans import CopyLoan
from pd_connector.scheduler.host.tier import HostTier
from pd_connector.scheduler.prefill.checksum_table import ChecksumTable
from pd_connector.scheduler.prefill.leases import LeaseTable, MovableLease
from pd_connector.scheduler.scheduler_role import SchedulerRole, ended
from pd_connector.stats import StatsRecorder
from pd_connector.vllm.block_pools import Leased
from pd_connector.vllm.device_blocks import DeviceBlocks, ids_of
from transfer.control.limits import ThrottledWarnings

logger = logging.getLogger(__name__)

#: For which a lease is left to its reader before it moves, unless requests wait for blocks.
_GRACE_S = 0.25
#: After host memory had no room, or a copy failed, until leases are chosen again.
_REST_S = 0.5
#: Leases that are looked at in one step, which must not take long; and while the oldest of them may all be too large.
_CHOSEN_AT_ONCE = 16
#: Blocks after which a step begins no further move (``benchmarks.host_step`` says how long that takes it).
_BLOCKS_AT_ONCE = 256
_CHOSEN_WHILE_FULL = 64
_LOG_INTERVAL_S = 10.0


@dataclass(frozen=True, slots=True, eq=False)
class _Move:
    """A lease on its way: its blocks on the device, and host blocks that are lent for them."""

    lease: MovableLease[Leased]
    why: str  # it moves
    loan: CopyLoan
    ids: Int64Array  # of the blocks

    def copies(self) -> Int64Array:
        """Return the cache group, id and slot of the blocks that host memory did not hold: [3, blocks]."""
        ids, slots = self.ids, self.loan.slots
        if len(self.loan.new) < len(ids):
            new = list(self.loan.new)
            ids, slots = ids[new], slots[new]
        groups = np.zeros_like(ids)
        for group, table in enumerate(self.lease.tables[1:], start=1):
            groups[np.isin(ids, table)] = group
        return np.array([groups, ids, slots])


@dataclass(slots=True)
class _Copy:
    """What one store copies. If it fails, all of these leases stay."""

    moves: tuple[_Move, ...]
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
        self._moves: dict[str, _Move] = {}  # under way, by lease
        self._copies: dict[int, _Copy] = {}  # under way, by the id of their store
        self._next_store = -1
        self._rests_until = 0.0
        self._too_large = math.inf  # until then, leases of so many blocks and more stay where they are
        self._warnings = ThrottledWarnings(logger, _LOG_INTERVAL_S)

    def use(self, tier: HostTier, ranks: int) -> None:
        """Move leases to this host memory from now on, of an engine with so many workers."""
        self._tier, self._ranks = tier, ranks

    @property
    def tier(self) -> HostTier:
        """The host memory that leases move to."""
        assert self._tier is not None, "a lease lies in host memory that nobody knows"
        return self._tier

    def is_due(self) -> bool:
        """Return whether leases are to be moved now. Any thread."""
        return self._tier is not None and any(True for _ in self._chosen())

    def step_orders(self, scheduled: Mapping[str, int]) -> Orders:
        """Choose leases, and order the copies of their blocks."""
        return Orders() if self._tier is None else Orders(stores=self._order(self._tier))

    def settled(self, request_ids: set[str], failed: set[str], report: Report) -> None:
        """End the moves whose copies all ranks have reported."""
        stores = {store_id: ends for store_id, ends in report.stores.items() if store_id < 0}  # not of the host tier
        for copy in ended(self._copies, stores, self._ranks, "store"):
            if copy.ends.failed:
                self._rest(0)
            for move in copy.moves:
                self._end(move, copy.ends)

    @property
    def wants_step(self) -> bool:
        """Whether the engine must step to order copies, or to learn of their end."""
        return bool(self._moves) or self.is_due()

    @property
    def frees_blocks_soon(self) -> bool:
        """Whether leases are on their way off the device."""
        return bool(self._moves)

    def update_stats(self, stats: StatsRecorder) -> None:
        """Record which leases have moved and why, which have not, and how many lie in host memory."""
        super().update_stats(stats)
        stats.gauge("leases_in_host", self._leases.in_host_memory)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        assert all(copy.ends.ranks < self._ranks for copy in self._copies.values()), "a copy should have ended"
        waiting = {move.lease.lease_id for copy in self._copies.values() for move in copy.moves}
        assert waiting == self._moves.keys(), "a move would never end"

    def _chosen(self) -> Iterator[tuple[MovableLease[Leased], str]]:
        """Yield the leases to move now, and why: the oldest first, until leases hold no more than their share."""
        is_short = self._is_short()
        above = self._blocks.leased - self._most_leased * self._blocks.total
        if not is_short:
            above -= sum(len(move.lease.held.blocks) for move in self._moves.copy().values())
            if above <= 0:
                return
        too_large = self._least_too_large
        most = _CHOSEN_AT_ONCE if too_large == math.inf else _CHOSEN_WHILE_FULL
        for lease in self._leases.movable(0.0 if is_short else _GRACE_S, most, frozenset(self._moves.copy())):
            if (blocks := len(lease.held.blocks)) >= too_large or not self._checksums.are_taken(lease.lease_id):
                continue
            yield lease, "short" if is_short else "share"
            above -= blocks
            if not is_short and above <= 0:
                return

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

    def _order(self, tier: HostTier) -> tuple[StoreOrder, ...]:
        """Begin moves; return the copies of those blocks that host memory lacks."""
        begun: list[_Move] = []
        blocks = 0
        for lease, why in self._chosen():
            held = lease.held.blocks
            if len(held) >= self._least_too_large or tier.will_hold(block.block_hash for block in held):
                continue
            loan = tier.loans.lend_for_copies(held)
            if loan is None:
                self.counts["lease_moves", "full"] += 1
                self._stays(len(held), tier.pool.slots)
                continue
            begun.append(_Move(lease, why, loan, ids_of(held)))
            if (blocks := blocks + len(held)) >= _BLOCKS_AT_ONCE:
                break
        copied = tuple(move for move in begun if move.loan.new)
        self._moves |= {move.lease.lease_id: move for move in copied}
        for move in begun:
            if not move.loan.new:
                self._end(move, StoreEnds(self._ranks))
        if not copied:
            return ()
        store_id, self._next_store = self._next_store, self._next_store - 1
        self._copies[store_id] = _Copy(copied)
        copies = BlockMoves(*np.concatenate([move.copies() for move in copied], axis=1))
        return (StoreOrder(store_id, copies),)

    def _stays(self, blocks: int, slots: int) -> None:
        """Note that a lease of so many blocks finds no room in host memory of so many slots."""
        self._rest(blocks)
        why = f"which has {slots} blocks in all" if blocks > slots else "because leases and loads use its blocks"
        self._warnings.warn(
            "full",
            f"PDConnector: a lease of {blocks} blocks stays on the device: host memory has no room for it, {why}. "
            "Raise cpu_bytes_to_use",
        )

    def _end(self, move: _Move, ends: StoreEnds) -> None:
        """Let a lease point to host memory, unless its copies have failed, or it was read or has ended meanwhile.

        What was copied can be found by others from now on.
        """
        lease_id, blocks, loan, loans = move.lease.lease_id, move.lease.held.blocks, move.loan, self.tier.loans
        self._moves.pop(lease_id, None)
        slots = dict(zip(move.ids.tolist(), loan.slots.tolist(), strict=True))
        before = None if ends.failed else self._leases.move(lease_id, Leased(hosts=loan.hosts), slots)
        if before is not None:
            loans.publish(blocks, loan)
            self._blocks.release(blocks)  # those that the prompt ends with are evicted first
            loans.take_back(before.hosts)  # that it was read in while the prompt was loaded
            self.counts["lease_blocks_moved", "copied"] += len(loan.new)
            self.counts["lease_blocks_moved", "present"] += len(blocks) - len(loan.new)
            self.counts["lease_moves", move.why] += 1
            return
        loans.take_back(loan.hosts, loan.new if ends.unsettled else ())
        how = "failed" if ends.failed else "read" if self._leases.still_valid([lease_id]) else "ended"
        self.counts["lease_moves", how] += 1
