"""Attention layers with vLLM's real CPU kernels, and the configuration of a worker that has them."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what torch and vLLM deprecate of each other is not ours
    import torch
    import vllm.platforms
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.attention.backends import cpu_attn
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.worker.worker_base import WorkerBase

from pd_connector.vllm.cpu import layout_check

OUR_CONNECTOR = {"kv_connector": "PDConnector", "kv_connector_module_path": "pd_connector"}

cpu_only = pytest.mark.skipif(not vllm.platforms.current_platform.is_cpu(), reason="needs vLLM's CPU kernels")


class Layer(AttentionLayerBase):  # type: ignore[misc]  # vLLM is untyped here
    """An attention layer with vLLM's real CPU implementation, as a worker's model holds it."""

    def __init__(self, shape: layout_check.CacheShape, backend: Any, window: int | None = None) -> None:
        self.backend = backend
        self._k_scale_float = self._v_scale_float = 1.0
        self.spec = FullAttentionSpec(
            block_size=shape.block_tokens,
            num_kv_heads=shape.kv_heads,
            head_size=shape.head_size,
            dtype=shape.cache_dtype,
        )
        parallel = SimpleNamespace(decode_context_parallel_size=1)
        current = SimpleNamespace(model_config=SimpleNamespace(dtype=shape.dtype), parallel_config=parallel)
        with set_current_vllm_config(current):
            self.impl = cpu_attn.CPUAttentionBackendImpl(
                shape.heads, shape.head_size, 0.1, shape.kv_heads, None, window, kv_cache_dtype(shape)
            )

    def get_attn_backend(self) -> Any:
        return self.backend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        return self.spec


def kv_cache_dtype(shape: layout_check.CacheShape) -> str:
    return "auto" if shape.cache_dtype == shape.dtype else "fp8"


def a_shape(**changes: Any) -> layout_check.CacheShape:
    values = {"heads": 4, "kv_heads": 2, "head_size": 32, "block_tokens": 32, "dtype": torch.float32}
    values |= changes
    return layout_check.CacheShape(**{"cache_dtype": values["dtype"], **values})


def layers_config(
    connector: dict[str, Any] | None,
    *layers: Layer,
    shape: layout_check.CacheShape | None = None,
) -> Any:
    shape = shape or a_shape()
    transfer = None
    if connector is not None:
        transfer = SimpleNamespace(**{"kv_connector_module_path": None, "kv_connector_extra_config": {}, **connector})
    held = layers or (Layer(shape, cpu_attn.CPUAttentionBackend),)
    return SimpleNamespace(
        kv_transfer_config=transfer,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        compilation_config=SimpleNamespace(static_forward_context={str(i): layer for i, layer in enumerate(held)}),
        model_config=SimpleNamespace(dtype=shape.dtype),
        cache_config=SimpleNamespace(cache_dtype=kv_cache_dtype(shape), block_size=shape.block_tokens),
    )


def asked(config: Any) -> list[str]:
    """What a worker of this configuration answers when the engine core asks for its layouts."""
    answer: list[str] = WorkerBase.get_supported_kv_cache_layouts(SimpleNamespace(vllm_config=config))
    return answer
