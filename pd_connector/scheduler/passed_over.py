"""Requests that wait before vLLM gives them blocks, at little cost.

In every step, vLLM would look up the whole prefix of each request that waits for blocks before it asks its connector:
milliseconds for a long prompt, and a thousand may wait for a prefill engine, a peer or the pool. For those it looks
nothing up.

What a request is answered meanwhile, it learns in the next step. So whoever holds its prefix is asked at the same time;
and as answers mostly take less than a step without work, an engine with nothing else to do waits for them.

Everything runs on the scheduler's thread.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pd_connector.scheduler.compute_rate import ComputeRate
from pd_connector.scheduler.scheduler_role import SchedulerRole
from pd_connector.vllm.engine_core import EngineLoop

if TYPE_CHECKING:
    from pd_connector.vllm.types import Request


#: For the answers of one role; about what a step without work takes on a CPU.
_ANSWERS_S = 0.005


class PassedOver:
    """Asks the roles whether requests wait, and owns which one is passed over."""

    def __init__(self, roles: Sequence[SchedulerRole], rate: ComputeRate, engine: EngineLoop) -> None:
        """Take the roles for which requests wait, which may become more, who counts how long they do, and the engine.

        If it has no other requests, it may rest.
        """
        self._roles = roles
        self._rate = rate
        self._engine = engine
        self._request_id = ""

    def pass_over(self, request: "Request") -> bool:
        """Return whether nothing is to be looked up for a request: what it waits for has yet to come.

        Then it must be told to wait: the news of the next moment count in the next step.
        """
        waits = any(role.is_waiting(request) for role in self._roles)
        self._request_id = request.request_id if waits else ""
        return waits

    def must_wait(self, request: "Request", computed_tokens: int) -> bool:
        """Return whether a request must not be given blocks in this step: see ``SchedulerRole.must_wait``."""
        if self._was_passed_over(request):
            return True
        for number, role in enumerate(self._roles):
            while role.must_wait(request, computed_tokens):
                if not (answers := role.answers(request)):
                    return True
                for other in self._roles[number + 1 :]:
                    other.look_ahead(request, computed_tokens)
                # Not while workers are to report something: peers may wait for it.
                if any(each.wants_step for each in self._roles) or not self._engine.rest(_ANSWERS_S, 1, answers):
                    return True
        return False

    def _was_passed_over(self, request: "Request") -> bool:
        """Return whether nothing was looked up for a request, once: some schedulers look up in other ways, too."""
        was = bool(request.request_id == self._request_id)
        self._request_id = ""
        if was:
            self._rate.delays(request.request_id)
        return was
