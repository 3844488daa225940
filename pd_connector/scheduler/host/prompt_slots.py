"""Host blocks that peers read while this engine loads a prompt from them, and computes the rest.

A prompt that this engine finds in its host memory is copied to the device before the first step that computes something
of it. Those who follow the prompt by name need not wait for the copy: the slots hold the same bytes. They are lent for
the prompt's attempt, and go to its lease when it is granted. Everything runs on the scheduler's thread.
"""

from typing import TYPE_CHECKING

from pd_connector.scheduler.host.tier import HostTier
from pd_connector.vllm.block_pools import slot_of
from pd_connector.vllm.device_blocks import HeldBlocks
from transfer.control.messages import SlotRange

if TYPE_CHECKING:
    from collections.abc import Sequence


class PromptSlots:
    """Owns the references to the host blocks of prompts that are being computed, by request."""

    def __init__(self) -> None:
        """Lend nothing before host memory is known."""
        self._tier: HostTier | None = None
        self._lent: dict[str, HeldBlocks] = {}

    def use(self, tier: HostTier) -> None:
        """Lend blocks of this host memory from now on."""
        self._tier = tier

    def is_loading(self, request_id: str) -> bool:
        """Return whether a request is being loaded from host memory."""
        return self._tier is not None and self._tier.loading(request_id) is not None

    def lend(self, request_id: str, block_tokens: "Sequence[int]") -> SlotRange:
        """Lend the host blocks that a request is being loaded from, and none are lent for.

        ``block_tokens``: block size of each cache group, in tokens.
        """
        hit = self._tier.loading(request_id) if self._tier is not None else None
        assert self._tier is not None, "host memory is not known"
        assert hit is not None, "the request is not being loaded"
        assert request_id not in self._lent, "blocks are lent twice for a request"
        self._tier.loans.lend(hit.blocks, 0)
        self._lent[request_id] = hit.blocks
        return SlotRange(
            hit.first_token,
            hit.first_token + hit.tokens,
            tuple(hit.first_token // size for size in block_tokens),
            tuple(tuple(-1 if block.is_null else slot_of(block) for block in blocks) for blocks in hit.groups),
        )

    def hand_over(self, request_id: str) -> HeldBlocks:
        """Return what is lent for a request, none if nothing is. It is the caller's, to give back to the loans."""
        return self._lent.pop(request_id, ())

    def end(self, request_id: str) -> None:
        """Take back what is lent for a request, if anything is."""
        if blocks := self.hand_over(request_id):
            assert self._tier is not None, "blocks were lent of host memory that nobody knows"
            self._tier.loans.take_back(blocks)

    @property
    def request_ids(self) -> frozenset[str]:
        """The requests for which blocks are lent."""
        return frozenset(self._lent)

    def check_integrity(self) -> None:
        """Raise AssertionError unless host memory knows what is lent."""
        if self._lent:
            assert self._tier is not None, "blocks are lent of host memory that nobody knows"
            assert self._tier.loans.are_lent(self._lent.values()), "blocks are lent of which host memory knows nothing"
