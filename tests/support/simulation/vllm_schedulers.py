"""Engines around vLLM's own scheduler and the connector's own scheduler side, on one thread and one clock.

Simulated are the workers (``engine_worker``), the control channel, and the router. What a request finds in its blocks
is checked whenever the model works on it.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal
from unittest.mock import patch

from vllm.config import KVTransferConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from pd_connector.engine_limits import EngineLimits
from pd_connector.orders import PullOrder, Report, WorkerHandshake
from pd_connector.scheduler.decode.consumer import Consumer
from pd_connector.scheduler.decode.renewals import Renewals
from pd_connector.scheduler.host.tier import HostTier
from pd_connector.scheduler.prefill.producer import Producer
from pd_connector.scheduler.scheduler import ConnectorScheduler
from pd_connector.scheduler.scheduler_role import SchedulerRole
from pd_connector.vllm.metadata import HandshakeMetadata, ReportMetadata, StepMetadata
from pd_connector.vllm.metrics import ConnectorStats
from pd_connector.worker.canary import canary_room
from pd_connector.worker.worker_role import FailedBlocks
from tests.support.connector.vllm_calls import NAMES_FAILED_REQUESTS
from tests.support.simulation.engine_config import simulated_config
from tests.support.simulation.engine_worker import EngineWorker
from tests.support.simulation.images import RequestWithImages, add_encoder, an_image, looked_at
from tests.support.simulation.pooled import POOLED_MODEL, PooledWorker, SimulatedPool
from tests.support.simulation.scheduler_pulls import Peer, ScheduledPull
from tests.support.simulation.state_groups import StateMode, States, caches, drafts, worker_with
from tests.support.waiting import ManualClock
from transfer.control.client import ControlClient
from transfer.control.failures import PeerRefused, PeerUnreachable
from transfer.control.messages import Error, Reply, decode_request, encode
from transfer.control.messages import Request as Message
from transfer.control.server import ServerCounters
from transfer.control.waiting_requests import NotYet

_BLOCK_TOKENS = 16
HOST = "127.0.0.1"
OUTPUT_TOKEN = 7
_LONGEST = 512  # tokens of a request
_STEP_TOKENS = 256

init_none_hash(sha256_cbor)
_hasher = get_request_block_hasher(_BLOCK_TOKENS, sha256_cbor)


def _stamps(tokens: list[int]) -> Iterator[int]:
    """What the cache must hold of each token: it depends on all before it."""
    return itertools.accumulate(tokens, lambda before, token: hash((before, token)), initial=0)


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A message that is not answered yet."""

    port: int
    message: Message
    future: Future[Reply]
    sent_at: float
    deadline: float


class World:
    """The clock, the engines by their control port, and the messages between them."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.engines: dict[int, EngineSim] = {}  # by port
        self._ports = itertools.count(1)
        self._messages: list[_UnderWay] = []
        self.pool = SimulatedPool(self.clock)

    def port(self) -> int:
        return next(self._ports)

    def request(self, host: str, port: int, message: Message, timeout_s: float) -> Future[Reply]:
        future: Future[Reply] = Future()
        assert decode_request(encode(1, message))[1] == message
        self._messages.append(_UnderWay(port, message, future, self.clock.now, self.clock.now + timeout_s))
        return future

    def deliver(self) -> None:
        """Answer messages to engines that can be reached and have something to say; fail those out of time."""
        self.pool.answer()
        messages, self._messages = self._messages, []
        for each in messages:
            if each.future.cancelled():
                continue
            engine = self.engines.get(each.port)
            is_reached = engine is not None and not engine.is_cut
            answers = engine is not None and is_reached and engine.service is not None
            reply = engine.service.handle(each.message) if engine is not None and answers else None
            if isinstance(reply, NotYet):
                reply = reply.reply if self.clock.now >= each.sent_at + reply.wait_s else None
            kind = str(each.message.__struct_config__.tag)
            if isinstance(reply, Error):
                each.future.set_exception(
                    PeerRefused(host=HOST, port=each.port, request_type=kind, code=reply.code, reason=reply.message)
                )
            elif reply is not None:
                each.future.set_result(reply)
            elif self.clock.now >= each.deadline:
                error = PeerUnreachable(host=HOST, port=each.port, request_type=kind, tried_s=1.0, attempts=1)
                each.future.set_exception(error)
            else:
                self._messages.append(each)

    def step(self, seconds: float = 0.05) -> None:
        """Every engine makes a step, and all messages arrive."""
        for engine in self.engines.values():
            engine.step()
        self.deliver()
        self.clock.advance(seconds)

    def run(self, within_s: float, seconds: float = 0.05) -> None:
        """Step until every request has ended, and what is pulled behind or beside it: in less than ``within_s``."""
        deadline = self.clock.now + within_s
        while any(each.requests or each.worker.borders or each.worker.canaries for each in self.engines.values()):
            assert self.clock.now < deadline, f"no progress: {[engine.state for engine in self.engines.values()]}"
            self.step(seconds)

    def run_to_the_end(self, within_s: float, each_s: float) -> None:
        """Step until every request has ended: all of them within some seconds of the clock from now on.

        Args:
            within_s: for a request that is alone.
            each_s: that it may take more for each other one that is there now.
        """
        number = sum(len(engine.requests) for engine in self.engines.values())
        self.run(within_s + number * each_s, 0.1)

    def close(self) -> None:
        for engine in self.engines.values():
            engine.scheduler.shutdown()


class _Client(ControlClient):
    def __init__(self, world: World, **given: Any) -> None:  # no thread
        self._world = world

    def request(self, host: str, port: int, message: Any, timeout_s: float) -> Future[Any]:
        return self._world.request(host, port, message, timeout_s)

    def close(self) -> None:
        """Nothing to close."""


class _Server:
    """What ``ControlServer`` is to the producer."""

    def __init__(self, world: World, service: Any, host: str, port: int, keys: Any = None) -> None:
        self.port, self.service = world.port(), service
        self.counters = ServerCounters()

    def start(self) -> None:
        """The world serves."""

    def changed(self, *topics: str) -> None:
        """Nobody waits for an answer."""

    def close(self) -> None:
        """Nothing to close."""


@dataclass(eq=False)
class ClientRequest:
    """A client's request, of which one leg is on an engine."""

    name: str
    tokens: list[int]
    outputs: int
    decodes_on: "EngineSim | None" = None  # where to send the decode leg; None: this is the only one
    priority: int = 0  # the lower, the earlier, on an engine with such a policy
    transfer_id: str = ""  # of a prefill leg whose decode leg is sent at the same time
    choice: str = ""  # which of several answers to the same request
    sampling: dict[str, Any] = field(default_factory=dict)  # further parameters of vLLM's
    image: int = 0  # so many tokens are an image's: the last ones, but for ``behind_image``
    behind_image: int = 0
    shown: Literal["", "shape", "whole"] = ""  # of it to a decode engine, and "whole" to others; "": no encoder looks
    ended: str = ""  # how: "finished", "failed", "aborted"


class EngineSim:
    """One engine: vLLM's scheduler with the connector, and a worker."""

    def __init__(
        self,
        world: World,
        role: str,
        blocks: int,
        policy: str = "recompute",
        pull_s: float = 0.1,
        scheduling: Literal["fcfs", "priority"] = "fcfs",
        slots: int = 0,
        states: StateMode = "",
        stated: Mapping[str, int] | None = None,
        pooled: bool = False,
        **settings: Any,
    ) -> None:
        """Start an engine whose host memory has so many ``slots``, in blocks; with 0, it has none.
        ``pooled``: whether the world's pool is behind it.

        ``states``: how the model's states are kept, if it has any. ``stated``: what else vLLM states of them.

        ``settings``: of the connector, or ``EngineLimits`` of it.
        """
        self.world = world
        self._scheduling = scheduling
        self.slots = slots
        if slots:
            settings = {"cpu_bytes_to_use": slots, **({"pool": "127.0.0.1:1"} if pooled else {}), **settings}
        self.is_cut = self.is_paused = False
        self.requests: dict[str, tuple[ClientRequest, Request]] = {}
        self.counts: Counter[str] = Counter()
        self.answers: dict[str, dict[str, Any] | None] = {}  # the kv_transfer_params of each request that has ended
        self._mode, self._caches = states, caches(_BLOCK_TOKENS, _LONGEST, blocks, states, stated)
        state_tokens = int(self._caches.kv_cache_groups[-1].kv_cache_spec.block_size)
        self.worker = EngineWorker(_BLOCK_TOKENS, state_tokens, pull_s)
        self._states, self._failures = States(self._caches), FailedBlocks()
        self.scheduler = self._make_scheduler(role, policy, settings)
        connector: Any = self.scheduler.connector
        self.side: ConnectorScheduler = connector._scheduler
        self.computed_tokens = self.pulled_tokens = 0
        self.computed_of: Counter[str] = Counter()  # tokens, by request id
        self.computed: Counter[str] = Counter()  # prompts that were computed instead of pulled, by cause
        patch.object(self.side._stats, "count", self._count).start()
        self.opens_host = self.side._role.is_read and settings.get("host_transfers", "off") != "off"
        worker = worker_with(self._caches)
        host, room = worker if self.opens_host else None, canary_room(worker)
        handshake = WorkerHandshake(worker, slots, host, room, model=POOLED_MODEL)
        self.pooled = PooledWorker(world.pool, worker, self.worker.memories.host)
        with patch("pd_connector.scheduler.host.pool_start.StoreThread", lambda *_: world.pool):
            connector.set_xfer_handshake_metadata_pp_aware({(0, 0): HandshakeMetadata(handshake)})
        if self.side._role.is_read:
            producer = self.role_of(Producer)
            self.service: Any = producer._service
            self.port = producer.port
        else:
            self.service, self.port = None, world.port()
        world.engines[self.port] = self

    def _count(self, name: str, number: int = 1, label: str = "") -> None:
        if name == "prompts_computed":
            self.computed[label] += number
        if name in {"prefixes", "prefixes_served", "pool_prompts", "pool_blocks", "canaries"}:
            self.counts[f"{name}: {label}"] += number

    @property
    def produces(self) -> bool:
        return self.side._role.produces

    @property
    def consumes(self) -> bool:
        return self.side._role.consumes

    @property
    def pulling(self) -> bool:
        """Whether blocks are kept for a pull that goes on, or whose end vLLM's scheduler has not been told yet."""
        has_arrived = (
            request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
            or (request.status is RequestStatus.WAITING and request.num_computed_tokens > 0)
            for _, request in self.requests.values()
        )
        consumer = self.role_of(Consumer)
        return any(has_arrived) or self.worker.is_busy or bool(consumer and consumer.wants_step)

    @property
    def blocks_in_use(self) -> int:
        pool = self.scheduler.kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - pool.get_num_free_blocks()) - 1

    @property
    def slots_in_use(self) -> int:
        """Slots of host memory to which somebody has references."""
        tier = self.role_of(HostTier)
        return len(tier.pool.references()) if tier is not None else 0

    @property
    def leases(self) -> int:
        return int(self.service.leases.active)

    @property
    def state(self) -> str:
        waiting = [request.request_id for _, request in self.requests.values()]
        used, pulls, landings = self.blocks_in_use, len(self.worker.pulls), len(self.worker.landings)
        return f"{used} blocks in use, {pulls} pulls, {landings} landings, waiting: {waiting}"

    def role_of(self, kind: type[SchedulerRole]) -> Any:
        return next((role for role in self.side._roles if isinstance(role, kind)), None)

    def ask(self, asked: ClientRequest, params: dict[str, Any] | None = None) -> None:
        """A request arrives: the prefill leg if it is to be decoded elsewhere, else with the ``params`` of one."""
        if asked.decodes_on is not None:
            params = {"do_remote_decode": True, "transfer_id": asked.transfer_id or None}
        sampling = SamplingParams(
            max_tokens=1 if asked.decodes_on else asked.outputs,
            ignore_eos=True,
            extra_args={"kv_transfer_params": params} if params else None,
            **asked.sampling,
        )
        request_id = f"{asked.name}-{'p' if asked.decodes_on else 'd'}{asked.choice}"
        hasher = _hasher if self._mode != "none" else None
        request = RequestWithImages(
            request_id, list(asked.tokens), sampling, None, priority=asked.priority, block_hasher=hasher
        )
        if asked.image:
            shown = "whole" if asked.shown and asked.decodes_on else asked.shown
            offset = len(asked.tokens) - asked.image - asked.behind_image
            request.mm_features = [an_image(shown, offset, asked.image)]
        self._states.note(request, list(_stamps(asked.tokens))[1:], _BLOCK_TOKENS)
        self.requests[request_id] = asked, request
        self.scheduler.add_request(request)

    def ask_by_name(self, asked: ClientRequest, prefills_on: "EngineSim", **changes: Any) -> None:
        """The decode leg of a request arrives whose legs are sent at once."""
        params = {"do_remote_prefill": True, "transfer_id": asked.name, "remote_host": HOST}
        self.ask(asked, {**params, "remote_port": prefills_on.port, **changes})

    def abort(self, request_id: str) -> None:
        asked, _ = self.requests.pop(request_id)
        asked.ended = "aborted"
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def pause(self, *, paused: bool) -> None:
        self.is_paused = paused
        self.scheduler.set_pause_state(PauseState.PAUSED_ALL if paused else PauseState.UNPAUSED)

    def step(self) -> None:
        """One step of the engine core: schedule, execute, take the output."""
        if (begun := self.begin_step()) is not None:
            self.end_step(*begun)

    def begin_step(self) -> tuple[SchedulerOutput, ModelRunnerOutput] | None:
        """Schedule and execute; None if there is nothing to step for."""
        for renewals in (vars(role)["_renewals"] for role in self.side._roles if "_renewals" in vars(role)):
            renewals.send_due()
        connector: Any = self.scheduler.connector
        if not self.scheduler.has_requests() and not connector.has_pending_push_work():
            return None
        output = self.scheduler.schedule()
        metadata = output.kv_connector_metadata
        assert isinstance(metadata, StepMetadata)
        self._failures.expect(metadata.orders.destinations)
        self._states.check_destinations(self.scheduler.kv_cache_manager.block_pool, metadata.orders)
        self.counts.update(str(order.cause) for order in metadata.orders.refusals)
        self.worker.start(metadata.orders, self.world.clock.now, self._peer_of)
        self.pooled.start(metadata.orders)
        ends = self.worker.take_ends(self.world.clock.now)
        self._count_pulls(ends.pulls)
        self.counts.update("lacked states" for pull in ends.borders if pull.lacking_states)
        self.counts.update("landed" for landing in ends.report.landings.values() if not landing.failed)
        result = self._execute(output)
        report = ends.report + self.pooled.take_report() + Report(steps=dict.fromkeys(metadata.orders.steps, 1))
        result.kv_connector_output = self._connector_output(ends.done, ends.failed, report)
        return output, result

    def end_step(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Take the output of the oldest step that has not ended."""
        for outputs in self.scheduler.update_from_output(output, result).values():
            for each in outputs.outputs:
                if each.finish_reason is not None:
                    self._finish(each.request_id, str(each.finish_reason), each.kv_transfer_params)
        self.side.check_integrity()
        self._states.check_found(self.scheduler.kv_cache_manager.block_pool, self.worker.memories.device)
        if (tier := self.role_of(HostTier)) is not None:
            self._states.check_found(tier.pool._pool, self.worker.memories.host, in_slots=True)

    def _connector_output(self, done: set[str], failed: set[str], report: Report) -> KVConnectorOutput:
        """What the workers tell: requests that have failed, or, before vLLM 0.30, blocks that have."""
        if NAMES_FAILED_REQUESTS:
            return KVConnectorOutput(
                finished_recving=done,
                failed_recving=failed,
                kv_connector_worker_meta=ReportMetadata(report),
            )
        self._failures.settle(done, failed)
        report += Report(failed=self._failures.take_requests())
        return KVConnectorOutput(
            finished_recving=done,
            invalid_block_ids=self._failures.take_blocks(),
            kv_connector_stats=ConnectorStats(),  # without a worker's, vLLM does not ask for the scheduler side's
            kv_connector_worker_meta=ReportMetadata(report),
        )

    def _make_scheduler(self, role: str, policy: str, settings: dict[str, Any]) -> Scheduler:
        config = copy(simulated_config(_LONGEST, _STEP_TOKENS, _BLOCK_TOKENS))
        config.cache_config = copy(config.cache_config)
        config.cache_config.num_gpu_blocks = self._caches.num_blocks
        config.speculative_config = drafts(self._caches)
        if self._mode:
            config.cache_config.mamba_cache_mode = self._mode
            config.cache_config.enable_prefix_caching = self._mode == "align"
        config.scheduler_config = copy(config.scheduler_config)
        config.scheduler_config.policy = self._scheduling
        bounds = {each.name for each in fields(EngineLimits)}
        limits = EngineLimits(**{name: value for name, value in settings.items() if name in bounds})
        settings = {name: value for name, value in settings.items() if name not in bounds}
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="PDConnector",
            kv_connector_module_path="pd_connector",
            kv_role=role,
            kv_load_failure_policy=policy,
            kv_connector_extra_config={"host": HOST, "canary": "off", **settings},
        )
        with ExitStack() as patches:
            world, clock = self.world, self.world.clock
            for target, new in (
                ("pd_connector.connector.ConnectorScheduler", partial(ConnectorScheduler, clock=clock, limits=limits)),
                ("pd_connector.scheduler.scheduler.ControlClient", lambda **given: _Client(world, **given)),
                ("pd_connector.scheduler.prefill.producer.ControlServer", partial(_Server, world)),
                ("pd_connector.scheduler.scheduler.drafts_late", lambda _: False),  # whatever vLLM's platform is here
            ):
                patches.enter_context(patch(target, new))
            patches.enter_context(patch.object(Renewals, "start"))
            block_tokens = _LONGEST if self._mode == "none" else _BLOCK_TOKENS  # as vLLM's engine core chooses them
            scheduler = Scheduler(config, self._caches, StructuredOutputManager(config), block_tokens)
        add_encoder(scheduler, _STEP_TOKENS)
        return scheduler

    def _peer_of(self, order: PullOrder) -> Peer:
        port = order.remote.remote_port
        engine = self.world.engines[port]
        return Peer(partial(self.world.request, HOST, port), engine.worker.memories, engine.opens_host)

    def _count_pulls(self, ended: list[ScheduledPull]) -> None:
        for pull in ended:
            if not pull.has_succeeded:
                self.counts["pulls failed"] += 1
                continue
            self.counts["pulled"] += 1
            self.pulled_tokens += pull.order.end_token - pull.order.first_token
            if pull.was_ahead:
                self.counts["pulled ahead"] += 1
            if pull.was_in_host:
                self.counts["read in host memory"] += 1
            if pull.prompt.restarts:
                self.counts["restarted"] += pull.prompt.restarts

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute the scheduled tokens, and check those that were there already."""
        ids = list(output.num_scheduled_tokens)
        self.counts.update("images" for _ in looked_at(self.scheduler.requests, output))
        sampled = []
        for request_id, scheduled in output.num_scheduled_tokens.items():
            request: Request = self.scheduler.requests[request_id]
            tables = self.scheduler.kv_cache_manager.get_block_ids(request_id)
            drafted = len(output.scheduled_spec_decode_tokens.get(request_id, ()))  # of which none is accepted
            number, end = scheduled - drafted, request.num_computed_tokens - drafted
            self.computed_of[request_id] += number
            self.computed_tokens += number
            stamps = list(_stamps(list(request.all_token_ids)))[1:]
            wrong = self.worker.compute(tables[0], stamps, end - number, end)
            assert wrong is None, f"{request_id} reads another prompt's keys: token {wrong} of {end - number}"
            self._states.note(request, stamps, _BLOCK_TOKENS)
            self._states.compute(self.worker.memories.device, tables, stamps, end - number, end)
            sampled.append([OUTPUT_TOKEN] if end >= request.num_tokens else [])
        return ModelRunnerOutput(ids, {each: index for index, each in enumerate(ids)}, sampled)

    def _finish(self, request_id: str, reason: str, params: dict[str, Any] | None) -> None:
        asked, _ = self.requests.pop(request_id, (None, None))
        self.answers[request_id] = params
        if asked is None:
            return
        if asked.decodes_on is not None and not asked.transfer_id and reason == "length":
            engine, asked.decodes_on = asked.decodes_on, None
            engine.ask(asked, params)
        else:
            asked.ended = "finished" if reason == "length" else "failed"
