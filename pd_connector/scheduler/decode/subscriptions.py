"""Follows named prompts at prefill engines until they are complete: what is known of each, and what to ask next.

A prefill engine answers when there is more to say, or when it has been waited for long enough. Each answer is followed
by the next question, until the prompt is complete, its request has ended, or nobody here waits for it any longer. From
the moment a prompt is complete, its lease is renewed, whether or not vLLM's scheduler has time for its request.

Nobody waits for ever for a transfer that the prefill engine does not know, keeps in its queue, does not go on with, or
starts over again and again: after ``queue_timeout_s`` without progress, it is cancelled there.

Workers follow a prompt that is pulled ahead themselves, range by range. Here it is then followed for its end alone, so
that this engine can rest until then: vLLM steps an engine whose requests all wait about a thousand times a second, to
ask its workers whether a pull has ended, and none can end before its prompt is complete.
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
from pd_connector.progress import Progress, TransferEnded
from pd_connector.scheduler.decode.legs import Refused
from pd_connector.scheduler.decode.renewals import Renewals
from pd_connector.vllm.engine_core import EngineLoop
from transfer.control.client import ControlClient
from transfer.control.messages import Followed, TransferState
from transfer.errors import TransferError

logger = logging.getLogger(__name__)

_WAIT_S = 5.0  # for which a prefill engine may keep a question if there is nothing new
_PAUSE_S = 0.05  # before the next question, if an engine answers at once and is no further
_ASKED_PER_STEP = 20  # after such a pause, because a step must not take long


@dataclass(frozen=True, slots=True)
class FollowLimits:
    """How long to wait for what, in seconds."""

    message_s: float  # an answer, beyond the time for which the prefill engine may keep the question
    queue_s: float  # the prefill engine to know the transfer, to begin with it, or to get further than before


@dataclass(slots=True, eq=False)
class _Subscription:
    request_id: str
    progress: Progress
    give_up_at: float
    asked_at: float = 0.0
    asked: Future[Followed] | None = None  # the last question; None if nobody waits for its answer
    was_answered: bool = False
    reached: int = -2  # tokens that were ever complete; -1 if the prompt was only queued, -2 if it was unknown
    is_pulled: bool = False  # so only its end matters
    failed: Refused | None = None

    @property
    def has_ended(self) -> bool:
        """Whether there is nothing left to ask."""
        return self.failed is not None or self.progress.is_complete


class Subscriptions:
    """Owns what is known of named prompts, by request id. Thread-safe; no method waits for a peer."""

    def __init__(
        self,
        client: ControlClient,
        renewals: Renewals,
        limits: FollowLimits,
        engine: EngineLoop,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Follow nothing yet.

        Args:
            client: sends the messages; closed by its owner.
            renewals: keep the leases of complete prompts alive.
            limits: of the time that anything may take.
            engine: woken when there is something new to ``look`` at, or a prompt that is pulled has ended.
            clock: a monotonic clock, in seconds.
        """
        self._client = client
        self._renewals = renewals
        self._limits = limits
        self._engine = engine
        self._clock = clock
        self._lock = threading.Lock()  # held while the renewals' or the client's is taken, never the other way round
        self._followed: dict[str, _Subscription] = {}
        self._paused: deque[tuple[float, _Subscription]] = deque()  # when to ask; the earliest first
        self._closing = False

    def follow(self, request_id: str, transfer: RemoteTransfer) -> None:
        """Follow a request's prompt from now on."""
        give_up_at = self._clock() + self._limits.queue_s
        subscription = _Subscription(request_id, Progress.of_transfer(transfer), give_up_at)
        with self._lock:
            self._followed[request_id] = subscription
        self._ask(subscription)

    def look(self, request_id: str) -> Progress | Refused | None:
        """Return how far a prompt is, or why it will not come; None if the prefill engine is not computing it yet.

        Gives up a transfer that has taken too long.
        """
        with self._lock:
            subscription = self._followed[request_id]
            is_late = not subscription.has_ended and self._clock() >= subscription.give_up_at
            if is_late:
                subscription.failed = self._too_late(subscription)
        if is_late:
            self._withdraw(subscription)
            self._renewals.cancel(subscription.progress.remote, subscription.progress.transfer_id)
        progress = subscription.progress
        is_begun = progress.state in {TransferState.COMPUTING, TransferState.COMPLETE}
        return subscription.failed or (progress if is_begun else None)

    def take(self, request_id: str) -> Progress | Refused:
        """Return the newest of a prompt for which ``look`` has returned something, and is pulled now if it comes.

        The lease of a complete prompt is renewed from then on until the renewals are told otherwise. One that is not
        complete is followed until it is, has ended or is forgotten, if the engine can be woken then.
        """
        with self._lock:
            subscription = self._followed[request_id]
            found = subscription.failed or subscription.progress
            subscription.is_pulled = not subscription.has_ended and self._engine.can_be_woken
            if subscription.is_pulled:
                subscription.progress = subscription.progress.without_tables()
        if subscription.is_pulled:
            self._withdraw(subscription)
            self._ask(subscription)
        else:
            self.forget(request_id)
        return found

    def forget(self, request_id: str) -> None:
        """Stop following a prompt. Those that are not followed are ignored."""
        with self._lock:
            subscription = self._followed.pop(request_id, None)
        if subscription is not None:
            self._withdraw(subscription)

    def abandon(self, request_id: str) -> None:
        """Stop following a prompt that nobody wants any longer, and tell the prefill engine."""
        with self._lock:
            subscription = self._followed[request_id]
        self.forget(request_id)
        self._renewals.drop(request_id)
        if subscription.failed is None:
            self._renewals.cancel(subscription.progress.remote, subscription.progress.transfer_id)

    def ask_due(self) -> None:
        """Ask again where an answer came at once that told of no progress. For every scheduler step."""
        for _ in range(_ASKED_PER_STEP):
            with self._lock:
                if not self._paused or self._paused[0][0] > self._clock():
                    return
                _, subscription = self._paused.popleft()
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
        """The requests whose prompts are followed and not pulled yet."""
        with self._lock:
            return frozenset(each for each, subscription in self._followed.items() if not subscription.is_pulled)

    @property
    def pulled(self) -> frozenset[str]:
        """The requests whose prompts are pulled and not complete, and about whose end the engine will be woken."""
        with self._lock:
            return frozenset(each for each, subscription in self._followed.items() if subscription.is_pulled)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every prompt that is followed has ended, was asked about, or soon will be."""
        with self._lock:
            paused = {id(subscription) for _, subscription in self._paused}
            for request_id, subscription in self._followed.items():
                assert subscription.request_id == request_id, "a prompt is followed for another request"
                goes_on = subscription.asked is not None or id(subscription) in paused or self._closing
                assert subscription.has_ended or goes_on, "a prompt is not followed"
                assert not (subscription.is_pulled and subscription.has_ended), "a pull's prompt is followed for ever"
                if subscription.progress.state in {TransferState.COMPUTING, TransferState.COMPLETE}:
                    assert subscription.progress.remote.lease_id, "nothing is known of a prompt that is being computed"

    def _ask(self, subscription: _Subscription) -> None:
        """Ask about a prompt, unless that was done, or it has ended or is not followed any longer."""
        # Long before it is given up, so that an engine that does not answer is known from one that has no news.
        wait_s = min(_WAIT_S, self._limits.queue_s / 4)
        with self._lock:
            is_asked = subscription.asked is not None and not subscription.asked.done()
            if is_asked or not self._is_followed(subscription):
                return
            remote, question = subscription.progress.remote, subscription.progress.question(wait_s)
            subscription.asked_at = self._clock()
            subscription.asked = future = self._client.request(
                remote.remote_host, remote.remote_port, question, wait_s + self._limits.message_s
            )
        future.add_done_callback(partial(self._take_answer, subscription))

    def _take_answer(self, subscription: _Subscription, future: Future[Followed]) -> None:
        """Take an answer, and ask again. Runs on the control client's thread."""
        if future.cancelled():
            return
        with self._lock:
            if subscription.asked is not future or not self._is_followed(subscription):
                return
            before, reached, now = subscription.progress, subscription.reached, self._clock()
            self._note(subscription, future)
            is_pulled, is_new = subscription.is_pulled, subscription.progress is not before
            # News alone, as of one attempt after the other, may never end. Of what is pulled, only the end is progress.
            is_further = subscription.reached > reached and not is_pulled
            asks_again = not subscription.has_ended and (is_further or now >= subscription.asked_at + _PAUSE_S)
            # A pull whose prompt brings nothing new is not followed on: without an answer to come, the engine steps
            # instead of resting, which costs steps, never time.
            is_over = subscription.has_ended or (is_pulled and not (asks_again or is_new))
            if is_over and is_pulled:
                del self._followed[subscription.request_id]
            elif not (is_over or asks_again):
                self._paused.append((now + _PAUSE_S, subscription))
        if is_over or (is_new and not is_pulled):
            self._engine.wake()
        if asks_again:
            self._ask(subscription)

    def _note(self, subscription: _Subscription, future: Future[Followed]) -> None:
        """Note an answer, or that there is none. With the lock held."""
        try:
            progress = subscription.progress.after(future.result())
        except TransferEnded as ended:
            subscription.failed = Refused(Cause.TRANSFER, str(ended))
            return
        except Exception as error:
            cause = cause_of(error) if isinstance(error, TransferError) else Cause.INTERNAL
            if cause is Cause.INTERNAL:
                logger.exception("PDConnector: unexpected answer about %s", subscription.progress.label)
            subscription.failed = Refused(cause, f"{subscription.progress.label} cannot be followed: {error}")
            return
        subscription.was_answered = True
        if subscription.is_pulled:
            progress = progress.without_tables()
        elif progress.is_complete:
            self._renewals.keep(subscription.request_id, progress.remote)
        subscription.progress = progress
        before = {TransferState.UNKNOWN: -2, TransferState.QUEUED: -1}
        if (reached := before.get(progress.state, progress.tokens)) > subscription.reached:  # starting over is not
            subscription.reached, subscription.give_up_at = reached, self._clock() + self._limits.queue_s

    def _too_late(self, subscription: _Subscription) -> Refused:
        progress, limits = subscription.progress, self._limits
        label, state, attempt = progress.label, progress.state, progress.attempt
        if state is TransferState.UNKNOWN and not subscription.was_answered:
            return Refused(
                Cause.UNREACHABLE,
                f"{label} is unknown: the prefill engine has not answered for {limits.queue_s:g} s "
                "(queue_timeout_s). Check that it runs, and that its control port can be reached from here",
            )
        if state is TransferState.UNKNOWN:
            return Refused(
                Cause.TRANSFER,
                f"{label} did not begin within {limits.queue_s:g} s (queue_timeout_s): the prefill engine has "
                "received no request with this transfer_id. The router must send it the other leg with the same "
                "transfer_id; if that takes longer, raise queue_timeout_s",
            )
        if state is TransferState.QUEUED and not attempt:
            return Refused(
                Cause.QUEUE,
                f"{label} was given up: it waited {limits.queue_s:g} s in the prefill engine's queue "
                "(queue_timeout_s): that engine has too many requests, or is paused",
            )
        if attempt > 0:
            return Refused(
                Cause.PREEMPTED,
                f"{label} was given up: the prefill engine has preempted the prompt and started it over (attempt "
                f"{attempt + 1}), and has not got beyond {max(subscription.reached, 0)} tokens for "
                f"{limits.queue_s:g} s (queue_timeout_s): it lacks KV blocks. Give it more memory or fewer requests at "
                "a time, or raise queue_timeout_s",
            )
        return Refused(
            Cause.QUEUE,
            f"{label} was given up: the prefill engine has not gone on with it for {limits.queue_s:g} s "
            "(queue_timeout_s): it is overloaded or paused",
        )

    def _withdraw(self, subscription: _Subscription) -> None:
        """Forget the question to which there is no answer yet. Not with the lock held: callbacks take it."""
        with self._lock:
            asked, subscription.asked = subscription.asked, None
        if asked is not None:
            asked.cancel()

    def _is_followed(self, subscription: _Subscription) -> bool:
        is_current = self._followed.get(subscription.request_id) is subscription
        return is_current and not (self._closing or subscription.has_ended)
