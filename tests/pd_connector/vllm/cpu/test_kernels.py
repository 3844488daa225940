"""How vLLM's CPU kernels order a block: the order that is found is where they put each item."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what torch and vLLM deprecate of each other is not ours
    import torch
    import vllm._custom_ops as ops
    from vllm.v1.attention.backends import cpu_attn

from pd_connector.vllm.cache_groups import head_order
from pd_connector.vllm.cpu import layout_check
from pd_connector.vllm.cpu.kernels import attention_layers
from tests.support.connector.cpu_layers import (
    OUR_CONNECTOR,
    Layer,
    a_shape,
    cpu_only,
    layers_config,
)
from tests.support.releases import INSTALLED, since

pytestmark = cpu_only


def one_sequence(shape: layout_check.CacheShape, isa: str) -> Any:
    """What vLLM 0.23, which writes to the cache when it attends, passes with the tokens of one block."""
    tokens, lengths = shape.block_tokens, torch.tensor([shape.block_tokens], dtype=torch.int32)
    starts = torch.tensor([0, tokens], dtype=torch.int32)
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=1, num_heads=shape.heads, num_kv_heads=shape.kv_heads, head_dim=shape.head_size, seq_lens=lengths,
        dtype=shape.dtype, query_start_loc=starts, causal=True, sliding_window_size=-1, isa=isa, enable_kv_split=False,
    )  # fmt: skip
    return cpu_attn.CPUAttentionMetadata(
        isa=isa, num_actual_tokens=tokens, max_query_len=tokens, query_start_loc=starts, max_seq_len=tokens,
        seq_lens=lengths, block_table=torch.zeros(1, 1, dtype=torch.int32), slot_mapping=torch.arange(tokens),
        scheduler_metadata=plan,
    )  # fmt: skip


@pytest.mark.parametrize("head_size", [64, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_order_that_is_found_is_where_the_kernels_put_each_item(head_size: int, dtype: torch.dtype) -> None:
    shape = a_shape(kv_heads=2, head_size=head_size, dtype=dtype)
    order = head_order(layers_config(OUR_CONNECTOR, shape=shape), shape.block_tokens, head_size, dtype)
    if order.key is None or order.value is None:
        pytest.skip(f"this machine's kernels have no strides: {order}")
    layer = Layer(shape, cpu_attn.CPUAttentionBackend)
    isa = cpu_attn._get_attn_isa(shape.dtype, shape.block_tokens, head_size, "auto")
    key, value = torch.randn(2, shape.block_tokens, shape.kv_heads, head_size).to(dtype)
    cache = torch.zeros(1, shape.kv_heads, shape.block_tokens, 2 * head_size, dtype=dtype)
    face = SimpleNamespace(isa=isa, _k_scale_float=1.0, _v_scale_float=1.0)
    if INSTALLED >= (0, 30):
        layer.impl.do_kv_cache_update(face, key, value, cache, torch.arange(shape.block_tokens))
    else:
        query = torch.zeros(shape.block_tokens, shape.heads, head_size, dtype=dtype)
        layer.impl.forward(face, query, key, value, cache, one_sequence(shape, isa), torch.zeros_like(query))
    for head in range(shape.kv_heads):
        block = cache[0, head].flatten()
        for written, part in ((key, order.key), (value, order.value)):
            tokens = torch.arange(shape.block_tokens)[:, None] * part.token_stride
            assert torch.equal(
                block[part.offset + tokens + torch.arange(head_size) * part.content_stride], written[:, head]
            )


@since((0, 30), "layouts, for which its kernels are checked,")
@pytest.mark.parametrize("window", [None, 40])
def test_kernels_are_called_with_the_window_of_their_layer(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    called: list[object] = []
    plan = ops.cpu_attn_get_scheduler_metadata

    def recorded(**options: Any) -> Any:
        called.append(options["sliding_window_size"])
        return plan(**options)

    monkeypatch.setattr(ops, "cpu_attn_get_scheduler_metadata", recorded)
    layer = Layer(a_shape(), cpu_attn.CPUAttentionBackend, window)
    ((shape, kernels),) = attention_layers(layers_config(OUR_CONNECTOR, layer)).items()
    assert layout_check.difference(kernels, shape, layout_check.PLAIN) == ""
    assert set(called) == {layer.impl.sliding_window}


def test_a_vllm_that_hides_its_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(cpu_attn, "_get_attn_isa")
    with pytest.raises(RuntimeError, match="_get_attn_isa"):
        head_order(layers_config(OUR_CONNECTOR), 32, 64, torch.float32)
