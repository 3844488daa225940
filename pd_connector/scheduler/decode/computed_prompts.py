"""Why the prompt of a decode leg is computed here, although a prefill engine holds it, or held it."""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pd_connector.orders import Cause
from pd_connector.params import RemotePrefill
from pd_connector.scheduler.decode.legs import Announced, Entry, Follower, Landed, Refused
from pd_connector.scheduler.decode.needed_blocks import NeededBlocks
from pd_connector.stats import ComputedHere
from pd_connector.vllm.cache_specs import Retention
from transfer.control.limits import ThrottledWarnings

if TYPE_CHECKING:
    from pd_connector.vllm.types import Request

logger = logging.getLogger(__name__)

_WARNING_INTERVAL_S = 60.0


class ComputedPrompts:
    """Finds the cause, and logs what a user can change. Belongs to the scheduler's thread."""

    def __init__(
        self, needed: NeededBlocks, groups: Sequence[Retention], is_untried: "Callable[[Request, RemotePrefill], bool]"
    ) -> None:
        """Take what is pulled at all.

        Args:
            needed: what prefill engines may lack.
            groups: what vLLM keeps of a request in every cache group.
            is_untried: whether the prefill engine that holds a request's prompt has yet to be proven.
        """
        self._needed = needed
        self._largest_block = max((kept.block_tokens for kept in groups if not kept.states), default=1)
        self._is_untried = is_untried
        self._warnings = ThrottledWarnings(logger, _WARNING_INTERVAL_S)

    def cause(self, request: "Request", leg: Announced | Entry | Landed, computed_tokens: int) -> str:
        """Return why a request computes its prompt, of which ``computed_tokens`` are here; empty if it does not."""
        missing = request.num_prompt_tokens - 1 - computed_tokens
        if isinstance(leg, Follower | Landed):  # the last block, which is not full, is in nobody's prefix cache
            missing -= self._largest_block - 1
        return self._cause(request, leg, computed_tokens) if missing > 0 else ""

    def _cause(self, request: "Request", leg: Announced | Entry | Landed, computed_tokens: int) -> str:
        match leg:
            case Refused():
                return leg.cause
            case Follower():
                return ComputedHere.SHARED
            case Landed():
                return Cause.LANDING
            case RemotePrefill() if lack := self._needed.lacking(leg, computed_tokens):
                text = f"PDConnector: request {request.request_id} is computed here: {lack.reason}"
                if lack.is_by_setting:
                    self._warnings.warn("setting", text)
                else:
                    logger.info("%s", text)
                return ComputedHere.WINDOW
            case RemotePrefill() if self._is_untried(request, leg):
                self._warnings.warn(
                    "unproven",
                    f"PDConnector: request {request.request_id} is computed here: its prefill engine is not proven "
                    "yet, and what is computed of the prompt is too short to do it, there is no room for that, or "
                    "another one has just failed to",
                )
                return ComputedHere.UNPROVEN
        return ComputedHere.DECLINED
