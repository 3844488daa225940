"""``PDConnector``, the class that vLLM loads. Delegates to the scheduler or worker side; holds no logic of its own.

Calls on vLLM's scheduler and model threads are timed, so that "the connector never blocks them" can be measured.
"""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group, has_kv_transfer_group

from pd_connector.config import parse_config
from pd_connector.orders import Orders, Report
from pd_connector.scheduler.scheduler import ConnectorScheduler
from pd_connector.stats import StatsRecorder
from pd_connector.vllm.ascend_options import check_ascend_options, log_ascend_release
from pd_connector.vllm.engine_config import check_outer_config, check_supported, extra_config
from pd_connector.vllm.layouts import wanted_layout
from pd_connector.vllm.metadata import HandshakeMetadata, ReportMetadata, StepMetadata
from pd_connector.vllm.metrics import ConnectorPromMetrics, ConnectorStats
from pd_connector.vllm.npu.aligned_chunks import align_chunks
from pd_connector.vllm.platform import share_logging
from pd_connector.vllm.plugin import register_connector
from pd_connector.vllm.releases import installed
from pd_connector.worker.transfer_engine import transport
from pd_connector.worker.worker import ConnectorWorker

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput

    from pd_connector.vllm.types import KVCacheBlocks, KVCacheConfig, KVCacheEvent, KVCacheManager, Request, VllmConfig

P = ParamSpec("P")
R = TypeVar("R")


def _timed(method: Callable[Concatenate["PDConnector", P], R]) -> Callable[Concatenate["PDConnector", P], R]:
    """Measure the wall time of a connector call, see ``StatsRecorder.timed``."""

    @wraps(method)
    def measured(self: "PDConnector", /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._stats.timed(f"{self._side}.{method.__name__}"):
            return method(self, *args, **kwargs)

    return measured


class PDConnector(KVConnectorBase_V1, SupportsHMA):
    """Disaggregates prefill and decode by pulling KV blocks, and offloads KV blocks to host memory.

    Each process has one instance, for the scheduler or the worker side. ``pd_connector.config`` has the settings.
    """

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        """Start this process's side. vLLM calls this in the scheduler process and in every worker.

        Raises:
            ConfigError: a setting is unknown or invalid.
            UnsupportedError: the connector cannot serve the engine's configuration.
            ControlStartError: the control port is in use, or this build of ZeroMQ has no authentication.
        """
        share_logging()
        installed.warn_unless_tested()  # first, because such a release may not have what comes next
        super().__init__(vllm_config, role, kv_cache_config)
        config = parse_config(dict(extra_config(vllm_config)))
        check_supported(vllm_config)
        check_outer_config(vllm_config)
        check_ascend_options(vllm_config)
        self._stats = StatsRecorder()
        self._scheduler_side: ConnectorScheduler | None = None
        self._worker_side: ConnectorWorker | None = None
        if role == KVConnectorRole.SCHEDULER:
            installed.log_limits()
            log_ascend_release()
            installed.current().hook()
            align_chunks()
            self._scheduler_side = ConnectorScheduler(vllm_config, kv_cache_config, config, self._stats)
        else:
            self._worker_side = ConnectorWorker(vllm_config, kv_cache_config, config, self._stats)

    @property
    def _side(self) -> str:
        """Which side this is, "scheduler" or "worker"."""
        return "scheduler" if self._scheduler_side is not None else "worker"

    @property
    def _scheduler(self) -> ConnectorScheduler:
        assert self._scheduler_side is not None, "called on the worker side"
        return self._scheduler_side

    @property
    def _worker(self) -> ConnectorWorker:
        assert self._worker_side is not None, "called on the scheduler side"
        return self._worker_side

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """Whether vLLM is to ask for what lies behind keys of which it lacks a state, where it lacks one."""
        return self._scheduler_side is not None and self._scheduler_side.finds_longer_hits

    def shutdown(self) -> None:
        """Stop all transfers and threads of this process."""
        for side in (self._scheduler_side, self._worker_side):
            if side is not None:
                side.shutdown()

    # Both sides

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str | None:
        """Return the layout that keeps all layers of a block together, if the backend is known to support it."""
        return wanted_layout(vllm_config)

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        """Return what this process has recorded since the last call."""
        if self._scheduler_side is not None:
            self._scheduler_side.update_stats()
        data = self._stats.take()
        must_tell = self._worker_side is not None and not installed.current().collects_scheduler_stats
        return ConnectorStats(data) if data or must_tell else None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return False: the connector does nothing layer by layer.

        If vLLM captures full graphs, it calls this before it loads the model, so an invalid setting fails early here.

        Raises:
            ConfigError: a setting is unknown or invalid.
        """
        parse_config(extra_config)
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats | None:
        """Return statistics from the form in which they travel between processes."""
        return ConnectorStats(data) if data else None

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ConnectorPromMetrics:
        """Return the connector's metrics for vLLM's ``/metrics``."""
        return ConnectorPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: "KVTransferConfig") -> bool:
        """Return whether sleep mode may be on: the transfer engine can be closed and made again in one process.

        On Ascend that is not known of Mooncake. Called since vLLM 0.33.
        """
        return transport(parse_config(dict(kv_transfer_config.kv_connector_extra_config))) in ("tcp", "rdma")

    # Scheduler side

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        """Take the manager of this engine's KV cache blocks."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler.bind_cache_manager(kv_cache_manager)

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        """Take the manager of this engine's KV cache blocks, whose pool this is, where vLLM hands over nothing else."""
        manager = installed.current().cache_manager_of(gpu_block_pool)
        if manager is not None:
            self._scheduler.bind_cache_manager(manager)

    def has_pending_push_work(self) -> bool:
        """Return whether the engine must step even though it has no requests."""
        return self._scheduler.wants_step()

    @_timed
    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Take the workers' handshakes, by (pipeline-parallel rank, tensor-parallel rank).

        Inside MultiConnector, those of another connector may come here; ours come with reports.
        """
        self._scheduler.set_workers(
            {key: value.handshake for key, value in metadata.items() if isinstance(value, HandshakeMetadata)}
        )

    @_timed
    def on_new_request(self, request: "Request") -> None:
        """Take up a new request."""
        self._scheduler.add(request)

    def get_loaded_kv_cache_group_ids(self, request: "Request") -> tuple[int, ...]:
        """Return all cache groups: pulls and loads fill a request's new blocks in each, so vLLM must not zero them.

        What a pull leaves of the last ones, workers clear.
        """
        return tuple(self._kv_cache_config.transfer_group_ids)

    @_timed
    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond ``num_computed_tokens`` to load or pull asynchronously; None: ask later."""
        missing = self._scheduler.missing_tokens(request, num_computed_tokens)
        return missing, bool(missing)

    @_timed
    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """Start loading and pulling into the blocks that the request was given."""
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        """Return the orders of this step. One without work may be held back while all requests wait for a P."""
        scheduled = scheduler_output.num_scheduled_tokens
        with self._stats.timed(f"{self._side}.build_connector_meta"):
            orders = self._scheduler.step_orders(scheduled)
        if not scheduled and orders == Orders():
            self._scheduler.rest()
        return StepMetadata(orders)

    @_timed
    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Take the workers' combined reports."""
        metadata = connector_output.kv_connector_worker_meta
        self._scheduler.settled(
            set(connector_output.finished_recving or ()),
            installed.current().failed_requests(connector_output),
            metadata.report if isinstance(metadata, ReportMetadata) else Report(),
        )

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Do the same as ``request_finished_all_groups``, for a model with one cache group."""
        return self.request_finished_all_groups(request, (block_ids,))

    @_timed
    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return the decode leg's params, if any, and False: vLLM may free its references to the blocks at once."""
        return False, self._scheduler.finish(request, block_ids)

    def reset_cache(self) -> bool:
        """End all leases and drop all host blocks: vLLM resets its prefix cache, for example after a weight update."""
        return self._scheduler.reset()

    def get_external_cache_hit_sources(
        self, request: "Request", num_external_tokens: int
    ) -> "dict[CacheHitSource, int]":
        """Return how many of the tokens that a request waits for come from host memory and from another engine."""
        loaded = self._scheduler.loaded_tokens(request)
        return installed.current().cache_hit_sources(loaded, num_external_tokens - loaded)

    def update_state_before_preempt(
        self, request: "Request", block_ids: tuple[list[int], ...], num_computed_tokens: int
    ) -> bool:
        """Return True: the request may be preempted as vLLM does it, and comes back here.

        Called by vllm-ascend's recompute scheduler, which otherwise ends the request for its router to send again. What
        can be kept of it is kept as with any preemption: by vLLM's prefix cache, and by host memory.
        """
        return True

    def has_pending_block_frees(self) -> bool:
        """Return whether blocks will be free soon, so that no request need be preempted for them."""
        return self._scheduler.frees_blocks_soon()

    def take_events(self) -> "Iterable[KVCacheEvent]":
        """Return the KV cache events of host memory, for routers."""
        return self._scheduler.take_events()

    # Worker side

    @_timed
    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        """Take the KV caches that the model runner allocated."""
        self._worker.register_caches(kv_caches)

    def unregister_kv_caches(self) -> None:
        """Let go of the KV caches, which vLLM is about to unmap: sleep mode. Called since vLLM 0.33."""
        try:
            self._worker.unregister_caches()
        except RuntimeError as error:
            error.add_note("PDConnector transfers nothing until the engine sleeps, or starts again")
            raise

    def restore_kv_caches(self) -> None:
        """Register the KV caches again, which vLLM has mapped where they were. It asks for handshakes after that."""
        self._worker.restore_caches()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return this worker's handshake, for the scheduler process.

        None inside another connector: MultiConnector passes on what its first child returns, so another child's would
        be lost, or ours. Ours then goes with the next report.
        """
        if has_kv_transfer_group() and get_kv_transfer_group() is not self:
            return None
        handshake = self._worker.handshake()
        return HandshakeMetadata(handshake) if handshake is not None else None

    @_timed
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Start a step's orders.

        ``start_load_kv`` would be later: vLLM calls it after launching the forward pass. Starting here is safe. Pulls
        and loads write to blocks that no forward pass touches (vLLM defers the reuse of freed blocks for consumers, or
        pulls wait for the work that the device was given before, as copies always do), and stores read what earlier
        steps have written.
        """
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata)
        self._worker.execute(connector_metadata.orders)

    @_timed
    def get_transfer_results(self, finished_req_ids: set[str]) -> "KVConnectorTransferResults":
        """Return the requests whose wait on this rank has ended since the last call, and which of them have failed."""
        return installed.current().transfer_results(*self._worker.take_results(finished_req_ids))

    @_timed
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Return nothing sent, and the requests whose wait on this rank has ended. Called by vLLM 0.23 only."""
        arrived, _ = self._worker.take_results(finished_req_ids)
        return set(), arrived

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks of the requests that have failed, where vLLM is not told which requests these are."""
        return self._worker.take_failed_blocks()

    @_timed
    def build_connector_worker_meta(self) -> ReportMetadata | None:
        """Return what else this rank reports to the scheduler side; None if nothing."""
        report = self._worker.take_report()
        return ReportMetadata(report) if report else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing: ``bind_connector_metadata`` has started everything."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request is scheduled only when its blocks are complete."""

    def save_kv_layer(self, layer_name: str, kv_layer: "torch.Tensor", attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: decode engines read the blocks where they are."""

    def wait_for_save(self) -> None:
        """Do nothing: what a step does has been launched when the next one begins, and not always by now."""


# MultiConnector looks up its children's statistics by name, so the name must be known wherever the class is.
register_connector()
