"""How vLLM's CPU kernels order a block: the order that is found is where they put each item."""

import warnings
from types import SimpleNamespace

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what torch and vLLM deprecate of each other is not ours
    import torch
    from vllm.v1.attention.backends import cpu_attn

from pd_connector.vllm.cache_groups import head_order
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


def test_a_vllm_that_hides_its_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(cpu_attn, "_get_attn_isa")
    with pytest.raises(RuntimeError, match="_get_attn_isa"):
        head_order(layers_config(OUR_CONNECTOR), 32, 64, torch.float32)
