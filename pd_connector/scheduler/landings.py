"""Landings: prompts that are pulled into this engine's host memory, because the device has no room for them yet.

A request that vLLM asks about passes through these states, each at most once:

    asked about --- worth it ---> slots are lent ---> landing --- all ranks have ended ---> landed: a host hit
        |                               |                '--- a rank has failed ---> refused, as a pull that fails
        '--- room on the device         '--- no slots ---> pulled to the device

Slots are lent to one prompt after the other, a share of them in each step (see ``step_share``). While a prompt lands,
its request owns no block of the device, and vLLM goes on with others. The slots belong to the
landing until every rank has ended its read: also if the request leaves, or the cache is reset, meanwhile. A rank whose
read has failed reports it only when nothing writes to the slots any more.

Everything runs on the scheduler's thread.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from pd_connector.orders import LandingEnds, Orders, PullOrder, Report
from pd_connector.scheduler import step_share
from pd_connector.scheduler.consumer import Consumer
from pd_connector.scheduler.host_tier import HostTier
from pd_connector.scheduler.roles import SchedulerRole
from pd_connector.scheduler.step_share import blocks_a_step
from pd_connector.stats import StatsRecorder
from pd_connector.vllm.block_pools import HostHit
from pd_connector.vllm.cache_specs import Retention, blocks_for
from pd_connector.vllm.device_blocks import DeviceBlocks

if TYPE_CHECKING:
    from pd_connector.vllm.types import KVCacheBlock, Request

logger = logging.getLogger(__name__)

LandingMode = Literal["auto", "always"]  # if the device has no room, or each that may

#: Landings at a time. Others wait until one of them ends; the pull timeout counts from the order on.
_MAX_UNDER_WAY = 16


class Fallback(StrEnum):
    """Why a prompt was not pulled to host memory. The values are labels of the metric."""

    FULL = "full"  # too few slots were free
    TOO_LARGE = "too_large"  # all of them would not do


@dataclass(slots=True)
class _Landing:
    request: "Request"
    hit: HostHit  # what the request is given: what host memory held before, and what lands
    first_token: int  # of those that land
    ends: LandingEnds
    is_wanted: bool = True  # the request has not left, and the contents are valid


@dataclass(slots=True)
class _Preparation:
    """A landing to be, for which slots are lent."""

    request: "Request"
    computed_tokens: int  # that the device holds
    tokens: range  # those to pull
    held: HostHit | None  # what host memory holds between the two, lent
    tables: "Sequence[tuple[range, int]]"  # by cache group, see ``_numbers``
    slots: "list[KVCacheBlock]" = field(default_factory=list)  # lent so far
    ids: list[int] = field(default_factory=list)  # of those blocks

    @property
    def lacks(self) -> int:
        """Number of slots that it needs, and has not."""
        return sum(len(numbers) for numbers, _ in self.tables) - len(self.slots)


class Landings(SchedulerRole):
    """Owns the landings under way, whose slots the host tier lends it."""

    def __init__(
        self,
        mode: LandingMode,
        tier: HostTier,
        consumer: Consumer,
        device: DeviceBlocks,
        groups: Sequence[Retention],
        ranks: int,
    ) -> None:
        """Start with none. ``groups``: what vLLM keeps of a request in every cache group; ``ranks``: of the engine."""
        self._mode = mode
        self._tier = tier
        self._consumer = consumer
        self._device = device
        self._groups = groups
        self._ranks = ranks
        self._preparing: _Preparation | None = None
        self._share = step_share.MOST_BLOCKS  # of slots to lend, in this step
        self._had_no_room: set[str] = set()  # requests that are to be told so when they are next asked about
        self._under_way: dict[str, _Landing] = {}
        self._orders: list[PullOrder] = []
        self._fell_back: dict[str, Fallback] = {}  # by request
        self._counts: Counter[str] = Counter()  # landings by event, since the last update of the statistics
        self._fallbacks: Counter[str] = Counter()
        #: Landings by event, and prompts without one by reason, all before the last update of the statistics.
        self.totals: Counter[str] = Counter()

    def must_land(self, request: "Request", computed_tokens: int) -> bool:
        """Return whether a request must wait for its prompt to arrive in host memory; begin that if it can be.

        ``computed_tokens``: those that the device holds already.
        """
        if request.request_id in self._under_way or self._prepares(request):
            return True
        if request.request_id in self._had_no_room:
            self._had_no_room.remove(request.request_id)
            return False
        if not self._consumer.may_land(request) or (self._mode == "auto" and self._has_room(request)):
            return False
        if self._preparing is not None or self._share <= 0 or len(self._under_way) >= _MAX_UNDER_WAY:
            return True
        return self._start(request, computed_tokens)

    def step_orders(self, scheduled: Mapping[str, int]) -> Orders:
        """Return the landings since the last step."""
        self._share = blocks_a_step(scheduled, self._tier.block_tokens)
        self._go_on()
        orders, self._orders = tuple(self._orders), []
        return Orders(landings=orders)

    def settled(self, request_ids: set[str], failed: set[str], report: Report) -> None:
        """End the landings that all ranks have reported."""
        for request_id, ends in report.landings.items():
            landing = self._under_way.get(request_id)
            if landing is None:
                logger.error("PDConnector: ignored that the landing of %s ended twice, which is a bug", request_id)
                continue
            landing.ends += ends
            if landing.ends.ranks >= self._ranks:
                del self._under_way[request_id]
                self._end(landing)

    def finish(self, request: "Request", block_ids: Sequence[Sequence[int]]) -> None:
        """Forget a request. Its landing goes on to the end, for nobody."""
        self._fell_back.pop(request.request_id, None)
        self._had_no_room.discard(request.request_id)
        if self._prepares(request):
            self._give_up()
        landing = self._under_way.get(request.request_id)
        if landing is not None:
            landing.is_wanted = False

    @property
    def wants_step(self) -> bool:
        """Whether the engine must step even without requests, to begin landings, and to learn how they end."""
        return bool(self._under_way) or self._preparing is not None

    @property
    def under_way(self) -> int:
        """Number of landings under way."""
        return len(self._under_way)

    def update_stats(self, stats: StatsRecorder) -> None:
        """Record how landings have ended, and why there was none."""
        for event, number in self._counts.items():
            stats.count("landings", number, event)
        for reason, number in self._fallbacks.items():
            stats.count("landing_fallbacks", number, reason)
        self.totals.update(self._counts)
        self.totals.update(self._fallbacks)
        self._counts.clear()
        self._fallbacks.clear()
        stats.gauge("landings_under_way", self.under_way)

    def reset(self) -> bool:
        """Make what is landing impossible to use: it is no longer valid. Its request computes its prompt."""
        if self._preparing is not None:  # with what host memory held; it begins anew
            self._give_up()
        for landing in self._under_way.values():
            landing.is_wanted = False
        return True

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        assert all(landing.ends.ranks < self._ranks for landing in self._under_way.values()), "one should have ended"
        hits = [each.hit.blocks for each in self._under_way.values()]
        if (preparing := self._preparing) is not None:
            hits.append(_lent(preparing))
            assert preparing.lacks, "a landing should have begun"
            assert preparing.request.request_id not in self._under_way, "a prompt would land twice"
        assert self._tier.loans.are_lent(hits), "slots that prompts are pulled to are not lent"
        assert self._under_way.keys() == self._consumer.landing, "the pulls that land are not the landings"

    def _has_room(self, request: "Request") -> bool:
        """Return whether the device has the blocks, besides those that vLLM keeps for requests that run."""
        spare = len(self._groups) + self._device.total // 50
        return self._device.free >= blocks_for(self._groups, request.num_tokens) + spare

    def _start(self, request: "Request", computed_tokens: int) -> bool:
        """Begin to lend slots for what is missing; return False if the request is to go on without."""
        end = request.num_prompt_tokens - 1
        held = self._tier.hit(request, computed_tokens)
        first = computed_tokens + (held.tokens if held is not None else 0)
        if first >= end:
            return False
        tables = [_numbers(kept, first, end) for kept in self._groups]
        preparation = _Preparation(request, computed_tokens, range(first, end), held, tables)
        needed = preparation.lacks
        if self._tier.loans.lend(_lent(preparation), 0, beside=needed) is None:
            self._fall_back(request, needed)
            return False
        self._preparing = preparation
        self._go_on()
        return True

    def _prepares(self, request: "Request") -> bool:
        return self._preparing is not None and self._preparing.request is request

    def _go_on(self) -> None:
        """Lend slots for the next landing, as far as this step's share goes, and begin it when it has all."""
        preparing = self._preparing
        if preparing is None:
            return
        number = min(preparing.lacks, self._share)
        taken = self._tier.loans.lend((), number)
        if taken is None:  # something else has taken the slots meanwhile
            self._had_no_room.add(preparing.request.request_id)
            self._fall_back(preparing.request, preparing.lacks)
            self._give_up()
            return
        self._share -= number
        preparing.slots.extend(taken)
        preparing.ids.extend([int(block.block_id) for block in taken])
        if preparing.lacks:
            return
        if not self._consumer.may_land(preparing.request):  # its lease is lost, for example
            self._give_up()
            return
        self._preparing = None
        self._begin(preparing)

    def _begin(self, prepared: _Preparation) -> None:
        """Order a landing whose slots are lent."""
        request, tokens = prepared.request, prepared.tokens
        self._fell_back.pop(request.request_id, None)
        hit, block_ids = self._lay_out(prepared)
        self._orders.append(self._consumer.start_landing(request, block_ids, tokens))
        self._under_way[request.request_id] = _Landing(request, hit, tokens.start, LandingEnds(0))

    def _give_up(self) -> None:
        """Give back what was lent for the next landing."""
        assert self._preparing is not None, "no landing is about to begin"
        preparing, self._preparing = self._preparing, None
        self._tier.loans.take_back(_lent(preparing))

    def _lay_out(self, prepared: _Preparation) -> tuple[HostHit, tuple[tuple[int, ...], ...]]:
        """Return what a request will find in host memory, and the block table of each cache group to pull into."""
        null, taken = self._tier.null_block, 0
        groups, block_ids = [], []
        for group, (numbers, holes) in enumerate(prepared.tables):
            own = slice(taken, taken + len(numbers))
            taken = own.stop
            before = prepared.held.groups[group] if prepared.held is not None else ()
            groups.append((*before, *[null] * holes, *prepared.slots[own]))
            block_ids.append((*[0] * numbers.start, *prepared.ids[own]))
        first = prepared.computed_tokens
        return HostHit(first, prepared.tokens.stop - first, tuple(groups)), tuple(block_ids)

    def _fall_back(self, request: "Request", needed: int) -> None:
        reason = Fallback.TOO_LARGE if needed > self._tier.slots else Fallback.FULL
        if self._fell_back.get(request.request_id) is not reason:
            self._fell_back[request.request_id] = reason
            self._fallbacks[reason] += 1

    def _end(self, landing: _Landing) -> None:
        request_id, is_wanted = landing.request.request_id, landing.is_wanted
        self._consumer.end_landing(request_id, failed=landing.ends.failed)
        if landing.ends.failed or not is_wanted:
            self._counts["failed" if landing.ends.failed else "left"] += 1
            self._tier.loans.take_back(landing.hit.blocks)
        else:
            self._counts["landed"] += 1
            self._tier.landed(landing.request, landing.hit, landing.first_token)


def _numbers(kept: Retention, first: int, end: int) -> tuple[range, int]:
    """Return the numbers of the blocks that tokens ``first`` to ``end`` (exclusive) need in a cache group.

    And how many blocks before those need not be held, because a sliding window has passed them at ``end``.
    """
    size = kept.block_tokens
    first_block, end_block = first // size, -(-end // size)
    needed = min(max(kept.first_token(end) // size, first_block), end_block)
    return range(needed, end_block), needed - first_block


def _lent(preparation: _Preparation) -> "tuple[KVCacheBlock, ...]":
    """Return all host blocks that are lent for a landing to be."""
    held = preparation.held.blocks if preparation.held is not None else ()
    return (*held, *preparation.slots)
