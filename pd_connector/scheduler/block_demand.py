"""The one book of who lacks blocks of the device: what a request needs, what is free, and who was left without.

vLLM looks no further than the first request that finds no blocks. It does not tell its connector of that: a request
that it asked about, and did not give blocks before the step is over, was left out.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pd_connector.vllm.cache_specs import Retention, blocks_for
from pd_connector.vllm.device_blocks import DeviceBlocks

if TYPE_CHECKING:
    from pd_connector.vllm.types import Request


class BlockDemand:
    """Knows what requests need of the device's blocks. Owns no blocks. Belongs to the scheduler's thread."""

    def __init__(self, blocks: DeviceBlocks, groups: Sequence[Retention], draft_tokens: int = 0) -> None:
        """Start with nobody waiting.

        Args:
            blocks: of the device.
            groups: what vLLM keeps of a request in every cache group.
            draft_tokens: for how many tokens the first step of a request that drafts has blocks, besides its own.
        """
        self.blocks = blocks
        self.groups = groups
        #: Blocks that stay free when a load begins. Nobody whose tokens have arrived can be preempted, and without room
        #: for drafts none of them runs: they would wait for each other for ever.
        self.kept_from_loads = sum(-(-draft_tokens // group.block_tokens) for group in groups)
        self._asked: Request | None = None  # the last one that is to be given blocks in this step
        #: The request that was given none in the last step, though it was its turn; None if all were given theirs.
        self.left_out: Request | None = None

    def blocks_of(self, request: "Request") -> int:
        """Return how many blocks vLLM gives a request for its tokens, at most."""
        return blocks_for(self.groups, request.num_tokens)

    def has_room(self, number: int) -> bool:
        """Return whether so many blocks are free, besides those that vLLM keeps for requests that run."""
        return self.blocks.free >= number + len(self.groups) + self.blocks.total // 50

    def has_room_for(self, request: "Request") -> bool:
        """Return whether so many are free as a request needs."""
        return self.has_room(self.blocks_of(request))

    def can_be_loaded(self, request: "Request") -> bool:
        """Return whether blocks will ever be free to load a request. If not, they may be to compute it."""
        if not self.kept_from_loads:
            return True
        needed = self.blocks_of(request)
        return not needed <= self.blocks.total < needed + self.kept_from_loads

    def asked(self, request: "Request") -> None:
        """Note that a request is to be given blocks next, whatever it needs them for."""
        self._asked = request

    def given(self) -> None:
        """Note that a request was given blocks."""
        self._asked = None

    def end_step(self) -> None:
        """Note that a step's blocks are given out."""
        self.left_out, self._asked = self._asked, None
