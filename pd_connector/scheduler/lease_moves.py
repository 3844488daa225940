"""Moves leases from the device to host memory, so that leases that nobody reads yet hold no device blocks.

    on the device --- chosen ---> being copied --- all ranks have reported, and nobody reads ---> in host memory
          ^                            '--- a rank has failed, a reader has come, or the lease has ended --.
          '------------------------------------------------------------------------------------------------'

A lease is chosen when requests wait for blocks, or when leases hold more than a share of the device's. Blocks that host
memory holds already are not copied: the lease takes references to their slots. While blocks are copied the lease holds
its device blocks, so that they do not change. Whether a reader has come is asked when the copy has ended
(``LeaseTable.move``), in one step with the move. Everything runs on the scheduler's thread, but for ``is_due``.

Leases are as large as prompts, and many copies may end at once. So a step begins moves of its share of blocks only (see
``step_share``), and lets go of as many; a lease that has more moves over several steps.
"""

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from pd_connector.orders import Orders, Report, StoreEnds, StoreOrder
from pd_connector.scheduler import step_share
from pd_connector.scheduler.checksum_table import ChecksumTable
from pd_connector.scheduler.host_tier import HostTier
from pd_connector.scheduler.leases import LeaseTable, MovableLease
from pd_connector.scheduler.moving_lease import MovingLease, Portion, block_moves, device_blocks
from pd_connector.scheduler.roles import SchedulerRole
from pd_connector.scheduler.step_share import blocks_a_step
from pd_connector.stats import StatsRecorder
from pd_connector.vllm.block_pools import HostBlocks, Leased
from pd_connector.vllm.device_blocks import DeviceBlocks
from transfer.control.limits import ThrottledWarnings

logger = logging.getLogger(__name__)

#: For which a lease is left to its reader before it moves, unless requests wait for blocks.
_GRACE_S = 0.25
#: After host memory had no room, or a copy failed, until leases are chosen again.
_REST_S = 0.5
#: Leases that are looked at in one step, which must not take long; and while the oldest of them may all be too large.
_CHOSEN_AT_ONCE = 16
_CHOSEN_WHILE_FULL = 64
_LOG_INTERVAL_S = 10.0


@dataclass(slots=True)
class _Copy:
    """What one store copies. If it fails, all of these leases stay."""

    portions: tuple[Portion, ...]
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
        self._moves: dict[str, MovingLease] = {}  # under way, by lease
        self._lending: MovingLease | None = None  # the one that has no host blocks yet for all of its blocks
        self._copies: dict[int, _Copy] = {}  # under way, by the id of their store
        self._arrived: deque[MovingLease] = deque()  # of those under way, whose copies all ranks have reported
        self._leaving: MovingLease | None = None  # has moved, or stays, and has blocks to let go of
        self._may_let_go = step_share.MOST_BLOCKS  # of blocks, in this step
        self._hurries = False
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
        if self._leaving is not None:
            self._leaving.has_ended(held)
        self._tier.loans.take_back(held.blocks)

    def hurry(self) -> None:
        """Move as much in the next step as if nothing ran: a request that runs waits for the blocks."""
        self._hurries = True

    def is_due(self) -> bool:
        """Return whether leases are to be moved now. Any thread."""
        return self._tier is not None and any(True for _ in self._chosen())

    def step_orders(self, scheduled: Mapping[str, int]) -> Orders:
        """End moves that earlier steps have left, choose leases, and order the copies of their blocks."""
        if self._tier is None:
            return Orders()
        are_awaited, self._hurries = self._hurries or self._is_short(), False
        most = self._may_let_go = blocks_a_step(scheduled, self._tier.block_tokens, are_awaited=are_awaited)
        self._end_arrived()
        return Orders(stores=self._order(self._tier, most))

    def settled(self, request_ids: set[str], failed: set[str], report: Report) -> None:
        """End the moves whose copies all ranks have reported, as far as this step may."""
        for store_id, ends in report.stores.items():
            if (copy := self._copies.get(store_id)) is None:
                continue
            copy.ends += ends
            if copy.ends.ranks < self._ranks:
                continue
            del self._copies[store_id]
            if copy.ends.failed:
                self._rest(0)
            for portion in copy.portions:
                portion.lease.end_copy(portion, copy.ends)
                if portion.lease.stays and portion.lease is self._lending:
                    self._lending = None
                self._note_arrival(portion.lease)
        self._end_arrived()

    @property
    def wants_step(self) -> bool:
        """Whether the engine must step to order copies, or to learn of their end."""
        return bool(self._moves) or self._leaving is not None or self.is_due()

    @property
    def frees_blocks_soon(self) -> bool:
        """Whether leases are on their way off the device."""
        return any(move.leaves_device for move in self._under_way())

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

    def release_device_blocks(self) -> None:
        """Let go of all that leases have left on the device; it is no longer valid, and neither are its copies."""
        if self._leaving is not None:
            self._leaving.forget_copies()
            self._leaving.let_go(self._blocks, len(self._leaving.blocks))
            self._leaving = None

    def reset(self) -> bool:
        """Make sure that nothing is found any more of what is moving: leases have ended, and so will their moves."""
        self.release_device_blocks()
        return True

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        assert all(copy.ends.ranks < self._ranks for copy in self._copies.values()), "a copy should have ended"
        assert all(move.has_arrived for move in self._arrived), "a move is to end before its copy has"
        waiting = {id(move) for move in self._arrived}
        waiting |= {id(portion.lease) for copy in self._copies.values() for portion in copy.portions}
        waiting |= {id(self._lending)}
        assert all(id(move) in waiting for move in self._moves.values()), "a move would never end"
        assert self._lending is None or self._lending.lease_id in self._moves, "a move has begun that is not under way"
        assert self._leaving is None or not self._leaving.is_done, "a move should have ended"

    def _chosen(self) -> Iterator[tuple[MovableLease[Leased], str]]:
        """Yield the leases to move now, and why: the oldest first, until leases hold no more than their share."""
        is_short = self._is_short()
        above = self._blocks.leased - self._most_leased * self._blocks.total
        if not is_short:
            above -= sum(move.leaves_device for move in self._under_way())
            if above <= 0:
                return
        too_large = self._least_too_large
        most = _CHOSEN_AT_ONCE if too_large == math.inf else _CHOSEN_WHILE_FULL
        for lease in self._leases.movable(0.0 if is_short else _GRACE_S, most, frozenset(self._moves.copy())):
            if (blocks := len(device_blocks(lease))) >= too_large or not self._checksums.are_taken(lease.lease_id):
                continue
            yield lease, "short" if is_short else "share"
            above -= blocks
            if not is_short and above <= 0:
                return

    def _under_way(self) -> tuple[MovingLease, ...]:
        """Return the moves that have begun, and not let go of everything."""
        leaving = self._leaving
        return (*self._moves.copy().values(), *((leaving,) if leaving is not None else ()))

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

    def _order(self, tier: HostTier, most: int) -> tuple[StoreOrder, ...]:
        """Begin or go on with moves of at most so many blocks; return the copies of those that host memory lacks."""
        if self._lending is not None and not self._leases.can_move(self._lending.lease_id):
            self._give_up_lending(self._why_not(self._lending))
        portions: list[Portion] = []
        others = self._candidates(tier)
        while most > 0 and (move := self._lending or next(others, None)) is not None:
            if tier.is_storing(move.next_blocks(most)):
                if move is self._lending:
                    break
                continue
            self._lending = self._moves[move.lease_id] = move
            portion = move.lend(most)
            if portion is None:  # something else has taken the slots since the move began
                self._stays(len(move.blocks), tier.slots)
                self._give_up_lending("full")
                continue
            most -= portion.blocks
            if portion.new:
                portions.append(portion)
            if move.is_lent:
                self._lending = None
                self._note_arrival(move)
        if not portions:
            return ()
        store_id, self._next_store = self._next_store, self._next_store - 1
        self._copies[store_id] = _Copy(tuple(portions))
        return (StoreOrder(store_id, block_moves(portions)),)

    def _candidates(self, tier: HostTier) -> Iterator[MovingLease]:
        """Yield the leases that are to move now and have room in host memory."""
        for lease, why in self._chosen():
            blocks = device_blocks(lease)
            if len(blocks) >= self._least_too_large:
                continue
            if tier.loans.has_room(blocks):
                yield MovingLease(lease, why, tier.loans)
            else:
                self._events["full"] += 1
                self._stays(len(blocks), tier.slots)

    def _give_up_lending(self, event: str) -> None:
        """Let the lease stay of which not all blocks have begun to move."""
        assert self._lending is not None, "no move is at its beginning"
        move, self._lending = self._lending, None
        move.stay(event)
        self._note_arrival(move)

    def _note_arrival(self, move: MovingLease) -> None:
        """Have a move ended if it can be. Called whenever one of its copies has ended, and when none is to follow."""
        if move.has_arrived:
            self._arrived.append(move)

    def _stays(self, blocks: int, slots: int) -> None:
        """Note that a lease of so many blocks finds no room in host memory of so many slots."""
        self._rest(blocks)
        why = f"which has {slots} blocks in all" if blocks > slots else "because leases and loads use its blocks"
        self._warnings.warn(
            "full",
            f"PDConnector: a lease of {blocks} blocks stays on the device: host memory has no room for it, {why}. "
            "Raise cpu_bytes_to_use",
        )

    def _end_arrived(self) -> None:
        """End moves whose copies have arrived, until this step has let go of enough blocks."""
        while self._may_let_go > 0:
            if self._leaving is None:
                if not self._arrived:
                    break
                self._leaving = self._arrived.popleft()
                self._end(self._leaving)
            self._may_let_go -= self._leaving.let_go(self._blocks, self._may_let_go)
            if self._leaving.is_done:
                self._leaving = None

    def _end(self, move: MovingLease) -> None:
        """Let a lease point to host memory, if its blocks have arrived there and nobody reads it on the device."""
        del self._moves[move.lease_id]
        if not move.stays:
            held, slots = move.host_blocks()
            if self._leases.move(move.lease_id, held, slots) is not None:
                move.has_moved(held)
                self._copied += move.copied
                self._present += len(move.blocks) - move.copied
            else:
                move.stay(self._why_not(move))
        self._events[move.event] += 1

    def _why_not(self, move: MovingLease) -> str:
        return "read" if self._leases.still_valid([move.lease_id]) else "ended"
