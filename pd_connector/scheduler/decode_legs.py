"""The states of a decode leg, as data."""

from dataclasses import dataclass

from pd_connector.orders import Cause
from pd_connector.params import PromptIdentity, RemotePrefill, RemoteTransfer
from pd_connector.scheduler.single_use import Key


@dataclass(frozen=True, slots=True)
class Refused:
    """A decode leg that cannot be pulled."""

    reason: str
    cause: Cause = Cause.PARAMS


@dataclass(frozen=True, slots=True)
class Follower:
    """A decode leg whose lease or transfer another request uses or has used."""

    key: Key


@dataclass(slots=True)
class Announced:
    """A decode leg whose prompt a prefill engine has yet to compute."""

    transfer: RemoteTransfer
    prompt: PromptIdentity | None  # None if it need not be compared
    is_checked: bool = False  # the prompt is that of the other leg


@dataclass(slots=True)
class Pulling:
    """A decode leg whose prompt is being pulled: to the device, to host memory, or to prove a prefill engine."""

    entry: RemotePrefill | Refused
    refused_for: Cause = Cause.NONE  # known here, so that nothing is read
    has_left: bool = False  # nobody waits for it any longer


#: What is to be pulled for a request that waits for blocks, or why nothing is.
Entry = RemotePrefill | Refused | Follower
