"""vLLM 0.30: where it differs from 0.31."""

from typing import TYPE_CHECKING, Any

from pd_connector.vllm.releases.release_031 import Release031

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler


class Release030(Release031):
    """vLLM 0.30. A request that finds no blocks keeps those behind it from running, even if they hold blocks."""

    serves_loaded_first = False

    def ending_with_errors(self, scheduler: "Scheduler") -> set[str]:
        """Return the requests that vLLM ends with an error when a step ends, to be added to."""
        return scheduler.grammar_compile_error_reqs  # type: ignore[no-any-return]  # vLLM is untyped here

    def prefill_lookahead(self, vllm_config: "VllmConfig", device: "KVCacheManager") -> int:
        """Return how many tokens past the computed ones a draft model reads during prefill.

        0 and 1 have the same effect, and 1 is returned for both: the coordinator keeps only what can be derived of it.
        """
        return int(device.coordinator.num_reprefillable_tokens) + 1

    def event_extra_keys(self, keys: "list[tuple[Any, ...] | None]") -> "list[tuple[Any, ...] | None] | None":
        """Return what besides its tokens shapes each block, in the form of KV cache events."""
        return keys or None
