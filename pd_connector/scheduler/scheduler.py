"""The scheduler side of the connector: passes the calls of vLLM's scheduler to the engine's roles."""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pd_connector.config import READERS, ConnectorConfig
from pd_connector.engine_limits import ENGINE_LIMITS, EngineLimits
from pd_connector.orders import Destinations, Orders, Report, WorkerHandshake, WorkerRanks
from pd_connector.params import is_decode_leg, is_prefill_leg
from pd_connector.scheduler.block_demand import BlockDemand
from pd_connector.scheduler.compute_rate import ComputeRate
from pd_connector.scheduler.decode.border_states import BorderStates
from pd_connector.scheduler.decode.canaries import Canaries
from pd_connector.scheduler.decode.consumer import Consumer
from pd_connector.scheduler.decode.landings import Landings
from pd_connector.scheduler.decode.look_ups import keys_suffice
from pd_connector.scheduler.decode.peer_prefixes import MESSAGE_S, PeerPrefixes
from pd_connector.scheduler.decode.pulls_ahead import PullsAhead
from pd_connector.scheduler.decode.renewals import Renewals
from pd_connector.scheduler.decode.subscriptions import FollowLimits, Subscriptions
from pd_connector.scheduler.external_loads import ExternalLoads
from pd_connector.scheduler.host.pool_start import open_host_tier, open_shared_pool
from pd_connector.scheduler.host.prompt_slots import PromptSlots
from pd_connector.scheduler.host.tier import HostTier
from pd_connector.scheduler.passed_over import PassedOver
from pd_connector.scheduler.prefill.drain import Drain
from pd_connector.scheduler.prefill.lease_moves import LeaseMoves
from pd_connector.scheduler.prefill.lease_service import LeaseService
from pd_connector.scheduler.prefill.leased_states import LeasedStates
from pd_connector.scheduler.prefill.leases import LeaseTable
from pd_connector.scheduler.prefill.producer import Producer
from pd_connector.scheduler.readers import Readers
from pd_connector.scheduler.request_admission import AdmissionLimits, RequestAdmission
from pd_connector.scheduler.request_params import RequestParams
from pd_connector.scheduler.scheduler_role import SchedulerRole
from pd_connector.scheduler.start_checks import (
    allow_connections,
    check_cache_manager,
    check_holds_a_prompt,
    check_secrets,
    check_settings,
    say_if_prompts_only,
    unshared_prefixes,
)
from pd_connector.scheduler.workers import Workers
from pd_connector.secret import load_keys
from pd_connector.stats import StatsRecorder
from pd_connector.vllm.block_hashes import BlockHashes
from pd_connector.vllm.block_pools import Leased
from pd_connector.vllm.cache_groups import retentions
from pd_connector.vllm.callers import has_siblings
from pd_connector.vllm.device_blocks import DeviceBlocks
from pd_connector.vllm.engine_config import (
    EngineRole,
    data_parallel_index,
    draft_tokens,
    drafts_keep_caches,
    drafts_late,
    engine_ranks,
    kv_port,
    max_model_len,
    steps_in_flight,
    stop_timeout_s,
    workers_of,
)
from pd_connector.vllm.engine_core import EngineLoop
from pd_connector.vllm.layouts import log_layout, warn_if_not_hooked
from pd_connector.vllm.model_changes import watch_model
from pd_connector.vllm.model_identity import model_identity
from pd_connector.vllm.platform import host_address
from pd_connector.vllm.prompts import Prompts
from pd_connector.vllm.releases import installed
from pd_connector.vllm.requests import block_ids_to_fill, computes_whole_prompt
from pd_connector.vllm.tracing import lease_spans
from transfer.control.client import ControlClient
from transfer.control.keys import ControlKeys
from transfer.peers import AllowedPeers, parse_address

if TYPE_CHECKING:
    from pd_connector.vllm.types import KVCacheBlocks, KVCacheConfig, KVCacheEvent, KVCacheManager, Request, VllmConfig

logger = logging.getLogger(__name__)

# News and new requests end a rest. A pull that fails on a worker is noticed when it is over.
_REST_S = 0.05


def _never(_: "Request") -> bool:
    return False


class ConnectorScheduler:
    """The connector in the engine core. All methods are called on the scheduler's thread; none holds others up."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        kv_cache_config: "KVCacheConfig",
        config: ConnectorConfig,
        stats: StatsRecorder,
        clock: Callable[[], float] = time.monotonic,
        limits: EngineLimits = ENGINE_LIMITS,
    ) -> None:
        """Start the roles that the configuration names. ``clock`` is a monotonic clock, in seconds."""
        self._vllm_config = vllm_config
        self._config = config
        self._limits = limits
        self._stats = stats
        self._clock = clock
        self._role = EngineRole.of(
            vllm_config, serves_prefixes=config.serve_prefixes, asks_peers=config.peers is not None
        )
        self._retentions = retentions(vllm_config, kv_cache_config)
        self._states = [group for group, kept in enumerate(self._retentions) if kept.states]
        warn_if_not_hooked(vllm_config)
        if installed.current().declares_layouts:
            log_layout(vllm_config, installed.current().layout_of(kv_cache_config))
        self._blocks = DeviceBlocks()
        self._demand = BlockDemand(self._blocks, self._retentions, draft_tokens(vllm_config))
        self._engine = EngineLoop()
        self._workers = Workers(workers_of(vllm_config))
        self._tier: HostTier | None = None  # when all workers are known
        self._moves: LeaseMoves | None = None  # if leases may move to host memory
        self._prompt_slots = PromptSlots()
        self._early: dict[str, Request] = {}  # requests that came before all workers were known
        self._destinations: list[Destinations] = []  # for the next step, if vLLM is told of failures by block ids
        self._model_changes = self._asked_handshakes = 0  # since the last step
        self._device_is_outdated = False  # vLLM may still find what another model has computed
        self._prefixes_at = ""  # where peers find prefixes here
        self._failed: set[str] = set()  # requests that have failed on a rank, and wait for others
        self._params = RequestParams(self._role, stats)
        self._unshared = unshared_prefixes(vllm_config, self._retentions)
        check_settings(config, self._role, vllm_config, unshared=self._unshared)
        allow_connections()
        keys = load_keys(config.secret_file)
        self._secret = keys.fingerprint if keys is not None else ""
        block_tokens = [kept.block_tokens for kept in self._retentions]
        self._external = ExternalLoads(self._blocks, block_tokens, steps_in_flight(vllm_config))
        # In the order in which they are asked for tokens. Host memory comes early: what it holds is not pulled.
        self._roles: list[SchedulerRole] = [self._external]
        self._rate = ComputeRate(clock)
        steps_alone = vllm_config.parallel_config.data_parallel_size == 1
        self._passed_over = PassedOver(self._roles, self._rate, self._engine if steps_alone else EngineLoop())
        self._canaries = self._make_canaries()
        self._prompts = Prompts(vllm_config, config.model_check)
        self._hashes = BlockHashes(vllm_config)
        self._readers = Readers() if READERS in (config.peers or ()) and self._role.produces else None
        self._consumer = self._make_consumer(keys, kv_cache_config) if self._role.consumes else None
        self._spans = lease_spans(vllm_config)
        leases: LeaseTable[Leased] = LeaseTable(
            config.lease_ttl_s, clock, limits.max_lease_age_s, config.claim_timeout_s
        )
        self._admission = self._make_admission(leases)
        self._add_roles(leases, keys)

    def _add_roles(self, leases: LeaseTable[Leased], keys: ControlKeys | None) -> None:
        """Start what serves other engines, and list the roles."""
        consumer = self._consumer
        if self._role.is_read:
            producer = self._make_producer(leases, keys, self._admission)
            self._prefixes_at = producer.serves_prefixes_at
            self._roles += [producer, self._admission]
            if self._moves is not None:
                self._roles.append(self._moves)
            if self._config.bootstrap_port and self._role.produces:
                self._roles.append(self._make_bootstrap(producer))
        else:
            self._roles.append(self._admission)
        if self._canaries.tries:
            self._roles.append(self._canaries)
        peer_prefixes = self._make_peer_prefixes(keys) if self._config.peers is not None else None
        if peer_prefixes is not None or self._config.pool is not None:
            self._roles.append(self._rate)
        self._roles += [role for role in (consumer, peer_prefixes) if role is not None]

    def bind_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        """Take the manager of the engine's blocks. Called while the engine core constructs its scheduler."""
        forgets = any(kept.window or kept.chunk or kept.states for kept in self._retentions)
        leasing = next((role for role in self._roles if isinstance(role, Producer) and forgets), None)
        to_pull = None if leasing is None else leasing.tokens_to_pull
        # Siblings are asked about a request, too. They would look for what the device has, or load from keys on.
        pass_over = _never if has_siblings() else self._passed_over.pass_over
        self._blocks.bind(kv_cache_manager, self._release_device_blocks, to_pull, self._device_was_reset, pass_over)
        check_cache_manager(self._vllm_config, self._blocks, self._retentions)
        installed.current().keep_from_loads(kv_cache_manager, self._demand.kept_from_loads)
        if self._states:
            consumer = self._consumer if self.finds_longer_hits and not has_siblings() else None
            self._blocks.find_longer_hits(_never if consumer is None else consumer.look_ups.may_lack_state)
        if self._config.serve_prefixes and not self._unshared:
            say_if_prompts_only(self._blocks.retention_interval, self._retentions)
        self._engine.find()
        watch_model(self.model_changed, self._prompts.loaded)

    @property
    def finds_longer_hits(self) -> bool:
        """Whether vLLM is to find keys behind the last state of a request that is pulled."""
        return self._consumer is not None and keys_suffice(self._retentions, self._config)

    def set_workers(self, handshakes: Mapping[WorkerRanks, WorkerHandshake]) -> None:
        """Take the workers' handshakes that vLLM passes on: at start, and when the engine wakes from sleep.

        None if MultiConnector passes on another child's. Then all of ours come with the next report.
        """
        if not handshakes:
            self._workers.expect_again()
            self._asked_handshakes = 1  # vLLM asks no worker to wake up that does not sleep
        self._take_handshakes(handshakes)

    def add(self, request: "Request") -> None:
        """Take up a new request."""
        self._params.check(request)
        if self._states and self._role.produces:
            self._leave_last_token(request)
        if self._waits_for_workers:
            self._early[request.request_id] = request
        for role in self._roles:
            role.add(request)
        self._params.remove_malformed(request)

    def missing_tokens(self, request: "Request", computed_tokens: int) -> int | None:
        """Return how many tokens beyond ``computed_tokens`` will be loaded or pulled; None if not known yet."""
        if self._waits_for_workers:
            return None  # a prompt that is computed now could be neither leased nor stored
        if self._passed_over.must_wait(request, computed_tokens):
            return None
        for role in self._roles:
            role.free_blocks()
        self._demand.asked(request)
        missing = 0
        for role in self._roles:
            missing += role.missing_tokens(request, computed_tokens + missing)
        return missing if self._demand.can_be_loaded(request) else 0

    def allocated(self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int) -> None:
        """Start loading and pulling into the blocks that a request was given."""
        self._demand.given()
        if external_tokens and not installed.current().fails_by_request:
            self._destinations.append(Destinations(request.request_id, block_ids_to_fill(blocks)))
        if external_tokens and self._states:
            self._blocks.leave_unzeroed(request.request_id, self._states)
        if external_tokens:
            self._admission.awaits_tokens(request)
        for role in self._roles:
            external_tokens -= role.allocated(request, blocks, external_tokens)

    def loaded_tokens(self, request: "Request") -> int:
        """Return how many of the tokens that a request waits for come from host memory."""
        return sum(role.loaded_tokens(request) for role in self._roles)

    def step_orders(self, scheduled: Mapping[str, int]) -> Orders:
        """Return the orders for the workers in a step that works on ``scheduled`` tokens of each request."""
        for role in self._roles:
            role.free_blocks()
        self._demand.end_step()
        own = Orders(
            destinations=tuple(self._destinations), model_changes=self._model_changes,
            asked_handshakes=self._asked_handshakes,
        )  # fmt: skip
        self._destinations, self._model_changes, self._asked_handshakes = [], 0, 0
        orders = sum((role.step_orders(scheduled) for role in self._roles), own)
        return orders.served_at(self._prefixes_at) if self._prefixes_at else orders

    def rest(self) -> None:
        """Wait a little if nothing can happen here before a prefill engine has news. For a step that has no work.

        The engines of a data-parallel deployment step together, so that none may rest for itself.
        """
        consumer = self._consumer
        if consumer is None or self._vllm_config.parallel_config.data_parallel_size > 1 or self.wants_step():
            return
        if waiting := consumer.waiting_for_prefill:
            self._engine.rest(_REST_S, waiting)

    def wants_step(self) -> bool:
        """Return whether the engine must step even without requests."""
        return self._waits_for_workers or any(role.wants_step for role in self._roles)

    def frees_blocks_soon(self) -> bool:
        """Return whether it is better to wait a few steps for blocks than to preempt a request. Then it waits."""
        return any(role.frees_blocks_soon for role in self._roles)

    def settled(self, request_ids: set[str], failed: set[str], report: Report) -> None:
        """Note that requests have ended their wait on all ranks, some as ``failed``, and what else ranks ``report``."""
        self._take_handshakes(report.handshakes)
        self._failed |= failed | report.failed
        failed = self._failed & request_ids
        self._failed -= failed
        for role in self._roles:
            role.settled(request_ids, failed, report)

    def finish(self, request: "Request", block_ids: Sequence[Sequence[int]]) -> dict[str, Any] | None:
        """Forget a request that has ended; return the ``kv_transfer_params`` of its response, if any."""
        self._early.pop(request.request_id, None)
        answers = [role.finish(request, block_ids) for role in self._roles]
        self._prompts.forget(request.request_id)
        return next((params for params in answers if params is not None), None)

    def take_events(self) -> "list[KVCacheEvent]":
        """Return the KV cache events of host memory since the last call."""
        return [event for role in self._roles for event in role.take_events()]

    def update_stats(self) -> None:
        """Record what the roles have counted."""
        for role in self._roles:
            role.update_stats(self._stats)

    def reset(self) -> bool:
        """End all leases and drop the contents of host memory, for example after a weight update.

        Returns:
            False if a request is loading such contents from host memory right now.
        """
        done = [role.reset() for role in self._roles]
        return all(done)

    def model_changed(self, by: str) -> None:
        """End all leases and forget what is known of the model, and of other engines': it computes something else now.

        ``by``: what may have changed it, for the log.
        """
        logger.info(
            "PDConnector: %s may have changed the model: all leases end, host memory is dropped, and other engines are "
            "compared anew", by,
        )  # fmt: skip
        self._forget_model()
        self._device_is_outdated = self._blocks.holds_anything
        self._model_changes += 1

    def shutdown(self) -> None:
        """Stop all communication and join all threads."""
        for role in self._roles:
            role.close()

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books of all roles balance."""
        for role in self._roles:
            role.check_integrity()

    def _release_device_blocks(self) -> None:
        """Give back all device blocks, if nothing else keeps vLLM from resetting its prefix cache.

        What they hold is about to become invalid: leases end, and stores in host memory are abandoned.
        """
        for role in self._roles:
            role.free_blocks()
        references = sum((role.device_references() for role in self._roles), Counter())
        if not references or not self._blocks.are_all_in_use(references):
            return
        logger.info("PDConnector: vLLM resets its prefix cache: all leases end, and blocks being stored are not kept")
        for role in self._roles:
            role.release_device_blocks()

    def _device_was_reset(self) -> None:
        """Drop what has come from the device since the model changed: vLLM found blocks of the old one there."""
        if self._device_is_outdated:
            self._device_is_outdated = False
            self._forget_model()

    def _forget_model(self) -> None:
        self.reset()
        for role in self._roles:
            role.model_changed()

    def _take_handshakes(self, handshakes: Mapping[WorkerRanks, WorkerHandshake]) -> None:
        if not (in_order := self._workers.add(handshakes)):
            return
        if self._role.reads:
            check_secrets(in_order, self._secret)
        if self._config.cpu_bytes_to_use and self._tier is None:
            tier = open_host_tier(self._config, self._vllm_config, self._blocks.manager, self._retentions, in_order)
            self._tier = tier
            self._roles.insert(1, tier)
            if self._config.pool is not None and not self._unshared:
                pool = open_shared_pool(
                    self._config, tier, self._retentions, in_order, self._hashes, self._rate, self._clock
                )  # fmt: skip
                self._roles.append(pool)
            if (mode := self._config.host_transfers) != "off":
                check_holds_a_prompt(tier.pool.slots, self._retentions, max_model_len(self._vllm_config), self._config)
                if self._consumer is not None:
                    landings = Landings(mode, tier, self._consumer, self._demand, len(in_order))
                    self._roles.insert(self._roles.index(self._consumer) + 1, landings)
            if self._moves is not None:
                self._moves.use(tier, len(in_order))
                self._prompt_slots.use(tier)
            for request in self._early.values():
                tier.add(request)
        self._early.clear()
        for role in self._roles:
            role.set_workers(in_order)

    @property
    def _waits_for_workers(self) -> bool:
        """Whether a role needs handshakes of workers that have not arrived. They come with the next step's report."""
        needs = self._role.is_read or self._config.cpu_bytes_to_use > 0 or self._canaries.tries
        return needs and not self._workers.known

    @property
    def _port(self) -> int:
        """The control port of the first data-parallel engine; 0 lets the system choose."""
        return self._config.port or kv_port(self._vllm_config)

    def _make_producer(
        self, leases: LeaseTable[Leased], keys: ControlKeys | None, admission: RequestAdmission
    ) -> Producer:
        config, vllm_config = self._config, self._vllm_config
        model = model_identity(vllm_config, config.model_check, reads_weights=False)  # workers know the rest
        tp_size, _ = engine_ranks(vllm_config)
        service = LeaseService(
            leases, model, tp_size, self._engine.wake, verify=config.verify, max_model_len=max_model_len(vllm_config),
            spans=self._spans, prompts=self._prompts, writes_late=drafts_late(vllm_config), readers=self._readers,
        )  # fmt: skip
        if config.host_transfers != "off":
            self._moves = LeaseMoves(
                leases, service.checksums, self._blocks, lambda: admission.wants_blocks, self._limits.move_leases_above,
                self._clock,
            )  # fmt: skip
        # The engines of a data-parallel deployment may share a host.
        port = self._port and self._port + data_parallel_index(vllm_config)
        drain = Drain(config.drain_timeout_s, stop_timeout_s(vllm_config), self._engine.is_stopping)
        in_flight = steps_in_flight(vllm_config)
        return Producer(
            service, config.host or host_address(), port, self._blocks, self._engine, drain,
            self._external, LeasedStates(self._blocks, self._retentions, self._prompts), keys, in_flight,
            self._moves, self._prompt_slots,
            self._hashes if config.serve_prefixes and not self._unshared else None, self._retentions,
            drafts_late=drafts_late(vllm_config), wants_blocks=lambda: admission.wants_blocks,
            is_outdated=lambda: self._device_is_outdated,
        )  # fmt: skip

    def _make_bootstrap(self, producer: Producer) -> SchedulerRole:
        if not self._port:
            logger.warning(
                "PDConnector: bootstrap_port is set and port is not, so the control channel has another port after "
                "every start. Routers ask for it only once, and would have to be restarted with this engine: set port"
            )
        from pd_connector.scheduler.prefill.bootstrap import Bootstrap  # noqa: PLC0415  an HTTP server that few engines need

        port = self._config.bootstrap_port + data_parallel_index(self._vllm_config)
        return Bootstrap(self._config.host or host_address(), producer.port, engine_ranks(self._vllm_config), port)

    def _make_admission(self, leases: LeaseTable[Leased]) -> RequestAdmission:
        consumer = self._consumer if self._role.produces else None  # no pull here ends a prefix that is lent
        fraction = self._limits.leased_fraction(consumes=self._role.consumes)
        limits = AdmissionLimits(fraction, self._config.lease_ttl_s, self._config.queue_timeout_s)
        loaded_first = installed.current().serves_loaded_first
        return RequestAdmission(limits, self._demand, leases, consumer, self._clock, loaded_first=loaded_first)

    def _make_canaries(self) -> Canaries:
        mode = self._config.canary_mode
        compares = not all(kept.states for kept in self._retentions)  # else there are no keys and values
        return Canaries(
            self._blocks, self._retentions, self._external.is_spoilt, clock=self._clock,
            tries=mode != "off" and self._role.reads and compares, refuses=mode == "refuse",
        )  # fmt: skip

    def _make_consumer(self, keys: ControlKeys | None, kv_cache_config: "KVCacheConfig") -> Consumer:
        limits, queue_s, message_s = self._limits, self._config.queue_timeout_s, self._limits.handshake_timeout_s
        client = ControlClient(keys=keys, allowed=AllowedPeers(self._config.allowed_peers))
        renewals = Renewals(client, message_s, queue_s, self._clock)
        subscriptions = Subscriptions(client, renewals, FollowLimits(message_s, queue_s), self._engine, self._clock)
        renewals.start()
        layers = [group.layer_names for group in kv_cache_config.kv_cache_groups]  # of the first pipeline stage
        borders = BorderStates(self._blocks, self._retentions, self._workers.expected, self._store_state)
        return Consumer(
            renewals, subscriptions, PullsAhead(limits, self._demand), self._retentions, layers, self._canaries,
            self._prompts, borders,
        )  # fmt: skip

    def _store_state(self, *state: Any) -> None:
        if self._tier is not None:
            self._tier.store_state(*state)

    def _make_peer_prefixes(self, keys: ControlKeys | None) -> PeerPrefixes | None:
        if self._unshared:
            return None
        client = ControlClient(keys=keys, allowed=AllowedPeers(self._config.allowed_peers))
        renewals = Renewals(client, MESSAGE_S, math.inf, self._clock)  # what is pulled waits for no blocks
        renewals.start()
        peers = [parse_address(peer) for peer in self._config.peers or () if peer != READERS]

        def held_in_host(request: "Request", computed_tokens: int) -> int:
            hit = self._tier and self._tier.pool.find(request, computed_tokens)
            return hit.tokens if hit else 0

        return PeerPrefixes(
            peers, client, renewals, self._blocks, self._retentions, self._hashes, self._canaries, self._rate,
            held_in_host, self._clock, self._readers,
        )  # fmt: skip

    def _leave_last_token(self, request: "Request") -> None:
        """Have a prefill leg leave its last token to the other engine, which needs the state before it."""
        params = request.kv_transfer_params
        if is_prefill_leg(params) and not (is_decode_leg(params) or computes_whole_prompt(request)):
            self._prompts.cut(request, self._blocks.hash_tokens, drafts=drafts_keep_caches(self._vllm_config))
