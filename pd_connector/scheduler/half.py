"""The scheduler half: what vLLM's scheduler asks the connector, answered by the producer and the consumer."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pd_connector.config import ConnectorConfig
from pd_connector.metadata import StepOrders, WorkerHandshake, WorkerReport
from pd_connector.params import is_decode_leg, is_prefill_leg
from pd_connector.scheduler.consumer import Consumer
from pd_connector.scheduler.drain import Drain
from pd_connector.scheduler.host_tier import HostTier
from pd_connector.scheduler.producer import Producer
from pd_connector.scheduler.renewals import Renewals
from pd_connector.shared_secret import load_keys
from pd_connector.stats import StatsRecorder
from pd_connector.vllm_blocks import BlockHolder, HeldBlocks, HostBlockPool
from pd_connector.vllm_compat import (
    EngineRole,
    block_ids_by_group,
    cache_groups,
    check_prefix_caching,
    data_parallel_index,
    engine_ranks,
    engine_waker,
    host_address,
    init_logger,
    model_identity,
    most_blocks_a_step,
    prefill_is_complete,
    stop_timeout_s,
    stop_watcher,
)
from transfer.control.client import ControlClient
from transfer.peers import AllowedPeers

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = init_logger(__name__)


class SchedulerHalf:
    """Lives in the engine core; every method is called on the scheduler's thread and none waits for a peer."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        kv_cache_config: "KVCacheConfig",
        config: ConnectorConfig,
        stats: StatsRecorder,
    ) -> None:
        self._stats = stats
        windows = [(group.block_tokens, group.window) for group in cache_groups(vllm_config, kv_cache_config)]
        self._block_tokens = [tokens for tokens, _ in windows]  # by cache group
        role = EngineRole.of(vllm_config)
        keys = load_keys(config.secret_file)
        self._producer: Producer[HeldBlocks] | None = None
        self._consumer: Consumer | None = None
        self._client: ControlClient | None = None
        self._renewals: Renewals | None = None
        self._blocks: BlockHolder | None = None
        self._config = config
        self._vllm_config = vllm_config
        self._cache_manager: KVCacheManager | None = None
        self._host: HostTier | None = None
        if config.cpu_bytes_to_use:
            check_prefix_caching(vllm_config)
        self._wake_engine: Callable[[], None] | None = None
        self._drain: Drain | None = None
        self._drain_timeouts_s = config.drain_timeout_s, stop_timeout_s(vllm_config)
        if role.produces:
            host = config.host or host_address()
            # Engines of one data-parallel deployment may share a host.
            port = config.port and config.port + data_parallel_index(vllm_config)
            model = model_identity(vllm_config, config.model_check)
            tp_size, _ = engine_ranks(vllm_config)
            self._producer = Producer(
                host, port, config.lease_ttl_s, model, tp_size, self._leases_ended, keys, verify=config.verify
            )
        if role.consumes:
            self._client = ControlClient(keys=keys, allowed=AllowedPeers(config.allowed_peers))
            self._renewals = Renewals(self._client, config.handshake_timeout_s)
            self._renewals.start()
            self._consumer = Consumer(self._client, config.handshake_timeout_s, self._renewals, windows)

    def bind_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        """Take the manager of the engine's blocks; called while the engine constructs its scheduler."""
        self._cache_manager = kv_cache_manager
        self._blocks = BlockHolder(kv_cache_manager)
        self._wake_engine = engine_waker()
        self._drain = Drain(*self._drain_timeouts_s, stop_watcher())

    def set_workers(self, handshakes: dict[tuple[int, int], WorkerHandshake]) -> None:
        """Take the workers' caches, keyed by (pipeline rank, tensor-parallel rank)."""
        if self._producer is not None:
            self._producer.set_workers(tuple(handshakes[ranks].geometry for ranks in sorted(handshakes)))
        if self._config.cpu_bytes_to_use:
            slots = min(handshake.host_slots for handshake in handshakes.values())
            self._host = self._open_host_tier(slots, len(handshakes))

    def add_request(self, request: "Request") -> None:
        """A request has arrived."""
        if self._host is not None:
            self._host.add_request(request)
        params = request.kv_transfer_params
        if is_decode_leg(params):
            if self._consumer is not None:
                self._consumer.add_request(request)
            else:
                self._warn_of_role(request, "do_remote_prefill", "kv_consumer")
        elif is_prefill_leg(params) and self._producer is None:
            self._warn_of_role(request, "do_remote_decode", "kv_producer")

    def missing_tokens(self, request: "Request", computed_tokens: int) -> int | None:
        """Tokens that will be loaded from host memory, or pulled, beyond the computed ones; None: not known yet.

        What neither the device nor host memory holds is pulled.
        """
        self._free_ended_leases()  # before blocks are looked for
        loaded = self._host.offer(request, computed_tokens) if self._host is not None else 0
        if self._consumer is None:
            return loaded
        pulled = self._consumer.missing_tokens(request, computed_tokens + loaded)
        if pulled is not None:
            return loaded + pulled
        if self._host is not None:
            self._host.withdraw(request.request_id)
        return None

    def blocks_allocated(self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int) -> None:
        """The request has its blocks; load and pull can start."""
        loaded = self._host.start_load(request, blocks, external_tokens) if self._host is not None else 0
        if self._consumer is not None and self._consumer.holds(request.request_id):
            self._consumer.start_pull(request, block_ids_by_group(blocks), external_tokens - loaded)

    def loaded_tokens(self, request: "Request") -> int:
        """Of the tokens that a request waits for, those that come from host memory."""
        return self._host.tokens_loading(request.request_id) if self._host is not None else 0

    def step_orders(self, scheduled: Mapping[str, int]) -> StepOrders:
        """What the workers have to do in this step, which works on ``scheduled`` tokens of each request."""
        pulls, refusals = self._consumer.take_orders() if self._consumer else ((), ())
        if self._producer is not None and self._drain is not None:
            self._drain.must_stay(self._producer.leases.active, busy=bool(scheduled))
        self._free_ended_leases()
        book = self._producer.checksums if self._producer else None
        hashes = book.take_orders() if book else ()
        if self._host is None:
            return StepOrders(pulls, refusals, hashes=hashes)
        self._host.choose_stores(scheduled)
        return StepOrders(pulls, refusals, *self._host.take_orders(), hashes)

    def wants_step(self) -> bool:
        """Whether the engine must step though it has no requests.

        To free the blocks of ended leases, to have checksums taken, to store blocks in host memory and hear of it, and
        when it is to stop, to stay for decode engines that hold leases.
        """
        if self._host is not None and self._host.wants_step:
            return True
        if self._producer is None:
            return False
        active = self._producer.leases.active
        if self._drain is not None and self._drain.must_stay(active):
            return True
        if self._producer.checksums is not None and self._producer.checksums.wants_step:
            return True
        # An engine that cannot be woken has to stay awake.
        return self._producer.leases.has_ended or (self._wake_engine is None and active > 0)

    def frees_blocks_soon(self) -> bool:
        """Whether it is worth while to wait for blocks instead of taking a request's: stores end within a few steps."""
        return self._host is not None and self._host.holds_device_blocks

    def settled(self, request_ids: set[str], failed: set[str], report: WorkerReport | None) -> None:
        """All ranks have reported these requests, and some ranks what no request waits for."""
        if self._consumer is not None:
            for request_id in request_ids:
                self._consumer.settle(request_id)
        if self._host is not None:
            self._stats.count("host_tokens", sum(map(self._host.tokens_loading, request_ids - failed)))
            self._host.loads_settled(request_ids, failed)
            if report is not None:
                self._stats.count("host_blocks", self._host.stores_settled(report.stores))
        if report is not None and self._producer is not None and self._producer.checksums is not None:
            for hashed in report.checksums:
                self._producer.checksums.add(hashed)

    def request_finished(self, request: "Request", block_ids: tuple[list[int], ...]) -> dict[str, Any] | None:
        """A request has ended: what the response tells the router. Its blocks are kept by references of our own."""
        if self._host is not None:
            self._host.finish_request(request)
        if self._consumer is not None:
            self._consumer.finish_request(request.request_id)
        if self._producer is None or not is_prefill_leg(request.kv_transfer_params):
            return None
        if not prefill_is_complete(request) or not any(block_ids):
            return None
        assert self._blocks is not None, "vLLM has not handed over its cache manager"
        return self._producer.finish_prefill(request, block_ids, self._blocks.hold(request.request_id))

    def take_events(self) -> "Sequence[KVCacheEvent]":
        """KV cache events of host memory since the last call."""
        return self._host.take_events() if self._host is not None else ()

    def update_stats(self) -> None:
        """Add the leases granted and ended since the last call to the statistics, and how full host memory is."""
        if self._host is not None:
            cached, slots = self._host.usage
            self._stats.gauge("host_blocks_cached", cached)
            self._stats.gauge("host_blocks_capacity", slots)
        if self._producer is not None:
            for event, number in self._producer.leases.take_events().items():
                self._stats.count("leases", number, event)
            for cause, number in self._producer.take_refusals().items():
                self._stats.count("control_refusals", number, cause)

    def reset(self) -> bool:
        """The caches' contents have lost their meaning, as after a change of weights: no lease is valid any more.

        False if a request is loading such contents from host memory right now.
        """
        if self._producer is not None:
            self._producer.leases.cancel_all()
            self._free_ended_leases()
        return self._host.reset() if self._host is not None else True

    def shutdown(self) -> None:
        """Stop answering and asking; joins all threads."""
        if self._producer is not None:
            self._producer.close()
        if self._renewals is not None:
            self._renewals.close()
        if self._client is not None:
            self._client.close()

    def _open_host_tier(self, slots: int, ranks: int) -> HostTier:
        assert self._cache_manager is not None, "vLLM has not handed over its cache manager"
        mode, device_blocks = self._config.cpu_store, self._cache_manager.kv_cache_config.num_blocks
        # At most half of the device's blocks: to store them all would be anything but lazy.
        most = min(most_blocks_a_step(self._vllm_config, self._block_tokens), device_blocks // 2)
        pool = HostBlockPool(self._vllm_config, self._cache_manager, slots, most if mode == "lazy" else 0)
        logger.info("PDConnector: host memory keeps up to %d blocks (%s), the device %d", slots, mode, device_blocks)
        if mode == "eager" and slots <= device_blocks:
            logger.warning(
                "PDConnector: host memory is no larger than the device's KV cache, and eager stores keep there what "
                "the device holds too: little will come back. Set cpu_bytes_to_use to several times the device's KV "
                "cache, or cpu_store to lazy"
            )
        return HostTier(pool, ranks, mode)

    def _leases_ended(self) -> None:
        if self._wake_engine is not None:
            self._wake_engine()

    def _free_ended_leases(self) -> None:
        if self._producer is not None and self._blocks is not None:
            for held in self._producer.leases.collect():
                self._blocks.let_go(held)

    def _warn_of_role(self, request: "Request", key: str, role: str) -> None:
        logger.warning(
            "PDConnector: request %s asks for %s, which needs kv_role %s or kv_both; it is served without a transfer",
            request.request_id, key, role,
        )  # fmt: skip
