"""How fast this engine computes prompts, as its answers show: the measure of what is worth waiting for.

A request that looks for its prefix elsewhere, at peers and in the pool, waits no longer than computing what it lacks
takes, in sum. Only what the search delays counts: while vLLM would not take a request up in any case, it may go on.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd_connector.orders import Orders
from pd_connector.scheduler.scheduler_role import SchedulerRole

if TYPE_CHECKING:
    from pd_connector.vllm.types import KVCacheBlocks, Request

#: Prompts of which a step computes fewer tokens say little.
_LEAST_TOKENS = 256
#: Weight of a prompt that took longer than those before: other work may have been the reason.
_WEIGHT = 0.1
#: What is computed within so long is not looked for elsewhere, as to bring it takes about that. Never more than so many
#: tokens, because not all of a prompt's time grows with its length; and so many as long as the rate is unknown.
_WORTH_S, _WORTH_TOKENS = 0.02, 128
_UNKNOWN_S, _LEAST_S, _MOST_S = 1.0, 0.05, 10.0


@dataclass(slots=True)
class _Prompt:
    """A prompt that is being computed. Tokens are those of all steps, counted from the start of the engine."""

    began_at: float
    began: int  # tokens scheduled before
    end: int  # tokens scheduled with its last step so far


class ComputeRate(SchedulerRole):
    """The tokens a second at which prompts are computed, with all that is computed beside them.

    Between the schedulings of two steps lies no step's time: vLLM schedules steps before those ahead of them have
    ended, and none behind the last request. So a prompt is timed from its first step to its first token.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Know nothing yet. ``clock``: monotonic, in seconds."""
        self._clock = clock
        self._per_second = 0.0
        self._scheduled = 0  # tokens, in all
        self._prompts: dict[str, _Prompt] = {}  # by request
        self._computing: dict[str, Request] = {}  # requests without a first token, by id
        self._left_s: dict[str, float] = {}  # for which a request may wait for a prefix, by request
        self._searching: set[str] = set()  # those of them that vLLM would have taken up in this step
        self._searched: set[str] = set()  # and in the last one
        self._stepped_at = 0.0

    def must_wait(self, request: "Request", computed_tokens: int) -> bool:
        """Note that only the roles behind this one keep vLLM from taking a request up, if anything does."""
        self.delays(request.request_id)
        return False

    def delays(self, request_id: str) -> None:
        """Note that a request is looked for elsewhere in a step in which vLLM would take it up."""
        if request_id in self._left_s:
            self._searching.add(request_id)

    def allocated(self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int) -> int:
        """Bring nothing."""
        if not request.num_output_tokens:
            self._computing[request.request_id] = request
        return 0

    def step_orders(self, scheduled: Mapping[str, int]) -> Orders:
        """Order nothing."""
        for request_id in [each for each, request in self._computing.items() if request.num_output_tokens]:
            self.answered(request_id)
            del self._computing[request_id]
        self.step(scheduled)
        now = self._clock()
        for request_id in self._searched & self._left_s.keys():
            self._left_s[request_id] -= now - self._stepped_at
        self._searched, self._searching, self._stepped_at = self._searching, set(), now
        return Orders()

    def finish(self, request: "Request", block_ids: Sequence[Sequence[int]]) -> None:
        """Forget a request."""
        if self._computing.pop(request.request_id, None) is not None and request.num_output_tokens:
            self.answered(request.request_id)
        self.forget(request.request_id)  # one that was preempted is computed again behind its first token
        self._left_s.pop(request.request_id, None)

    def step(self, scheduled: Mapping[str, int]) -> None:
        """Note that a step is scheduled that computes so many tokens of each request."""
        began = self._scheduled
        self._scheduled += sum(scheduled.values())
        for request_id, tokens in scheduled.items():
            if tokens >= _LEAST_TOKENS and request_id not in self._prompts:
                self._prompts[request_id] = _Prompt(self._clock(), began, 0)
            if tokens > 1 and (prompt := self._prompts.get(request_id)) is not None:
                prompt.end = self._scheduled

    def answered(self, request_id: str) -> None:
        """Note that the first token of a request has come. Those of short prompts are ignored."""
        prompt = self._prompts.pop(request_id, None)
        if prompt is None:
            return
        now = self._clock()
        for other in self._prompts.values():  # what was computed for both is not counted twice
            if other.began < prompt.end:
                other.began, other.began_at = prompt.end, now
        tokens, took = prompt.end - prompt.began, now - prompt.began_at
        if tokens >= _LEAST_TOKENS and took > 0:
            new = tokens / took
            self._per_second = max(new, (1 - _WEIGHT) * self._per_second + _WEIGHT * new)

    def forget(self, request_id: str) -> None:
        """Note that a request has left. Unknown ones are ignored."""
        self._prompts.pop(request_id, None)

    @property
    def least_tokens(self) -> int:
        """How many tokens must be missing to be looked for elsewhere: 128, or fewer that take 20 ms to compute."""
        return math.ceil(min(_WORTH_S * self._per_second or math.inf, _WORTH_TOKENS))

    def deadline_of(self, request_id: str, missing_tokens: int) -> float:
        """Return until when a request may wait for what it lacks of its prefix, with all that it has waited before.

        The less it lacks, the sooner. The step under way counts when it has ended.
        """
        left_s = min(self._left_s.get(request_id, math.inf), self.seconds_for(missing_tokens))
        self._left_s[request_id] = left_s
        self._searching.add(request_id)
        return self._clock() + left_s

    def seconds_for(self, tokens: int) -> float:
        """Return how long computing ``tokens`` takes, about: between 0.05 and 10 s, and 1 s if that is not known."""
        if not self._per_second:
            return _UNKNOWN_S
        return min(max(tokens / self._per_second, _LEAST_S), _MOST_S)
