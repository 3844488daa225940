"""Prompts that were pulled to host memory, until their requests have loaded them or are gone.

    landed --- its request has blocks ---> being loaded --- loaded ---> left: its slots are given back
       '------- its request is gone ----------------------------------------^

Meanwhile, its full blocks are published one after the other, so that other requests find them. A prompt has thousands
of blocks: a step publishes and gives back a share of them (see ``step_share``), unless a request asks that can use
them. Slots are given back when they have been published, so that what has arrived is not lost. Everything runs on the
scheduler's thread.
"""

from collections import deque
from collections.abc import Container, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from pd_connector.scheduler import step_share
from pd_connector.scheduler.host_loans import HostLoans
from pd_connector.vllm.block_pools import HostBlockPool, HostHit
from pd_connector.vllm.device_blocks import HeldBlocks

if TYPE_CHECKING:
    from pd_connector.vllm.types import Request


@dataclass(slots=True, eq=False)
class LandedPrompt:
    """A prompt in host blocks that are lent."""

    request: "Request"  # for which it has landed
    hit: HostHit
    first_token: int  # that vLLM was last told of
    publication: Iterator[None]  # publishes a block with every step; closed if they are not valid any more
    to_give_back: HeldBlocks = ()  # once it is left


class LandedPrompts:
    """Owns the loans of prompts that have landed."""

    def __init__(self, pool: HostBlockPool, loans: HostLoans) -> None:
        """Start with none. ``loans``: of this pool."""
        self._pool = pool
        self._loans = loans
        self._waiting: dict[str, LandedPrompt] = {}  # by the request that waits for blocks
        self._unfinished: deque[LandedPrompt] = deque()  # those to be published, and those to be given back
        self._share = step_share.MOST_BLOCKS  # of blocks, in this step

    def add(self, request: "Request", hit: HostHit, first_token: int) -> None:
        """Keep what has landed for a request in blocks that were lent, and let others find it as well.

        ``first_token``: of those that have landed; before, host memory held the hit already.
        """
        prompt = LandedPrompt(request, hit, hit.first_token, self._pool.publish_landed(request, hit, first_token))
        self._waiting[request.request_id] = prompt
        self._unfinished.append(prompt)
        self._go_on()

    def publish_for(self, request: "Request") -> None:
        """Publish at once all blocks that another request with the same beginning may find."""
        for prompt in self._unfinished:
            if request.block_hashes[:1] == prompt.request.block_hashes[:1]:
                deque(prompt.publication, maxlen=0)

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
        if prompt not in self._unfinished:
            self._unfinished.append(prompt)
        prompt.to_give_back = prompt.hit.blocks
        self._go_on()

    def withdraw(self, request_id: str) -> None:
        """Forget a request, if something has landed for it."""
        if (prompt := self._waiting.pop(request_id, None)) is not None:
            self.leave(prompt)

    def use(self, blocks: int) -> None:
        """Go on with this step's share of blocks."""
        self._share = blocks
        self._go_on()

    def reset(self, keep: Container[str] = ()) -> None:
        """Give back what waits, but for requests to ``keep``: it is no longer valid.

        What is being loaded stays until it is left.
        """
        for prompt in self._unfinished:
            _close(prompt)
            self._loans.take_back(prompt.to_give_back)
        self._unfinished.clear()
        for request_id in [*self._waiting]:
            if request_id not in keep:
                self._loans.take_back(self._waiting.pop(request_id).hit.blocks)

    @property
    def request_ids(self) -> frozenset[str]:
        """The requests that wait for blocks."""
        return frozenset(self._waiting)

    @property
    def wants_step(self) -> bool:
        """Whether the engine must step even without requests, to publish blocks or to give them back."""
        return bool(self._unfinished)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        held = [prompt.hit.blocks for prompt in self._waiting.values()]
        held += [prompt.to_give_back for prompt in self._unfinished if prompt.to_give_back]
        assert self._loans.are_lent(held), "prompts have landed in slots that are not lent"
        assert not any(prompt.to_give_back for prompt in self._waiting.values()), "a prompt is left that is waited for"
        assert len({id(prompt) for prompt in self._unfinished}) == len(self._unfinished), "a prompt is left twice"

    def _go_on(self) -> None:
        """Publish blocks, and give them back, as far as this step's share goes."""
        while self._share > 0 and self._unfinished:
            prompt = self._unfinished[0]
            self._share -= sum(1 for _ in islice(prompt.publication, self._share))
            if self._share <= 0:
                break
            # A prompt's last blocks are to be evicted first.
            blocks, rest = prompt.to_give_back[-self._share :], prompt.to_give_back[: -self._share]
            self._loans.take_back(blocks)
            prompt.to_give_back = rest
            self._share -= len(blocks)
            if not rest:
                self._unfinished.popleft()


def _close(prompt: LandedPrompt) -> None:
    """Publish no more of a prompt."""
    prompt.publication = iter(())
