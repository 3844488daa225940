"""vLLM 0.30: where it differs from 0.31."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pd_connector.vllm.releases.newest import wrap
from pd_connector.vllm.releases.release_031 import Release031

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

#: The attribute of a cache manager that ``hook`` adds: how many blocks stay free when a load begins.
KEPT = "_pd_connector_kept"


class Release030(Release031):
    """vLLM 0.30. A request that finds no blocks keeps those behind it from running, even if they hold blocks.

    It begins loads without leaving room for the drafts of those whose tokens have arrived.
    """

    serves_loaded_first = False

    def hook(self) -> None:
        """Add to vLLM's scheduler classes what the connector needs, and they lack. Idempotent."""
        from vllm.v1.core.kv_cache_manager import KVCacheManager  # noqa: PLC0415

        super().hook()
        wrap(KVCacheManager, "allocate_slots", _with_room_for_drafts)

    def ending_with_errors(self, scheduler: "Scheduler") -> set[str]:
        """Return the requests that vLLM ends with an error when a step ends, to be added to."""
        return scheduler.grammar_compile_error_reqs  # type: ignore[no-any-return]  # vLLM is untyped here

    def keep_from_loads(self, manager: "KVCacheManager", blocks: int) -> None:
        """Have so many blocks stay free when tokens begin to be loaded or pulled, besides those that vLLM says."""
        setattr(manager, KEPT, blocks)

    def prefill_lookahead(self, vllm_config: "VllmConfig", device: "KVCacheManager") -> int:
        """Return how many tokens past the computed ones a draft model reads during prefill.

        0 and 1 have the same effect, and 1 is returned for both: the coordinator keeps only what can be derived of it.
        """
        return int(device.coordinator.num_reprefillable_tokens) + 1

    def event_extra_keys(self, keys: "list[tuple[Any, ...] | None]") -> "list[tuple[Any, ...] | None] | None":
        """Return what besides its tokens shapes each block, in the form of KV cache events."""
        return keys or None


def _with_room_for_drafts(allocate: Callable[..., Any]) -> Callable[..., Any]:
    """Begin no load into the last blocks: without them, those whose tokens have arrived could not draft, nor run."""

    def allocate_slots(self: "KVCacheManager", request: "Request", *args: Any, **named: Any) -> Any:
        if named.get("delay_cache_blocks"):
            named["reserved_blocks"] = named.get("reserved_blocks", 0) + getattr(self, KEPT, 0)
        return allocate(self, request, *args, **named)

    return allocate_slots
