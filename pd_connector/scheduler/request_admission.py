"""Keeps requests and leases from blocking each other when blocks are short: who waits, and which lease gives way.

Leased blocks are free only when a decode engine has read them, and it reads when it has blocks of its own. An engine
that prefills for others and also decodes could fill up with leases whose readers wait in its own queue, and two such
engines with leases of each other. These rules prevent that:

- Prompts for others are not started while leases, with those that follow from prompts being computed, would exceed
  their share of the blocks. So there are always blocks for requests that pull. (Only if the engine also decodes.)
- While a request waits for blocks, requests that pull go first: they end leases. (Only if the engine also decodes.)
- When requests wait for blocks and leases exceed their share, or nothing was given blocks for a lease's time to live,
  the oldest lease that is not being read gives way, one in each step until a request gets its blocks.
- Requests whose tokens have arrived go before those that lack blocks where vLLM does not see to it. It looks no further
  than the first request that finds no blocks, and such requests hold theirs.
- A request whose tokens have not arrived after all has lost its blocks, and may need more to compute them: windows,
  drafts and states take more then. If it finds too few, those that hold blocks and whose wait is over go first.

Nobody waits for ever by these rules. The second one holds a request back for a bounded time. By the first one it waits
for leases that are read, given up (``queue_timeout_s`` of the decode engine), or give way; meanwhile, no prefixes are
lent (``wants_blocks``).
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pd_connector.orders import Orders, Report
from pd_connector.params import is_decode_leg, is_prefill_leg
from pd_connector.scheduler.block_demand import BlockDemand
from pd_connector.scheduler.decode.consumer import Consumer
from pd_connector.scheduler.prefill.leases import LeaseTable
from pd_connector.scheduler.scheduler_role import SchedulerRole
from pd_connector.vllm.block_pools import Leased
from transfer.control.limits import ThrottledWarnings

if TYPE_CHECKING:
    from pd_connector.vllm.types import KVCacheBlocks, Request

logger = logging.getLogger(__name__)

_PATIENCE_S = 1.0  # for which requests wait for blocks before a lease above the leases' share gives way
_LOG_INTERVAL_S = 10.0


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """What leases may take of an engine's blocks, and for how long."""

    leased_fraction: float  # of the blocks, 0 to 1
    stall_s: float  # leases give way if no request was given blocks for so long while some wait
    prefill_wait_s: float  # for which a prompt for others waits at most for requests that pull; others: ``stall_s``


class RequestAdmission(SchedulerRole):
    """Tells requests to wait and revokes leases. Owns neither blocks nor leases."""

    def __init__(
        self,
        limits: AdmissionLimits,
        demand: BlockDemand,
        leases: LeaseTable[Leased],
        consumer: Consumer | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        loaded_first: bool = True,
    ) -> None:
        """Start with nothing waiting.

        Args:
            limits: of leases.
            demand: of the device's blocks, which count those that are leased.
            leases: of this engine.
            consumer: the engine's role as a decode engine, if it also prefills for others.
            clock: a monotonic clock, in seconds.
            loaded_first: whether vLLM itself gives requests whose tokens have arrived their turn before others.
        """
        self._limits = limits
        self._demand = demand
        self._blocks = demand.blocks
        self._leases = leases
        self._consumer = consumer
        self._clock = clock
        self._loaded_first = loaded_first
        self._warnings = ThrottledWarnings(logger, _LOG_INTERVAL_S)
        self._prefills: dict[str, int] = {}  # blocks of the prompts that are being computed for others, by request
        self._held_since: dict[str, float] = {}  # of requests that were told to wait
        self._has_allocated = False  # whether a request was given blocks in this step
        self._loading: set[str] = set()  # requests that hold blocks into which tokens arrive
        self._arrived: dict[str, bool] = {}  # those whose tokens have; whether they have waited for a whole step since
        self._failed: set[str] = set()  # those whose tokens have not
        self._freed: set[str] = set()  # those of them whose blocks vLLM has freed
        self._holds = False  # whether a request was told to wait in this step
        self._holds_prefills = False  # in this step: those behind the first one that is held wait too
        #: Whether the last step ended with requests that were not given blocks, or were told to wait for them.
        self.wants_blocks = False
        self._is_short = False  # whether the last step ended with a request that was not given blocks
        self._stalled_since: float | None = None  # when requests began to wait without any of them getting blocks

    def must_wait(self, request: "Request", computed_tokens: int) -> bool:
        """Return whether others go first, or leases would exceed their share."""
        has_failed = request.request_id in self._failed
        if has_failed:
            self._freed.add(request.request_id)  # vLLM does not ask about requests that hold blocks
        if (has_failed or not self._loaded_first) and self._must_let_pass(request):
            self._holds = True
            return True
        if has_failed:
            return False  # vLLM keeps blocks for it, so that others find none
        if self._consumer is None or self._consumer.awaits_blocks(request):
            return False
        self._prefills.pop(request.request_id, None)  # it was preempted
        waits = self._pulls_go_first(request) or self._exceeds_share(request)
        if waits:
            self._holds = True
            if request.request_id not in self._held_since:
                self._held_since[request.request_id] = self._clock()
        return waits

    def is_waiting(self, request: "Request") -> bool:
        """Return whether a prompt waits behind one that this step has held back: leases would exceed their share."""
        return self._holds_prefills and _is_for_others(request) and request.request_id in self._held_since

    def allocated(self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int) -> int:
        """Note that a request was given blocks. Returns 0: this role brings no tokens."""
        self._stalled_since = None
        self._has_allocated = True
        self._held_since.pop(request.request_id, None)
        self._drop_arrived(request)
        if _is_for_others(request):
            self._prefills[request.request_id] = self._demand.blocks_of(request)
        return 0

    def awaits_tokens(self, request: "Request") -> None:
        """Note that a request holds blocks into which tokens arrive, from host memory or from a prefill engine."""
        self._loading.add(request.request_id)

    def step_orders(self, scheduled: Mapping[str, int]) -> Orders:
        """Let a lease give way if requests wait for blocks, see above. Returns no orders."""
        needed = self._needed_blocks()
        self._is_short = needed > 0 and not self._demand.has_room(needed)
        self.wants_blocks = self._is_short or self._holds
        if not (self._is_short or self._holds):
            self._stalled_since = None
        elif self._stalled_since is None:
            self._stalled_since = self._clock()
        elif self._must_revoke(self._clock() - self._stalled_since, needed):
            self._revoke(self._clock() - self._stalled_since)
        self._has_allocated, self._holds, self._holds_prefills = False, False, False
        self._arrived = dict.fromkeys(self._arrived, True)
        return Orders()

    def settled(self, request_ids: set[str], failed: set[str], report: Report) -> None:
        """Note whose tokens have arrived. vLLM does not ask about them again, but they may need another block."""
        self._arrived |= dict.fromkeys(self._loading & request_ids, False)
        self._failed |= self._loading & failed
        self._loading -= request_ids

    def finish(self, request: "Request", block_ids: Sequence[Sequence[int]]) -> dict[str, Any] | None:
        """Forget a request."""
        self._prefills.pop(request.request_id, None)
        self._held_since.pop(request.request_id, None)
        self._loading.discard(request.request_id)
        self._drop_arrived(request)
        return None

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        assert not self._prefills.keys() & self._held_since.keys(), "a request has blocks and is told to wait"
        assert self._consumer is not None or not self._held_since, "a mere prefill engine makes requests wait"
        assert self._freed <= self._failed <= self._arrived.keys(), "requests are waited for that have gone on"

    def _drop_arrived(self, request: "Request") -> None:
        self._arrived.pop(request.request_id, None)
        self._failed.discard(request.request_id)
        self._freed.discard(request.request_id)

    def _must_let_pass(self, request: "Request") -> bool:
        """Return whether requests are behind this one that have waited for a whole step since their tokens arrived.

        Not of one that finds blocks: vLLM goes on behind it. Some schedulers leave one that has arrived aside for long,
        for other reasons: because of its adapter, or to balance the ranks. One that has failed does not wait for those
        without blocks, so that no two wait for each other.
        """
        if self._demand.left_out is not request and self._demand.has_room_for(request):
            return False
        overdue = {request_id for request_id, waited in self._arrived.items() if waited}
        return bool(overdue - self._freed if request.request_id in self._failed else overdue)

    def _pulls_go_first(self, request: "Request") -> bool:
        if not self._is_short or self._consumer is None or not self._consumer.waiting:
            return False
        now = self._clock()
        # A prompt for others takes blocks and ends as another lease, which is what those that pull must not wait for.
        longest_s = self._limits.prefill_wait_s if _is_for_others(request) else self._limits.stall_s
        return now - self._held_since.get(request.request_id, now) < longest_s

    def _exceeds_share(self, request: "Request") -> bool:
        if not _is_for_others(request):
            return False
        if not self._holds_prefills:
            taken = self._blocks.leased + sum(self._prefills.values())
            share = self._limits.leased_fraction * self._blocks.total
            # Later ones wait too, so that short prompts do not keep a long one waiting for ever.
            self._holds_prefills = taken > 0 and taken + self._demand.blocks_of(request) > share
        return self._holds_prefills

    def _needed_blocks(self) -> int:
        """Return how many blocks the first request needs that this step has given none; 0 if there is none.

        vLLM stops for other reasons than blocks too.
        """
        if (left_out := self._demand.left_out) is not None:
            return self._demand.blocks_of(left_out)
        # Those whose tokens have arrived come first. Behind one that finds no block, nobody is asked.
        return int(any(self._arrived.values()) and not self._has_allocated)

    def _must_revoke(self, stalled_s: float, needed: int) -> bool:
        if needed and not self._demand.has_room(needed - self._blocks.leased):
            return False  # it would help nobody
        exceeds = self._is_short and self._blocks.leased > self._limits.leased_fraction * self._blocks.total
        return stalled_s >= (min(_PATIENCE_S, self._limits.stall_s) if exceeds else self._limits.stall_s)

    def _revoke(self, stalled_s: float) -> None:
        leased = self._blocks.leased
        age_s = self._leases.revoke_oldest()
        if age_s is not None:
            self._warnings.warn(
                "revoked",
                f"PDConnector: a lease of {age_s:.0f} s, which nobody was reading, gave way: requests here have waited "
                f"{stalled_s:.0f} s for blocks, and leases hold {leased} of {self._blocks.total}. A decode engine is "
                "overloaded, paused or gone, or this engine has too few blocks",
            )


def _is_for_others(request: "Request") -> bool:
    return is_prefill_leg(request.kv_transfer_params) and not is_decode_leg(request.kv_transfer_params)
