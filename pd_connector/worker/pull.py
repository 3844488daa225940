"""One pull of one rank from start to end: handshake; plan, read (and reshape), range by range; verify, confirm."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any, TypeVar

from layout.copies import EMPTY, Copies, concatenate
from layout.plan import BlockTable, PlanError
from pd_connector.orders import Cause, PullOrder, block_table
from pd_connector.progress import TransferEnded
from pd_connector.traces import Lap, PullTrace
from pd_connector.worker.followed_prompt import FOLLOW_WAIT_S, FollowedPrompt
from pd_connector.worker.lease_checksums import Interrupted
from pd_connector.worker.peer import Peer, PullContext
from pd_connector.worker.pull_end import (
    LONGER,
    MIN_ANSWER_S,
    PullEnd,
    PullFailed,
    RankRead,
    ReadSoFar,
    Stopwatch,
    asks_to_wait,
    cancel_message,
    got_no_further,
    release_message,
    verdict,
    why_ended,
)
from pd_connector.worker.quarantine import HeldRead, LostPull, UnsettledPull
from pd_connector.worker.remote_reader import for_each_rank
from transfer.control.messages import Followed, Locate, Place, Release, Released, Reply, RequestFor, TransferState
from transfer.copies.batch.base import Pauses
from transfer.engine.cuda_ipc import CudaIpcLink
from transfer.engine.interface import ReadFailed
from transfer.errors import TransferError

logger = logging.getLogger(__name__)

#: Pause before P is asked again, if it has answered at once though it was no further: it may serve too many.
_FOLLOW_PAUSE_S = 0.05

#: Of a reason, which may quote P: its welcome has room for megabytes.
_REASON_CHARACTERS = 4096

_Reply = TypeVar("_Reply", bound=Reply)

#: How a pull has ended, or that it has failed and is not settled.
AnyEnd = PullEnd | UnsettledPull | LostPull


class Pull:
    """Owns the order, the deadline and the stopwatch of one pull, and what is known of its prompt.

    A pull ends once: by the confirmation that ``run`` asks for, or by ``fail`` or ``lose`` after ``run`` has raised. It
    is not reported as a ``PullEnd`` before all of its reads have settled, because until then they may write to its
    blocks.

    A prompt that P still computes is read in ranges. Between them, the pull waits for an answer of P; it belongs to one
    thread at a time, which may be another one after each answer.
    """

    def __init__(
        self, context: PullContext, order: PullOrder, report: Callable[[AnyEnd], None], closing: threading.Event
    ) -> None:
        """Start the clock, on the model's thread.

        ``report`` is called with the end, on any thread; ``closing`` interrupts verification and waits for the device.
        """
        self.order = order  # its ``remote`` is what P holds at the end, once the prompt is complete
        self.prompt = FollowedPrompt(order)
        self._context = context
        self._report = report
        self._closing = closing
        self._answer: Future[Followed] | None = None  # to the question for more of the prompt
        self._answered_at: float | None = None  # when it came
        self._may_ask_at = 0.0  # without a pause
        self._read = ReadSoFar()
        self._states_are_read = False
        self._lacking_states: list[set[tuple[int, int]]] = []  # on each prefill rank
        self._place = Place.DEVICE  # where P has said that the blocks are
        self._slots: list[BlockTable] = []  # of P's host memory, if they are there
        self._held: list[HeldRead] = []
        self._has_ended = False
        self._fence = context.raise_fence()
        self._tails_are_clear = False
        self._laps: list[Lap] | None = [] if context.trace is not None and order.traceparent else None
        self._watch = Stopwatch(context.clock, self._laps)
        self._deadline = self._watch.started + context.pull_timeout_s
        self._reached = self._reach((0, 0, False))

    @cached_property
    def _local(self) -> list[BlockTable]:
        return [block_table(ids) for ids in self.order.local_block_ids]

    @property
    def is_ahead(self) -> bool:
        """Whether P still computes the prompt, as far as it has said."""
        answer = self._answer
        if answer is not None and answer.done() and not answer.cancelled() and answer.exception() is None:
            return answer.result().state != TransferState.COMPLETE
        return not self.prompt.is_complete

    @property
    def tokens_left(self) -> int:
        """How many tokens are still to be read, whether P has computed them or not. States may take as long as all."""
        return self.order.end_token - (0 if self.order.part else self.prompt.read_until)

    def run(self, connect: Callable[[float], Peer]) -> "Future[Followed] | None":
        """Read what can be read now. Then ask P for more, or, if that was all, whether the lease was valid throughout.

        ``connect`` returns the prefill engine after the handshake. Its argument is a deadline on the context's clock.

        Returns:
            The question for more: call ``run`` again when it has been answered. None once P was asked to confirm, whose
            answer nobody waits for.

        Raises:
            PullFailed: bytes are missing, or not those that were leased. No read is under way, but failed ones may not
                have settled; ``fail`` sees to that.
            Interrupted: ``closing`` is set.
        """
        self._end_wait()
        self._watch.lap("queue")
        self.take_answer()
        peer = connect(self._deadline)
        reads_host = peer.host_plans is not None
        if self.prompt.is_complete and (reads_host if self.order.transfer_id else peer.locates):
            self._locate(peer)
        self._watch.lap("handshake")
        least, token_bytes = self._context.reads.least_bytes, max(peer.token_bytes, 1)
        ahead = self._context.reads_ahead or peer.is_read_between_devices
        least_on_device = least(peer.costs) / token_bytes if ahead else float("inf")
        while True:
            if (tokens := self.prompt.next_range(peer.border_tokens, least_on_device, peer.range_tokens)) is not None:
                self._read_range(peer, tokens, self._place)
            elif reads_host and (
                tokens := self.prompt.next_in_host(peer.border_tokens, least() / token_bytes, peer.range_tokens)
            ):
                self._read_range(peer, tokens, Place.HOST)
            else:
                break
        if not self.prompt.is_complete:
            return self.follow(reads_host=reads_host)
        if not self._states_are_read and peer.has_states:
            self._read_range(peer, range(self.order.end_token, self.order.end_token), self._place)
        if self._context.verifier is not None:
            self._context.verifier.verify(self.order, peer.workers, peer.sources, self._deadline, self._closing)
            self._watch.lap("verify")
        self.confirm()
        return None

    def follow(self, *, reads_host: bool = False) -> "Future[Followed]":
        """Ask P for more of the prompt, on its device or, if that can be read, in its host memory.

        ``take_answer`` takes what the future brings.

        Raises:
            PullFailed: for the pull timeout, P has not got further with the prompt than before.
        """
        remaining_s = self._deadline - self._context.clock()
        if remaining_s <= 0:
            raise got_no_further(self.prompt.progress, self._reached[0], self._context.pull_timeout_s)
        wait_s = min(FOLLOW_WAIT_S, remaining_s)
        if self._context.clock() < self._may_ask_at:
            self._closing.wait(_FOLLOW_PAUSE_S)
        self._may_ask_at = self._context.clock() + _FOLLOW_PAUSE_S
        self._answered_at = None
        self._answer = self._send(
            self.prompt.progress.question(wait_s, reads_host=reads_host), wait_s + self._context.handshake_timeout_s
        )
        self._answer.add_done_callback(self._note_answer)
        return self._answer

    def _note_answer(self, _: "Future[Followed]") -> None:
        self._answered_at = self._context.clock()

    def _end_wait(self) -> None:
        """Time the wait for an answer, on the thread that the pull belongs to: the answer comes on another one."""
        if self._answer is not None:
            self._watch.lap("wait", self._answered_at)

    def take_answer(self) -> None:
        """Learn from the answer to the last question, if there was one. What was not computed before gives more time.

        Raises:
            PullFailed: P does not answer, refuses to, or will not complete the prompt.
        """
        answer, self._answer = self._answer, None
        if answer is None:
            return
        restarts = self.prompt.restarts
        try:
            is_news = self.prompt.take(answer.result())
        except TransferError as error:
            raise PullFailed.unanswered(error, had_time=True) from error
        except TransferEnded as error:
            raise PullFailed(Cause.TRANSFER, str(error)) from error
        if is_news:
            self._extend_deadline()
        if self.prompt.restarts != restarts:
            self._read = ReadSoFar()
            logger.debug(
                "PDConnector: %s begins again, with attempt %d of the prefill engine", self.order.request_id,
                self.prompt.progress.attempt,
            )  # fmt: skip
        if self.prompt.is_complete:
            self.order = replace(self.order, remote=self.prompt.progress.remote)

    def confirm(self) -> None:
        """Ask P whether the lease was valid throughout. The answer ends the pull, on the control client's thread."""
        done = PullEnd(
            self.order.request_id,
            tokens=self.order.end_token - self.order.first_token,
            is_ahead=bool(self.order.transfer_id),
            restarts=self.prompt.restarts,
            lacking_states=frozenset[tuple[int, int]]().union(*self._lacking_states),
            **asdict(self._read),
        )

        def end(answer: "Future[Released]") -> None:
            try:
                self._watch.lap("release")
                cause, reason = verdict(self.order, answer)
            except Exception as error:  # a future would swallow it, and the request would wait for ever
                logger.exception("PDConnector: unexpected answer to the pull of request %s", self.order.request_id)
                cause, reason = Cause.INTERNAL, f"{type(error).__name__}: {error}"
            if cause:
                self._report_failed(cause, reason)
            else:
                self._end(replace(done, seconds=self._watch.total()))

        timeout_s = min(self._deadline - self._context.clock(), self._context.handshake_timeout_s)
        self._send(self._release_message(), max(timeout_s, MIN_ANSWER_S)).add_done_callback(end)

    def fail(self, error: PullFailed) -> None:
        """End the pull as failed, and release this reader's share of the lease unless P is unresponsive.

        P can then free the blocks when all readers have released them, before the lease expires. A prompt that is not
        complete has no lease yet: its transfer is cancelled, for all readers. A read that has not settled may go on:
        what it reads is never used. Does not wait for P.
        """
        self._end_wait()
        if self._answer is not None:
            self._answer.cancel()
        if not error.is_unresponsive:
            try:
                is_leased = self.prompt.is_complete
                message: RequestFor[Any] = self._release_message() if is_leased else cancel_message(self.order)
                self._send(message, self._context.handshake_timeout_s)
            except Exception:  # the request must end whatever becomes of the message: the lease expires
                logger.exception("PDConnector: the pull of request %s cannot be released", self.order.request_id)
        self._report_failed(error.cause, str(error))

    def lose(self, error: BaseException) -> None:
        """End the pull, unless it has ended: its clean-up has raised, so its blocks may still be written."""
        if not self._has_ended:
            self._end(LostPull(self.order.request_id, f"{type(error).__name__}: {error}"))

    def _read_range(self, peer: Peer, tokens: range, place: Place) -> None:
        """Read a range of tokens where P has them, or find that it cannot be read there yet."""
        is_ahead = not self.prompt.is_complete
        batches = self._plan(peer, tokens, place)
        self._watch.lap("plan")
        if batches is None and place is Place.HOST:
            self.prompt.leave_host()
            return
        if batches is None:
            self.prompt.wait_for_end()
            return
        logger.debug(
            "PDConnector: %s, tokens %d to %d of %d (%s)",
            self.order.request_id, tokens.start, tokens.stop - 1, self.order.end_token, self.prompt.progress.state,
        )  # fmt: skip
        self._await_device()
        if not self._tails_are_clear:  # before the first read, which may write some of them
            self._context.clear_tails(self._local, self.order.end_token)
            self._tails_are_clear = True
        self._read = self._read.plus(self._read_batches(peer, batches, place), place, is_ahead=is_ahead)
        if not tokens:
            return
        plans = peer.plans.values() if place is Place.DEVICE else ()  # slots stay until the attempt ends, or the lease
        span = tokens.start, tokens.stop
        self.prompt.has_read(tokens, (read for plan in plans for read in plan.remote_blocks(self._local, *span)))
        if is_ahead:
            self._extend_deadline()

    def _locate(self, peer: Peer) -> None:
        """Learn where P has the blocks. They stay there until the release. If they have moved, all is read again.

        Raises:
            PullFailed: the lease has ended, or P does not answer, or with slots for other blocks, or it is too late.
        """
        remote, longest_s = self.order.remote, self._context.handshake_timeout_s
        while True:
            left_s = self._time_to_read()
            try:
                timeout_s = min(max(left_s, MIN_ANSWER_S), longest_s)
                reply = self._send(Locate(remote.remote_engine_id, remote.lease_id), timeout_s).result()
                break
            except TransferError as error:
                # While steps of P's write to the blocks, it is asked again, however long they take.
                if left_s <= longest_s or not asks_to_wait(error):
                    raise PullFailed.unanswered(error, had_time=left_s >= longest_s) from error
        if not reply.place:
            raise PullFailed(Cause.LEASE, why_ended(self.order, reply.reason))
        if reply.place == Place.DEVICE:
            return
        if (
            peer.host_plans is None
            or reply.place != Place.HOST
            or list(map(len, reply.slots)) != list(map(len, remote.remote_block_ids))
        ):
            raise PullFailed(
                Cause.PARAMS,
                f"the prefill engine says that the lease lies in {reply.place!r}, with "
                f"{list(map(len, reply.slots))} slots; the block tables have "
                f"{list(map(len, remote.remote_block_ids))} entries",
            )
        self._place, self._slots = Place.HOST, [BlockTable.of(slots) for slots in reply.slots]
        if self.prompt.read_until > self.order.first_token:  # since they moved, what was read may have been another's
            self.prompt.read_again()
            self._read = ReadSoFar()

    def _time_to_read(self) -> float:
        """Return the seconds that are left; raise PullFailed if none are."""
        left_s = self._deadline - self._context.clock()
        if left_s <= 0:
            reason = f"the pull timeout of {self._context.pull_timeout_s} s was over before the read: {LONGER}"
            raise PullFailed(Cause.TIMEOUT, reason)
        return left_s

    def _plan(self, peer: Peer, tokens: range, place: Place) -> dict[int, Copies] | None:
        """Return the descriptors for each prefill rank to read from; None if P has not announced all blocks yet."""
        local, plans = self._local, peer.plans
        remote: Sequence[BlockTable] = self.prompt.progress.tables
        if place is Place.HOST and peer.host_plans is not None:
            plans, remote = peer.host_plans, self._slots or self.prompt.progress.host_tables
        groups = len(peer.workers[0].groups)
        if len(remote) != groups:
            raise PullFailed(
                Cause.PARAMS,
                f"remote_block_ids holds {len(remote)} block tables; the prefill engine has {groups} cache groups",
            )
        end_token = self.order.end_token
        reads_states = self.prompt.is_complete and tokens.stop == end_token  # with the last tokens

        def descriptors(rank: int) -> Copies:
            of_tokens = plans[rank].instantiate(local, remote, tokens.start, tokens.stop) if tokens else EMPTY
            if not (reads_states and plans[rank].states):
                return of_tokens
            wants_last = not self.order.part
            of_states = plans[rank].instantiate_states(local, remote, end_token, wants_last=wants_last)
            return concatenate([of_tokens, of_states])

        try:
            batches = for_each_rank(descriptors, list(plans))
            self._states_are_read = reads_states
            if reads_states:
                self._lacking_states = [plan.lacking_states(local, remote, end_token) for plan in plans.values()]
            return {rank: copies for rank, copies in batches.items() if len(copies)}
        except PlanError as error:
            if not self.prompt.is_complete:
                return None
            raise PullFailed(Cause.PARAMS, str(error)) from error

    def _await_device(self) -> None:
        """Wait until the device has done the work that it was given before the pull: it may write to the same blocks.

        Raises:
            PullFailed: it is not done when the pull timeout expires. Nothing was written.
            Interrupted: ``closing`` is set.
        """
        fence, pauses = self._fence, Pauses()
        while fence is not None and not fence.passed():
            if self._closing.is_set():
                raise Interrupted
            if self._context.clock() >= self._deadline:
                raise PullFailed(
                    Cause.TIMEOUT,
                    f"the pull timeout of {self._context.pull_timeout_s} s was over before the device had done the "
                    "work that it had been given before the pull",
                )
            time.sleep(pauses.next_s())
        self._fence = None

    def _read_batches(self, peer: Peer, batches: dict[int, Copies], place: Place) -> list[RankRead]:
        """Read the bytes of all ranks into place, through staging where that is cheaper."""
        peer.open_links(batches, place)
        reads = list(
            for_each_rank(lambda rank: self._read_from(peer, rank, batches[rank], place), list(batches)).values()
        )
        if reshaped := [read for read in reads if read.in_place > read.all_read]:
            self._watch.lap("read", max(read.all_read for read in reshaped))
            self._watch.lap("reshape", max(read.in_place for read in reshaped))
        self._watch.lap("read")
        return reads

    def _read_from(self, peer: Peer, rank: int, copies: Copies, place: Place) -> RankRead:
        self._time_to_read()
        link, context, reads = peer.link(rank, place), self._context, self._context.reads
        held = HeldRead(link, reads.land)
        self._held.append(held)  # first: whatever happens from here on, nothing is reused before it has settled
        schedule = held.keep(reads.planned(copies, peer.regions[rank], link.cost))
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("PDConnector: %s, prefill rank %d: %s", self.order.request_id, rank, schedule.describe())
        try:
            given_up = peer.watch.of_read()
            copying_s = reads.carry_out(link, schedule, self._deadline - context.clock(), given_up)
            in_place = context.clock()
            link.prove(max(self._deadline - context.clock(), MIN_ANSWER_S))
        except ValueError as error:
            raise PullFailed(Cause.PARAMS, f"prefill rank {rank}: {error}") from error
        except BaseException as error:
            peer.drop_link(rank, place)
            if isinstance(error, ReadFailed):
                raise self._failed_read(rank, error) from error
            raise
        if held.release():
            self._held.remove(held)  # the link may be another pull's by the time that this one ends
        return RankRead(schedule, in_place - copying_s, in_place, isinstance(link, CudaIpcLink))

    def _failed_read(self, rank: int, error: ReadFailed) -> PullFailed:
        reason = f"prefill rank {rank}: {error}"
        if self._context.clock() < self._deadline:
            return PullFailed(Cause.READ, reason)
        timeout_s = self._context.pull_timeout_s
        return PullFailed(Cause.TIMEOUT, f"{reason}. The pull timeout of {timeout_s} s was over: {LONGER}")

    def _reach(self, before: tuple[int, int, bool]) -> tuple[int, int, bool]:
        """Return how far the prompt has ever been computed and read, in tokens, and whether it is complete."""
        prompt = self.prompt
        return max(prompt.progress.tokens, before[0]), max(prompt.read_until, before[1]), prompt.is_complete

    def _extend_deadline(self) -> None:
        """Let the pull timeout begin anew if the prompt is further than ever. One that is only started over is not.

        P may then be asked for more at once.
        """
        reached = self._reach(self._reached)
        if reached != self._reached:
            self._reached, self._deadline = reached, self._context.clock() + self._context.pull_timeout_s
            self._may_ask_at = 0.0

    def _release_message(self) -> Release:
        return release_message(self.order, self._context.reader, self._context.readers, self._place)

    def _send(self, message: RequestFor[_Reply], timeout_s: float) -> "Future[_Reply]":
        remote = self.order.remote
        return self._context.client.request(remote.remote_host, remote.remote_port, message, timeout_s)

    def _report_failed(self, cause: Cause, reason: str) -> None:
        reason = f"pull from {self.order.remote.engine} failed: {reason[:_REASON_CHARACTERS]}"
        end = PullEnd(self.order.request_id, cause, reason, restarts=self.prompt.restarts, seconds=self._watch.total())
        unsettled = [read for read in self._held if not read.release()]
        self._end(UnsettledPull(self.order, end, unsettled) if unsettled else end)

    def _end(self, end: AnyEnd) -> None:
        self._has_ended = True
        if self._laps is not None:
            self._trace(self._laps, end)
        self._report(end)

    def _trace(self, laps: list[Lap], end: AnyEnd) -> None:
        if isinstance(end, LostPull):
            end = PullEnd(end.request_id, Cause.INTERNAL, end.reason)
        elif isinstance(end, UnsettledPull):
            end = end.end
        remote = self.order.remote
        figures = {
            "tokens": end.tokens,
            "bytes": end.copied_bytes,
            "bytes_ahead": end.ahead_bytes,
            "descriptors": end.descriptors,
            "restarts": end.restarts,
        }
        trace = PullTrace(
            end.request_id, self.order.traceparent, str(remote.engine.at), remote.lease_id, self._watch.started,
            tuple(laps), end.cause, end.reason, figures,
        )  # fmt: skip
        try:
            assert self._context.trace is not None
            self._context.trace(trace)
        except Exception:  # the request must end whatever becomes of its trace
            logger.exception("PDConnector: the pull of request %s cannot be traced", self.order.request_id)
