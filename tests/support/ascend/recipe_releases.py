"""What vllm-ascend 0.23 and 0.30 have otherwise, of what the engines of recipes are made with."""

import importlib
from collections.abc import Sequence
from typing import Any

from tests.support.ascend.paths import ascend_release

_IS_OLD = ascend_release() == "0.23"
_LAYOUTS = "vllm.v1.attention.backends.utils"


def supported_layouts(backends: Sequence[Any]) -> list[str]:
    """The names of the KV cache layouts that all attention backends know; none where layouts have no names."""
    if _IS_OLD:
        return []
    return [layout.name for layout in importlib.import_module(_LAYOUTS).get_supported_kv_cache_layouts(backends)]


def choose_layout(config: Any, layouts: list[list[str]], specs: list[Any]) -> str:
    """The name of the layout that vLLM's engine core chooses; empty where layouts have no names."""
    return (
        "" if _IS_OLD else str(importlib.import_module(_LAYOUTS).resolve_kv_cache_layout(config, layouts, specs).name)
    )


def record_layout(config: Any, layout: str) -> None:
    """Tell an engine's configuration what its engine core has chosen."""
    if layout:
        importlib.import_module(_LAYOUTS).record_kv_cache_layout(config.cache_config, layout)


def is_sparse(config: Any) -> bool:
    """Whether attention selects tokens by an indexer."""
    if _IS_OLD:
        return hasattr(config.model_config.hf_text_config, "index_topk")
    return bool(importlib.import_module("vllm_ascend.utils").enable_sfa(config))


def let_models_be_made_alone() -> None:
    """Experts prepare to talk to each other, and tables (Engram) ask whether all ranks are on one machine."""
    module = "vllm_ascend.ops.fused_moe.fused_moe"
    for name in (module, f"{module}_0_23_0") if _IS_OLD else (module,):
        vars(importlib.import_module(name))["setup_moe_comm_method"] = lambda _: None
    if not _IS_OLD:
        tables = importlib.import_module("vllm_ascend.models.deepseek_v41.engram.embedding")
        vars(tables)["in_the_same_node_as"] = lambda group: [True] * group.size()


def make_caches(runner: Any, kv_cache_config: Any, sizes: list[int]) -> Any:
    """Have a model runner make its caches; ``sizes``: tokens of the kernel's block, by cache group."""
    runner.enable_hamming_sparse = False
    runner.kernel_block_sizes = [[size] for size in sizes] if _IS_OLD else sizes
    given = {} if _IS_OLD else {"kernel_block_sizes": sizes}
    return runner.initialize_kv_cache_tensors(kv_cache_config, **given)
