"""The states of a decode leg, as data, and the book that holds each leg in one of them."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from pd_connector.orders import Cause
from pd_connector.params import ParamsError, PromptIdentity, RemotePrefill, RemoteTransfer, check_prompt
from pd_connector.scheduler.decode.single_use import Key


@dataclass(frozen=True, slots=True)
class Refused:
    """Why nothing is pulled for a decode leg, or from a prefill engine, and until when on the clock."""

    cause: Cause
    reason: str  # for people
    until: float = math.inf


@dataclass(frozen=True, slots=True)
class Follower:
    """A decode leg whose lease or transfer another request uses or has used."""

    key: Key


#: What is to be pulled for a request that waits for blocks, or why nothing is.
Entry = RemotePrefill | Refused | Follower


@dataclass(slots=True)
class Announced:
    """A decode leg whose prompt a prefill engine has yet to compute."""

    transfer: RemoteTransfer
    prompt: PromptIdentity | None  # None if it need not be compared
    is_checked: bool = False  # whether the prompt was compared with that of the other leg
    computed_tokens: int = 0  # held here when vLLM last asked

    def mismatch(self, remote: RemotePrefill) -> str:
        """Return in what the prompt of the other leg differs, for people; empty if it does not, as far as is known."""
        try:
            if self.prompt is not None:
                check_prompt(remote, self.prompt)
        except ParamsError as error:
            return f"{self.transfer.label} is of another prompt: {error}"
        return ""


@dataclass(slots=True)
class Waiting:
    """A decode leg that has yet to be given blocks."""

    entry: Entry
    computed_tokens: int = 0  # held here when vLLM last asked


@dataclass(slots=True)
class Pulling:
    """A decode leg whose prompt is being pulled to the device."""

    entry: RemotePrefill | Refused
    refused_for: Cause = Cause.NONE  # known here, so that nothing is read
    has_left: bool = False  # nobody waits for it any longer


@dataclass(slots=True)
class Landing:
    """A decode leg whose prompt is being pulled to host memory: its request waits, without blocks."""

    remote: RemotePrefill
    has_left: bool = False  # nobody waits for it any longer


@dataclass(slots=True)
class Landed:
    """A decode leg whose pull to host memory has ended: its request takes what it finds there."""

    computed_tokens: int = 0  # held here, host memory included, when vLLM last asked


@dataclass(frozen=True, slots=True)
class Proving:
    """A decode leg that is computed here, and pulled to prove its prefill engine: nobody waits for it."""

    remote: RemotePrefill


@dataclass(frozen=True, slots=True)
class Bordering:
    """What is left of a leg that was pulled: states at borders of blocks, named by their own pull. Nobody waits."""

    remote: RemotePrefill


@dataclass(frozen=True, slots=True)
class Computed:
    """A decode leg that will be computed here."""

    cause: str


Leg = Announced | Waiting | Pulling | Landing | Landed | Proving | Bordering | Computed


def lease(leg: Leg) -> RemotePrefill | None:
    """Return the lease that a leg needs, None if it needs none."""
    match leg:
        case Waiting(RemotePrefill() as remote) | Pulling(RemotePrefill() as remote):
            return remote
        case Landing(remote) | Proving(remote) | Bordering(remote):
            return remote
    return None


class Legs:
    """The decode legs of an engine by request id, counted by state."""

    def __init__(self) -> None:
        self._legs: dict[str, Leg] = {}
        self._numbers: Counter[type[Leg]] = Counter()

    def __contains__(self, request_id: str) -> bool:
        """Return whether a request has a leg."""
        return request_id in self._legs

    def get(self, request_id: str) -> Leg | None:
        """Return a request's leg, None if it has none."""
        return self._legs.get(request_id)

    def put(self, request_id: str, leg: Leg) -> None:
        """Bring a request's leg into another state."""
        self.drop(request_id)
        self._legs[request_id] = leg
        self._numbers[type(leg)] += 1

    def drop(self, request_id: str) -> None:
        """Forget a request's leg, if it has one."""
        if (leg := self._legs.pop(request_id, None)) is not None:
            self._numbers[type(leg)] -= 1

    def number(self, *states: type[Leg]) -> int:
        """Return how many legs are in one of some states."""
        return sum(self._numbers[state] for state in states)

    def items(self) -> Iterable[tuple[str, Leg]]:
        """Return the requests and their legs."""
        return self._legs.items()
