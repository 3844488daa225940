"""Follows named prompts at prefill engines until they can be pulled: what is known of each, and what to ask next.

A prefill engine answers when there is more to say, or when it has been waited for long enough. Each answer is followed
by the next question, until the prompt is complete, its request has ended, or nobody here waits for it any longer. From
the moment a prompt is complete, its lease is renewed, whether or not vLLM's scheduler has time for its request.

Nobody waits for ever for a transfer that the prefill engine does not know, keeps in its queue, does not go on with, or
starts over again and again: after ``queue_timeout_s`` without progress, it is cancelled there.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from pd_connector.orders import Cause, cause_of
from pd_connector.params import RemoteTransfer
from pd_connector.progress import BadProgressError, Progress, progress_of
from pd_connector.scheduler.renewals import Renewals, log_undelivered
from transfer.control.client import ControlClient
from transfer.control.messages import Cancel, Follow, Followed, Reply, TransferState
from transfer.errors import TransferError

logger = logging.getLogger(__name__)

_WAIT_S = 5.0  # for which a prefill engine may keep a question if there is nothing new
_PAUSE_S = 0.05  # before the next question, if an engine answers at once that there is nothing new
_ASKED_PER_STEP = 20  # after such a pause, because a step must not take long


@dataclass(frozen=True, slots=True)
class FollowLimits:
    """How long to wait for what, in seconds."""

    message_s: float  # an answer, beyond the time for which the prefill engine may keep the question
    queue_s: float  # the prefill engine to know the transfer, to begin with it, or to get further than before


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """A prompt will not come. Final."""

    cause: Cause
    reason: str  # for people


@dataclass(slots=True, eq=False)
class _Subscription:
    request_id: str
    transfer: RemoteTransfer
    engine_id: str  # that is asked; empty: whichever is there
    give_up_at: float
    asked_at: float = 0.0
    asked: Future[Reply] | None = None
    was_answered: bool = False
    state: TransferState = TransferState.UNKNOWN
    attempt: int = -1
    progress: Progress | None = None  # the last known, perhaps of an earlier attempt
    reached: int = -2  # tokens that were ever complete; -1 if the prompt was only queued, -2 if it was unknown
    failed: TransferFailed | None = None

    @property
    def has_ended(self) -> bool:
        """Whether there is nothing left to ask."""
        return self.failed is not None or self.state is TransferState.COMPLETE

    def gets_further(self) -> bool:
        """Note how far the prompt is; return whether that is further than ever before. Starting over is not."""
        before = self.reached
        match self.state:
            case TransferState.QUEUED:
                self.reached = max(before, -1)
            case TransferState.COMPUTING if self.progress is not None:
                self.reached = max(before, self.progress.tokens)
        return self.reached > before

    def question(self, wait_s: float) -> Follow:
        """Return what to ask next, and be answered after ``wait_s`` at the latest."""
        is_known = self.progress is not None and self.progress.remote.remote_attempt == self.attempt
        tokens = self.progress.tokens if self.progress is not None and is_known else 0
        return Follow(self.engine_id, self.transfer.transfer_id, self.attempt, tokens, self.state, wait_s)


class Subscriptions:
    """Owns what is known of named prompts, by request id. Thread-safe; no method waits for a peer."""

    def __init__(
        self,
        client: ControlClient,
        renewals: Renewals,
        limits: FollowLimits,
        clock: Callable[[], float] = time.monotonic,
        on_news: Callable[[], None] = lambda: None,
    ) -> None:
        """Follow nothing yet.

        Args:
            client: sends the messages; closed by its owner.
            renewals: keep the leases of complete prompts alive.
            limits: of the time that anything may take.
            clock: a monotonic clock, in seconds.
            on_news: called on the control client's thread when there is something new to ``look`` at.
        """
        self._on_news = on_news
        self._client = client
        self._renewals = renewals
        self._limits = limits
        self._clock = clock
        self._lock = threading.Lock()  # held while the renewals' is taken, never the other way round
        self._followed: dict[str, _Subscription] = {}
        self._paused: deque[tuple[float, _Subscription]] = deque()  # when to ask; the earliest first
        self._closing = False

    def follow(self, request_id: str, transfer: RemoteTransfer) -> None:
        """Follow a request's prompt from now on."""
        give_up_at = self._clock() + self._limits.queue_s
        subscription = _Subscription(request_id, transfer, transfer.remote_engine_id, give_up_at)
        with self._lock:
            self._followed[request_id] = subscription
        self._ask(subscription)

    def look(self, request_id: str) -> Progress | TransferFailed | None:
        """Return how far a prompt is, or why it will not come; None if the prefill engine is not computing it yet.

        Gives up a transfer that has taken too long.
        """
        with self._lock:
            subscription = self._followed[request_id]
            is_late = not subscription.has_ended and self._clock() >= subscription.give_up_at
            if is_late:
                subscription.failed = self._too_late(subscription)
            if subscription.failed is not None:
                found: Progress | TransferFailed | None = subscription.failed
            elif subscription.state in {TransferState.COMPUTING, TransferState.COMPLETE}:
                found = subscription.progress
            else:
                found = None
        if is_late:
            self._withdraw(subscription)
            self._cancel(subscription)
        return found

    def end(self, request_id: str) -> Progress | TransferFailed:
        """Stop following a prompt for which ``look`` has returned something; return the newest of it.

        The lease of a complete prompt is renewed from then on until the renewals are told otherwise.
        """
        subscription = self._forget(request_id)
        found = subscription.failed or subscription.progress
        assert found is not None, "nothing is known of a transfer that is to be pulled"
        return found

    def abandon(self, request_id: str) -> None:
        """Stop following a prompt that nobody wants any longer, and tell the prefill engine."""
        subscription = self._forget(request_id)
        self._renewals.drop(request_id)
        if subscription.failed is None:
            self._cancel(subscription)

    def ask_due(self) -> None:
        """Ask again where an answer came at once that said nothing new. For every scheduler step."""
        for _ in range(_ASKED_PER_STEP):
            if (subscription := self._next_due()) is None:
                return
            self._ask(subscription)

    def close(self) -> None:
        """Stop following. Nothing is cancelled: the prefill engines' leases expire."""
        with self._lock:
            self._closing = True
            followed = list(self._followed.values())
        for subscription in followed:
            self._withdraw(subscription)

    @property
    def request_ids(self) -> frozenset[str]:
        """The requests whose prompts are followed."""
        with self._lock:
            return frozenset(self._followed)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every prompt that is followed has ended, was asked about, or soon will be."""
        with self._lock:
            paused = {id(subscription) for _, subscription in self._paused}
            for request_id, subscription in self._followed.items():
                assert subscription.request_id == request_id, "a prompt is followed for another request"
                is_asked = subscription.asked is not None and not subscription.asked.cancelled()
                goes_on = is_asked or id(subscription) in paused or self._closing
                assert subscription.has_ended or goes_on, "a prompt is not followed"
                if subscription.state in {TransferState.COMPUTING, TransferState.COMPLETE}:
                    assert subscription.progress is not None, "nothing is known of a prompt that is being computed"

    def _ask(self, subscription: _Subscription) -> None:
        limits = self._limits
        # Long before it is given up, so that an engine that does not answer is known from one that has no news.
        wait_s = min(_WAIT_S, limits.queue_s / 4)
        with self._lock:
            question = subscription.question(wait_s)
            subscription.asked_at = self._clock()
        transfer, timeout_s = subscription.transfer, wait_s + limits.message_s
        future = self._client.request(transfer.remote_host, transfer.remote_port, question, timeout_s)
        with self._lock:
            subscription.asked = future
            is_wanted = self._is_followed(subscription)
        if not is_wanted:
            future.cancel()
        future.add_done_callback(partial(self._take_answer, subscription))

    def _take_answer(self, subscription: _Subscription, future: Future[Reply]) -> None:
        """Take an answer, and ask again. Runs on the control client's thread."""
        if future.cancelled():
            return
        with self._lock:
            if not self._is_followed(subscription) or subscription.has_ended:
                return
            is_new = self._note(subscription, future)
            now = self._clock()
            asks_again = not subscription.has_ended and (is_new or now >= subscription.asked_at + _PAUSE_S)
            if not asks_again and not subscription.has_ended:
                self._paused.append((now + _PAUSE_S, subscription))
        if is_new or subscription.has_ended:
            self._on_news()
        if asks_again:
            self._ask(subscription)

    def _note(self, subscription: _Subscription, future: Future[Reply]) -> bool:
        """Note an answer, or that there is none; return whether it was news. With the lock held."""
        label, error = subscription.transfer.label, future.exception()
        if error is not None:
            cause = cause_of(error) if isinstance(error, TransferError) else Cause.INTERNAL
            subscription.failed = TransferFailed(cause, f"{label} cannot be followed: {error}")
            return True
        reply = future.result()
        assert isinstance(reply, Followed), "the control client passes on what belongs to the question only"
        subscription.was_answered = True
        before = subscription.state, subscription.attempt, subscription.progress
        try:
            state = TransferState(reply.state)
        except ValueError:  # of a later version
            state = TransferState.ENDED
        match state:
            case TransferState.ENDED:
                self._fail(subscription, f"the prefill engine says that {label} has ended: {_reason(reply)}")
            case TransferState.UNKNOWN if subscription.state is not TransferState.UNKNOWN:
                self._fail(subscription, f"the prefill engine no longer knows {label}, which was {subscription.state}")
            case TransferState.UNKNOWN:
                pass
            case TransferState.QUEUED:
                subscription.engine_id, subscription.state, subscription.attempt = (
                    reply.engine_id, state, reply.attempt,
                )  # fmt: skip
            case TransferState.COMPUTING | TransferState.COMPLETE:
                self._advance(subscription, reply, state)
        is_new = before != (subscription.state, subscription.attempt, subscription.progress)
        if subscription.gets_further():
            subscription.give_up_at = self._clock() + self._limits.queue_s
        return is_new

    def _advance(self, subscription: _Subscription, reply: Followed, state: TransferState) -> None:
        try:
            progress = progress_of(subscription.transfer, reply, subscription.progress)
        except BadProgressError as error:
            self._fail(subscription, str(error))
            return
        subscription.engine_id, subscription.attempt = reply.engine_id, reply.attempt
        subscription.state, subscription.progress = state, progress
        if progress.is_complete:
            self._renewals.keep(subscription.request_id, progress.remote)

    def _fail(self, subscription: _Subscription, reason: str) -> None:
        subscription.failed = TransferFailed(Cause.TRANSFER, reason)

    def _too_late(self, subscription: _Subscription) -> TransferFailed:
        label, limits = subscription.transfer.label, self._limits
        if subscription.state is TransferState.UNKNOWN and not subscription.was_answered:
            return TransferFailed(
                Cause.UNREACHABLE,
                f"{label} is unknown: the prefill engine has not answered for {limits.queue_s:g} s "
                "(queue_timeout_s). Check that it runs, and that its control port can be reached from here",
            )
        if subscription.state is TransferState.UNKNOWN:
            return TransferFailed(
                Cause.TRANSFER,
                f"{label} did not begin within {limits.queue_s:g} s (queue_timeout_s): the prefill engine has "
                "received no request with this transfer_id. The router must send it the other leg with the same "
                "transfer_id; if that takes longer, raise queue_timeout_s",
            )
        if subscription.state is TransferState.QUEUED and not subscription.attempt:
            return TransferFailed(
                Cause.QUEUE,
                f"{label} was given up: it waited {limits.queue_s:g} s in the prefill engine's queue "
                "(queue_timeout_s): that engine has too many requests, or is paused",
            )
        if subscription.attempt > 0:
            return TransferFailed(
                Cause.PREEMPTED,
                f"{label} was given up: the prefill engine has preempted the prompt and started it over (attempt "
                f"{subscription.attempt + 1}), and has not got beyond {max(subscription.reached, 0)} tokens for "
                f"{limits.queue_s:g} s (queue_timeout_s): it lacks KV blocks. Give it more memory or fewer requests at "
                "a time, or raise queue_timeout_s",
            )
        return TransferFailed(
            Cause.QUEUE,
            f"{label} was given up: the prefill engine has not gone on with it for {limits.queue_s:g} s "
            "(queue_timeout_s): it is overloaded or paused",
        )

    def _cancel(self, subscription: _Subscription) -> None:
        """Tell the prefill engine that a prompt will not be read, if it can be reached."""
        transfer, progress = subscription.transfer, subscription.progress
        if progress is not None:
            self._renewals.cancel(progress.remote)
            return
        message = Cancel("", (), (transfer.transfer_id,))
        future = self._client.request(transfer.remote_host, transfer.remote_port, message, self._limits.message_s)
        future.add_done_callback(log_undelivered)

    def _forget(self, request_id: str) -> _Subscription:
        with self._lock:
            subscription = self._followed.pop(request_id)
        self._withdraw(subscription)
        return subscription

    def _withdraw(self, subscription: _Subscription) -> None:
        """Forget the question to which there is no answer yet. Not with the lock held: callbacks take it."""
        if subscription.asked is not None:
            subscription.asked.cancel()

    def _next_due(self) -> _Subscription | None:
        """Remove and return a subscription whose pause is over; None if there is none."""
        with self._lock:
            while self._paused and self._paused[0][0] <= self._clock():
                _, subscription = self._paused.popleft()
                if self._is_followed(subscription) and not subscription.has_ended:
                    return subscription
            return None

    def _is_followed(self, subscription: _Subscription) -> bool:
        return not self._closing and self._followed.get(subscription.request_id) is subscription


def _reason(reply: Followed) -> str:
    return reply.reason or f"it is {reply.state!r}"
