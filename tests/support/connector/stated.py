"""What vLLM states of caches, as the connector takes it."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any

from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

from pd_connector.vllm.cache_groups import GroupSpec, cache_groups


def model_config(
    tp_size: int = 1,
    kv_heads: int = 2,
    *,
    draft_heads: int = 0,
    sampling: str = "greedy",
    layers: int = 8,
    text: Mapping[str, Any] = MappingProxyType({}),
    built: Mapping[str, Any] = MappingProxyType({}),
    **parallel: int,
) -> Any:
    """As much of vLLM's configuration as tells what a layer's cache is.

    ``text``: of the model's own. ``built``: the layers of the model, by name.
    """

    def model(heads: int, values: Mapping[str, Any]) -> Any:
        return SimpleNamespace(
            get_total_num_kv_heads=lambda: heads,
            get_total_num_hidden_layers=lambda: layers,
            hf_text_config=SimpleNamespace(**values, to_dict=lambda: dict(values)),
            use_mla="kv_lora_rank" in values,
        )

    draft = SimpleNamespace(draft_model_config=model(draft_heads, {}), draft_sample_method=sampling)
    return SimpleNamespace(
        model_config=model(kv_heads, text),
        cache_config=SimpleNamespace(),
        compilation_config=SimpleNamespace(static_forward_context=dict(built)),
        speculative_config=draft if draft_heads else None,
        parallel_config=SimpleNamespace(tensor_parallel_size=tp_size, pipeline_parallel_size=1, **parallel),
    )


def stated_groups(*groups: tuple[Sequence[str], Any], blocks: int = 8, config: Any = None) -> tuple[GroupSpec, ...]:
    """The cache groups of (layer names, specification), as the connector reads them from vLLM's configuration."""
    specs = [KVCacheGroupSpec(list(layers), spec) for layers, spec in groups]
    return cache_groups(config or model_config(), KVCacheConfig(blocks, [], specs))
