"""Requests for which vLLM looks nothing up in its prefix cache, because they wait in any case.

In every step, vLLM would look up the whole prefix of each request that waits for blocks before it asks its connector:
milliseconds for a long prompt, and a thousand may wait for a prefill engine, a peer or the pool.

Everything runs on the scheduler's thread.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pd_connector.scheduler.compute_rate import ComputeRate
from pd_connector.scheduler.scheduler_role import SchedulerRole

if TYPE_CHECKING:
    from pd_connector.vllm.types import Request


class PassedOver:
    """Owns which request is passed over."""

    def __init__(self, roles: Sequence[SchedulerRole], rate: ComputeRate) -> None:
        """Take the roles for which requests wait, which may become more, and who counts how long they do."""
        self._roles = roles
        self._rate = rate
        self._request_id = ""

    def pass_over(self, request: "Request") -> bool:
        """Return whether nothing is to be looked up for a request: what it waits for has yet to come.

        Then it must be told to wait: the news of the next moment count in the next step.
        """
        waits = any(role.is_waiting(request) for role in self._roles)
        self._request_id = request.request_id if waits else ""
        return waits

    def was_passed_over(self, request: "Request") -> bool:
        """Return whether nothing was looked up for a request, once: some schedulers look up in other ways, too."""
        was = bool(request.request_id == self._request_id)
        self._request_id = ""
        if was:
            self._rate.delays(request.request_id)
        return was
