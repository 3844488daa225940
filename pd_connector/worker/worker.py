"""The worker side of the connector: registers the caches, passes orders to its roles, reports what has ended."""

import logging
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from layout.geometry import ModelIdentity, Region, WorkerGeometry
from layout.host_blocks import host_layout
from layout.host_slots import SlotPlaneError, host_block_geometry
from pd_connector.config import ConfigError, ConnectorConfig, recipe_keys
from pd_connector.engine_limits import ENGINE_LIMITS
from pd_connector.orders import Orders, Report, WorkerHandshake, WorkerRanks
from pd_connector.secret import load_keys
from pd_connector.stats import StatsRecorder
from pd_connector.vllm.ascend_options import check_computes_prompts
from pd_connector.vllm.cache_groups import Ranks, cache_groups, needs_zeroing, with_head_orders
from pd_connector.vllm.devices import caches_are_host_memory, device_type
from pd_connector.vllm.engine_config import (
    EngineRole,
    arithmetic,
    drafts_late,
    engine_name,
    extra_config,
    max_model_len,
)
from pd_connector.vllm.model_identity import model_identity
from pd_connector.vllm.model_numbers import fill_token_scales
from pd_connector.vllm.model_stream import leave_default_stream
from pd_connector.vllm.platform import worker_ranks, workers_on_this_machine
from pd_connector.vllm.releases import installed
from pd_connector.vllm.tracing import pull_spans
from pd_connector.worker.caches import Cache, all_tensors, describe_caches
from pd_connector.worker.canary import canary_pulls, canary_room
from pd_connector.worker.device_fence import RaiseFence, StepEnds, fences, no_fence
from pd_connector.worker.host.pool import HostPool, HostQuota
from pd_connector.worker.host.pool_copies import open_pool_copies
from pd_connector.worker.lease_checksums import CacheChecksums, LeaseChecksums
from pd_connector.worker.peer import ClearTails, PullContext, keep_tails
from pd_connector.worker.pulls import Pulls
from pd_connector.worker.readers import host_reader, remote_reader
from pd_connector.worker.remote_reader import RemoteReader
from pd_connector.worker.same_host import first_way, same_host_address
from pd_connector.worker.transfer_engine import (
    check_reaches,
    goes_through_device,
    lender,
    open_engine,
    read_cost,
    transport,
)
from pd_connector.worker.unawaited_pulls import LandingPulls, PrefixPulls
from pd_connector.worker.verification import Verifier
from pd_connector.worker.worker_role import Arrivals, FailedBlocks, WorkerRole, fail_transfers
from transfer.control.client import ControlClient
from transfer.copies.checksums.block_checksums import BlockReader, in_place
from transfer.copies.checksums.device_reader import DeviceReader
from transfer.copies.clearing import TailCleaner
from transfer.engine.interface import EngineStartError, TransferEngine
from transfer.memory import bytes_of
from transfer.peers import AllowedPeers

if TYPE_CHECKING:
    from pd_connector.vllm.types import KVCacheConfig, VllmConfig

logger = logging.getLogger(__name__)


class ConnectorWorker:
    """The connector in one worker. All methods are called on the model's thread; only ``shutdown`` waits for peers."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        kv_cache_config: "KVCacheConfig",
        config: ConnectorConfig,
        stats: StatsRecorder,
        make_engine: Callable[[ConnectorConfig], TransferEngine] | None = None,
    ) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._config = config
        self._stats = stats
        self._role = EngineRole.of(
            vllm_config, serves_prefixes=config.serve_prefixes, asks_peers=config.peers is not None
        )
        self._keys = load_keys(config.secret_file)
        self._make_engine = make_engine or partial(
            open_engine,
            is_read=self._role.is_read,
            reads=self._role.reads,
            lend=lender(config),
            has_secret=self._keys is not None,
            qos=recipe_keys(extra_config(vllm_config)).qos_priority,
        )
        self._allowed = AllowedPeers(config.allowed_peers)
        self._engine: TransferEngine | None = None
        self._handshake: WorkerHandshake | None = None
        self._unsent: dict[WorkerRanks, WorkerHandshake] = {}  # the handshake, until vLLM or a report takes it
        self._model: ModelIdentity | None = None
        self._caches: _RegisteredCaches | None = None
        self._host: HostPool | None = None
        self._landing_reads: RemoteReader | None = None  # if prompts are pulled to host memory
        self._roles: list[WorkerRole] = []  # host memory first
        self._arrivals = Arrivals()
        self._failures = FailedBlocks()
        self._lost = Report()  # what the end of the transfer engine has ended, until the next report
        self.steps = StepEnds()  # that are to be reported

    def register_caches(self, kv_caches: Mapping[str, Cache]) -> None:
        """Describe the caches, register their memory with the transfer engine, and start this worker's roles.

        Raises:
            UnknownCacheError: a cache cannot be described.
            UnsupportedError: a cache is not an attention cache, or the engine cannot compute prompts.
            RuntimeError, NotImplementedError: the order that CPU kernels use in a block cannot be determined.
            EngineStartError: the transfer engine does not start, or refuses the memory.
            ConfigError, ValueError, MemoryError: tuning.staging_bytes is too little, or more than the device has.
            ConfigError: cpu_bytes_to_use is too little, more than the machine has, or impossible with these caches.
        """
        check_computes_prompts(self._vllm_config)
        fill_token_scales(self._vllm_config)
        config, ranks, tensors = self._config, worker_ranks(), all_tensors(kv_caches)
        on_host = caches_are_host_memory()
        if tensors and ranks.world_size == 1 and goes_through_device(transport(config), device_type()):
            leave_default_stream(tensors[0].device)
        # A pull is good only if it is on every rank, so one may compare the weights for all.
        self._model = model_identity(self._vllm_config, config.model_check, kv_caches, reads_weights=ranks.index == 0)
        self._engine = engine = self._make_engine(config)
        groups = [
            with_head_orders(self._vllm_config, group, kv_caches, on_cpu=on_host)
            for group in cache_groups(self._vllm_config, self._kv_cache_config)
        ]
        geometry = describe_caches(kv_caches, groups, ranks, engine.address)
        geometry = replace(geometry, transport=transport(config), identity=engine.identity)
        check_reaches(config, geometry.regions)
        self._caches = caches = _RegisteredCaches(ranks, geometry, kv_caches, tensors, on_host)
        host_slots, host = 0, None
        if config.cpu_bytes_to_use:
            self._check_host_transport()
            self._host = self._open_host_pool(geometry, tensors, ranks)
            self._roles = [self._host]  # so that it is closed if what follows fails
            host_slots = self._host.slots
            host = self._readable_host(self._host, geometry)
        reads = self._register(engine, caches)
        self._register_host(engine)
        logger.info(
            "PDConnector: rank %d of %d registered %d bytes of KV cache with the %s transport, %d bytes per block in "
            "%d planes",
            ranks.index, ranks.world_size, sum(region.size for region in geometry.regions), geometry.transport,
            geometry.block_bytes, sum(len(group.planes) for group in geometry.groups),
        )  # fmt: skip
        if tensors and drafts_late(self._vllm_config):
            self.steps = StepEnds(fences(tensors[0].device))
        self._start_roles(engine, caches, reads)
        secret = self._keys.fingerprint if self._keys is not None else ""
        canary = canary_room(geometry) if self._tries_canaries else None
        how = arithmetic(self._vllm_config) if config.pool is not None else ""
        made = WorkerHandshake(geometry, host_slots, host, canary, secret=secret, model=self._model, arithmetic=how)
        self._announce(made)

    def unregister_caches(self) -> None:
        """Let go of the caches' memory, which is about to be unmapped: sleep mode. Idempotent.

        Ends everything that reads or writes the caches, and the transfer engine, so that no peer reads what will be
        there. Requests that wait are reported as failed. Host memory stays, with its contents.

        Raises:
            RuntimeError: something may still touch the memory.
        """
        if self._engine is None:
            return
        transfers = self._end_transfers(self._engine)
        self._engine.check_settled()
        for role in transfers:
            role.check_ended()
        if self._host is not None:
            self._host.settle()
        self._settle_ends()
        self._lost += sum((role.abandoned() for role in transfers), Report())
        self._arrivals.abandon()
        self._engine = None  # only now may the memory go: a call that has failed can be made again
        self._roles = [self._host] if self._host is not None else []
        logger.info("PDConnector: the KV caches are not registered for transfers while the engine sleeps")

    def restore_caches(self) -> None:
        """Register the caches again, which are mapped at the same addresses as before. Idempotent.

        The transfer engine is a new one, at another address. So the handshake is passed on anew.

        Raises:
            EngineStartError: the transfer engine does not start, or refuses the memory.
        """
        before, caches = self._handshake, self._caches
        if before is None or caches is None:
            return
        if self._engine is None:
            engine = self._make_engine(self._config)
            try:
                caches = caches.at(engine)
                reads = self._register(engine, caches)
                self._register_host(engine)
                self._start_roles(engine, caches, reads)
            except BaseException:
                self._end_transfers(engine)
                self._roles = [self._host] if self._host is not None else []
                raise
            self._engine, self._caches = engine, caches
            host = self._readable_host(self._host, caches.geometry) if self._host is not None else None
            known = replace(before, geometry=caches.geometry, host=host, model=self._model)
            before = replace(known, generation=before.generation + 1)
            logger.info("PDConnector: the KV caches are registered for transfers again, at %s", engine.address)
        self._announce(before)

    def handshake(self) -> WorkerHandshake | None:
        """Return this worker's caches, for the scheduler side to describe to peers; None before ``register_caches``.

        The caller passes it on. Without this call, the next report has it, and also where workers share the computation
        of a prompt: vLLM has one place for the handshakes of them all.
        """
        if self._handshake is not None and self._handshake.geometry.pcp_size > 1:
            return None
        self._unsent = {}
        return self._handshake

    def execute(self, orders: Orders) -> None:
        """Start the scheduler side's orders. While the engine sleeps, what waits for a transfer fails at once."""
        self._failures.expect(orders.destinations)
        self.steps.begin(orders.steps)
        if orders.model_changes and self._model is not None:
            self._model = self._model.with_other_weights()  # they are not those of the files any more
        if orders.asked_handshakes and self._engine is not None and self._handshake is not None:
            self._announce(self._handshake)
        for role in self._roles:
            for request_id in role.execute(orders):
                self._arrivals.expect(request_id)
        if self._engine is None and self._caches is not None:
            self._lost += fail_transfers(orders, self._arrivals)

    def take_results(self, left: Collection[str] = ()) -> tuple[set[str], set[str]]:
        """Return the requests whose wait here has ended since the last call, those ``left`` too, and which have failed.

        Raises:
            UnsettledLoadError: a load failed, but the device may still be writing to KV blocks.
            UnsettledReadError: a pull failed, but the transfer engine may still be writing to KV blocks.
        """
        self._arrivals.leave(left)
        self._settle_ends()
        finished, failed = self._arrivals.take()
        self._failures.settle(finished, failed)
        return finished, failed

    def take_failed_blocks(self) -> set[int]:
        """Return the device blocks that failed to be filled, of requests that ``take_results`` has returned.

        Only of requests whose destinations were ordered: vLLM is told of failures by block ids then.
        """
        return self._failures.take_blocks()

    def take_report(self) -> Report:
        """Return what else has ended on this rank since the last call, for which no request waits.

        vLLM calls this after it has launched what the step computes, and passes the report on with the results. So the
        steps in it have been computed when it arrives. A step that drafts is in a later report, when the device has
        done all of it.
        """
        handshakes, self._unsent = self._unsent, {}
        steps = dict.fromkeys(self.steps.take(), 1)
        report = Report(handshakes=handshakes, failed=self._failures.take_requests(), steps=steps)
        lost, self._lost = self._lost, Report()
        return sum((role.take_report() for role in self._roles), report + lost)

    def shutdown(self) -> None:
        """Stop all transfers, unregister the memory, join all threads."""
        self._end_transfers(self._engine)
        if self._host is not None:
            self._host.close()  # last: what peers, pulls and the pool read and write until here
            self._host.join()

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance, including those of the roles."""
        self._arrivals.check_integrity()
        self._failures.check_integrity()
        for role in self._roles:
            role.check_integrity()

    def _end_transfers(self, engine: TransferEngine | None) -> list[WorkerRole]:
        """Close the transfer engine and all roles but host memory; return these roles, whose threads have ended."""
        transfers = [role for role in self._roles if role is not self._host]
        for role in transfers:
            role.close()
        if engine is not None:
            engine.close()  # ends the reads that the roles' threads wait for
        for role in transfers:
            role.join()
        return transfers

    def _settle_ends(self) -> None:
        for role in self._roles:
            for end in role.take_ends():
                if not (end.comes_of_leaving and self._arrivals.has_left(end.request_id)):
                    end.count(self._stats)
                    if end.failure and not end.is_told:
                        then = "Its prompt is computed here instead" if self._role.recomputes else "The request fails"
                        logger.error("PDConnector: request %s: %s. %s", end.request_id, end.failure, then)
                self._arrivals.settle(end.request_id, failed=bool(end.failure))

    def _announce(self, handshake: WorkerHandshake) -> None:
        """Have the handshake passed on to the scheduler side, by vLLM or by the next report."""
        place = replace(handshake.geometry, same_host_address=same_host_address(self._engine))
        self._handshake = handshake = replace(handshake, geometry=place)
        self._unsent = {(place.pp_rank, place.pcp_rank * place.tp_size + place.tp_rank): handshake}

    def _register(self, engine: TransferEngine, caches: "_RegisteredCaches") -> RemoteReader | None:
        """Register the memory of the caches, and what reads need; return what carries reads out, if there are any."""
        reads = None
        if self._role.reads:
            reads = remote_reader(self._config, caches.geometry, caches.tensors, on_host=caches.on_host)
        engine.register((*caches.geometry.regions, *(reads.regions if reads is not None else ())))
        return reads

    def _readable_host(self, host: HostPool, geometry: WorkerGeometry) -> WorkerGeometry | None:
        """Return the slots of host memory as peers may read them; None if they may not."""
        if not (self._role.is_read and self._uses_host):
            return None
        try:
            return host.geometry(geometry)
        except ValueError as error:
            raise ConfigError(f"host_transfers = {self._config.host_transfers!r}: {error}; set it to 'off'") from error

    def _check_host_transport(self) -> None:
        """Raise ConfigError if transfers are to begin or end in host memory, and the transport cannot do that."""
        if self._uses_host and transport(self._config) == "ascend":
            raise ConfigError(
                f"host_transfers = {self._config.host_transfers!r}: over the Ascend transport (HCCS) no transfer "
                "begins or ends in host memory; set it to 'off'"
            )

    def _register_host(self, engine: TransferEngine) -> None:
        """Register the slots of host memory in one region, if peers read them or prompts are pulled there.

        Raises:
            EngineStartError: the transfer engine refuses it.
            ConfigError: tuning.staging_bytes is too little.
        """
        if self._host is None or not self._uses_host:
            return
        region = self._host.region
        staging: tuple[Region, ...] = ()
        if self._role.consumes:  # prompts are pulled there
            self._landing_reads = host_reader(self._config, (region,))
            staging = self._landing_reads.regions
        try:
            engine.register((region, *staging))
        except EngineStartError as error:
            raise EngineStartError(
                f"host_transfers: the transfer engine refuses the {region.size} bytes of this worker's host memory, "
                f"which must be registered in one piece: {error}. Allow the process to lock more memory (ulimit -l), "
                "set cpu_bytes_to_use to less, or host_transfers to 'off'"
            ) from error
        logger.info("PDConnector: registered the %d bytes of this worker's host memory (host_transfers)", region.size)

    @property
    def _uses_host(self) -> bool:
        """Whether transfers begin or end in this worker's host memory."""
        return self._config.host_transfers != "off"

    @property
    def _tries_canaries(self) -> bool:
        return self._role.reads and self._config.canary_mode != "off"

    def _start_roles(self, engine: TransferEngine, caches: "_RegisteredCaches", reads: RemoteReader | None) -> None:
        config, ranks = self._config, caches.ranks
        if self._host is not None and config.pool is not None:
            self._roles.append(open_pool_copies(config, self._host, caches.geometry, self._keys, self._stats))
        checksums = self._cache_checksums(caches) if config.verify else None
        if checksums is not None and self._role.is_read:
            self._roles.append(LeaseChecksums(checksums, ranks.index))
        if reads is None:
            return
        assert self._model is not None, "the model is identified when the caches are registered"
        client = ControlClient(keys=self._keys, allowed=self._allowed)
        context = PullContext(
            local=caches.geometry,
            model=self._model,
            engine=engine,
            client=client,
            allowed=self._allowed,
            reader=ranks.index,
            readers=ranks.world_size,
            reads=reads,
            reads_ahead=not goes_through_device(caches.geometry.transport, device_type()),
            handshake_timeout_s=ENGINE_LIMITS.handshake_timeout_s,
            pull_timeout_s=config.pull_timeout_s,
            verifier=Verifier(checksums, client) if checksums is not None else None,
            raise_fence=self._fences(caches),
            clear_tails=self._cleaner(caches.geometry, caches.tensors),
            replica_turn=zlib.crc32(engine_name(self._vllm_config).encode()),
            trace=pull_spans(self._vllm_config, ranks.index),
            max_model_len=max_model_len(self._vllm_config),
            stated=recipe_keys(extra_config(self._vllm_config)).prefill,
        )
        if self._role.consumes:
            self._roles.append(Pulls(context, ENGINE_LIMITS.peer_idle_s, self._stats))
        if config.peers is not None:
            self._roles.append(PrefixPulls(context, ENGINE_LIMITS.peer_idle_s, self._stats))
        if self._tries_canaries:
            cost = read_cost(config)
            self._roles.append(canary_pulls(context, caches.by_layer, caches.tensors, cost, on_host=caches.on_host))
        if self._host is not None and self._landing_reads is not None:
            self._roles.append(self._landings(context, self._host, self._landing_reads))

    def _landings(self, context: PullContext, host: HostPool, reads: RemoteReader) -> LandingPulls:
        """Return what pulls to host memory: nothing of the device takes part, so no pull waits for it."""
        config = self._config
        try:
            geometry = host_block_geometry(context.local, host_layout(context.local), host.region)
        except SlotPlaneError as error:
            raise ConfigError(
                f"host_transfers = {config.host_transfers!r}: {error}; or set host_transfers to 'off'"
            ) from error
        verifier = Verifier(CacheChecksums(geometry, in_place), context.client) if config.verify else None
        context = replace(
            context,
            local=geometry,
            engine=first_way(context.engine),  # what it reads to may not be pinned
            reads=reads,
            verifier=verifier,
            raise_fence=no_fence,
            clear_tails=self._cleaner(geometry, [torch.from_numpy(bytes_of(host.region))]),
        )
        return LandingPulls(context, ENGINE_LIMITS.peer_idle_s, self._stats)

    def _fences(self, caches: "_RegisteredCaches") -> RaiseFence:
        """Return what raises the fences of pulls; none are needed if vLLM defers the reuse of freed blocks enough.

        It does so only on engines that decode for others. A prefill engine pulls prefixes. What a step zeroes for a
        request that is preempted while that step is scheduled may be free before it ends, and some of vllm-ascend's
        schedulers have blocks zeroed into which a pull is to write.
        """
        defers = self._role.consumes and installed.current().defers_block_reuse
        is_deferred = defers and not (needs_zeroing(self._kv_cache_config) or drafts_late(self._vllm_config))
        if is_deferred or not caches.tensors:
            return no_fence
        return fences(caches.tensors[0].device)

    def _cleaner(self, geometry: WorkerGeometry, tensors: Sequence[torch.Tensor]) -> ClearTails:
        """Return what clears the rows that pulls leave, if vLLM zeroes blocks; it leaves that to who fills them."""
        return TailCleaner(geometry, tensors) if needs_zeroing(self._kv_cache_config) and tensors else keep_tails

    def _open_host_pool(self, geometry: WorkerGeometry, tensors: Sequence[torch.Tensor], ranks: Ranks) -> HostPool:
        if not tensors:
            raise ConfigError(f"cpu_bytes_to_use: rank {ranks.index} holds no KV cache; set it to 0")
        workers_here = workers_on_this_machine(self._vllm_config)
        quota = HostQuota(self._config.cpu_bytes_to_use, ranks.world_size, workers_here)
        return HostPool.open(quota, geometry, tensors, self._stats)

    def _cache_checksums(self, caches: "_RegisteredCaches") -> CacheChecksums:
        read: BlockReader = in_place if caches.on_host or not caches.tensors else DeviceReader(caches.tensors)
        logger.info(
            "PDConnector: rank %d takes checksums for every pull, which costs time (verify)", caches.ranks.index
        )
        return CacheChecksums(caches.geometry, read)


@dataclass(frozen=True)
class _RegisteredCaches:
    """The caches of this worker as they are registered."""

    ranks: Ranks
    geometry: WorkerGeometry
    by_layer: Mapping[str, Cache]
    tensors: Sequence[torch.Tensor]
    on_host: bool  # whether the CPU can read and write them

    def at(self, engine: TransferEngine) -> "_RegisteredCaches":
        """Return the same caches, registered with another transfer engine."""
        geometry = replace(self.geometry, engine_address=engine.address, identity=engine.identity)
        return replace(self, geometry=geometry)
