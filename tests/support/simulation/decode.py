"""A simulated decode engine: vLLM's scheduler and workers as far as the connector meets them, and their memory."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from layout.geometry import CacheGroup, WorkerGeometry
from pd_connector.engine_limits import EngineLimits
from pd_connector.orders import Cause, Orders, PullOrder, Report
from pd_connector.params import EngineAddress
from pd_connector.scheduler.block_demand import BlockDemand
from pd_connector.scheduler.decode.consumer import Consumer
from pd_connector.vllm.cache_specs import Retention
from pd_connector.vllm.device_blocks import DeviceBlocks
from pd_connector.worker.peer import PullContext
from pd_connector.worker.pull import AnyEnd, Pull
from pd_connector.worker.pull_end import PullFailed
from pd_connector.worker.pulls import Pulls
from pd_connector.worker.quarantine import HeldRead
from pd_connector.worker.session import LANES, PeerSession
from tests.support.connector.consumers import MESSAGE_TIMEOUT_S, consumer_parts
from tests.support.connector.requests import FakeRequest, allocated
from tests.support.simulation.network import HOST, PORT, Network, SimulatedClient
from tests.support.simulation.prefill import TOKENS_PER_BLOCK, PrefillSim, Prompt, Stamp
from transfer.control.failures import PeerRefused
from transfer.control.messages import Followed, Hello

RANKS = 2
PULL_TIMEOUT_S = 60.0
AHEAD = EngineLimits(max_pulls_ahead=2, max_ahead_fraction=0.75)

FindEngine = Callable[[str], PrefillSim | None]  # the engine of an id, if it lives


class DecodeState(Enum):
    WAITING = "waiting"  # for blocks, or for an answer of the connector
    PULLING = "pulling"
    RUNNING = "running"


@dataclass(eq=False)
class DecodeJob:
    """A request as vLLM's scheduler holds it."""

    request: FakeRequest
    prompt: Prompt
    state: DecodeState = DecodeState.WAITING
    blocks: tuple[int, ...] = ()
    pulled: range = range(0)  # which of its blocks come from the prefill engine
    pull_id: str = ""
    since: float = 0.0  # when its pull was ordered
    is_followed: bool = False  # the prompt was still being computed then
    was_ordered: bool = False  # once is enough: afterwards it is computed here
    aborted: bool = False
    reported_by: set[int] = field(default_factory=set)  # ranks
    failed: bool = False


class NeverClosing(threading.Event):
    """The session is open, and nobody waits in earnest."""

    def wait(self, timeout: float | None = None) -> bool:
        return False


@dataclass(eq=False)
class PullSim:
    """A pull, and how far it is."""

    pull: Pull
    span: range = range(0)  # the tokens that are being read
    blocks_read: int = 0  # of them
    question: Future[Followed] | None = None  # to which it awaits the answer

    @property
    def is_parked(self) -> bool:
        return self.question is not None and not self.question.done()


@dataclass(eq=False)
class LateRead:
    """A read that has failed and goes on: its link, and the blocks to which it still writes, each with its source."""

    request_id: str
    source: PrefillSim
    blocks: list[tuple[int, int]]
    since: float
    settled: bool = False
    lands: bool = True


class SessionSim(PeerSession):
    """One rank's pulls from one engine: what the lanes of ``PeerSession`` do, in steps."""

    def __init__(self, rank: "RankSim", report: Callable[[AnyEnd], None], engine_id: str) -> None:  # no thread
        self.last_used = time.monotonic()
        self._rank = rank
        self._engine_id = engine_id
        self._report = report
        self._queue: list[PullSim] = []  # in the order of submission
        self._hello: Any = None
        self._connected = False

    @property
    def idle(self) -> bool:
        return not self._queue

    @property
    def has_met(self) -> bool:
        return self._connected

    def __len__(self) -> int:
        return len(self._queue)

    def submit(self, order: PullOrder) -> None:
        pull = Pull(self._rank.context, order, self._report, NeverClosing())
        self._queue.append(PullSim(pull))

    def close(self) -> None:
        self._queue.clear()

    def join(self, timeout_s: float) -> bool:
        return True

    def check_integrity(self) -> None:
        assert sum(bool(job.span) for job in self._queue) <= LANES, "a pull was read before its turn"

    def step(self, blocks: int, *, fails: bool, lane: int = 0, is_late: bool = False) -> None:
        """Go on with a pull under way: ``blocks`` blocks, if the handshake is done and nothing fails.

        Under way are the first ``LANES`` that have been begun, or wait for a lane. ``is_late``: what fails goes on.
        """
        ready = sorted((job for job in self._queue if not job.is_parked), key=lambda job: not job.span)[:LANES]
        if not ready or not self._shake_hands(ready[0]):
            return
        job = ready[lane % len(ready)]
        engine = self._rank.find_engine(self._engine_id)
        try:
            self._learn(job)
            if self._rank.now() >= job.pull._deadline:
                self._fail(job, PullFailed(Cause.TIMEOUT, "as told"))
            elif fails or engine is None:
                self._connected = False
                if is_late and engine is not None:
                    self._go_on_unnoticed(job, engine)
                self._fail(job, PullFailed(Cause.READ, "as told"))
            else:
                self._read_blocks(job, engine, blocks)
        except PullFailed as error:
            for each in [*self._queue] if error.cause.is_peer_wide else [job]:
                self._fail(each, error)

    @staticmethod
    def _learn(job: PullSim) -> None:
        """Take the answer that the pull was parked for."""
        if job.question is not None:
            job.question = None
            job.pull.take_answer()

    def _read_blocks(self, job: PullSim, engine: PrefillSim, blocks: int) -> None:
        """Read up to so many blocks of what can be read; then ask for more, or for the confirmation."""
        prompt = job.pull.prompt
        local, remote = job.pull.order.local_block_ids[0], prompt.progress.tables[0].block_ids
        while blocks and (span := job.span or prompt.next_range(TOKENS_PER_BLOCK)):
            job.span, first = span, span.start // TOKENS_PER_BLOCK
            wanted = range(first, math.ceil(span.stop / TOKENS_PER_BLOCK))
            for number in wanted[job.blocks_read : job.blocks_read + blocks]:
                if number >= len(remote) or not 0 < remote[number] < len(engine.memory):
                    raise PullFailed(Cause.PARAMS, "as told")
                self._rank.write(local[number], engine.memory[remote[number]], job.pull.order.request_id)
            now_read = min(blocks, len(wanted) - job.blocks_read)
            job.blocks_read, blocks = job.blocks_read + now_read, blocks - now_read
            if job.blocks_read < len(wanted):
                return
            prompt.has_read(span, [] if prompt.is_complete else [(0, np.array(wanted))])
            prompt.check_integrity()
            job.span, job.blocks_read = range(0), 0
        if prompt.next_range(TOKENS_PER_BLOCK) is not None:
            return
        if not prompt.is_complete:
            job.question = job.pull.follow()
        else:
            job.pull.confirm()
            self._queue.remove(job)

    def _go_on_unnoticed(self, job: PullSim, engine: PrefillSim) -> None:
        """Let a read that is about to fail write the rest of its range later."""
        local, remote = job.pull.order.local_block_ids[0], job.pull.prompt.progress.tables[0].block_ids
        span = job.span or job.pull.prompt.next_range(TOKENS_PER_BLOCK) or range(0)
        wanted = range(span.start // TOKENS_PER_BLOCK, math.ceil(span.stop / TOKENS_PER_BLOCK))
        blocks = [(local[number], int(remote[number])) for number in wanted[job.blocks_read :] if number < len(remote)]
        late = LateRead(job.pull.order.request_id, engine, blocks, self._rank.now())
        self._rank.late.append(late)
        link: Any = late
        job.pull._held.append(HeldRead(link))

    def _shake_hands(self, job: PullSim) -> bool:
        if self._connected:
            return True
        if self._hello is None:
            self._hello = self._rank.client.request(HOST, PORT, Hello(self._engine_id), MESSAGE_TIMEOUT_S)
        if not self._hello.done():
            return False
        error, self._hello = self._hello.exception(), None
        if error is None:
            self._connected = True
        elif isinstance(error, PeerRefused):
            self._fail(job, PullFailed(Cause.REFUSED, "as told"))
        else:
            for each in [*self._queue]:
                self._fail(each, PullFailed(Cause.UNREACHABLE, "as told", is_unresponsive=True))
        return self._connected

    def _fail(self, job: PullSim, error: PullFailed) -> None:
        self._queue.remove(job)
        job.pull.fail(error)


class FreeBlocks(DeviceBlocks):
    """How many blocks a decode engine has, and has free."""

    def __init__(self, engine: "DecodeSim") -> None:
        super().__init__()
        self._engine = engine

    @property
    def free(self) -> int:
        return len(self._engine.free)

    @property
    def total(self) -> int:
        return self._engine.blocks


class RankSim:
    """One worker: its memory and its pulls."""

    def __init__(self, number: int, engine: "DecodeSim") -> None:
        self.number = number
        self.client = engine.client
        self.find_engine = engine.find_engine
        self.memory: list[Stamp] = [("nothing", block) for block in range(engine.blocks + 1)]
        self.sessions: list[SessionSim] = []
        self.late: list[LateRead] = []
        nothing: Any = None
        self.context = PullContext(
            local=WorkerGeometry(number, RANKS, 0, 1, "", (CacheGroup(TOKENS_PER_BLOCK, 0, ()),), ()),
            model=nothing,
            engine=nothing,
            client=self.client,
            allowed=nothing,
            reader=number,
            readers=RANKS,
            reads=nothing,
            handshake_timeout_s=MESSAGE_TIMEOUT_S,
            pull_timeout_s=PULL_TIMEOUT_S,
            clock=engine.network.clock,
        )
        self.service = Pulls(self.context, 600.0, open_session=self._open)
        self._engine = engine

    def now(self) -> float:
        return self._engine.network.clock.now

    def write(self, block: int, stamp: Stamp, request_id: str) -> None:
        """A byte of a pull arrives."""
        job = self._engine.owners.get(block)
        assert job is not None, "I5: a read writes to a block that is nobody's"
        assert job.request.request_id == request_id, "I5: a read writes to another request's block"
        assert self.number not in job.reported_by, "I5: a read writes after it was reported as settled"
        self.memory[block] = stamp

    def land(self, before: float = math.inf) -> None:
        """What late reads write arrives, of those that have failed by then."""
        for late in [each for each in self.late if each.since <= before]:
            self.late.remove(late)
            for block, source in late.blocks:
                if 0 < source < len(late.source.memory):
                    self.write(block, late.source.memory[source], late.request_id)
            late.settled = True

    def _open(self, _: PullContext, report: Callable[[AnyEnd], None], address: EngineAddress) -> PeerSession:
        assert (address.host, address.port) == (HOST, PORT)
        self.sessions.append(SessionSim(self, report, address.engine_id))
        return self.sessions[-1]


class DecodeSim:
    """One life of a decode engine of two ranks."""

    def __init__(self, network: Network, find_engine: FindEngine, *, recomputes: bool, blocks: int = 8) -> None:
        self.network = network
        self.find_engine = find_engine
        self.recomputes = recomputes
        self.blocks = blocks
        self.client = SimulatedClient(network)
        groups = [Retention(TOKENS_PER_BLOCK)]
        self.demand = BlockDemand(FreeBlocks(self), groups)
        parts = consumer_parts(self.client, network.clock, groups, self.demand, AHEAD)
        self.renewals, self.consumer = parts.renewals, Consumer(*parts)
        self.free = deque(range(1, blocks + 1))
        self.owners: dict[int, DecodeJob] = {}
        self.jobs: dict[str, DecodeJob] = {}
        self.ranks = [RankSim(number, self) for number in range(RANKS)]
        self.pulled: set[str] = set()  # lease ids

    def arrive(self, request_id: str, prompt: Prompt, params: dict[str, Any]) -> None:
        job = DecodeJob(FakeRequest(request_id, prompt.token_ids, params), prompt)
        self.jobs[request_id] = job
        self.consumer.add(job.request)

    def schedule(self, job: DecodeJob, cached_blocks: int) -> None:
        """vLLM looks at a waiting request, of which its prefix cache holds some blocks, and makes a step."""
        assert job.state is DecodeState.WAITING
        cached = min(cached_blocks, (job.prompt.tokens - 1) // TOKENS_PER_BLOCK)
        if self.consumer.must_wait(job.request, cached * TOKENS_PER_BLOCK):
            return
        self.demand.asked(job.request)
        missing = self.consumer.missing_tokens(job.request, cached * TOKENS_PER_BLOCK)
        assert not (missing and job.was_ordered), "a request that was computed here is to be pulled again"
        assert 0 <= missing < job.prompt.tokens - cached * TOKENS_PER_BLOCK or not missing
        if len(self.free) < job.prompt.blocks:
            return
        job.blocks = tuple(self.free.popleft() for _ in range(job.prompt.blocks))
        self.owners |= dict.fromkeys(job.blocks, job)
        self._compute(job, range(cached))
        self.demand.given()
        self.consumer.allocated(job.request, allocated(job.blocks), missing)
        if missing:
            end = math.ceil((job.prompt.tokens - 1) / TOKENS_PER_BLOCK)
            job.pulled, job.state, job.since = range(cached, end), DecodeState.PULLING, self.network.clock.now
            job.was_ordered, job.reported_by, job.failed = True, set(), False
        else:
            self._compute(job, range(job.prompt.blocks))
            job.state = DecodeState.RUNNING
        self._step(job, is_async=bool(missing))

    def report(self) -> None:
        """vLLM collects what its workers have settled, and goes on with what all of them have reported."""
        for rank in self.ranks:
            for end in rank.service.take_ends():
                job = self.jobs.get(end.request_id)
                assert job is not None, "I6: vLLM does not hold this request"
                assert job.state is DecodeState.PULLING, "I6: this request does not wait for a pull"
                assert rank.number not in job.reported_by, "I6: reported twice"
                job.reported_by.add(rank.number)
                job.failed |= bool(end.cause)
                if len(job.reported_by) == RANKS:
                    self._settled(job)

    def leave(self, job: DecodeJob) -> None:
        """The request ends: its client has left, or its answer is complete."""
        self.consumer.finish(job.request, ())
        job.aborted = True
        if job.state is not DecodeState.PULLING:  # else its blocks are freed when all ranks have reported
            self._forget(job)

    def preempt(self, job: DecodeJob) -> None:
        assert job.state is DecodeState.RUNNING
        self._free(job)
        job.state = DecodeState.WAITING

    def in_state(self, *states: DecodeState) -> list[DecodeJob]:
        return [job for job in self.jobs.values() if job.state in states and not job.aborted]

    def check_integrity(self) -> None:
        self.consumer.check_integrity()
        for rank in self.ranks:
            rank.service.check_integrity()
        ahead = [job for job in self.jobs.values() if job.state is DecodeState.PULLING and job.is_followed]
        held = sum(len(job.blocks) for job in ahead)
        assert len(ahead) <= AHEAD.max_pulls_ahead, "I9: too many prompts that are still computed hold blocks"
        assert held <= AHEAD.max_ahead_fraction * self.blocks, "I9: prompts still computed hold too many blocks"
        assert sorted([*self.free, *self.owners]) == list(range(1, self.blocks + 1)), "blocks are lost, or free twice"
        assert {id(job) for job in self.owners.values()} <= {id(job) for job in self.jobs.values()}

    def _step(self, job: DecodeJob, *, is_async: bool) -> None:
        self.demand.end_step()
        orders = self.consumer.step_orders({})
        assert orders == Orders(pulls=orders.pulls, refusals=orders.refusals)
        ordered = [order.request_id for order in orders.pulls] + [order.request_id for order in orders.refusals]
        assert ordered == ([job.request.request_id] if is_async else []), "I4: a request waits for nothing"
        for order in orders.pulls:
            assert order.remote.lease_id not in self.client.ended, "a lease is read that is known to have ended"
            assert order.remote.lease_id not in self.pulled, "a lease is pulled twice"
            self.pulled.add(order.remote.lease_id)
            job.pull_id, job.is_followed = order.pull_id, bool(order.transfer_id)
        for rank in self.ranks:
            assert sorted(rank.service.execute(orders)) == sorted(ordered)

    def _settled(self, job: DecodeJob) -> None:
        request_id = job.request.request_id
        fails = job.failed and not job.aborted and not self.recomputes
        if fails:
            self.consumer.finish(job.request, ())
        self.consumer.settled({request_id}, set(), Report())
        if job.aborted or fails:
            self._forget(job)
        elif job.failed:
            self._free(job)
            job.state = DecodeState.WAITING
        else:
            self._accept(job)

    def _accept(self, job: DecodeJob) -> None:
        for rank in self.ranks:
            assert (job.pull_id, rank.number) in self.client.confirmed, "I2: a pull is used that was not confirmed"
            for number in job.pulled:
                assert rank.memory[job.blocks[number]] == job.prompt.stamp(number), "I2: wrong bytes are used"
        self._compute(job, range(job.pulled.stop, job.prompt.blocks))
        job.state = DecodeState.RUNNING

    def _compute(self, job: DecodeJob, blocks: range) -> None:
        for rank in self.ranks:
            for number in blocks:
                rank.memory[job.blocks[number]] = job.prompt.stamp(number)

    def _free(self, job: DecodeJob) -> None:
        self.free.extend(job.blocks)
        for block in job.blocks:
            del self.owners[block]
        job.blocks = ()

    def _forget(self, job: DecodeJob) -> None:
        self._free(job)
        del self.jobs[job.request.request_id]
