"""Bounds pulls of prompts that prefill engines are still computing: they hold blocks here while they wait for others.

- At most so many at a time, with at most such a share of the blocks. What is not pulled ahead is pulled when it has
  been computed, like any other prompt; so nobody waits here for ever.
- A request that can run goes first: none is pulled ahead while another request wants blocks and finds too few, nor
  with the last free blocks, which running requests grow into. vLLM, which looks no further than the first request that
  finds no blocks, is not even asked then.

A pull counts until all ranks have settled it, even if its prompt is complete earlier.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd_connector.vllm.cache_specs import Retention, blocks_for
from pd_connector.vllm.device_blocks import DeviceBlocks
from pd_connector.vllm.requests import waits_for_tokens

if TYPE_CHECKING:
    from pd_connector.vllm.types import Request


@dataclass(frozen=True, slots=True)
class AheadLimits:
    """What pulls ahead may take of an engine."""

    pulls: int
    fraction: float  # of the blocks, 0 to 1


class PullsAhead:
    """Knows which pulls are ahead of their prompts' computation, and whether one more may be. Owns no blocks."""

    def __init__(self, limits: AheadLimits, blocks: DeviceBlocks, groups: Sequence[Retention]) -> None:
        """Start with none.

        Args:
            limits: of all pulls ahead together.
            blocks: of the device.
            groups: what vLLM keeps of a request in every cache group.
        """
        self._limits = limits
        self._blocks = blocks
        self._groups = groups
        self._held: dict[str, int] = {}  # blocks, by request
        self._total = 0  # of them
        self._let_in: dict[str, Request] = {}  # those for which there was room, and whose pulls have not begun
        self._asked: Request | None = None  # the last one that is to be given blocks in this step
        self._left_out: Request | None = None  # the one that was given none in the last step

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._held

    def has_room(self, request: "Request") -> bool:
        """Return whether a request may be pulled ahead now."""
        # vLLM may have given others their blocks, and tell of it later.
        let_in = [each for each in self._let_in.values() if waits_for_tokens(each)]
        self._let_in = {each.request_id: each for each in let_in}
        if len(self._held) + len(let_in) >= self._limits.pulls:
            return False
        needed = blocks_for(self._groups, request.num_tokens)
        total = self._total + sum(blocks_for(self._groups, each.num_tokens) for each in let_in)
        if total + needed > self._limits.fraction * self._blocks.total:
            return False
        other = self._left_out
        if other is not None and other is not request and self._is_short(blocks_for(self._groups, other.num_tokens)):
            return False
        if self._is_short(needed):
            return False
        self._let_in[request.request_id] = request
        return True

    def start(self, request: "Request") -> None:
        """Count a pull ahead."""
        self._let_in.pop(request.request_id, None)
        held = self._held[request.request_id] = blocks_for(self._groups, request.num_tokens)
        self._total += held

    def end(self, request_id: str) -> None:
        """Count a pull no longer. Those that are not ahead are ignored."""
        self._total -= self._held.pop(request_id, 0)

    def asked(self, request: "Request") -> None:
        """Note that a request is to be given blocks next, whatever it needs them for."""
        self._asked = request

    def given(self) -> None:
        """Note that it was given blocks."""
        self._asked = None

    def next_step(self) -> None:
        """Note that a step's blocks are given out."""
        asked, self._asked = self._asked, None
        self._left_out = None if asked is None or waits_for_tokens(asked) else asked

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        assert self._total == sum(self._held.values()), "blocks of pulls ahead are miscounted"
        assert len(self._held) <= self._limits.pulls, "too many prompts are pulled ahead"

    def _is_short(self, needed: int) -> bool:
        """Return whether fewer blocks than needed are free, besides those that vLLM keeps for requests that run."""
        return self._blocks.free < needed + len(self._groups) + self._blocks.total // 50
