"""How a pull passes and ends on this rank: phases, why it fails, what to tell the prefill engine, and what that means.

Data and decisions only: no threads, no memory, and nothing is sent.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from layout.staging import Schedule
from pd_connector.engine_limits import ENGINE_LIMITS
from pd_connector.orders import Cause, PullOrder, cause_of
from pd_connector.params import contents_digest
from pd_connector.progress import Progress
from pd_connector.stats import StatsRecorder
from pd_connector.traces import Lap
from transfer.control.failures import PeerRefused
from transfer.control.messages import Cancel, ErrorCode, InvalidReason, Place, Release, Released
from transfer.errors import TransferError

#: Minimum time for P's answer, even after the deadline: bytes that were read should not be wasted for a round trip.
MIN_ANSWER_S = 1.0

#: What to do about a pull that had too little time.
LONGER = "if prompts are so long, or so many at a time, for this network, raise pull_timeout_s"


def asks_to_wait(error: TransferError) -> bool:
    """Return whether P has answered, and wants to be asked again later."""
    return isinstance(error, PeerRefused) and error.code == ErrorCode.NOT_READY


class PullFailed(Exception):  # noqa: N818
    """A pull has failed, and nothing of it is under way any longer, except for reads that have not settled."""

    def __init__(self, cause: Cause, reason: str, *, is_unresponsive: bool = False) -> None:
        super().__init__(reason)
        self.cause = cause
        self.is_unresponsive = is_unresponsive  # on the control channel, or denies access to it: a release is useless

    @classmethod
    def unanswered(cls, error: TransferError, *, had_time: bool) -> "PullFailed":
        """Return the failure of a pull whose message to P ended with ``error``; ``had_time`` as for ``cause_of``."""
        cause = Cause.TIMEOUT if asks_to_wait(error) else cause_of(error, had_time=had_time)
        return cls(cause, str(error), is_unresponsive=cause not in (Cause.REFUSED, Cause.TIMEOUT))


def got_no_further(prompt: Progress, reached: int, timeout_s: float) -> PullFailed:
    """Return the failure of a pull whose prompt has not got beyond ``reached`` tokens for the pull timeout."""
    of = f"{prompt.remote.remote_num_tokens} prompt tokens"
    if prompt.attempt:
        return PullFailed(
            Cause.PREEMPTED,
            f"the prefill engine has preempted the prompt and started it over (attempt {prompt.attempt + 1}), and has "
            f"not got beyond {reached} of {of} for the pull timeout of {timeout_s} s: it lacks KV blocks. Give it more "
            "memory or fewer requests at a time, or raise pull_timeout_s",
        )
    return PullFailed(
        Cause.TIMEOUT,
        f"the prefill engine has announced nothing new for the pull timeout of {timeout_s} s: its request is "
        f"{str(prompt.state)!r}, {prompt.tokens} of {of} are computed",
    )


@dataclass(frozen=True)
class RankRead:
    """A range that was read from one rank, and on the pull's clock, when all was read and when all was in place."""

    schedule: Schedule
    all_read: float
    in_place: float  # as all_read, if nothing had to be copied
    is_mapped: bool = False  # whether the rank's memory is mapped here


@dataclass(frozen=True, kw_only=True)
class ReadSoFar:
    """What a pull has read since it began, or since it began again."""

    copied_bytes: int = 0
    host_bytes: int = 0  # of them, from the prefill engine's host memory
    mapped_bytes: int = 0  # of them, from its device memory as it is mapped here
    ahead_bytes: int = 0  # of them, before the prompt was computed
    descriptors: int = 0

    def plus(self, reads: Sequence[RankRead], place: Place, *, is_ahead: bool) -> "ReadSoFar":
        """Return the same with a range that was read in ``place``, from all ranks."""
        wanted_bytes = sum(read.schedule.wanted_bytes for read in reads)
        return ReadSoFar(
            copied_bytes=self.copied_bytes + wanted_bytes,
            host_bytes=self.host_bytes + (wanted_bytes if place is Place.HOST else 0),
            mapped_bytes=self.mapped_bytes + sum(read.schedule.wanted_bytes for read in reads if read.is_mapped),
            ahead_bytes=self.ahead_bytes + (wanted_bytes if is_ahead else 0),
            descriptors=self.descriptors + sum(read.schedule.descriptors for read in reads),
        )


@dataclass(frozen=True)
class PullEnd(ReadSoFar):
    """How a pull ended on this rank. ``cause`` is empty if all bytes arrived under a valid lease."""

    request_id: str
    cause: Cause = Cause.NONE
    reason: str = ""  # for people
    tokens: int = 0
    is_ahead: bool = False  # whether it began before the prefill engine had computed the prompt
    restarts: int = 0  # how many times what had been read came to nothing
    #: Of what was ordered, the states that the prefill engine does not have: cache groups and entries of their tables.
    lacking_states: frozenset[tuple[int, int]] = frozenset()
    seconds: dict[str, float] = field(default_factory=dict)  # by phase
    is_told: bool = False  # see ``PartEnd``

    @property
    def failure(self) -> str:
        """Why the pull failed, with the cause that is counted; empty if it did not."""
        return f"{self.reason} (cause {self.cause})" if self.cause else ""

    @property
    def comes_of_leaving(self) -> bool:
        """See ``Cause``."""
        return self.cause.comes_of_leaving

    def count(self, stats: StatsRecorder) -> None:
        """Record the pull in the statistics."""
        stats.count("pull_restarts", self.restarts)
        if self.cause:
            stats.count("pull_failures", label=self.cause)
            return
        stats.count("pulls")
        self.count_bytes(stats)
        stats.count("pull_tokens", self.tokens)
        stats.count("pulls_ahead", int(self.is_ahead))
        stats.count("pull_bytes_ahead", self.ahead_bytes)
        for phase, seconds in self.seconds.items():
            stats.observe(phase, seconds)

    def count_bytes(self, stats: StatsRecorder) -> None:
        """Record what was read, alone."""
        stats.count("pull_bytes", self.copied_bytes)
        stats.count("pull_bytes_from_host", self.host_bytes)
        stats.count("pull_bytes_over_ipc", self.mapped_bytes)
        stats.count("pull_descriptors", self.descriptors)


class Stopwatch:
    """Measures the phases of one pull, in seconds. A phase may come several times: its times add up."""

    def __init__(self, clock: Callable[[], float], laps: list[Lap] | None = None) -> None:
        """Start the first phase. ``laps`` gets each of them; None keeps their sums alone."""
        self.started = clock()
        self._laps = laps
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._lap = self.started

    def lap(self, phase: str, at: float | None = None) -> None:
        """End ``phase`` and start the next one: now, or at a moment of the clock since the last one began."""
        now = self._clock() if at is None else max(at, self._lap)
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._lap
        if self._laps is not None:
            self._laps.append(Lap(phase, self._lap, now))
        self._lap = now

    def total(self) -> dict[str, float]:
        """Return the durations of all phases so far, and the total without "wait", which P needs for its prompt."""
        taken = self._clock() - self.started - self.seconds.get("wait", 0.0)
        return {**self.seconds, "total": max(taken, 0.0)}


def cancel_message(order: PullOrder) -> Cancel:
    """Return the message that lets go of a prompt that is not complete, whose lease cannot be released yet."""
    return Cancel(order.remote.remote_engine_id, (), (order.transfer_id,))


def release_message(order: PullOrder, reader: int, readers: int, place: str = Place.DEVICE) -> Release:
    """Return the message that ``reader`` sends when all reads of the pull have settled, successful or not."""
    remote, reader, readers = order.remote, order.part * readers + reader, order.parts * readers
    return Release(
        remote.remote_engine_id, remote.lease_id, reader, readers, order.pull_id, contents_digest(remote), place,
        order.prefixes_at,
    )  # fmt: skip


_INVALID_REASONS: dict[str, str] = {
    InvalidReason.EXPIRED: "had expired when the read was done, so its blocks may have changed: it was not renewed in "
    f"time, or is over {ENGINE_LIMITS.max_lease_age_s:g} s old, the most that a pull may take behind its prompt",
    InvalidReason.CANCELLED: "was cancelled before the read was done, so its blocks may have changed",
    InvalidReason.REVOKED: "gave way to other requests before the read was announced: the prefill engine was short of "
    "blocks",
    InvalidReason.RELEASED: "was used up by another pull: kv_transfer_params are good for one pull. Prefill again",
    InvalidReason.UNKNOWN: "is unknown to the prefill engine: it ended long ago, or kv_transfer_params name another",
    InvalidReason.READERS: "is being read by a decode engine of another size: kv_transfer_params are good for one pull",
    InvalidReason.CONTENTS: "does not hold what was read: kv_transfer_params were altered on the way. Pass them on "
    "unchanged",
    InvalidReason.EARLY: "was read without asking whether all of it was written: this engine's connector is older than "
    "the prefill engine's. Use the same version on both sides",
    InvalidReason.MOVED: "has moved to the prefill engine's host memory, and was read on its device",
}


def why_ended(order: PullOrder, reason: str) -> str:
    """Return for people why a lease could not be read, or what was read of it cannot be used."""
    return f"lease {order.remote.lease_id} {_INVALID_REASONS.get(reason, f'is not valid: {reason!r}')}"


def verdict(order: PullOrder, answer: "Future[Released]") -> tuple[Cause, str]:
    """Return the cause and reason of failure of a pull that read all bytes, given the answer to its release.

    The cause is ``Cause.NONE`` only if the lease is known to have been valid until after the read.
    """
    if answer.cancelled():
        return Cause.UNCONFIRMED, "the release was abandoned before it was answered"
    if (error := answer.exception()) is not None:
        return Cause.UNCONFIRMED, f"the release was not answered: {error}"
    reply = answer.result()
    if reply.valid:
        return Cause.NONE, ""
    return Cause.LEASE, why_ended(order, reply.reason)
