"""An attention layer of vllm-ascend without a model, to check its operators on a machine that has none at hand."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.plugins import load_general_plugins

from pd_connector.vllm.npu.cache_check import PartShape
from pd_connector.vllm.npu.operators import GqaOperators

HEADS, KV_HEADS, HEAD_SIZE, BLOCK_TOKENS, DTYPE = 8, 2, 128, 128, torch.bfloat16

PARTS = (PartShape((BLOCK_TOKENS, KV_HEADS, HEAD_SIZE), DTYPE),) * 2  # K and V


@dataclass(frozen=True)
class _ModelConfig:
    """What the implementation reads of a model's configuration."""

    dtype: torch.dtype = DTYPE
    runner_type: str = "generate"
    hf_config: Any = None
    hf_text_config: Any = None


@dataclass(frozen=True)
class _LayerStandIn:
    """The attributes that the implementation reads from its layer."""

    impl: Any
    layer_name: str = "attention"
    _k_scale_float: float = 1.0
    _v_scale_float: float = 1.0

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """Return what vLLM would state of the layer's cache."""
        from vllm.v1.kv_cache_interface import FullAttentionSpec  # noqa: PLC0415

        return FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=KV_HEADS, head_size=HEAD_SIZE, dtype=DTYPE)


@contextmanager
def attention_layer(device: torch.device) -> Iterator[GqaOperators]:
    """Yield the operators of a layer of 8 heads and 2 KV heads of size 128 in bfloat16."""
    load_general_plugins()
    # In the order of a worker: in another one, modules of vllm-ascend 0.23 import each other in a circle.
    importlib.import_module("vllm_ascend.worker.worker")
    from vllm_ascend.ascend_config import init_ascend_config  # noqa: PLC0415  exists on this platform only
    from vllm_ascend.attention.attention_v1 import AscendAttentionBackendImpl  # noqa: PLC0415

    config: Any = VllmConfig()
    init_ascend_config(config)
    config.model_config = _ModelConfig()
    with set_current_vllm_config(config):
        impl = AscendAttentionBackendImpl(
            num_heads=HEADS, head_size=HEAD_SIZE, scale=HEAD_SIZE**-0.5, num_kv_heads=KV_HEADS, alibi_slopes=None,
            sliding_window=None, kv_cache_dtype="bfloat16", logits_soft_cap=None, attn_type="decoder",
            kv_sharing_target_layer_name=None,
        )  # fmt: skip
        yield GqaOperators(_LayerStandIn(impl), config, device)
