"""One pull of one rank from start to end: handshake, plan, read (and reshape), verify, confirm."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from layout.copies import Copies
from layout.plan import PlanError
from layout.staging import Schedule
from pd_connector.orders import Cause, PullOrder, block_table
from pd_connector.worker.checksums import Interrupted
from pd_connector.worker.peer import Peer, PullContext
from pd_connector.worker.pull_end import PullEnd, PullFailed, Stopwatch, release_message, verdict
from pd_connector.worker.quarantine import HeldRead, LostPull, UnsettledPull
from pd_connector.worker.remote_reader import SLOTS
from transfer.batch_copy.base import Pauses
from transfer.control.messages import Reply
from transfer.engine.base import ReadFailed

logger = logging.getLogger(__name__)

#: Minimum time for P's answer, even after the deadline: bytes that were read should not be wasted for a round trip.
_MIN_CONFIRM_S = 1.0

_Result = TypeVar("_Result")

#: How a pull has ended, or that it has failed and is not settled.
AnyEnd = PullEnd | UnsettledPull | LostPull


class Pull:
    """Owns the order, the deadline and the stopwatch of one pull.

    A pull ends once: by the confirmation that ``run`` asks for, or by ``fail`` or ``lose`` after ``run`` has raised. It
    is not reported as a ``PullEnd`` before all of its reads have settled, because until then they may write to its
    blocks.
    """

    def __init__(
        self, context: PullContext, order: PullOrder, report: Callable[[AnyEnd], None], closing: threading.Event
    ) -> None:
        """Start the clock, on the model's thread.

        ``report`` is called with the end, on any thread; ``closing`` interrupts verification and the wait for the
        device.
        """
        self.order = order
        self._context = context
        self._report = report
        self._closing = closing
        self._held: list[HeldRead] = []
        self._has_ended = False
        self._fence = context.raise_fence()
        self._watch = Stopwatch(context.clock)
        self._deadline = self._watch.started + context.pull_timeout_s

    def run(self, connect: Callable[[float], Peer]) -> None:
        """Read all bytes, then ask P to confirm that the lease was valid throughout. Does not wait for the answer.

        ``connect`` returns the prefill engine after the handshake. Its argument is a deadline on the context's clock.

        Raises:
            PullFailed: bytes are missing, or not those that were leased. No read is under way, but failed ones may not
                have settled; ``fail`` sees to that.
            Interrupted: ``closing`` is set.
        """
        self._watch.lap("queue")
        peer = connect(self._deadline)
        self._watch.lap("handshake")
        batches = self._plan(peer)
        self._watch.lap("plan")
        self._await_device()
        schedules = self._read(peer, batches)
        self._watch.lap("read")
        if self._context.verifier is not None:
            self._context.verifier.verify(self.order, peer.workers, peer.sources, self._deadline, self._closing)
            self._watch.lap("verify")
        self.confirm(schedules)

    def confirm(self, schedules: Sequence[Schedule]) -> None:
        """Ask P whether the lease was valid throughout. The answer ends the pull, on the control client's thread."""
        done = PullEnd(
            self.order.request_id,
            tokens=self.order.end_token - self.order.first_token,
            copied_bytes=sum(schedule.wanted_bytes for schedule in schedules),
            descriptors=sum(schedule.descriptors for schedule in schedules),
        )

        def end(answer: "Future[Reply]") -> None:
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
        self._release(max(timeout_s, _MIN_CONFIRM_S)).add_done_callback(end)

    def fail(self, error: PullFailed) -> None:
        """End the pull as failed, and release this reader's share of the lease unless P is unresponsive.

        P can then free the blocks when all readers have released them, before the lease expires. A read that has not
        settled may go on: what it reads is never used. Does not wait for P.
        """
        if not error.is_unresponsive:
            try:
                self._release(self._context.handshake_timeout_s)
            except Exception:  # the request must end whatever becomes of the message: the lease expires
                logger.exception("PDConnector: the pull of request %s cannot be released", self.order.request_id)
        self._report_failed(error.cause, str(error))

    def lose(self, error: BaseException) -> None:
        """End the pull, unless it has ended: its clean-up has raised, so its blocks may still be written."""
        if not self._has_ended:
            self._end(LostPull(self.order.request_id, f"{type(error).__name__}: {error}"))

    def _plan(self, peer: Peer) -> dict[int, Copies]:
        """Return the descriptors for each prefill rank to read from."""
        order = self.order
        local = [block_table(ids) for ids in order.local_block_ids]
        remote = [block_table(ids) for ids in order.remote.remote_block_ids]
        groups = len(peer.workers[0].groups)
        if len(remote) != groups:
            raise PullFailed(
                Cause.PARAMS,
                f"remote_block_ids holds {len(remote)} block tables; the prefill engine has {groups} cache groups",
            )
        try:
            return for_each_rank(
                lambda rank: peer.plans[rank].instantiate(local, remote, order.first_token, order.end_token),
                list(peer.plans),
            )
        except PlanError as error:
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

    def _read(self, peer: Peer, batches: dict[int, Copies]) -> list[Schedule]:
        """Read the bytes of all ranks into place, through staging where that is cheaper."""
        for rank in batches:
            peer.link(rank)
        schedules = for_each_rank(lambda rank: self._read_from(peer, rank, batches[rank]), list(batches))
        return list(schedules.values())

    def _read_from(self, peer: Peer, rank: int, copies: Copies) -> Schedule:
        if self._deadline <= self._context.clock():
            raise PullFailed(
                Cause.TIMEOUT, f"the pull timeout of {self._context.pull_timeout_s} s was over before the read"
            )
        link, reads = peer.link(rank), self._context.reads
        held = HeldRead(link)
        self._held.append(held)  # first: whatever happens from here on, nothing is reused before it has settled
        schedule = held.keep(reads.planned(copies, peer.regions[rank]))
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("PDConnector: %s, prefill rank %d: %s", self.order.request_id, rank, schedule.describe())
        try:
            reads.carry_out(link, schedule, self._deadline - self._context.clock())
            link.prove(max(self._deadline - self._context.clock(), _MIN_CONFIRM_S))
        except ValueError as error:
            raise PullFailed(Cause.PARAMS, f"prefill rank {rank}: {error}") from error
        except BaseException as error:
            peer.drop_link(rank)
            if isinstance(error, ReadFailed):
                raise PullFailed(Cause.READ, f"prefill rank {rank}: {error}") from error
            raise
        held.release()
        return schedule

    def _release(self, timeout_s: float) -> "Future[Reply]":
        remote, context = self.order.remote, self._context
        message = release_message(self.order, context.reader, context.readers)
        return context.client.request(remote.remote_host, remote.remote_port, message, timeout_s)

    def _report_failed(self, cause: Cause, reason: str) -> None:
        remote = self.order.remote
        source = f"engine {remote.remote_engine_id} at {remote.remote_host}:{remote.remote_port}"
        reason = f"pull from {source} failed: {reason}"
        end = PullEnd(self.order.request_id, cause, reason, seconds=self._watch.total())
        unsettled = [read for read in self._held if not read.release()]
        self._end(UnsettledPull(self.order, end, unsettled) if unsettled else end)

    def _end(self, end: AnyEnd) -> None:
        self._has_ended = True
        self._report(end)


def for_each_rank(work: Callable[[int], _Result], ranks: Sequence[int]) -> dict[int, _Result]:
    """Return the results of ``work`` for all ranks once all have ended; runs as many at once as can be staged."""
    if len(ranks) <= 1:
        return {rank: work(rank) for rank in ranks}
    with ThreadPoolExecutor(min(len(ranks), SLOTS), "pd-rank") as threads:
        results = {rank: threads.submit(work, rank) for rank in ranks}
    return {rank: result.result() for rank, result in results.items()}
