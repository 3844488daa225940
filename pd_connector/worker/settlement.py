"""How a pull ends: what is said to the prefill engine when its reads are done, and what the answer means.

Decisions and messages only: no thread, no memory. Whoever reads (``peer``) comes here when no read of the pull can
write any more.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from pd_connector.metadata import Cause, PullOrder
from pd_connector.params import contents_digest
from transfer.control.client import ControlClient
from transfer.control.errors import AuthenticationFailed, PeerRefused
from transfer.control.messages import InvalidReason, Release, Released, Reply
from transfer.errors import PeerNotAllowed, TransferError

#: What has been read is not thrown away for want of an answer that takes a round trip.
_LEAST_CONFIRM_S = 1.0


class PullFailed(Exception):  # noqa: N818
    """A pull cannot be completed; nothing writes to its blocks any more."""

    def __init__(self, cause: Cause, reason: str, *, is_mute: bool = False) -> None:
        super().__init__(reason)
        self.cause = cause
        self.is_mute = is_mute  # the prefill engine does not answer on the control channel: there is nobody to tell


def cause_of(error: TransferError) -> Cause:
    """Why a pull fails whose prefill engine does not answer as it should."""
    if isinstance(error, PeerRefused):
        return Cause.REFUSED
    return Cause.DENIED if isinstance(error, AuthenticationFailed | PeerNotAllowed) else Cause.UNREACHABLE


@dataclass(frozen=True)
class Settled:
    """The end of a pull on this rank. ``cause`` is empty if all bytes arrived under a valid lease."""

    request_id: str
    cause: Cause = Cause.NONE
    reason: str = ""  # a sentence for people
    tokens: int = 0
    copied_bytes: int = 0
    descriptors: int = 0
    seconds: dict[str, float] = field(default_factory=dict)  # by phase


class Stopwatch:
    """Durations of the phases of one pull, in seconds."""

    def __init__(self, started: float) -> None:
        """``started``: on ``time.monotonic``."""
        self.started = started
        self.seconds: dict[str, float] = {}
        self._lap = started

    def lap(self, phase: str) -> None:
        """End a phase; the next one begins."""
        now = time.monotonic()
        self.seconds[phase] = now - self._lap
        self._lap = now

    def total(self) -> dict[str, float]:
        """All phases so far, and the whole time."""
        return {**self.seconds, "total": time.monotonic() - self.started}


class Settlement:
    """Ends the pulls of one reader, each exactly once: ``settle`` is called with the end, on any thread."""

    def __init__(
        self,
        client: ControlClient,
        reader: int,
        readers: int,
        message_timeout_s: float,
        settle: Callable[[Settled], None],
    ) -> None:
        self._client = client
        self._reader = reader
        self._readers = readers
        self._message_timeout_s = message_timeout_s
        self._settle = settle

    def confirm(self, order: PullOrder, done: Settled, timeout_s: float, watch: Stopwatch) -> None:
        """Ask whether the lease was valid all the time; the answer settles the pull. Does not wait for it.

        ``done`` is how it ends if so. ``timeout_s``: what is left of the pull's time, however little.
        """

        def settle(answer: "Future[Reply]") -> None:
            watch.lap("release")
            cause, reason = verdict(order, answer)
            if cause:
                self._settle_failed(order, cause, reason, watch)
            else:
                self._settle(replace(done, seconds=watch.total()))

        timeout_s = max(min(timeout_s, self._message_timeout_s), _LEAST_CONFIRM_S)
        self._release(order, timeout_s).add_done_callback(settle)

    def fail(self, order: PullOrder, cause: Cause, reason: str, watch: Stopwatch, *, tell: bool) -> None:
        """Settle a failed pull; if ``tell``, let the engine know that this reader will not come back.

        Its blocks are then free when all readers have said so, and not when the lease expires. Nobody waits for that.
        """
        if tell:
            self._release(order, self._message_timeout_s)
        self._settle_failed(order, cause, reason, watch)

    def _release(self, order: PullOrder, timeout_s: float) -> "Future[Reply]":
        remote = order.remote
        message = release_of(order, self._reader, self._readers)
        return self._client.request(remote.remote_host, remote.remote_port, message, timeout_s)

    def _settle_failed(self, order: PullOrder, cause: Cause, reason: str, watch: Stopwatch) -> None:
        remote = order.remote
        source = f"engine {remote.remote_engine_id} at {remote.remote_host}:{remote.remote_port}"
        self._settle(Settled(order.request_id, cause, f"pull from {source} failed: {reason}", seconds=watch.total()))


def release_of(order: PullOrder, reader: int, readers: int) -> Release:
    """What ``reader`` says when no read of the pull can write any more, whether it brought all bytes or not."""
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
    """What the completed answer to a release makes of a pull that brought all bytes.

    Returns the cause of its failure and a sentence for people; ``Cause.NONE`` only if the lease is known to have been
    valid until after the read.
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
