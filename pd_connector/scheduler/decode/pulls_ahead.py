"""Bounds pulls of prompts that prefill engines are still computing: they hold blocks here while they wait for others.

- At most so many at a time, with at most such a share of the blocks. What is not pulled ahead is pulled when it has
  been computed, like any other prompt; so nobody waits here for ever.
- A request that can run goes first: none is pulled ahead while another request wants blocks and finds too few, nor
  with the last free blocks, which running requests grow into. vLLM, which looks no further than the first request that
  finds no blocks, is not even asked then.

A pull counts until all ranks have settled it, even if its prompt is complete earlier.
"""

from typing import TYPE_CHECKING

from pd_connector.engine_limits import EngineLimits
from pd_connector.scheduler.block_demand import BlockDemand

if TYPE_CHECKING:
    from pd_connector.vllm.types import Request


class PullsAhead:
    """Knows which pulls are ahead of their prompts' computation, and whether one more may be. Owns no blocks."""

    def __init__(self, limits: EngineLimits, demand: BlockDemand) -> None:
        """Start with none. ``limits``: of all pulls ahead together; ``demand``: of the device's blocks."""
        self._limits = limits
        self._demand = demand
        self._held: dict[str, int] = {}  # blocks, by request

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._held

    def has_room(self, request: "Request") -> bool:
        """Return whether a request may be pulled ahead now."""
        if len(self._held) >= self._limits.max_pulls_ahead:
            return False
        demand = self._demand
        if sum(self._held.values()) + demand.blocks_of(request) > self._limits.max_ahead_fraction * demand.blocks.total:
            return False
        other = demand.left_out
        if other is not None and other is not request and not demand.has_room_for(other):
            return False
        return demand.has_room_for(request)

    def start(self, request: "Request") -> None:
        """Count a pull ahead."""
        self._held[request.request_id] = self._demand.blocks_of(request)

    def end(self, request_id: str) -> None:
        """Count a pull no longer. Those that are not ahead are ignored."""
        self._held.pop(request_id, None)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        assert len(self._held) <= self._limits.max_pulls_ahead, "too many prompts are pulled ahead"
