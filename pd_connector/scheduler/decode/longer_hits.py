"""Which requests vLLM may find keys and values for of which no state is here.

A prefix hit ends with a state. By default, vLLM keeps none of an answer; and where the block sizes of two engines have
no common border, none of a prompt that was pulled. So each turn of a conversation would pull the answer before it, or
all before it, again. But a pull brings the state after its last token, whatever lies before it: keys are enough for a
pull, and for nothing else.

Everything runs on the scheduler's thread.
"""

from typing import TYPE_CHECKING

from pd_connector.params import RemotePrefill
from pd_connector.progress import Progress
from pd_connector.scheduler.decode.canaries import Canaries
from pd_connector.scheduler.decode.legs import Announced, Legs, Waiting
from pd_connector.scheduler.decode.subscriptions import Subscriptions

if TYPE_CHECKING:
    from pd_connector.vllm.types import Request


class LongerHits:
    """Looks at the decode legs. Owns nothing."""

    def __init__(self, legs: Legs, subscriptions: Subscriptions, canaries: Canaries) -> None:
        """Take what knows of the legs."""
        self._legs = legs
        self._subscriptions = subscriptions
        self._canaries = canaries

    def is_pulled(self, request: "Request") -> bool:
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
