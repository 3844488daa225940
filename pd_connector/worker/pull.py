"""One pull of one rank, top to bottom: handshake, plan, read (and reshape), verify, confirm."""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from layout.copies import Copies
from layout.plan import PlanError
from layout.staging import Schedule
from pd_connector.orders import Cause, PullOrder, block_table
from pd_connector.worker.peer import Peer, PullContext
from pd_connector.worker.pull_end import PullEnd, PullFailed, Stopwatch, release_of, verdict
from pd_connector.worker.remote_reader import SLOTS
from transfer.control.messages import Reply
from transfer.engine.base import ReadFailed

logger = logging.getLogger(__name__)

#: What has been read is not thrown away for want of an answer that takes a round trip.
_LEAST_CONFIRM_S = 1.0

_Result = TypeVar("_Result")


class Pull:
    """Owns the order, the deadline and the stopwatch of one pull.

    Ends once: by ``run``, whose confirmation reports it, or by ``fail`` after ``run`` has raised. It never ends before
    all of its reads have settled, because until then its blocks may be written to.
    """

    def __init__(
        self, context: PullContext, order: PullOrder, report: Callable[[PullEnd], None], closing: threading.Event
    ) -> None:
        """Start the clock. ``report`` is called with the end, on any thread; ``closing`` interrupts what can wait."""
        self.order = order
        self._context = context
        self._report = report
        self._closing = closing
        self._watch = Stopwatch(context.clock)
        self._deadline = self._watch.started + context.pull_timeout_s

    def run(self, meet: Callable[[float], Peer]) -> None:
        """Bring all bytes, and have P confirm that the lease was valid all the time. Does not wait for its answer.

        ``meet`` returns the prefill engine after the handshake, by a deadline on the context's clock.

        Raises:
            PullFailed: bytes are missing, or are not what was leased; every read has settled.
            Interrupted: ``closing`` is set.
        """
        self._watch.lap("queue")
        peer = meet(self._deadline)
        self._watch.lap("handshake")
        batches = self._plan(peer)
        self._watch.lap("plan")
        schedules = self._read(peer, batches)
        self._watch.lap("read")
        if self._context.verifier is not None:
            self._context.verifier.verify(self.order, peer.workers, peer.sources, self._deadline, self._closing)
            self._watch.lap("verify")
        self.confirm(schedules)

    def confirm(self, schedules: Sequence[Schedule]) -> None:
        """Ask P whether the lease was valid all the time. The answer ends the pull, on the control client's thread."""
        done = PullEnd(
            self.order.request_id,
            tokens=self.order.end_token - self.order.first_token,
            copied_bytes=sum(schedule.wanted_bytes for schedule in schedules),
            descriptors=sum(schedule.descriptors for schedule in schedules),
        )

        def end(answer: "Future[Reply]") -> None:
            self._watch.lap("release")
            cause, reason = verdict(self.order, answer)
            if cause:
                self._report_failed(cause, reason)
            else:
                self._report(replace(done, seconds=self._watch.total()))

        timeout_s = min(self._deadline - self._context.clock(), self._context.handshake_timeout_s)
        self._release(max(timeout_s, _LEAST_CONFIRM_S)).add_done_callback(end)

    def fail(self, error: PullFailed) -> None:
        """End the pull as failed, and tell P that this reader will not come back, unless it does not answer anyway.

        P's blocks are then free when all readers have said so, and not when the lease expires. Nobody waits for that.
        """
        if not error.is_mute:
            self._release(self._context.handshake_timeout_s)
        self._report_failed(error.cause, str(error))

    def _plan(self, peer: Peer) -> dict[int, Copies]:
        """Return the descriptors of each prefill rank that is read from."""
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

    def _read(self, peer: Peer, batches: dict[int, Copies]) -> list[Schedule]:
        """Bring the bytes of all ranks to their places, reshaped on the way where that is cheaper."""
        for rank in batches:
            peer.link(rank)
        schedules = for_each_rank(lambda rank: self._read_from(peer, rank, batches[rank]), list(batches))
        return list(schedules.values())

    def _read_from(self, peer: Peer, rank: int, copies: Copies) -> Schedule:
        remaining = self._deadline - self._context.clock()
        if remaining <= 0:
            raise PullFailed(
                Cause.TIMEOUT, f"the pull timeout of {self._context.pull_timeout_s} s was over before the read"
            )
        link, reads = peer.link(rank), self._context.reads
        with reads.planned(copies, peer.regions[rank]) as schedule:
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug("request %s, prefill rank %d: %s", self.order.request_id, rank, schedule.describe())
            try:
                reads.carry_out(link, schedule, remaining)
            except ValueError as error:
                raise PullFailed(Cause.PARAMS, f"prefill rank {rank}: {error}") from error
            except BaseException as error:
                # Closing the link settles its reads: after that blocks and staging may be given to others.
                peer.drop_link(rank)
                if isinstance(error, ReadFailed):
                    raise PullFailed(Cause.READ, f"prefill rank {rank}: {error}") from error
                raise
        return schedule

    def _release(self, timeout_s: float) -> "Future[Reply]":
        remote, context = self.order.remote, self._context
        message = release_of(self.order, context.reader, context.readers)
        return context.client.request(remote.remote_host, remote.remote_port, message, timeout_s)

    def _report_failed(self, cause: Cause, reason: str) -> None:
        remote = self.order.remote
        source = f"engine {remote.remote_engine_id} at {remote.remote_host}:{remote.remote_port}"
        reason = f"pull from {source} failed: {reason}"
        self._report(PullEnd(self.order.request_id, cause, reason, seconds=self._watch.total()))


def for_each_rank(work: Callable[[int], _Result], ranks: Sequence[int]) -> dict[int, _Result]:
    """Return what ``work`` returns for each rank, when all of that has ended; as many at once as can be staged."""
    if len(ranks) <= 1:
        return {rank: work(rank) for rank in ranks}
    with ThreadPoolExecutor(min(len(ranks), SLOTS), "pd-rank") as threads:
        results = {rank: threads.submit(work, rank) for rank in ranks}
    return {rank: result.result() for rank, result in results.items()}
