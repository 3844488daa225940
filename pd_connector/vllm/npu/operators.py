"""Calls vllm-ascend's attention implementations outside a model, to check which caches their operators take.

Everything here goes through the layer's own implementation, because that decides what an operator gets: a release may
hand a dense copy of the cache to an operator that would take the view.
"""

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.forward_context import create_forward_context, override_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from pd_connector.vllm.npu.cache_form import LayersApartError
from pd_connector.vllm.paged_batches import Batch, CacheOperators, Parts

_GQA, _MLA = "AscendAttentionBackendImpl", "AscendMLAImpl"

#: Attributes of an implementation by which it calls other operators, or the same in another way.
_KIND = (
    "num_heads", "num_kv_heads", "head_size", "sliding_window", "fa_quant_layer", "enable_kv_nz", "enable_mlapo",
)  # fmt: skip


def attention_operators(vllm_config: Any, layers: Sequence[str], device: torch.device) -> list[CacheOperators]:
    """Return the operators of one layer of each kind among ``layers``.

    Raises:
        LayersApartError: a layer's implementation is not known to take caches of all layers together.
    """
    found = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, list(layers))
    kinds: dict[tuple[object, ...], CacheOperators] = {}
    for name in layers:
        impl = found[name].impl
        kind = type(impl).__name__
        if kind not in (_GQA, _MLA):
            raise LayersApartError(f"the attention implementation {kind} is not known to take them")
        key = (kind, getattr(impl, "sinks", None) is None, *(getattr(impl, attribute, None) for attribute in _KIND))
        if key not in kinds:
            of_kind = GqaOperators if kind == _GQA else _MlaOperators
            kinds[key] = of_kind(found[name], vllm_config, device)
    return list(kinds.values())


@contextmanager
def _outside_a_step(vllm_config: Any) -> Iterator[None]:
    """Let implementations ask for the step's context, in which nothing is being captured."""
    with override_forward_context(create_forward_context(None, vllm_config)):
        yield


class _Inputs:
    """Random tensors of one seed, without the global generator, which is the model's."""

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self._random = torch.Generator(device="cpu").manual_seed(seed)
        self._dtype = dtype
        self._device = device

    def normal(self, *sizes: int) -> torch.Tensor:
        """Return a tensor of these sizes on the device."""
        values = torch.randn(sizes, generator=self._random, dtype=torch.float32, device="cpu")
        return values.to(self._dtype).to(self._device)


class GqaOperators:
    """Keys and values of several heads, as ``AscendAttentionBackendImpl`` treats them."""

    def __init__(self, layer: Any, vllm_config: Any, device: torch.device) -> None:
        self._layer, self._config, self._device = layer, vllm_config, device
        self._dtype = vllm_config.model_config.dtype
        self._check_paged_attention()

    def _check_paged_attention(self) -> None:
        """Raise if vllm-ascend itself allocates a dense cache for this layer, for an operator of ATB that needs one."""
        from vllm_ascend.attention import utils  # noqa: PLC0415  exists on this platform only

        needs_dense = getattr(utils, "requires_contiguous_pa_kv_cache", None)
        if needs_dense and needs_dense(self._layer, self._config, self._layer.get_kv_cache_spec(self._config)):
            raise LayersApartError(
                "some steps use the paged attention of ATB, which needs dense caches (pa_shape_list)"
            )

    def write(self, cache: Parts, batch: Batch, seed: int) -> None:
        """Implement ``CacheOperators``."""
        impl, inputs = self._impl(), _Inputs(seed, self._dtype, self._device)
        heads, size = impl.num_kv_heads, impl.head_size
        key, value = (inputs.normal(batch.tokens, heads, size) for _ in range(2))
        impl.do_kv_cache_update(self._layer, key, value, list(cache), self._slots(batch))

    def attend(self, cache: Parts, batch: Batch, seed: int) -> list[torch.Tensor]:
        """Implement ``CacheOperators``."""
        impl = self._impl()
        query = _Inputs(seed, self._dtype, self._device).normal(batch.tokens, impl.num_heads, impl.head_size)
        output = torch.zeros_like(query)
        with _outside_a_step(self._config):
            # Without new keys and values, the implementation attends to the cache and writes nothing.
            impl.forward(self._layer, query, None, None, tuple(cache), self._metadata(batch), output)
        return [output]

    def _impl(self) -> Any:
        """Return the implementation as it is before it has met a cache, the first of which it keeps."""
        impl = copy.copy(self._layer.impl)
        impl.key_cache = impl.value_cache = None
        return impl

    def _slots(self, batch: Batch) -> torch.Tensor:
        return batch.slots.to(torch.int32).to(self._device)

    def _metadata(self, batch: Batch) -> Any:
        from vllm_ascend.attention.attention_mask import AttentionMaskBuilder  # noqa: PLC0415  on this platform only
        from vllm_ascend.attention.attention_v1 import AscendAttentionState, AscendMetadata  # noqa: PLC0415

        decodes = batch.longest_query == 1
        sequences = len(batch.sequence_lengths)
        return AscendMetadata(
            attn_mask=AttentionMaskBuilder(self._device).get_splitfuse_attn_mask(),
            attn_state=AscendAttentionState.DecodeOnly if decodes else AscendAttentionState.ChunkedPrefill,
            num_actual_tokens=batch.tokens,
            num_decode_tokens=sequences if decodes else 0,
            num_decodes=sequences if decodes else 0,
            num_prefills=0 if decodes else sequences,
            seq_lens=batch.sequence_lengths,
            seq_lens_cpu=batch.sequence_lengths,
            seq_lens_list=batch.sequence_lengths.tolist(),
            actual_seq_lengths_q=batch.query_start[1:].tolist(),
            query_start_loc=batch.query_start.to(self._device),
            max_query_len=batch.longest_query,
            block_tables=batch.block_table.to(self._device),
            slot_mapping=self._slots(batch),
            model_runner_type=self._config.model_config.runner_type,
        )


class _MlaOperators:
    """A latent vector and a rotary key, as ``AscendMLAImpl`` treats them."""

    def __init__(self, layer: Any, vllm_config: Any, device: torch.device) -> None:
        self._impl, self._config, self._device = layer.impl, vllm_config, device
        self._dtype = vllm_config.model_config.dtype
        for switch, what in (("fa_quant_layer", "quantized"), ("enable_kv_nz", "in the fractal order of kv_nz")):
            if getattr(self._impl, switch, False):
                raise LayersApartError(f"the cache is {what}")
        if getattr(self._impl, "enable_mlapo", False):
            raise LayersApartError("the fused operator before MLA (enable_mlapo) writes the cache")

    def write(self, cache: Parts, batch: Batch, seed: int) -> None:
        """Implement ``CacheOperators``."""
        impl, inputs = self._impl, _Inputs(seed, self._dtype, self._device)
        new = inputs.normal(batch.tokens, impl.kv_lora_rank + impl.qk_rope_head_dim)
        cos, sin = (inputs.normal(batch.tokens, 1, 1, impl.qk_rope_head_dim) for _ in range(2))
        write = impl.exec_kv_decode if batch.longest_query == 1 else impl.exec_kv_prefill
        write(new, cos, sin, tuple(cache), batch.slots.to(self._device))

    def attend(self, cache: Parts, batch: Batch, seed: int) -> list[torch.Tensor]:
        """Implement ``CacheOperators``: what decodes read, and what prefills fetch of earlier tokens."""
        return [self._decode(cache, batch, seed), *self._fetch(cache, batch)]

    def _decode(self, cache: Parts, batch: Batch, seed: int) -> torch.Tensor:
        from vllm_ascend.attention.mla_v1 import DecodeMLAPreprocessResult  # noqa: PLC0415  on this platform only

        impl, inputs = self._impl, _Inputs(seed, self._dtype, self._device)
        latent, rope = cache
        sequences = len(batch.sequence_lengths)
        queries = inputs.normal(sequences, impl.num_heads, impl.kv_lora_rank)
        rotary = inputs.normal(sequences, impl.num_heads, impl.qk_rope_head_dim)
        block_tokens, metadata = int(latent.shape[1]), self._metadata(batch)
        with _outside_a_step(self._config):
            if "decode_preprocess_res" in inspect.signature(impl._forward_decode).parameters:
                prepared = DecodeMLAPreprocessResult(queries, rotary, latent, rope)
                output: torch.Tensor = impl._forward_decode(prepared, block_tokens, metadata)
            else:  # as it was in vLLM 0.23
                output = impl._forward_decode(queries, rotary, latent, rope, block_tokens, metadata)
        return output

    def _fetch(self, cache: Parts, batch: Batch) -> list[torch.Tensor]:
        from vllm_ascend.device.device_op import DeviceOperator  # noqa: PLC0415  exists on this platform only

        lengths = batch.sequence_lengths
        fetched = [
            torch.zeros((int(lengths.sum()), *part.shape[2:]), dtype=part.dtype, device=self._device) for part in cache
        ]
        starts = torch.zeros_like(lengths)
        tables = (value.to(self._device) for value in (batch.block_table, lengths, starts))
        DeviceOperator.kv_cache_load(*cache, *tables, key=fetched[0], value=fetched[1])
        return fetched

    def _metadata(self, batch: Batch) -> Any:
        """Return the metadata of a step in which each sequence decodes its last token."""
        from types import SimpleNamespace  # noqa: PLC0415

        from vllm_ascend.attention.attention_mask import AttentionMaskBuilder  # noqa: PLC0415
        from vllm_ascend.attention.attention_v1 import AscendAttentionState  # noqa: PLC0415

        decode = SimpleNamespace(
            block_table=batch.block_table.to(self._device),
            seq_lens=batch.sequence_lengths,
            seq_lens_list=batch.sequence_lengths.tolist(),
            actual_seq_lengths_q=list(range(1, len(batch.sequence_lengths) + 1)),
            attn_mask=AttentionMaskBuilder(self._device).get_splitfuse_attn_mask(),
        )
        return SimpleNamespace(decode=decode, attn_state=AscendAttentionState.DecodeOnly, causal=True)
