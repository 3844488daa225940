"""Calls vLLM's CPU attention kernels outside a model, to check a layout and to see how they order a block."""

from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backends import cpu_attn

from pd_connector.vllm.cpu.head_order import Write
from pd_connector.vllm.cpu.layout_check import CacheShape
from pd_connector.vllm.paged_batches import Batch, Parts


def attention_layers(vllm_config: Any) -> dict[CacheShape, "CpuKernels"]:
    """Return the kernels of one layer of each shape in the worker's model.

    Raises:
        LookupError: the model has no attention layer with a KV cache.
    """
    _ask_for_tiles()
    layers: dict[CacheShape, CpuKernels] = {}
    for layer in get_layers_from_vllm_config(vllm_config, AttentionLayerBase).values():
        spec = layer.get_kv_cache_spec(vllm_config)
        if spec is None:  # it has no cache, or uses another layer's
            continue
        dtype = vllm_config.model_config.dtype
        shape = CacheShape(layer.impl.num_heads, spec.num_kv_heads, spec.head_size, spec.block_size, dtype, spec.dtype)
        if shape not in layers:
            layers[shape] = CpuKernels(layer, shape, vllm_config.cache_config.cache_dtype)
    if not layers:
        raise LookupError("the worker has no attention layer with a KV cache")
    return layers


def _ask_for_tiles() -> None:
    """Have Linux let this process use AMX, which ends whoever has not asked. Does nothing where there is none.

    vLLM's kernels take for granted that a matrix product of oneDNN has asked before, as in a model it has.
    """
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


class CpuKernels:
    """A layer's own attention implementation, called as vLLM's model runner calls it."""

    def __init__(self, layer: Any, shape: CacheShape, kv_cache_dtype: str) -> None:
        self._impl = layer.impl
        self._shape = shape
        self._kv_cache_dtype = kv_cache_dtype
        self._isa = cpu_attn._get_attn_isa(shape.dtype, shape.block_tokens, shape.head_size, kv_cache_dtype)
        self._layer = _LayerStandIn(self._isa, layer._k_scale_float, layer._v_scale_float)

    def write(self, cache: Parts, batch: Batch, seed: int) -> None:
        """Implement ``CacheOperators``."""
        _, key, value = _inputs(self._shape, batch, seed)
        self._impl.do_kv_cache_update(self._layer, key, value, cache[0], batch.slots)

    def attend(self, cache: Parts, batch: Batch, seed: int) -> list[torch.Tensor]:
        """Implement ``CacheOperators``."""
        query, _, _ = _inputs(self._shape, batch, seed)
        plan = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(batch.sequence_lengths),
            num_heads=self._shape.heads,
            num_kv_heads=self._shape.kv_heads,
            head_dim=self._shape.head_size,
            seq_lens=batch.sequence_lengths,
            dtype=self._shape.dtype,
            query_start_loc=batch.query_start,
            causal=True,
            sliding_window_size=self._impl.sliding_window,
            isa=self._isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            kv_cache_dtype=self._kv_cache_dtype,
        )
        metadata = cpu_attn.CPUAttentionMetadata(
            num_actual_tokens=batch.tokens,
            max_query_len=batch.longest_query,
            query_start_loc=batch.query_start,
            max_seq_len=batch.longest_sequence,
            seq_lens=batch.sequence_lengths,
            block_table=batch.block_table,
            slot_mapping=batch.slots,
            scheduler_metadata=plan,
        )
        output = torch.zeros_like(query)
        # A decoder's forward takes keys and values from the cache and ignores these arguments.
        self._impl.forward(self._layer, query, query, query, cache[0], metadata, output)
        return [output]


def _inputs(shape: CacheShape, batch: Batch, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return query, key and value of a layer's step, without using the global generator, which is the model's."""
    random = torch.Generator(device="cpu").manual_seed(seed)

    def normal(heads: int) -> torch.Tensor:
        size = (batch.tokens, heads, shape.head_size)
        return torch.randn(size, generator=random, dtype=torch.float32, device="cpu").to(shape.dtype)

    return normal(shape.heads), normal(shape.kv_heads), normal(shape.kv_heads)


class _LayerStandIn:
    """The attributes that the implementation reads from its layer. vLLM sets ``isa`` on the real layer only later."""

    def __init__(self, isa: str, k_scale: float, v_scale: float) -> None:
        self.isa = isa
        self._k_scale_float = k_scale
        self._v_scale_float = v_scale


def writer(vllm_config: Any, block_tokens: int, head_size: int) -> Write:
    """Return the kernel by which vLLM's CPU attention writes to the cache, for one head and one block."""
    kv_cache_dtype = vllm_config.cache_config.cache_dtype
    with set_current_vllm_config(vllm_config):
        kernels = cpu_attn.CPUAttentionBackendImpl(1, head_size, 1.0, 1, None, None, kv_cache_dtype)
    isa = cpu_attn._get_attn_isa(vllm_config.model_config.dtype, block_tokens, head_size, kv_cache_dtype)
    layer = _LayerStandIn(isa, 1.0, 1.0)
    slots = torch.arange(block_tokens, dtype=torch.int64, device="cpu")

    def write(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor) -> None:
        kernels.do_kv_cache_update(layer, key, value, cache, slots)

    return write
