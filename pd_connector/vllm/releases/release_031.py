"""vLLM 0.31: where it differs from 0.32."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pd_connector.vllm.releases.release_032 import Release032

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionBackend, MultipleOf
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.kv_cache_interface import KVCacheSpec


class Release031(Release032):
    """vLLM 0.31. Its metrics do not tell where tokens came from, and no method says how many tokens it caches."""

    limits: tuple[str, ...] = (
        "its metrics count tokens from host memory and tokens from other engines together, as external ones "
        "(vLLM tells them apart since 0.32)",
        "a pause that waits for requests does not wait for pulls under way, and cannot clear the caches meanwhile "
        "(since 0.32 it waits)",
    )

    def leave_unzeroed(self, coordinator: "KVCacheCoordinator", request_id: str, groups: Sequence[int]) -> None:
        """Have vLLM not zero what it has just given a request in ``groups``.

        vLLM itself takes out the blocks at the places of the tokens that a connector brings. A ring's only block is at
        the first place, whatever tokens it holds.
        """
        for manager in (coordinator.single_type_managers[group] for group in groups):
            given = {block.block_id for block in manager.req_to_blocks[request_id]}
            manager.new_block_ids = [block_id for block_id in manager.new_block_ids if block_id not in given]

    def cacheable_tokens(self, coordinator: "KVCacheCoordinator", computed: int, group: int) -> int:
        """Return how many of a request's ``computed`` tokens vLLM caches in a group, as ``cache_blocks`` does."""
        from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator  # noqa: PLC0415

        final = max(0, computed - coordinator.num_reprefillable_tokens)
        if not isinstance(coordinator, HybridKVCacheCoordinator):
            return int(final)
        manager = coordinator.single_type_managers[group]
        aligned = coordinator._align_cacheable(computed)
        if manager.use_eagle and aligned > 0:
            return int(min(final, coordinator._align_cacheable(final) + manager.block_size))
        return int(aligned)

    def kernel_block_sizes(self, backend: "type[AttentionBackend]", spec: "KVCacheSpec") -> "list[int | MultipleOf]":
        """Return the block sizes, in tokens, that a backend's kernels take: of any cache alike."""
        sizes: list[int | MultipleOf] = backend.get_supported_kernel_block_sizes()
        return sizes

    def aligns_rows(self, backend: "type[AttentionBackend]", spec: "KVCacheSpec") -> bool:
        """Return whether block-outer layouts have blocks a whole number of rows apart, for kernels that count these.

        Those of sparse MLA do. vLLM 0.31 aligns blocks for some of them, 0.30 for none.
        """
        counts = backend.is_sparse() and backend.is_mla()
        return not counts or getattr(spec, "block_stride_alignment", None) is not None
