"""What vLLM keeps of a request in a cache group, and which groups it makes of a model's layers: by its own classes."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager, get_manager_for_kv_cache_spec
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec

from tests.support.releases import INSTALLED

SIZES: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}


def vllms_manager(spec: Any) -> SingleTypeKVCacheManager:
    """vLLM's manager of a cache group's blocks, over 63 blocks of its own."""
    pool = BlockPool(64, enable_caching=False, hash_block_size=spec.block_size)
    return get_manager_for_kv_cache_spec(
        spec,
        512,
        512,
        block_pool=pool,
        enable_caching=False,
        kv_cache_group_id=0,
        scheduler_block_size=spec.block_size,
    )


def leased_table(spec: Any, tokens: int) -> tuple[int, ...]:
    """The block table of a prompt that is computed, as far as the last of its tokens needs it; 0 marks holes."""
    manager = vllms_manager(spec)
    manager.allocate_new_blocks("r", tokens, tokens)
    manager.remove_skipped_blocks("r", tokens - 1)
    return _blocks_of(manager)


def table_to_pull_into(spec: Any, tokens: int) -> tuple[int, ...]:
    """The block table of a request that is to be brought its first ``tokens`` tokens; 0 marks holes."""
    manager = vllms_manager(spec)
    if INSTALLED >= (0, 30):
        manager.add_local_computed_blocks("r", [], 0, tokens)
        manager.allocate_external_computed_blocks("r", 0, tokens)
    else:
        manager.allocate_new_computed_blocks("r", [], 0, tokens)
    manager.allocate_new_blocks("r", tokens, tokens)
    return _blocks_of(manager)


def _blocks_of(manager: SingleTypeKVCacheManager) -> tuple[int, ...]:
    return tuple(0 if block.is_null else block.block_id for block in manager.req_to_blocks["r"])


def groups_by_vllm(
    windows: Mapping[str, int], block_tokens: int = 16, *, hybrid: bool = True
) -> list[KVCacheGroupSpec]:
    """The cache groups that vLLM makes of a model's layers.

    Args:
        windows: tokens that each layer sees, 0 for all, in the order in which vLLM registers them: a draft's last.
        block_tokens: of all layers.
        hybrid: whether the hybrid cache manager is on.
    """
    try:
        from vllm.v1.core.kv_cache_planning import get_kv_cache_groups  # noqa: PLC0415  since vLLM 0.33
    except ImportError:
        from vllm.v1.core.kv_cache_utils import get_kv_cache_groups  # noqa: PLC0415
    specs: dict[str, Any] = {
        name: SlidingWindowSpec(block_size=block_tokens, sliding_window=window, **SIZES)
        if window
        else FullAttentionSpec(block_size=block_tokens, **SIZES)
        for name, window in windows.items()
    }
    layout = SimpleNamespace(is_block_outermost=False)
    config: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=not hybrid),
        cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: layout),
        speculative_config=None,
        model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type="gemma3_text")),
    )
    return list(get_kv_cache_groups(config, specs))
