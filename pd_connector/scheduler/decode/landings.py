"""Landings: prompts that are pulled into this engine's host memory, because the device has no room for them yet.

A request that vLLM asks about passes through these states, each at most once:

    asked about --- worth it ---> slots are lent ---> landing --- all ranks have ended ---> landed: a host hit
        |                               |                '--- a rank has failed ---> refused, as a pull that fails
        '--- room on the device         '--- no slots ---> pulled to the device

States at borders of blocks land as well, if there are slots for them: only there a longer prompt finds its beginning
(see ``border_states``). Its request does not load them.

While a prompt lands, its request owns no block of the device, and vLLM goes on with others. The slots belong to the
landing until every rank has ended its read: also if the request leaves, or the cache is reset, meanwhile. A rank whose
read has failed reports it only when nothing writes to the slots any more.

Everything runs on the scheduler's thread.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from pd_connector.orders import Orders, PullOrder, RankEnds, Report
from pd_connector.params import RemotePrefill
from pd_connector.scheduler.block_demand import BlockDemand
from pd_connector.scheduler.decode.consumer import Consumer
from pd_connector.scheduler.host.landed_prompts import BorderBlocks
from pd_connector.scheduler.host.tier import HostTier
from pd_connector.scheduler.scheduler_role import SchedulerRole, ended
from pd_connector.stats import StatsRecorder
from pd_connector.vllm.block_pools import HostHit
from pd_connector.vllm.device_blocks import HeldBlocks

if TYPE_CHECKING:
    from pd_connector.vllm.types import Request

logger = logging.getLogger(__name__)

LandingMode = Literal["auto", "always"]  # if the device has no room, or each that may

#: Landings at a time from one prefill engine, whose session takes a few at once: the pull timeout counts from the order
#: on. Others from there wait until one of them ends, but not those from other engines: it may hang.
_MAX_UNDER_WAY = 16


class Fallback(StrEnum):
    """Why a prompt was not pulled to host memory. The values are labels of the metric."""

    FULL = "full"  # too few slots were free
    TOO_LARGE = "too_large"  # all of them would not do


@dataclass(frozen=True, slots=True)
class _FellBack:
    reason: Fallback
    free: int  # slots at that time
    computed_tokens: int  # that the device held


@dataclass(slots=True)
class _Landing:
    request: "Request"
    engine_id: str  # of the prefill engine
    hit: HostHit  # what the request is given: what host memory held before, and what lands
    first_token: int  # of those that land
    ends: RankEnds
    borders: BorderBlocks
    is_wanted: bool = True  # the request has not left, and the contents are valid

    @property
    def border_blocks(self) -> HeldBlocks:
        """The slots for states at borders."""
        return tuple(block for *_, block in self.borders)


class Landings(SchedulerRole):
    """Owns the landings under way, whose slots the host tier lends it."""

    def __init__(self, mode: LandingMode, tier: HostTier, consumer: Consumer, demand: BlockDemand, ranks: int) -> None:
        """Start with none. ``demand``: of the device's blocks; ``ranks``: of the engine."""
        logger.info(
            "PDConnector: prompts are pulled to host memory%s, and loaded from there (host_transfers = %s)",
            " if the device has no room for them" if mode == "auto" else "", mode,
        )  # fmt: skip
        self._mode = mode
        self._tier = tier
        self._consumer = consumer
        self._demand = demand
        self._ranks = ranks
        self._under_way: dict[str, _Landing] = {}
        self._from: Counter[str] = Counter()  # how many of them, by prefill engine
        self._orders: list[PullOrder] = []
        self._fell_back: dict[str, _FellBack] = {}  # by request

    def must_wait(self, request: "Request", computed_tokens: int) -> bool:
        """Return whether a request must wait for its prompt to arrive in host memory; begin that if it can be.

        ``computed_tokens``: those that the device holds already.
        """
        if self.is_waiting(request):
            return True
        remote = self._consumer.may_land(request)
        if remote is None or (self._mode == "auto" and self._demand.has_room_for(request)):
            return False
        if self._from[remote.remote_engine_id] >= _MAX_UNDER_WAY:
            return True
        before = self._fell_back.get(request.request_id)
        if before is not None and self._tier.loans.free <= before.free and computed_tokens <= before.computed_tokens:
            return False  # vLLM asks in every step, and looking a long prompt up takes milliseconds
        return self._start(request, remote, computed_tokens)

    def is_waiting(self, request: "Request") -> bool:
        """Return whether a request's prompt is landing."""
        return request.request_id in self._under_way

    def step_orders(self, scheduled: Mapping[str, int]) -> Orders:
        """Return the landings since the last step."""
        orders, self._orders = tuple(self._orders), []
        return Orders(landings=orders)

    def settled(self, request_ids: set[str], failed: set[str], report: Report) -> None:
        """End the landings that all ranks have reported."""
        for landing in ended(self._under_way, report.landings, self._ranks, "the landing of"):
            self._end(landing)

    def finish(self, request: "Request", block_ids: Sequence[Sequence[int]]) -> None:
        """Forget a request. Its landing goes on to the end, for nobody."""
        self._fell_back.pop(request.request_id, None)
        landing = self._under_way.get(request.request_id)
        if landing is not None:
            landing.is_wanted = False

    @property
    def wants_step(self) -> bool:
        """Whether the engine must step even without requests, to learn how landings end."""
        return bool(self._under_way)

    @property
    def under_way(self) -> int:
        """Number of landings under way."""
        return len(self._under_way)

    def update_stats(self, stats: StatsRecorder) -> None:
        """Record how landings have ended, and why there was none."""
        super().update_stats(stats)
        stats.gauge("landings_under_way", self.under_way)

    def reset(self) -> bool:
        """Make what is landing impossible to use: it is no longer valid. Its request computes its prompt."""
        for landing in self._under_way.values():
            landing.is_wanted = False
        return True

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        assert all(landing.ends.ranks < self._ranks for landing in self._under_way.values()), "one should have ended"
        lent = [each.hit.blocks + each.border_blocks for each in self._under_way.values()]
        assert self._from == Counter(each.engine_id for each in self._under_way.values()), "landings are miscounted"
        assert self._tier.loans.are_lent(lent), "slots that prompts are pulled to are not lent"
        assert self._under_way.keys() == self._consumer.landing, "the pulls that land are not the landings"

    def _start(self, request: "Request", remote: RemotePrefill, computed_tokens: int) -> bool:
        """Order a landing of what is missing; return False if the request is to go on without."""
        end = request.num_prompt_tokens - 1
        held = self._tier.pool.find(request, computed_tokens)
        first = computed_tokens + (held.tokens if held is not None else 0)
        if first >= end:
            return False
        tables = [kept.needed_blocks(first, end) for kept in self._demand.groups]
        needed = sum(len(numbers) for numbers, _ in tables)
        borders = self._borders(request, remote, range(first, end), tables)
        before = held.blocks if held is not None else ()
        slots = self._tier.loans.lend(before, needed + len(borders))
        if slots is None and borders:
            borders, slots = [], self._tier.loans.lend(before, needed)
        if slots is None:
            self._fall_back(request, needed, computed_tokens)
            return False
        self._fell_back.pop(request.request_id, None)
        hit, block_ids = self._lay_out(range(computed_tokens, end), held, tables, slots[:needed])
        states = [(*place, slot) for place, slot in zip(borders, slots[needed:], strict=True)]
        for group, entry, slot in states:
            block_ids[group][entry] = slot.block_id
        order = self._consumer.start_landing(request, tuple(map(tuple, block_ids)), range(first, end))
        self._orders.append(order)
        self._under_way[request.request_id] = _Landing(
            request, remote.remote_engine_id, hit, first, RankEnds(0), states
        )  # fmt: skip
        self._from[remote.remote_engine_id] += 1
        return True

    def _borders(
        self, request: "Request", remote: RemotePrefill, tokens: range, tables: Sequence[tuple[range, int]]
    ) -> list[tuple[int, int]]:
        """Return the cache groups and entries of states at borders of ``tokens`` that the request does not need itself.

        ``tables``: what is needed of each group, see ``Retention.needed_blocks``.
        """
        return [
            (group, entry)
            for border in self._consumer.borders(request, remote, tokens)
            for group, (kept, (numbers, _)) in enumerate(zip(self._demand.groups, tables, strict=True))
            if kept.states and (entry := border // kept.block_tokens - 1) >= 0 and entry not in numbers
        ]

    def _lay_out(
        self, tokens: range, held: HostHit | None, tables: Sequence[tuple[range, int]], slots: HeldBlocks
    ) -> tuple[HostHit, list[list[int]]]:
        """Return what a request will find of ``tokens`` in host memory, and the table of each cache group to pull into.

        ``held``: what is there. ``tables``: by cache group, of what is not, see ``Retention.needed_blocks``. ``slots``:
        lent for that.
        """
        null, ids, taken = self._tier.pool.null_block, [block.block_id for block in slots], 0
        groups, block_ids = [], []
        for group, (numbers, holes) in enumerate(tables):
            own = slice(taken, taken + len(numbers))
            taken = own.stop
            before = held.groups[group] if held is not None else ()
            groups.append((*before, *[null] * holes, *slots[own]))
            block_ids.append([*[0] * numbers.start, *ids[own]])
        return HostHit(tokens.start, len(tokens), tuple(groups)), block_ids

    def _fall_back(self, request: "Request", needed: int, computed_tokens: int) -> None:
        reason = Fallback.TOO_LARGE if needed > self._tier.pool.slots else Fallback.FULL
        before = self._fell_back.get(request.request_id)
        self._fell_back[request.request_id] = _FellBack(reason, self._tier.loans.free, computed_tokens)
        if before is None or before.reason is not reason:
            self.counts["landing_fallbacks", reason] += 1

    def _end(self, landing: _Landing) -> None:
        request_id, is_wanted = landing.request.request_id, landing.is_wanted
        self._from -= Counter([landing.engine_id])  # which leaves no engine behind with none
        self._consumer.end_landing(request_id, failed=landing.ends.failed)
        if landing.ends.failed or not is_wanted:
            self.counts["landings", "failed" if landing.ends.failed else "left"] += 1
            self._tier.loans.take_back(landing.hit.blocks)
        else:
            self.counts["landings", "landed"] += 1
            borders = () if landing.ends.lacking_states else landing.borders
            self._tier.landed(landing.request, landing.hit, landing.first_token, borders)
        self._tier.loans.take_back(landing.border_blocks)
