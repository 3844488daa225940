"""The worker half: registers the caches, carries out the scheduler half's orders, reports what has settled."""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from layout.cost import CostModel
from layout.geometry import ModelIdentity, WorkerGeometry
from pd_connector.cache_groups import Ranks
from pd_connector.config import ConfigError, ConnectorConfig
from pd_connector.metadata import (
    LoadOrder,
    PullOrder,
    RefuseOrder,
    StepOrders,
    StoreEnds,
    WorkerHandshake,
    WorkerReport,
)
from pd_connector.shared_secret import load_keys
from pd_connector.stats import StatsRecorder
from pd_connector.vllm_compat import (
    EngineRole,
    KVConnectorTransferResults,
    cache_groups,
    caches_are_host_memory,
    default_protocol,
    host_address,
    init_logger,
    model_identity,
    with_head_orders,
    worker_ranks,
    workers_on_this_machine,
)
from pd_connector.worker.arrivals import Arrivals
from pd_connector.worker.caches import Cache, describe_caches, tensors_of
from pd_connector.worker.device_reader import DeviceReader
from pd_connector.worker.hashing import HashService, Summing
from pd_connector.worker.host_copies import CopyEnd
from pd_connector.worker.host_pool import HostPool, Share
from pd_connector.worker.peer import PullContext
from pd_connector.worker.pulls import PullService
from pd_connector.worker.settlement import Settled
from pd_connector.worker.staged_reads import ReadPlanner
from pd_connector.worker.verification import Verifier
from transfer.control.client import ControlClient
from transfer.engine.base import TransferEngine
from transfer.engine.guarded import GuardedEngine
from transfer.engine.mooncake import MooncakeEngine, MooncakeOptions
from transfer.local_copy.checksums import BlockReader, in_place
from transfer.peers import AllowedPeers

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger(__name__)


class WorkerHalf:
    """Lives in one worker; every method is called on the model's thread and none but ``shutdown`` waits for a peer."""

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
        self._role = EngineRole.of(vllm_config)
        self._make_engine = make_engine or _mooncake
        self._keys = load_keys(config.secret_file)
        self._allowed = AllowedPeers(config.allowed_peers)
        self._engine: TransferEngine | None = None
        self._client: ControlClient | None = None
        self._pulls: PullService | None = None
        self._geometry: WorkerGeometry | None = None
        self._host: HostPool | None = None
        self._arrivals = Arrivals()
        self._stores: dict[int, StoreEnds] = {}  # that have ended since the last report
        self._summing: Summing | None = None  # with verify
        self._hashing: HashService | None = None  # and if this engine prefills

    def register_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Describe the caches, register their memory with the transfer engine, get ready to pull.

        Raises:
            UnknownCacheError: a cache cannot be described.
            UnsupportedError: a cache is not an attention cache.
            RuntimeError, NotImplementedError: how CPU kernels order a block cannot be found out.
            EngineStartError: the transfer engine does not start or refuses the memory.
            ConfigError, ValueError, MemoryError: staging_bytes is too little, or more than the device has.
            ConfigError: cpu_bytes_to_use is too little, more than the machine has, or of no use with these caches.
        """
        ranks = worker_ranks()
        model = model_identity(self._vllm_config, self._config.model_check)
        self._engine = GuardedEngine(self._make_engine(self._config), self._allowed)
        groups = [
            with_head_orders(self._vllm_config, group, kv_caches)
            for group in cache_groups(self._vllm_config, self._kv_cache_config)
        ]
        geometry = describe_caches(kv_caches, groups, ranks, model.kv_heads, self._engine.address)
        reads = self._plan_reads(geometry, kv_caches) if self._role.consumes else None
        staging = () if reads is None or reads.staging is None else (reads.staging.region,)
        self._engine.register((*geometry.regions, *staging))
        self._geometry = geometry
        logger.info(
            "PDConnector: rank %d of %d: %d bytes of KV cache registered, %d bytes a block in %d planes",
            ranks.index, ranks.world_size, sum(region.size for region in geometry.regions), geometry.block_bytes,
            sum(len(group.planes) for group in geometry.groups),
        )  # fmt: skip
        if self._config.cpu_bytes_to_use:
            self._host = self._open_host_pool(geometry, kv_caches, ranks)
        if self._config.verify:
            self._start_summing(geometry, kv_caches, ranks)
        if reads is not None:
            self._client = ControlClient(keys=self._keys, allowed=self._allowed)
            self._pulls = PullService(self._context(ranks, model, reads), self._config.peer_idle_s)

    def handshake(self) -> WorkerHandshake | None:
        """This worker's caches, for the scheduler process to describe to peers."""
        if self._geometry is None:
            return None
        return WorkerHandshake(self._geometry, self._host.slots if self._host is not None else 0)

    def execute(self, orders: StepOrders) -> None:
        """Start what the scheduler half ordered."""
        parts: tuple[RefuseOrder | PullOrder | LoadOrder, ...] = (*orders.refusals, *orders.pulls, *orders.loads)
        for part in parts:
            self._arrivals.expect(part.request_id)
        if self._host is not None:
            for store in orders.stores:
                self._host.copies.store(store)
            for load in orders.loads:
                self._host.copies.load(load)
        if self._pulls is not None:
            for refusal in orders.refusals:
                self._pulls.refuse(refusal)
            for pull in orders.pulls:
                self._pulls.submit(pull)
        if self._hashing is not None:
            for leased in orders.hashes:
                self._hashing.submit(leased)

    def take_results(self) -> KVConnectorTransferResults:
        """The requests whose blocks have arrived on this rank, from wherever they came, since the last call.

        Raises:
            DeviceLostError: the device failed and may still write to KV blocks.
        """
        for end in self._pulls.take_settled() if self._pulls is not None else ():
            self._record(end)
            self._arrivals.settle(end.request_id, failed=bool(end.cause))
        if self._host is not None:
            for request_id, load in self._host.copies.take_loads().items():
                self._record_load(request_id, load)
                self._arrivals.settle(request_id, failed=bool(load.failure))
            for store_id, (store, ends) in self._host.copies.take_stores().items():
                self._record_store(store)
                self._stores[store_id] = ends
        finished, failed = self._arrivals.take()
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def take_report(self) -> WorkerReport | None:
        """What has ended on this rank that no request waits for, since the last call."""
        stores, self._stores = self._stores, {}
        checksums = self._hashing.take() if self._hashing is not None else ()
        return WorkerReport(stores, checksums) if stores or checksums else None

    def shutdown(self) -> None:
        """End all transfers, unregister the memory, join all threads."""
        if self._hashing is not None:
            self._hashing.close()
        if self._pulls is not None:
            self._pulls.close()
        if self._engine is not None:
            self._engine.close()  # ends the reads that the sessions' threads wait for
        if self._client is not None:
            self._client.close()
        if self._pulls is not None:
            self._pulls.join()
        if self._host is not None:
            self._host.close()

    def _open_host_pool(self, geometry: WorkerGeometry, kv_caches: Mapping[str, Cache], ranks: Ranks) -> HostPool:
        tensors = [tensor for cache in kv_caches.values() for tensor in tensors_of(cache)]
        if not tensors:
            raise ConfigError(f"cpu_bytes_to_use: rank {ranks.index} holds no KV cache; set it to 0")
        share = Share(self._config.cpu_bytes_to_use, ranks.world_size, workers_on_this_machine(self._vllm_config))
        return HostPool.open(share, geometry, tensors)

    def _start_summing(self, geometry: WorkerGeometry, kv_caches: Mapping[str, Cache], ranks: Ranks) -> None:
        tensors = [tensor for cache in kv_caches.values() for tensor in tensors_of(cache)]
        read: BlockReader = in_place if caches_are_host_memory() or not tensors else DeviceReader(tensors)
        self._summing = Summing(geometry, read)
        if self._role.produces:
            self._hashing = HashService(self._summing, ranks.index)
        logger.info("PDConnector: rank %d takes checksums of every pull, which costs time (verify)", ranks.index)

    def _plan_reads(self, geometry: WorkerGeometry, kv_caches: Mapping[str, Cache]) -> ReadPlanner:
        config = self._config
        cost = CostModel.of_protocol(_protocol(config))
        if config.descriptor_cost_us is not None:
            cost = replace(cost, alpha=config.descriptor_cost_us * 1e-6)
        if config.byte_cost_ns is not None:
            cost = replace(cost, beta=config.byte_cost_ns * 1e-9)
        tensors = [tensor for cache in kv_caches.values() for tensor in tensors_of(cache)]
        if not (config.staging_bytes and tensors):
            return ReadPlanner(cost, geometry.regions)
        if caches_are_host_memory():
            try:
                return ReadPlanner.with_staging(cost, geometry.regions, config.staging_bytes)
            except ValueError as error:
                raise ConfigError(f"staging_bytes = {config.staging_bytes}: {error}; 0 switches staging off") from error
        return ReadPlanner.with_device_staging(cost, geometry.regions, config.staging_bytes, tensors)

    def _context(self, ranks: Ranks, model: ModelIdentity, reads: ReadPlanner) -> PullContext:
        assert self._geometry is not None
        assert self._engine is not None
        assert self._client is not None
        return PullContext(
            local=self._geometry,
            model=model,
            engine=self._engine,
            client=self._client,
            reader=ranks.index,
            readers=ranks.world_size,
            reads=reads,
            handshake_timeout_s=self._config.handshake_timeout_s,
            pull_timeout_s=self._config.pull_timeout_s,
            verifier=Verifier(self._summing, self._client) if self._summing is not None else None,
            replica_turn=zlib.crc32(str(self._vllm_config.kv_transfer_config.engine_id).encode()),
        )

    def _record(self, end: Settled) -> None:
        if end.cause:
            self._stats.count("pull_failures", label=end.cause)
            logger.error("PDConnector: request %s: %s. %s", end.request_id, end.reason, self._what_now)
            return
        self._stats.count("pulls")
        self._stats.count("pull_bytes", end.copied_bytes)
        self._stats.count("pull_descriptors", end.descriptors)
        self._stats.count("pull_tokens", end.tokens)
        for phase, seconds in end.seconds.items():
            self._stats.observe(phase, seconds)

    def _record_load(self, request_id: str, load: CopyEnd) -> None:
        if load.failure:
            self._stats.count("host_failures", label="load")
            logger.error(
                "PDConnector: request %s: %d blocks could not be loaded from host memory: %s. %s",
                request_id, load.blocks, load.failure, self._what_now,
            )  # fmt: skip
            return
        self._stats.count("host_bytes", load.copied_bytes, "loaded")
        self._stats.observe("load", load.seconds)

    def _record_store(self, store: CopyEnd) -> None:
        if store.failure:
            self._stats.count("host_failures", label="store")
            logger.warning(
                "PDConnector: %d blocks could not be stored in host memory, and will be computed again when they are "
                "needed: %s", store.blocks, store.failure,
            )  # fmt: skip
            return
        self._stats.count("host_bytes", store.copied_bytes, "stored")
        self._stats.observe("store", store.seconds)

    @property
    def _what_now(self) -> str:
        return "Its prompt is computed here instead" if self._role.recomputes else "The request fails"


def _protocol(config: ConnectorConfig) -> str:
    return default_protocol() if config.protocol == "auto" else config.protocol


def _mooncake(config: ConnectorConfig) -> TransferEngine:
    return MooncakeEngine(
        MooncakeOptions(
            host=config.host or host_address(),
            protocol=_protocol(config),
            devices=config.devices,
            descriptors_per_call=config.descriptors_per_call,
            max_descriptors_in_flight=config.max_descriptors_in_flight,
            connect_timeout_s=config.handshake_timeout_s,
        )
    )
