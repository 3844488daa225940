"""The role that has slots of host memory zeroed whose contents nobody can find any more (``host_scrub``).

    in use, or found --- given back, or forgotten by a reset ---> forgotten --- ordered ---> zeroed on every rank
           ^                                                          |
           '--- taken by what overwrites it, or has it zeroed first --'

Workers zero on the thread of their stores, in the order of the orders. So a slot that is taken while it is being zeroed
is zeroed before anything is stored there; a pull to host memory waits for that on the worker's side. What was forgotten
is ordered in portions, the next one when every rank has reported the last: after a reset it may be all of host memory,
and stores, and the step that orders it, would wait for that.
"""

from collections.abc import Mapping

import numpy as np

from pd_connector.orders import Orders, Report, ScrubOrder
from pd_connector.scheduler.roles import SchedulerRole
from pd_connector.stats import StatsRecorder
from pd_connector.vllm.forgotten_slots import ForgottenSlots

#: The most bytes of a portion on a worker: some tens of milliseconds on one core, the longest that a store waits.
PORTION_BYTES = 256 << 20
#: The most slots of a portion. Choosing a slot and handing it over takes a step a fraction of a microsecond.
PORTION_SLOTS = 256


def portion_slots(slot_bytes: int) -> int:
    """Return how many slots of so many bytes on a worker (0: none of its own) make a portion."""
    return max(min(PORTION_SLOTS, PORTION_BYTES // max(slot_bytes, 1)), 1)


class HostScrub(SchedulerRole):
    """Orders what is to be zeroed, and waits for the end of each portion."""

    def __init__(self, forgotten: ForgottenSlots, ranks: int, portion: int) -> None:
        """Order nothing yet.

        Args:
            forgotten: the slots, as the pool of host blocks knows them.
            ranks: number of workers of the engine, each of which zeroes its part of every slot.
            portion: number of slots, at least 1.
        """
        self._forgotten = forgotten
        self._ranks = ranks
        self._portion = portion
        self._under_way: dict[int, int] = {}  # by order: ranks that have reported it
        self._of_portion: int | None = None  # that of them which is a portion; the others are urgent
        self._next = 0
        self._scrubbed = 0  # slots, since the last update of the statistics

    def step_orders(self, scheduled: Mapping[str, int]) -> Orders:
        """Order what must be zeroed before this step's orders write to it, and a portion unless one is under way."""
        orders = []
        if urgent := self._forgotten.take_urgent():
            orders.append(self._order(urgent))
        if self._of_portion is None and (slots := self._forgotten.take(self._portion)):
            self._of_portion = self._next
            orders.append(self._order(slots))
        return Orders(scrubs=tuple(orders))

    def settled(self, request_ids: set[str], failed: set[str], report: Report) -> None:
        """End the orders that all ranks have reported."""
        for scrub_id, ranks in report.scrubs.items():
            self._under_way[scrub_id] += ranks
            if self._under_way[scrub_id] >= self._ranks:
                del self._under_way[scrub_id]
                if scrub_id == self._of_portion:
                    self._of_portion = None

    @property
    def wants_step(self) -> bool:
        """Whether the engine must step to order something, or to learn of its end."""
        return bool(self._forgotten) or bool(self._under_way)

    def update_stats(self, stats: StatsRecorder) -> None:
        """Record how many slots were zeroed."""
        stats.count("host_blocks_scrubbed", self._scrubbed)
        self._scrubbed = 0

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        assert all(ranks < self._ranks for ranks in self._under_way.values()), "an order should have ended"
        assert self._of_portion is None or self._of_portion in self._under_way, "a portion is lost"

    def _order(self, slots: tuple[int, ...]) -> ScrubOrder:
        scrub_id, self._next = self._next, self._next + 1
        self._under_way[scrub_id] = 0
        self._scrubbed += len(slots)
        return ScrubOrder(scrub_id, np.array(slots, np.int64))
