"""All pulls of one worker from one prefill engine, on a thread of their own, so that no peer delays another.

The way of a pull: handshake (once per engine), plan, read from every prefill rank that holds a share, release. A pull
is settled exactly once, whatever happens, and not before every read of it is settled: until then its blocks may
still be written to.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from layout.compatibility import check_models
from layout.conversion import describe_conversion
from layout.copies import Copies
from layout.geometry import ModelIdentity, WorkerGeometry
from layout.plan import Plan, PlanError, compile_plans
from layout.regions import RegionTable
from layout.sharding import Source, choose_sources
from layout.staging import Schedule
from pd_connector.metadata import Cause, PullOrder
from pd_connector.vllm_compat import init_logger
from pd_connector.worker.block_tables import block_table
from pd_connector.worker.hashing import Interrupted
from pd_connector.worker.settlement import PullFailed, Settled, Settlement, Stopwatch, cause_of
from pd_connector.worker.staged_reads import SLOTS, ReadPlanner
from pd_connector.worker.verification import Verifier
from transfer.control.client import ControlClient
from transfer.control.messages import Hello, Welcome
from transfer.engine.base import Link, ReadFailed, TransferEngine
from transfer.errors import PeerNotAllowed, TransferError

logger = init_logger(__name__)

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class PullContext:
    """What all pulls of a worker share."""

    local: WorkerGeometry
    model: ModelIdentity
    engine: TransferEngine
    client: ControlClient
    reader: int  # this worker among the readers of a lease
    readers: int
    reads: ReadPlanner
    handshake_timeout_s: float
    pull_timeout_s: float
    replica_turn: int = 0  # see ``layout.sharding.choose_sources``
    verifier: Verifier | None = None  # compares checksums of every pull


@dataclass
class _Peer:
    """A prefill engine after the handshake.

    Owned by the session's thread, which waits while the threads of a pull read: each touches the link of its own rank.
    """

    workers: Sequence[WorkerGeometry]
    plans: dict[int, Plan]  # by index into workers
    regions: dict[int, RegionTable]  # of the workers that are read from
    sources: Sequence[Source]
    links: dict[int, Link] = field(default_factory=dict)


class PeerSession:
    """Pulls from one prefill engine, in the order of their submission.

    ``submit``, ``close`` and ``join`` belong to one thread; the work is done on the session's own.
    """

    def __init__(
        self, context: PullContext, settle: Callable[[Settled], None], engine_id: str, host: str, port: int
    ) -> None:
        """Start the thread. ``settle`` is called once per pull, on any thread."""
        self.last_used = time.monotonic()
        self._context = context
        self._settlement = Settlement(
            context.client, context.reader, context.readers, context.handshake_timeout_s, settle
        )
        self._engine_id, self._host, self._port = engine_id, host, port
        self._peer: _Peer | None = None
        self._orders: queue.SimpleQueue[tuple[PullOrder, float] | None] = queue.SimpleQueue()
        self._unsettled = 0  # pulls that were submitted and have not been read yet; touched under _lock
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"pd-pull-{engine_id[:8]}", daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        """Whether no pull is under way or waiting."""
        with self._lock:
            return self._unsettled == 0

    def submit(self, order: PullOrder) -> None:
        """Queue a pull. It is settled within the pull timeout, or when its reads have settled and P has answered."""
        with self._lock:
            self._unsettled += 1
        self.last_used = time.monotonic()
        self._orders.put((order, self.last_used))

    def close(self) -> None:
        """Stop after the read under way; what is queued is dropped and not settled. Does not wait."""
        self._closing.set()
        self._orders.put(None)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the pulls that are counted are at least those that wait, and are worked on."""
        with self._lock:
            assert self._unsettled >= 0, "more pulls have ended than were submitted"
            assert self._closing.is_set() or self._thread.is_alive(), "nobody reads for this session"

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread after ``close``; whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._orders.get()) is not None and not self._closing.is_set():
            try:
                self._pull(*item)
            except Exception:
                # Reads that could not be settled. Better one request that waits than blocks that are written later.
                logger.exception("PDConnector: the pull of request %s cannot be settled", item[0].request_id)
            with self._lock:
                self._unsettled -= 1
        self._drop_links()

    def _pull(self, order: PullOrder, submitted: float) -> None:
        watch = Stopwatch(submitted)
        watch.lap("queue")
        deadline = submitted + self._context.pull_timeout_s
        try:
            self._confirm(order, self._read_all(order, deadline, watch), deadline, watch)
        except Interrupted:
            return  # closing: what is outstanding is not reported any more
        except PullFailed as error:
            self._settlement.fail(order, error.cause, str(error), watch, tell=not error.is_mute)
            if error.cause.cuts_off:
                self._fail_queued(error)
        except Exception as error:
            # A peer's geometry is data from another machine. Whatever it makes us trip over, the request must end.
            logger.exception("PDConnector: unexpected failure of the pull of request %s", order.request_id)
            self._drop_links()
            self._settlement.fail(order, Cause.INTERNAL, f"{type(error).__name__}: {error}", watch, tell=True)

    def _read_all(self, order: PullOrder, deadline: float, watch: Stopwatch) -> list[Schedule]:
        """Bring all bytes of a pull.

        Raises:
            PullFailed: some are missing, or not what was leased; every read has settled.
        """
        peer = self._handshake(deadline)
        watch.lap("handshake")
        local = [block_table(ids) for ids in order.local_block_ids]
        remote = [block_table(ids) for ids in order.remote.remote_block_ids]
        if len(remote) != len(peer.workers[0].groups):
            raise PullFailed(
                Cause.PARAMS,
                f"remote_block_ids holds {len(remote)} block tables; the prefill engine has "
                f"{len(peer.workers[0].groups)} cache groups",
            )
        ranks = list(peer.plans)
        try:
            batches = for_each_rank(
                lambda index: peer.plans[index].instantiate(local, remote, order.first_token, order.end_token), ranks
            )
        except PlanError as error:
            raise PullFailed(Cause.PARAMS, str(error)) from error
        watch.lap("plan")
        for index in ranks:
            self._link(peer, index)
        schedules = for_each_rank(lambda index: self._read(peer, index, batches[index], order, deadline), ranks)
        watch.lap("read")
        if self._context.verifier is not None:
            self._context.verifier.verify(order, peer.workers, peer.sources, deadline, self._closing)
            watch.lap("verify")
        return list(schedules.values())

    def _read(self, peer: _Peer, index: int, copies: Copies, order: PullOrder, deadline: float) -> Schedule:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise PullFailed(
                Cause.TIMEOUT, f"the pull timeout of {self._context.pull_timeout_s} s was over before the read"
            )
        link, reads = peer.links[index], self._context.reads
        with reads.planned(copies, peer.regions[index]) as schedule:
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug("request %s, prefill rank %d: %s", order.request_id, index, schedule.describe())
            try:
                reads.carry_out(link, schedule, remaining)
            except ValueError as error:
                raise PullFailed(Cause.PARAMS, f"prefill rank {index}: {error}") from error
            except BaseException as error:
                # Closing the link settles its reads: after that blocks and staging may be given to others.
                link.close()
                del peer.links[index]
                if isinstance(error, ReadFailed):
                    raise PullFailed(Cause.READ, f"prefill rank {index}: {error}") from error
                raise
        return schedule

    def _link(self, peer: _Peer, index: int) -> Link:
        if index not in peer.links:
            worker = peer.workers[index]
            try:
                peer.links[index] = self._context.engine.open(worker.engine_address, worker.regions)
            except ReadFailed as error:
                cause = Cause.DENIED if isinstance(error.__cause__, PeerNotAllowed) else Cause.UNREACHABLE
                raise PullFailed(cause, f"prefill rank {index}: {error}") from error
        return peer.links[index]

    def _handshake(self, deadline: float) -> _Peer:
        """Learn the engine's geometry, compile the plans and connect; once per engine.

        Raises:
            PullFailed: the engine does not answer, is another one, or its caches cannot be used here.
        """
        if self._peer is not None:
            return self._peer
        context = self._context
        timeout = min(context.handshake_timeout_s, max(deadline - time.monotonic(), 0.001))
        try:
            welcome = context.client.request(self._host, self._port, Hello(self._engine_id), timeout).result()
        except TransferError as error:
            cause = cause_of(error)
            raise PullFailed(cause, str(error), is_mute=cause is not Cause.REFUSED) from error
        assert isinstance(welcome, Welcome)
        try:
            check_models(context.model, welcome.model)
            sources = choose_sources(context.local, welcome.workers, context.replica_turn)
            plans = compile_plans(context.local, welcome.workers, sources)
            if context.verifier is not None:
                context.verifier.check_peer(welcome.verify, welcome.workers, sources)
            regions = {index: RegionTable(welcome.workers[index].regions) for index in plans}
        except ValueError as error:  # IncompatibleCachesError, PlanError, or regions that overlap
            raise PullFailed(Cause.INCOMPATIBLE, str(error)) from error
        peer = _Peer(welcome.workers, plans, regions, sources)
        try:
            for index in plans:
                self._link(peer, index)
        except BaseException:
            for link in peer.links.values():
                link.close()
            raise
        self._peer = peer
        logger.info(
            "PDConnector: rank %d pulls from engine %s at %s:%d, ranks %s of %d: %s",
            context.reader, self._engine_id, self._host, self._port, sorted(plans), len(welcome.workers),
            describe_conversion(context.local, welcome.workers, plans),
        )  # fmt: skip
        return peer

    def _confirm(self, order: PullOrder, schedules: list[Schedule], deadline: float, watch: Stopwatch) -> None:
        """Ask whether the lease was valid all the time; the answer settles the pull. Does not wait for it."""
        done = Settled(
            order.request_id,
            tokens=order.end_token - order.first_token,
            copied_bytes=sum(schedule.wanted_bytes for schedule in schedules),
            descriptors=sum(schedule.descriptors for schedule in schedules),
        )
        self._settlement.confirm(order, done, deadline - time.monotonic(), watch)

    def _fail_queued(self, error: PullFailed) -> None:
        """Fail the pulls behind one that found the engine unreachable, instead of letting each wait as long."""
        while not self._orders.empty():
            item = self._orders.get_nowait()
            if item is None:
                self._orders.put(None)
                return
            order, submitted = item
            self._settlement.fail(order, error.cause, str(error), Stopwatch(submitted), tell=not error.is_mute)
            with self._lock:
                self._unsettled -= 1

    def _drop_links(self) -> None:
        if self._peer is not None:
            for link in self._peer.links.values():
                link.close()
            self._peer = None


def for_each_rank(work: Callable[[int], _Result], ranks: Sequence[int]) -> dict[int, _Result]:
    """What ``work`` returns for each rank, as many at once as can be staged; all have ended when this one does."""
    if len(ranks) <= 1:
        return {rank: work(rank) for rank in ranks}
    with ThreadPoolExecutor(min(len(ranks), SLOTS), "pd-rank") as threads:
        results = {rank: threads.submit(work, rank) for rank in ranks}
    return {rank: result.result() for rank, result in results.items()}
