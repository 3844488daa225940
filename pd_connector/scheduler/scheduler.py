"""The scheduler side of the connector: what vLLM's scheduler asks, answered by the engine's roles."""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pd_connector.config import ConnectorConfig
from pd_connector.orders import Orders, Report, WorkerHandshake
from pd_connector.params import is_decode_leg, is_prefill_leg
from pd_connector.scheduler.consumer import Consumer
from pd_connector.scheduler.drain import Drain
from pd_connector.scheduler.host_tier import HostTier
from pd_connector.scheduler.lease_service import LeaseService
from pd_connector.scheduler.leases import LeaseTable
from pd_connector.scheduler.producer import Producer
from pd_connector.scheduler.renewals import Renewals
from pd_connector.scheduler.roles import SchedulerRole
from pd_connector.secret import load_keys
from pd_connector.stats import StatsRecorder
from pd_connector.vllm.block_pools import DeviceBlocks, HeldBlocks, HostBlockPool
from pd_connector.vllm.cache_groups import cache_groups
from pd_connector.vllm.engine_config import (
    EngineRole,
    check_prefix_caching,
    data_parallel_index,
    engine_ranks,
    max_blocks_per_step,
    stop_timeout_s,
)
from pd_connector.vllm.engine_core import EngineLoop
from pd_connector.vllm.model_identity import model_identity
from pd_connector.vllm.platform import host_address
from transfer.control.client import ControlClient
from transfer.control.keys import ControlKeys
from transfer.peers import AllowedPeers

if TYPE_CHECKING:
    from pd_connector.vllm.types import KVCacheBlocks, KVCacheConfig, KVCacheEvent, KVCacheManager, Request, VllmConfig

logger = logging.getLogger(__name__)


class ConnectorScheduler:
    """Lives in the engine core; every method is called on the scheduler's thread and none waits for a peer."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        kv_cache_config: "KVCacheConfig",
        config: ConnectorConfig,
        stats: StatsRecorder,
    ) -> None:
        self._vllm_config = vllm_config
        self._config = config
        self._stats = stats
        self._does = EngineRole.of(vllm_config)
        self._windows = [(group.block_tokens, group.window) for group in cache_groups(vllm_config, kv_cache_config)]
        self._blocks = DeviceBlocks()
        self._engine = EngineLoop()
        if config.cpu_bytes_to_use:
            check_prefix_caching(vllm_config)
        keys = load_keys(config.secret_file)
        # In the order in which they are asked for tokens: what host memory holds is not pulled.
        self._roles: list[SchedulerRole] = []
        if self._does.produces:
            self._roles.append(self._make_producer(keys))
        if self._does.consumes:
            self._roles.append(self._make_consumer(keys))

    def bind_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        """Take the manager of the engine's blocks; called while the engine constructs its scheduler."""
        self._blocks.bind(kv_cache_manager)
        self._engine.find()

    def set_workers(self, handshakes: Mapping[tuple[int, int], WorkerHandshake]) -> None:
        """Take the workers' caches, keyed by (pipeline rank, tensor-parallel rank)."""
        in_order = [handshakes[ranks] for ranks in sorted(handshakes)]
        if self._config.cpu_bytes_to_use:
            self._roles.insert(0, self._open_host_tier(in_order))
        for role in self._roles:
            role.set_workers(in_order)

    def add(self, request: "Request") -> None:
        """Take up a request that has arrived."""
        params = request.kv_transfer_params
        if is_decode_leg(params) and not self._does.consumes:
            self._warn_of_role(request, "do_remote_prefill", "kv_consumer")
        elif is_prefill_leg(params) and not is_decode_leg(params) and not self._does.produces:
            self._warn_of_role(request, "do_remote_decode", "kv_producer")
        for role in self._roles:
            role.add(request)

    def missing_tokens(self, request: "Request", computed_tokens: int) -> int | None:
        """Return how many tokens behind the computed ones will be loaded or pulled; None: not known yet."""
        for role in self._roles:
            role.free_blocks()
        missing = 0
        for number, role in enumerate(self._roles):
            more = role.missing_tokens(request, computed_tokens + missing)
            if more is None:
                for asked in self._roles[:number]:
                    asked.withdraw(request)
                return None
            missing += more
        return missing

    def allocated(self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int) -> None:
        """Begin to load and pull: the request has its blocks."""
        for role in self._roles:
            external_tokens -= role.allocated(request, blocks, external_tokens)

    def loaded_tokens(self, request: "Request") -> int:
        """Return how many of the tokens that a request waits for come from host memory."""
        return sum(role.loaded_tokens(request) for role in self._roles)

    def step_orders(self, scheduled: Mapping[str, int]) -> Orders:
        """Return what the workers have to do in this step, which works on ``scheduled`` tokens of each request."""
        for role in self._roles:
            role.free_blocks()
        return sum((role.step_orders(scheduled) for role in self._roles), Orders())

    def wants_step(self) -> bool:
        """Whether the engine must step though it has no requests."""
        return any(role.wants_step for role in self._roles)

    def frees_blocks_soon(self) -> bool:
        """Whether waiting a few steps for blocks is better than taking those of a request."""
        return any(role.frees_blocks_soon for role in self._roles)

    def settled(self, request_ids: set[str], failed: set[str], report: Report) -> None:
        """Take what all ranks have reported of requests, and some ranks of what no request waits for."""
        for role in self._roles:
            role.settled(request_ids, failed, report)

    def finish(self, request: "Request", block_ids: Sequence[Sequence[int]]) -> dict[str, Any] | None:
        """Let a request go that has ended; return what its response tells the router."""
        answers = [role.finish(request, block_ids) for role in self._roles]
        return next((params for params in answers if params is not None), None)

    def take_events(self) -> "list[KVCacheEvent]":
        """Return the KV cache events of host memory since the last call."""
        return [event for role in self._roles for event in role.take_events()]

    def update_stats(self) -> None:
        """Add what the roles have counted to the statistics."""
        for role in self._roles:
            role.update_stats(self._stats)

    def reset(self) -> bool:
        """Forget all contents of the caches, as after a change of weights: no lease is valid any more.

        Returns:
            False if a request is loading such contents from host memory right now.
        """
        done = [role.reset() for role in self._roles]
        return all(done)

    def shutdown(self) -> None:
        """Stop answering and asking; join all threads."""
        for role in self._roles:
            role.close()

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books of all roles balance."""
        for role in self._roles:
            role.check_integrity()

    def _make_producer(self, keys: ControlKeys | None) -> Producer:
        config, vllm_config = self._config, self._vllm_config
        model = model_identity(vllm_config, config.model_check)
        tp_size, _ = engine_ranks(vllm_config)
        leases: LeaseTable[HeldBlocks] = LeaseTable(config.lease_ttl_s, time.monotonic)
        service = LeaseService(leases, model, tp_size, self._engine.wake, verify=config.verify)
        # Engines of one data-parallel deployment may share a host.
        port = config.port and config.port + data_parallel_index(vllm_config)
        drain = Drain(config.drain_timeout_s, stop_timeout_s(vllm_config), self._engine.is_stopping)
        return Producer(service, config.host or host_address(), port, self._blocks, self._engine, drain, keys)

    def _make_consumer(self, keys: ControlKeys | None) -> Consumer:
        client = ControlClient(keys=keys, allowed=AllowedPeers(self._config.allowed_peers))
        renewals = Renewals(client, self._config.handshake_timeout_s)
        renewals.start()
        return Consumer(client, self._config.handshake_timeout_s, renewals, self._windows)

    def _open_host_tier(self, handshakes: Sequence[WorkerHandshake]) -> HostTier:
        mode, manager = self._config.cpu_store, self._blocks.manager
        slots, device_blocks = min(handshake.host_slots for handshake in handshakes), manager.kv_cache_config.num_blocks
        # At most half of the device's blocks: to store them all would be anything but lazy.
        most = min(max_blocks_per_step(self._vllm_config, [tokens for tokens, _ in self._windows]), device_blocks // 2)
        pool = HostBlockPool(self._vllm_config, manager, slots, most if mode == "lazy" else 0)
        logger.info("PDConnector: host memory keeps up to %d blocks (%s), the device %d", slots, mode, device_blocks)
        if mode == "eager" and slots <= device_blocks:
            logger.warning(
                "PDConnector: host memory is no larger than the device's KV cache, and eager stores keep there what "
                "the device holds too: little will come back. Set cpu_bytes_to_use to several times the device's KV "
                "cache, or cpu_store to lazy"
            )
        return HostTier(pool, len(handshakes), mode)

    def _warn_of_role(self, request: "Request", key: str, role: str) -> None:
        logger.warning(
            "PDConnector: request %s asks for %s, which needs kv_role %s or kv_both; it is served without a transfer",
            request.request_id, key, role,
        )  # fmt: skip
