"""vLLM 0.33, and the interface behind which the supported releases differ.

vLLM's names are imported where they are used, because other releases may not have them.
"""

import logging
from collections.abc import Callable, Sequence
from copy import copy
from functools import wraps
from typing import TYPE_CHECKING, Any

from pd_connector.vllm.requests import lacks_data

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.attention.backend import AttentionBackend, MultipleOf
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import BlockHash, ExternalBlockHash, KVCacheBlock
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from pd_connector.vllm.cpu.head_order import Write
    from pd_connector.vllm.free_queue import FreeQueueCursor

logger = logging.getLogger(__name__)


class VllmRelease:
    """A vLLM release, as far as the connector depends on it. Holds no state."""

    #: What this release cannot give, a sentence each, logged at start.
    limits: tuple[str, ...] = ()

    #: Whether workers name the requests that have failed. Otherwise they name the blocks that have.
    fails_by_request = True
    #: Whether a decode engine reuses a freed block only after the steps that may still write to it.
    defers_block_reuse = True
    #: The devices that are served, by torch's names; empty if all are.
    devices: tuple[str, ...] = ()
    #: Whether KV cache layouts are declared by attention backends, and asked for by connectors.
    declares_layouts = True
    #: Whether vLLM collects the scheduler side's statistics in steps in which workers have none.
    collects_scheduler_stats = True
    #: Whether states of recurrent layers and compressed caches are served: earlier releases lay them out otherwise.
    serves_states = True
    #: Whether context parallelism is served: earlier releases share tokens among prefill ranks, too.
    serves_context_parallel = True
    #: Whether the scheduler gives requests whose tokens have been loaded their turn before it looks at others.
    serves_loaded_first = True
    #: Whether a block that is not full may have a key, of a part of its tokens.
    names_parts = True
    #: Whether DeepSeek V4.1's caches of packed rows keep the scales of each token behind its values.
    keeps_scales_by_token = True

    def hook(self) -> None:
        """Add to vLLM's scheduler classes what the connector needs, and they lack. Idempotent.

        Called when vLLM constructs the scheduler, before it makes its cache manager.
        """
        from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415

        wrap(Scheduler, "_try_schedule_encoder_inputs", self._unless_data_is_lacking)

    def _unless_data_is_lacking(self, schedule: Callable[..., Any]) -> Callable[..., Any]:
        """End requests with an error for which images would be computed that came without their data.

        vLLM's worker, and the engine with it, would end instead. Decode engines take such images, because prefill
        engines compute them: whoever pulls needs no encoder, unless the pull fails, or is lost to a preemption.
        """

        def _try_schedule_encoder_inputs(
            scheduler: "Scheduler", request: "Request", *numbers: int, **named: int
        ) -> tuple[Any, ...]:
            found: tuple[Any, ...] = schedule(scheduler, request, *numbers, **named)
            inputs, _, budget, *others = found
            pulls = scheduler.vllm_config.kv_transfer_config.is_kv_consumer  # others take no such images
            if not (pulls and any(lacks_data(request.mm_features[each]) for each in inputs)):
                return found
            ending = self.ending_with_errors(scheduler)
            if request.request_id not in ending:
                ending.add(request.request_id)
                logger.error(
                    "PDConnector: request %s ends with an error: of an image or the like, only its shape and hash are "
                    "here, and it would have to be computed here, because it is not pulled. Send it whole, or to a "
                    "prefill engine first; a prompt of text proves that one", request.request_id,
                )  # fmt: skip
            return [], 0, budget, *([] for _ in others)

        return _try_schedule_encoder_inputs

    def ending_with_errors(self, scheduler: "Scheduler") -> set[str]:
        """Return the requests that vLLM ends with an error when a step ends, to be added to."""
        return scheduler.encoder_cache_mismatch_reqs  # type: ignore[no-any-return]  # vLLM is untyped here

    def cache_manager_of(self, pool: "BlockPool") -> "KVCacheManager | None":
        """Return the manager that a block pool belongs to; None if vLLM hands over the manager itself."""
        return None

    def failed_requests(self, output: "KVConnectorOutput") -> set[str]:
        """Return the requests that have failed by what vLLM has aggregated of the workers' results."""
        return set(output.failed_recving or ())

    @property
    def tells_of_sleep(self) -> bool:
        """Whether connectors are told when sleep mode unmaps the KV caches and maps them again: since vLLM 0.33."""
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1  # noqa: PLC0415

        return hasattr(KVConnectorBase_V1, "restore_kv_caches")

    @property
    def host_medium(self) -> str:
        """The name of host memory in KV cache events."""
        from vllm.distributed.kv_events import MEDIUM_CPU  # noqa: PLC0415

        return str(MEDIUM_CPU)

    def transfer_results(self, arrived: set[str], failed: set[str]) -> Any:
        """Return a worker's results: the requests whose blocks have arrived, and those of them that failed."""
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults  # noqa: PLC0415

        return KVConnectorTransferResults(finished_recving=arrived, failed_recving=failed)

    def cache_hit_sources(self, loaded: int, pulled: int) -> dict[Any, int]:
        """Return how many tokens of a request come from host memory and another engine, by vLLM's source names."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource  # noqa: PLC0415

        sources = {CacheHitSource.HOST: loaded, CacheHitSource.P2P: pulled}
        return {source: tokens for source, tokens in sources.items() if tokens}

    def host_coordinator(self, vllm_config: "VllmConfig", device: "KVCacheManager", slots: int) -> "KVCacheCoordinator":
        """Return a coordinator over ``slots`` host blocks for the cache groups of ``device``."""
        from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator  # noqa: PLC0415

        config = copy(device.kv_cache_config)  # with the role of the engine, which vllm-ascend has added
        config.num_blocks = slots + 1  # block 0 is vLLM's null block
        return get_kv_cache_coordinator(
            kv_cache_config=config,
            max_model_len=device.max_model_len,
            max_in_flight_tokens=vllm_config.max_in_flight_tokens,
            use_eagle=device.use_eagle,
            enable_caching=True,
            enable_kv_cache_events=self.has_events(device),
            dcp_world_size=max(manager.dcp_world_size for manager in device.coordinator.single_type_managers),
            pcp_world_size=1,
            scheduler_block_size=device.coordinator.scheduler_block_size,
            hash_block_size=device.block_pool.hash_block_size,
            num_prefill_lookahead=self.prefill_lookahead(vllm_config, device),
            allow_partial_hash_hits=False,  # slots are copied whole
        )

    def keep_from_loads(self, manager: "KVCacheManager", blocks: int) -> None:
        """Have so many blocks stay free when tokens begin to be loaded or pulled. Since 0.31, vLLM sees to it."""

    def prefill_lookahead(self, vllm_config: "VllmConfig", device: "KVCacheManager") -> int:
        """Return how many tokens past the computed ones a draft model reads during prefill."""
        return int(vllm_config.num_prefill_lookahead_tokens)

    def cacheable_groups(self, device: "KVCacheManager") -> tuple[int, ...]:
        """Return the indices of the cache groups whose blocks can be found by their contents."""
        return tuple(device.kv_cache_config.prefix_cacheable_group_ids)

    def layout_of(self, kv_cache_config: "KVCacheConfig") -> str | None:
        """Return the KV cache layout that vLLM has chosen, if it chooses one."""
        chosen: str | None = kv_cache_config.kv_cache_layout
        return chosen

    def has_mixed_precision(self, kv_cache_config: "KVCacheConfig") -> bool:
        """Return whether the engine's caches differ in data type or quantization."""
        return bool(kv_cache_config.has_mixed_precision_kv_cache)

    def hidden_scales(self, spec: Any) -> str:
        """Return what of a cache neither its tensors nor ``spec`` show, in words; empty if nothing."""
        return ""

    def scales_indexer_by_mx(self) -> bool:
        """Return whether an FP8 indexer keeps a token's scale as UE8M0 bytes on this device, not as a float32."""
        from vllm.utils.deep_gemm import mqa_logits_use_mx_scales  # noqa: PLC0415  only models with an indexer have it

        return bool(mqa_logits_use_mx_scales())

    def cpu_writer(self, vllm_config: "VllmConfig", block_tokens: int, head_size: int) -> "Write":
        """Return the kernel by which vLLM's CPU attention writes to the cache, for one head and one block.

        Raises:
            ImportError, AttributeError: a private name of vLLM is missing.
        """
        from pd_connector.vllm.cpu import kernels  # noqa: PLC0415  only on the CPU platform

        return kernels.writer(vllm_config, block_tokens, head_size)

    def has_events(self, device: "KVCacheManager") -> bool:
        """Return whether ``device`` publishes KV cache events."""
        return bool(device.enable_kv_cache_events)

    def block_tokens(self, coordinator: "KVCacheCoordinator") -> tuple[int, ...]:
        """Return the block size of each cache group, in tokens."""
        return tuple(int(manager.block_size) for manager in coordinator.single_type_managers)

    def chunk_tokens(self, coordinator: "KVCacheCoordinator") -> frozenset[int]:
        """Return the sizes of the chunks in which layers with chunked local attention see tokens."""
        sizes = (getattr(manager, "attention_chunk_size", 0) for manager in coordinator.single_type_managers)
        return frozenset(int(size) for size in sizes if size)

    def leave_unzeroed(self, coordinator: "KVCacheCoordinator", request_id: str, groups: Sequence[int]) -> None:
        """Have vLLM not zero what it has just given a request in ``groups``: it asks the connector for these."""

    def named_tokens(self, block: "KVCacheBlock") -> int | None:
        """Return how many tokens of a request the key of one of its blocks names; None if it has none."""
        return block.block_hash_num_tokens  # type: ignore[no-any-return]  # vLLM is untyped here

    def cacheable_tokens(self, coordinator: "KVCacheCoordinator", computed: int, group: int) -> int:
        """Return how many of a request's ``computed`` tokens vLLM caches in a group."""
        return int(coordinator.get_num_cacheable_tokens(computed, group))

    def block_hashes(self, hashes: "Sequence[BlockHash]", hash_tokens: int, block_tokens: int) -> "Sequence[BlockHash]":
        """Return a request's hashes of blocks of ``block_tokens`` tokens, given those of ``hash_tokens`` tokens."""
        from vllm.v1.core.kv_cache_utils import resolve_block_hashes  # noqa: PLC0415

        resolved: Sequence[BlockHash] = resolve_block_hashes(hashes, hash_tokens, block_tokens)
        return resolved

    def longest_hit(
        self, coordinator: "KVCacheCoordinator", hashes: "Sequence[BlockHash]", longest: int
    ) -> "tuple[tuple[Sequence[KVCacheBlock], ...], int]":
        """Return the blocks of each cache group that hold a prefix of at most ``longest`` tokens, and its length."""
        groups, tokens, _ = coordinator.find_longest_cache_hit(hashes, longest)
        return tuple(groups), int(tokens)

    def find_longer_hits(self, manager: "KVCacheManager", is_pulled: "Callable[[Request], bool]") -> None:
        """Have vLLM find the keys of a request behind the last state, if what lies behind these ``is_pulled``.

        At least a token is left for that: of nothing, vLLM asks nobody for a state. Of other requests, vLLM finds what
        ends with a state, also if it has not asked its connector: vllm-ascend's dynamic load balancing does not.
        """
        find, find_with_state = manager.get_computed_blocks_for_connector, manager.get_computed_blocks

        def find_if_pulled(request: "Request", *limits: Any) -> tuple[Any, ...]:
            with_state = find_with_state(request, *limits)
            *_, shared_prefix_boundary = with_state  # 0 if keys reach no further; the other search is dearer
            if shared_prefix_boundary and is_pulled(request):
                hit: tuple[Any, ...] = find(request, *limits)
                _, tokens, _, lacks_state = hit
                if not lacks_state or tokens < request.num_prompt_tokens - 1:
                    return hit
            return *with_state, False

        manager.get_computed_blocks_for_connector = find_if_pulled

    def free_queue_cursor(self, pool: "BlockPool", depth: int) -> "FreeQueueCursor":
        """Return a cursor over the first ``depth`` free blocks of ``pool``."""
        from pd_connector.vllm.free_queue import FreeQueueCursor  # noqa: PLC0415  only engine cores need it

        return FreeQueueCursor(pool, depth)

    def take_host_events(self, pool: "BlockPool") -> "list[KVCacheEvent]":
        """Return a host pool's KV cache events since the last call."""
        events: list[KVCacheEvent] = pool.take_events()
        return events

    def stored_event(self, **fields: Any) -> "KVCacheEvent":
        """Return the KV cache event of a stored block with these fields of ``BlockStored``."""
        from vllm.distributed.kv_events import BlockStored  # noqa: PLC0415

        return BlockStored(medium=self.host_medium, **fields)

    def removed_event(self, block_hashes: "list[ExternalBlockHash]", group: int) -> "KVCacheEvent":
        """Return the KV cache event of evicted blocks of a cache group."""
        from vllm.distributed.kv_events import BlockRemoved  # noqa: PLC0415

        return BlockRemoved(block_hashes=block_hashes, medium=self.host_medium, group_idx=group)

    def session_id(self, request: "Request") -> str | None:
        """Return the session that a request belongs to, if it names one."""
        session: str | None = request.session_id
        return session

    def event_extra_keys(self, keys: "list[tuple[Any, ...] | None]") -> "list[tuple[Any, ...] | None] | None":
        """Return what besides its tokens shapes each block, in the form of KV cache events.

        Args:
            keys: of each block, as ``generate_block_hash_extra_keys`` returns them.
        """
        from vllm.v1.core.kv_cache_utils import to_event_extra_keys  # noqa: PLC0415

        converted: list[tuple[Any, ...] | None] | None = to_event_extra_keys(keys)
        return converted

    def kernel_block_sizes(self, backend: "type[AttentionBackend]", spec: "KVCacheSpec") -> "list[int | MultipleOf]":
        """Return the block sizes, in tokens, that a backend's kernels take of a cache of ``spec``; empty: all."""
        sizes: list[int | MultipleOf] = backend.get_supported_kernel_block_sizes(spec)
        return sizes

    def aligns_rows(self, backend: "type[AttentionBackend]", spec: "KVCacheSpec") -> bool:
        """Return whether block-outer layouts have blocks a whole number of rows apart, for kernels that count these."""
        return True


def wrap(owner: type, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a method by what ``wrapper`` makes of it, in the class that defines it, unless that was done before.

    That may be a base of ``owner``, for which vllm-ascend puts a class of its own in vLLM's place.
    """
    method = getattr(owner, name)
    owner = next(each for each in owner.__mro__ if name in vars(each))
    if not getattr(method, "wrapped_by_pd_connector", False):
        wrapped = wraps(method)(wrapper(method))
        wrapped.wrapped_by_pd_connector = True  # type: ignore[attr-defined]  # a mark on a function
        setattr(owner, name, wrapped)
