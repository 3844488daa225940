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

pytestmark = cpu_only


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
    layer.impl.do_kv_cache_update(face, key, value, cache, torch.arange(shape.block_tokens))
    for head in range(shape.kv_heads):
        block = cache[0, head].flatten()
        for written, part in ((key, order.key), (value, order.value)):
            tokens = torch.arange(shape.block_tokens)[:, None] * part.token_stride
            assert torch.equal(
                block[part.offset + tokens + torch.arange(head_size) * part.content_stride], written[:, head]
            )


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
