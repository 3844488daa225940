"""What vLLM looks up in its prefix cache for requests that are pulled: also keys of which no state is here.

A prefix hit ends with a state. By default, vLLM keeps none of an answer; and where the block sizes of two engines have
no common border, none of a prompt that was pulled. So each turn of a conversation would pull the answer before it, or
all before it, again. But a pull brings the state after its last token, whatever lies before it: keys are enough for a
pull, and for nothing else.

Everything runs on the scheduler's thread.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pd_connector.config import ConnectorConfig
from pd_connector.params import RemotePrefill
from pd_connector.progress import Progress
from pd_connector.scheduler.decode.canaries import Canaries
from pd_connector.scheduler.decode.legs import Announced, Legs, Waiting
from pd_connector.scheduler.decode.subscriptions import Subscriptions
from pd_connector.vllm.cache_specs import Retention

if TYPE_CHECKING:
    from pd_connector.vllm.types import Request


def keys_suffice(retentions: Sequence[Retention], config: ConnectorConfig) -> bool:
    """Return whether keys of which no state is here are of use to a pull.

    Not beside host memory and peers, whose prefixes go on from a state, nor with windows or keys in several cache
    groups, of which vLLM would take what each has: what lies between that and the pull would be missing.
    """
    keys = [kept for kept in retentions if not kept.states]
    is_plain = len(keys) == 1 and not (keys[0].window or keys[0].chunk)
    others_bring = config.cpu_bytes_to_use > 0 or config.peers is not None
    return len(keys) < len(retentions) and is_plain and not others_bring


class LookUps:
    """Looks at the decode legs. Owns nothing."""

    def __init__(self, legs: Legs, subscriptions: Subscriptions, canaries: Canaries) -> None:
        """Take what knows of the legs."""
        self._legs = legs
        self._subscriptions = subscriptions
        self._canaries = canaries

    def awaits_prefill(self, request: "Request") -> bool:
        """Return whether a prefill engine has yet to begin with a request's prompt."""
        is_announced = isinstance(self._legs.get(request.request_id), Announced)
        return is_announced and self._subscriptions.look(request.request_id) is None

    def may_lack_state(self, request: "Request") -> bool:
        """Return whether a request's prompt will be pulled if it can be. If not after all, vLLM looks for a state.

        Not if it is to prove its prefill engine: of what is compared, a canary takes what vLLM has found for computed.
        """
        match self._legs.get(request.request_id):
            case Waiting(RemotePrefill() as remote):
                return self._canaries.is_proven(request, remote)
            case Announced():
                found = self._subscriptions.look(request.request_id)
                return isinstance(found, Progress) and self._canaries.is_proven(request, found.remote)
        return False
