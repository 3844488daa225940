"""Prompts that were pulled to host memory, until their requests have loaded them or are gone.

    landed --- its request has blocks ---> being loaded --- loaded ---> left: its slots are given back
       '------- its request is gone ----------------------------------------^

Its full blocks are published when it lands, so that other requests find them. Everything runs on the scheduler's
thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from pd_connector.scheduler.host.loans import HostLoans
from pd_connector.vllm.block_pools import HostBlockPool, HostHit

if TYPE_CHECKING:
    from pd_connector.vllm.types import KVCacheBlock, Request

#: Cache groups of states, entries of a request's block tables, and the host blocks with the states after these.
BorderBlocks: TypeAlias = "Sequence[tuple[int, int, KVCacheBlock]]"


@dataclass(slots=True, eq=False)
class LandedPrompt:
    """A prompt in host blocks that are lent."""

    hit: HostHit
    first_token: int  # that vLLM was last told of


class LandedPrompts:
    """Owns the loans of prompts that have landed."""

    def __init__(self, pool: HostBlockPool, loans: HostLoans) -> None:
        """Start with none. ``loans``: of this pool."""
        self._pool = pool
        self._loans = loans
        self._waiting: dict[str, LandedPrompt] = {}  # by the request that waits for blocks

    def add(self, request: "Request", hit: HostHit, first_token: int, borders: BorderBlocks) -> None:
        """Keep what has landed for a request in blocks that were lent, and let others find it as well.

        ``first_token``: of those that have landed; before, host memory held the hit already. ``borders``: states that
        only others need.
        """
        self._pool.publish_landed(request, hit, first_token)
        for group, entry, host in borders:
            self._pool.publish_at(request, group, entry, (host,))
        self._waiting[request.request_id] = LandedPrompt(hit, hit.first_token)

    def tokens(self, request: "Request", computed_tokens: int) -> int | None:
        """Return how many tokens beyond ``computed_tokens`` have landed for a request; None if nothing of use has.

        If the device holds less of the prompt than when the landing began, host memory must hold what comes between.
        Otherwise what has landed is left to prefix hits.
        """
        prompt = self._waiting.get(request.request_id)
        if prompt is None:
            return None
        if (first := prompt.hit.first_token) > computed_tokens:
            between = self._pool.find(request, computed_tokens, first)
            if between is None or computed_tokens + between.tokens < first:
                self.withdraw(request.request_id)
                return None
            self._loans.lend(between.blocks, 0)
            groups = tuple(before + after for before, after in zip(between.groups, prompt.hit.groups, strict=True))
            prompt.hit = HostHit(computed_tokens, between.tokens + prompt.hit.tokens, groups)
        prompt.first_token = computed_tokens
        return max(prompt.hit.first_token + prompt.hit.tokens - computed_tokens, 0)

    def take(self, request_id: str) -> LandedPrompt | None:
        """Return what has landed for a request that has blocks now. It is the caller's, to ``leave`` once."""
        return self._waiting.pop(request_id, None)

    def leave(self, prompt: LandedPrompt) -> None:
        """Give back the host blocks of a prompt that nobody waits for any more."""
        self._loans.take_back(prompt.hit.blocks)

    def withdraw(self, request_id: str) -> None:
        """Forget a request, if something has landed for it."""
        if (prompt := self._waiting.pop(request_id, None)) is not None:
            self.leave(prompt)

    def reset(self) -> None:
        """Give back what waits: it is no longer valid. What is being loaded stays until it is left."""
        for request_id in [*self._waiting]:
            self.withdraw(request_id)

    @property
    def request_ids(self) -> frozenset[str]:
        """The requests that wait for blocks."""
        return frozenset(self._waiting)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        held = [prompt.hit.blocks for prompt in self._waiting.values()]
        assert self._loans.are_lent(held), "prompts have landed in slots that are not lent"
