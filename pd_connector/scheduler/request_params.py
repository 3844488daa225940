"""What a request's ``kv_transfer_params`` ask of an engine that it is not, or cannot: logged, counted, taken away."""

import logging
from typing import TYPE_CHECKING

from pd_connector.orders import Cause
from pd_connector.params import is_decode_leg, is_malformed, is_prefill_leg, unusable_keys
from pd_connector.stats import ComputedHere, StatsRecorder
from pd_connector.vllm.engine_config import EngineRole
from transfer.control.limits import ThrottledWarnings

if TYPE_CHECKING:
    from pd_connector.vllm.types import Request

logger = logging.getLogger(__name__)

_LOG_INTERVAL_S = 10.0
_MAX_NAMED_KEYS = 10  # of a request's params, in a warning


class RequestParams:
    """Looks at the params of every request that comes. Belongs to the scheduler's thread."""

    def __init__(self, role: EngineRole, stats: StatsRecorder) -> None:
        """``role``: of this engine."""
        self._role = role
        self._stats = stats
        self._warnings = ThrottledWarnings(logger, _LOG_INTERVAL_S)

    def check(self, request: "Request") -> None:
        """Log and count what a new request asks for and will not get; take it away where it might be got."""
        params = request.kv_transfer_params
        if is_decode_leg(params) and not self._role.consumes:
            self._warn_wrong_role(request, "do_remote_prefill", "kv_consumer")
            self._stats.count("prompts_computed", label=ComputedHere.ROLE)
        elif is_prefill_leg(params) and not is_decode_leg(params) and not self._role.produces:
            self._warn_wrong_role(request, "do_remote_decode", "kv_producer")
            request.kv_transfer_params = None  # an engine that only serves prefixes could lease it all the same
        elif keys := unusable_keys(params):
            self._stats.count("prompts_computed", label=ComputedHere.UNUSABLE)
            named = ", ".join(repr(key)[:60] for key in keys[:_MAX_NAMED_KEYS])
            self._warnings.warn(
                "unusable",
                f"PDConnector: request {request.request_id} is served without a transfer: its kv_transfer_params have "
                f"neither do_remote_prefill nor do_remote_decode, but {named}: "
                "the router speaks a contract that PDConnector does not",
            )

    def remove_malformed(self, request: "Request") -> None:
        """Take away params that are no JSON object: vLLM's scheduler reads them as one, and would end the engine."""
        if not is_malformed(request.kv_transfer_params):
            return
        if not self._role.consumes:  # otherwise the consumer has refused the request
            logger.error(
                "PDConnector: request %s is served without a transfer: its kv_transfer_params must be a JSON object, "
                "not %.100r", request.request_id, request.kv_transfer_params,
            )  # fmt: skip
            self._stats.count("prompts_computed", label=Cause.PARAMS)
        request.kv_transfer_params = None

    def _warn_wrong_role(self, request: "Request", key: str, role: str) -> None:
        self._warnings.warn(
            key,
            f"PDConnector: request {request.request_id} asks for {key}, which needs kv_role {role} or kv_both; "
            "it is served without a transfer",
        )
