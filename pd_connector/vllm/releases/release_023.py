"""vLLM 0.23: where it differs from 0.30.

It asks no connector whether to step, hands over its block pool but not the manager of it, and learns of failed loads by
block ids, which it can look up for models with one KV cache group only. With several groups, it may give a request the
same block twice. ``hook`` adds what is missing to vLLM's classes, and lets vllm-ascend's prefill engines preempt.
Nothing else is changed.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pd_connector.vllm.free_queue import FreeQueueCursor
from pd_connector.vllm.releases.newest import wrap
from pd_connector.vllm.releases.release_030 import KEPT, Release030

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from pd_connector.vllm.cpu.head_order import Write

#: The attribute of a block pool that ``hook`` adds: the manager that it belongs to.
_MANAGER = "_pd_connector_cache_manager"
#: The attribute of a cache manager that ``hook`` adds: requests into which tokens are loaded, or were.
_LOADED = "_pd_connector_loaded"


class Release023(Release030):
    """vLLM 0.23, alone or under vllm-ascend 0.23."""

    limits = (
        "connectors cannot ask for layouts (they can since vLLM 0.30), so except on NPU each layer's KV cache stays "
        "apart",
        "a request may be preempted for blocks that a store in host memory would have freed a few steps later",
        "KV cache events do not name the session of a block's request",
        "with both legs at once, except on NPU, what requests of the last steps have in P's prefix cache is pulled "
        "after a step of P",
        *Release030.limits,
    )
    fails_by_request = False
    defers_block_reuse = False
    serves_states = False
    serves_context_parallel = False
    declares_layouts = False
    collects_scheduler_stats = False
    names_parts = False
    devices = ("cpu", "npu")

    @property
    def host_medium(self) -> str:
        """The name of host memory in KV cache events."""
        return "CPU"

    def named_tokens(self, block: "KVCacheBlock") -> int | None:
        """Return None: only full blocks have keys, and ``names_parts`` is False."""
        return None

    def find_longer_hits(self, manager: "KVCacheManager", is_pulled: "Callable[[Request], bool]") -> None:
        """Do nothing: no states are served."""

    def hook(self) -> None:
        """Add to vLLM's scheduler classes what the connector needs, and they lack. Idempotent."""
        from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator  # noqa: PLC0415
        from vllm.v1.core.kv_cache_manager import KVCacheManager  # noqa: PLC0415
        from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415

        wrap(KVCacheManager, "__init__", _remembered_by_its_pool)
        wrap(KVCacheManager, "allocate_slots", _with_room_for_what_was_loaded)
        wrap(KVCacheCoordinator, "allocate_new_computed_blocks", _with_hits_of_all_groups_in_use)
        wrap(Scheduler, "has_finished_requests", _or_connector_wants_step)
        wrap(Scheduler, "_update_requests_with_invalid_blocks", _for_any_number_of_groups)
        # On prefill engines, vllm-ascend 0.23 preempts nothing, so requests may wait for each other's blocks for ever.
        # It fears that a prompt ends without its blocks, which is not leased here.
        ascend: Any = sys.modules.get("vllm_ascend.patch.platform.patch_balance_schedule")
        if hasattr(ascend, "_disable_preemption_on_prefill_node"):
            ascend._disable_preemption_on_prefill_node = lambda vllm_config: False

    def cache_manager_of(self, pool: "BlockPool") -> "KVCacheManager":
        """Return the manager that a block pool belongs to.

        Raises:
            RuntimeError: vLLM made the manager before it made the connector.
        """
        manager: KVCacheManager | None = getattr(pool, _MANAGER, None)
        if manager is None:
            raise RuntimeError(
                "PDConnector cannot find this engine's KV cache manager, which was made before the connector. Start "
                "with vLLM's own scheduler, or one derived from it"
            )
        return manager

    def failed_requests(self, output: "KVConnectorOutput") -> set[str]:
        """Return nothing: workers report failed requests to the scheduler side themselves."""
        return set()

    def layout_of(self, kv_cache_config: "KVCacheConfig") -> str | None:
        """Return None: each attention backend has its own layout."""
        return None

    def has_mixed_precision(self, kv_cache_config: "KVCacheConfig") -> bool:
        """Return whether the engine's caches differ in data type or quantization."""
        specs = [
            spec
            for group in kv_cache_config.kv_cache_groups
            for spec in getattr(group.kv_cache_spec, "kv_cache_specs", {"": group.kv_cache_spec}).values()
        ]
        return len({(getattr(spec, "dtype", None), getattr(spec, "kv_quant_mode", None)) for spec in specs}) > 1

    def hidden_scales(self, spec: Any) -> str:
        """Return what of a cache neither its tensors nor ``spec`` show, in words; empty if nothing."""
        mode = getattr(spec, "kv_quant_mode", None)
        if mode is not None and (mode.is_per_token_head or mode.is_nvfp4):
            return f"whose scales vLLM 0.23 keeps beside its values ({mode.name.lower()})"
        if getattr(spec, "cache_dtype_str", None) == "fp8_ds_mla":
            return "in which scales follow the values of each token (fp8_ds_mla)"
        return ""

    def cpu_writer(self, vllm_config: "VllmConfig", block_tokens: int, head_size: int) -> "Write":
        """Return the kernel by which vLLM's CPU attention writes to the cache, for one head and one block."""
        import torch  # noqa: PLC0415  the plugin loads this module in every process of vLLM
        from vllm import _custom_ops as ops  # noqa: PLC0415  only on the CPU platform
        from vllm.v1.attention.backends import cpu_attn  # noqa: PLC0415

        dtype = vllm_config.cache_config.cache_dtype
        isa = cpu_attn._get_attn_isa(vllm_config.model_config.dtype, block_tokens, head_size, dtype)
        slots = torch.arange(block_tokens, dtype=torch.int64, device="cpu")

        def write(key: "torch.Tensor", value: "torch.Tensor", cache: "torch.Tensor") -> None:
            # What CPUAttentionBackendImpl.forward does before it attends: [blocks, heads, 2 * tokens, head size].
            halves = cache.view(1, 1, 2 * block_tokens, head_size).chunk(2, dim=2)
            ops.cpu_attn_reshape_and_cache(key, value, *halves, slots, isa, kv_cache_dtype=dtype)

        return write

    def host_coordinator(self, vllm_config: "VllmConfig", device: "KVCacheManager", slots: int) -> "KVCacheCoordinator":
        """Return a coordinator over ``slots`` host blocks for the cache groups of ``device``."""
        from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator  # noqa: PLC0415

        return get_kv_cache_coordinator(
            kv_cache_config=replace(device.kv_cache_config, num_blocks=slots + 1),  # block 0 is vLLM's null block
            max_model_len=device.max_model_len,
            max_num_batched_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
            use_eagle=device.use_eagle,
            enable_caching=True,
            enable_kv_cache_events=device.block_pool.enable_kv_cache_events,
            dcp_world_size=1,
            pcp_world_size=1,
            scheduler_block_size=device.coordinator.scheduler_block_size,
            hash_block_size=device.block_pool.hash_block_size,
        )

    def cacheable_groups(self, device: "KVCacheManager") -> tuple[int, ...]:
        """Return the indices of the cache groups whose blocks can be found by their contents: all that are served."""
        return tuple(range(device.num_kv_cache_groups))

    def has_events(self, device: "KVCacheManager") -> bool:
        """Return whether ``device`` publishes KV cache events."""
        return bool(device.block_pool.enable_kv_cache_events)

    def cacheable_tokens(self, coordinator: "KVCacheCoordinator", computed: int, group: int) -> int:
        """Return how many of a request's ``computed`` tokens vLLM caches in a group, as ``cache_blocks`` does."""
        from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator  # noqa: PLC0415

        if not isinstance(coordinator, HybridKVCacheCoordinator):
            return computed
        aligned: int = computed // coordinator.scheduler_block_size * coordinator.scheduler_block_size
        manager = coordinator.single_type_managers[group]
        return min(computed, aligned + int(manager.block_size)) if manager.use_eagle and aligned else aligned

    def block_hashes(self, hashes: "Sequence[BlockHash]", hash_tokens: int, block_tokens: int) -> "Sequence[BlockHash]":
        """Return a request's hashes of blocks of ``block_tokens`` tokens, given those of ``hash_tokens`` tokens."""
        from vllm.v1.core.kv_cache_utils import BlockHashListWithBlockSize  # noqa: PLC0415

        if block_tokens == hash_tokens:
            return hashes
        larger: Sequence[BlockHash] = BlockHashListWithBlockSize(hashes, hash_tokens, block_tokens)
        return larger

    def longest_hit(
        self, coordinator: "KVCacheCoordinator", hashes: "Sequence[BlockHash]", longest: int
    ) -> "tuple[tuple[Sequence[KVCacheBlock], ...], int]":
        """Return the blocks of each cache group that hold a prefix of at most ``longest`` tokens, and its length."""
        groups, tokens = coordinator.find_longest_cache_hit(hashes, longest)
        return tuple(groups), int(tokens)

    def take_host_events(self, pool: "BlockPool") -> "list[KVCacheEvent]":
        """Return a host pool's KV cache events since the last call. vLLM's pools take themselves for the device's."""
        events: list[KVCacheEvent] = pool.take_events()
        for event in events:
            if hasattr(event, "medium"):
                event.medium = self.host_medium
        return events

    def stored_event(self, **fields: Any) -> "KVCacheEvent":
        """Return the KV cache event of a stored block, without its session, which vLLM does not know of."""
        del fields["session_id"]
        return super().stored_event(**fields)

    def session_id(self, request: "Request") -> str | None:
        """Return None: vLLM does not know of sessions."""
        return None

    def free_queue_cursor(self, pool: "BlockPool", depth: int) -> FreeQueueCursor:
        """Return a cursor over the first ``depth`` free blocks of ``pool``."""
        return MixedQueueCursor(pool, depth)


class MixedQueueCursor(FreeQueueCursor):
    """A cursor over a queue in which blocks without contents may lie anywhere.

    vLLM 0.23 appends all freed blocks of full attention, among them the last one of a prompt, which has no contents
    that can be found. Only those that a window has passed are prepended.
    """

    def _was_allocated(self, first: "KVCacheBlock") -> bool:
        """Return whether the first visited block is in use, or was, and now follows blocks with contents."""
        before = first.prev_free_block
        while before is not None and before is not self._queue.fake_free_list_head and before.block_hash is None:
            if before.block_id in self._visited:
                return True  # the first one was visited before it
            before = before.prev_free_block
        return before is None or before.block_hash is not None


def remember_manager(manager: "KVCacheManager") -> None:
    """Let a cache manager be found by its block pool."""
    setattr(manager.block_pool, _MANAGER, manager)


def _remembered_by_its_pool(construct: Callable[..., None]) -> Callable[..., None]:
    """Let a cache manager be found by its block pool, which is all that vLLM hands over."""

    def __init__(self: "KVCacheManager", *args: Any, **kwargs: Any) -> None:  # noqa: N807  vLLM's
        construct(self, *args, **kwargs)
        remember_manager(self)

    return __init__


def _with_hits_of_all_groups_in_use(allocate: Callable[..., None]) -> Callable[..., None]:
    """Keep the blocks that a request has found, in all cache groups, from being given to it as new ones as well.

    vLLM goes from group to group: it takes the found blocks into use, then new blocks for the tokens that a connector
    brings. So the new ones of the first group may be those that the second has found and not taken into use yet.
    """

    def allocate_new_computed_blocks(
        self: "KVCacheCoordinator",
        request_id: str,
        new_computed_blocks: "tuple[Sequence[KVCacheBlock], ...]",
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        computed = num_local_computed_tokens + num_external_computed_tokens
        found: list[KVCacheBlock] = []
        for manager, blocks in zip(self.single_type_managers, new_computed_blocks, strict=True):
            # Those before are not taken into use: a window has passed them. vLLM has counted them as free.
            passed = manager.get_num_skipped_tokens(computed) // manager.block_size
            found += [block for block in blocks[passed:] if not block.is_null]
        self.block_pool.touch(found)
        allocate(self, request_id, new_computed_blocks, num_local_computed_tokens, num_external_computed_tokens)
        for block in found:
            block.ref_cnt -= 1  # the request has a reference now

    return allocate_new_computed_blocks


def _with_room_for_what_was_loaded(allocate: Callable[..., Any]) -> Callable[..., Any]:
    """Begin no load into blocks that requests lack into which others are loaded, or were.

    Such requests cannot be preempted, and would wait for each other's blocks. vLLM's own scheduler says how many must
    stay free (``reserved_blocks``); those of vllm-ascend 0.23 do not.
    """

    def allocate_slots(self: "KVCacheManager", request: "Request", *args: Any, **named: Any) -> Any:
        if not named.get("delay_cache_blocks"):
            return allocate(self, request, *args, **named)
        kept = getattr(self, KEPT, 0)
        if "reserved_blocks" in named:
            named["reserved_blocks"] += kept
            return allocate(self, request, *args, **named)
        lacking = {each: blocks for each in getattr(self, _LOADED, ()) if (blocks := _lacking_blocks(self, each))}
        named.setdefault("full_sequence_must_fit", True)
        blocks = allocate(self, request, *args, **named, reserved_blocks=sum(lacking.values()) + kept)
        setattr(self, _LOADED, (*lacking, request) if blocks is not None else tuple(lacking))
        return blocks

    return allocate_slots


def _lacking_blocks(manager: "KVCacheManager", request: "Request") -> int:
    """Return how many blocks a request lacks for its tokens, at most; 0 if it holds none, or needs no more."""
    held = manager.get_blocks(request.request_id).blocks
    if request.is_finished() or not any(held):
        return 0
    sizes = [each.block_size for each in manager.coordinator.single_type_managers]
    return sum(max(-(-request.num_tokens // size) - len(blocks), 0) for size, blocks in zip(sizes, held, strict=True))


def _or_connector_wants_step(ask: Callable[["Scheduler"], bool]) -> Callable[["Scheduler"], bool]:
    """Let the engine step without requests if the connector, or a child of MultiConnector, must."""

    def has_finished_requests(self: "Scheduler") -> bool:
        return bool(ask(self)) or wants_step(self.connector)

    return has_finished_requests


def wants_step(connector: Any) -> bool:
    """Return whether the engine must step for a connector or, if it is MultiConnector, for a child of it.

    vLLM's own connectors of 0.23 never say so.
    """
    asked = [getattr(each, "has_pending_push_work", None) for each in getattr(connector, "_connectors", (connector,))]
    return any(ask() for ask in asked if ask is not None)


def _for_any_number_of_groups(update: Callable[..., Any]) -> Callable[..., Any]:
    """Let requests that wait fail in models with several KV cache groups, where vLLM raises ValueError.

    They are computed from their first token, as all of their blocks are then: vLLM frees them and looks for hits again.
    """

    def _update_requests_with_invalid_blocks(
        self: "Scheduler",
        requests: "Iterable[Request]",
        invalid_block_ids: set[int],
        num_scheduled_tokens: dict[str, int],
        evict_blocks: bool = True,
    ) -> tuple[set[str], int, set[int]]:
        requests = list(requests)
        if len(self.kv_cache_config.kv_cache_groups) == 1:
            result: tuple[set[str], int, set[int]] = update(
                self, requests, invalid_block_ids, num_scheduled_tokens, evict_blocks
            )
            return result
        affected, tokens = set(), 0
        for request in requests:
            held = self.kv_cache_manager.get_block_ids(request.request_id)
            if invalid_block_ids.isdisjoint(block for group in held for block in group):
                continue
            if evict_blocks:
                raise NotImplementedError(
                    f"blocks of the running request {request.request_id} are reported as not loaded: vLLM 0.23 cannot "
                    "recover from that in a model with several KV cache groups"
                )
            affected.add(request.request_id)
            tokens += request.num_computed_tokens
            request.num_computed_tokens = 0
        return affected, tokens, set()

    return _update_requests_with_invalid_blocks
