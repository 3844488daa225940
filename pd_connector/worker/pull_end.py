"""How a pull ends on this rank: its causes of failure, what is said to the prefill engine, what its answer means.

Data and decisions only: no thread, no memory, no message is sent here.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from pd_connector.orders import Cause, PullOrder
from pd_connector.params import contents_digest
from pd_connector.stats import StatsRecorder
from transfer.control.errors import AuthenticationFailed, PeerRefused
from transfer.control.messages import InvalidReason, Release, Released, Reply
from transfer.errors import PeerNotAllowed, TransferError


class PullFailed(Exception):  # noqa: N818
    """A pull cannot be completed; nothing writes to its blocks any more."""

    def __init__(self, cause: Cause, reason: str, *, is_mute: bool = False) -> None:
        super().__init__(reason)
        self.cause = cause
        self.is_mute = is_mute  # the prefill engine does not answer on the control channel: there is nobody to tell


def cause_of(error: TransferError) -> Cause:
    """Return why a pull fails whose prefill engine does not answer as it should."""
    if isinstance(error, PeerRefused):
        return Cause.REFUSED
    return Cause.DENIED if isinstance(error, AuthenticationFailed | PeerNotAllowed) else Cause.UNREACHABLE


@dataclass(frozen=True)
class PullEnd:
    """The end of a pull on this rank. ``cause`` is empty if all bytes arrived under a valid lease."""

    request_id: str
    cause: Cause = Cause.NONE
    reason: str = ""  # a sentence for people
    tokens: int = 0
    copied_bytes: int = 0
    descriptors: int = 0
    seconds: dict[str, float] = field(default_factory=dict)  # by phase

    @property
    def failure(self) -> str:
        """Why it failed; empty if it did not."""
        return self.reason if self.cause else ""

    def count(self, stats: StatsRecorder) -> None:
        """Add it to the statistics."""
        if self.cause:
            stats.count("pull_failures", label=self.cause)
            return
        stats.count("pulls")
        stats.count("pull_bytes", self.copied_bytes)
        stats.count("pull_descriptors", self.descriptors)
        stats.count("pull_tokens", self.tokens)
        for phase, seconds in self.seconds.items():
            stats.observe(phase, seconds)


class Stopwatch:
    """Measures the phases of one pull, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start it."""
        self.started = clock()
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._lap = self.started

    def lap(self, phase: str) -> None:
        """End a phase; the next one begins."""
        now = self._clock()
        self.seconds[phase] = now - self._lap
        self._lap = now

    def total(self) -> dict[str, float]:
        """Return all phases so far, and the whole time."""
        return {**self.seconds, "total": self._clock() - self.started}


def release_of(order: PullOrder, reader: int, readers: int) -> Release:
    """Return what ``reader`` says when no read of the pull can write any more, whether it brought all bytes or not."""
    remote = order.remote
    return Release(remote.remote_engine_id, remote.lease_id, reader, readers, order.pull_id, contents_digest(remote))


_WORDS: dict[str, str] = {
    InvalidReason.EXPIRED: "had expired when the read was done: its blocks may have changed",
    InvalidReason.CANCELLED: "was cancelled before the read was done: its blocks may have changed",
    InvalidReason.RELEASED: "was used up by another pull: kv_transfer_params are good for one. Prefill again",
    InvalidReason.UNKNOWN: "is not known there: it ended long ago, or kv_transfer_params name the wrong one",
    InvalidReason.READERS: "is being read by a decode engine of another size: kv_transfer_params are good for one pull",
    InvalidReason.CONTENTS: "does not hold what was read: kv_transfer_params were altered on their way. Pass them on "
    "unchanged",
}


def verdict(order: PullOrder, answer: "Future[Reply]") -> tuple[Cause, str]:
    """Return what the completed answer to a release makes of a pull that brought all bytes.

    Returns:
        The cause of its failure and a sentence for people. ``Cause.NONE`` only if the lease is known to have been valid
        until after the read.
    """
    if answer.cancelled():
        return Cause.UNCONFIRMED, "the release was given up before it was answered"
    if (error := answer.exception()) is not None:
        return Cause.UNCONFIRMED, f"the release was not answered: {error}"
    reply = answer.result()
    if not isinstance(reply, Released):
        return Cause.UNCONFIRMED, f"the release was answered with a {type(reply).__name__}"
    if reply.valid:
        return Cause.NONE, ""
    return Cause.LEASE, f"lease {order.remote.lease_id} {_WORDS.get(reply.reason, f'is not valid: {reply.reason!r}')}"
