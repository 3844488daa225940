"""Differences between the vLLM releases that the connector supports, behind one interface.

``VllmRelease`` is vLLM 0.32. A release that differs gets a subclass in its own module and a line in ``current``. vLLM's
names are imported where they are used, because other releases may not have them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import BlockHash


class VllmRelease:
    """A vLLM release, as far as the connector depends on it. Holds no state."""

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

        return get_kv_cache_coordinator(
            kv_cache_config=replace(device.kv_cache_config, num_blocks=slots + 1),  # block 0 is vLLM's null block
            max_model_len=device.max_model_len,
            max_in_flight_tokens=vllm_config.max_in_flight_tokens,
            use_eagle=device.use_eagle,
            enable_caching=True,
            enable_kv_cache_events=device.enable_kv_cache_events,
            dcp_world_size=1,
            pcp_world_size=1,
            scheduler_block_size=device.coordinator.scheduler_block_size,
            hash_block_size=device.block_pool.hash_block_size,
            num_prefill_lookahead=vllm_config.num_prefill_lookahead_tokens,
            allow_partial_hash_hits=False,  # slots are copied whole
        )

    def cacheable_groups(self, device: "KVCacheManager") -> tuple[int, ...]:
        """Return the indices of the cache groups whose blocks can be found by their contents."""
        return tuple(device.kv_cache_config.prefix_cacheable_group_ids)

    def block_tokens(self, coordinator: "KVCacheCoordinator") -> tuple[int, ...]:
        """Return the block size of each cache group, in tokens."""
        return tuple(coordinator.group_block_sizes)

    def cacheable_tokens(self, coordinator: "KVCacheCoordinator", computed: int, group: int) -> int:
        """Return how many of a request's ``computed`` tokens vLLM caches in a group."""
        return int(coordinator.get_num_cacheable_tokens(computed, group))

    def block_hashes(self, hashes: "Sequence[BlockHash]", hash_tokens: int, block_tokens: int) -> "Sequence[BlockHash]":
        """Return a request's hashes of blocks of ``block_tokens`` tokens, given those of ``hash_tokens`` tokens."""
        from vllm.v1.core.kv_cache_utils import resolve_block_hashes  # noqa: PLC0415

        resolved: Sequence[BlockHash] = resolve_block_hashes(hashes, hash_tokens, block_tokens)
        return resolved


def current() -> VllmRelease:
    """Return the installed release."""
    return VllmRelease()
