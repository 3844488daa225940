"""Which attention implementations are known, and of which layers they are checked; tests/ascend_sim calls them."""

import sys
import warnings
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what torch and vLLM deprecate of each other is not ours
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from pd_connector.vllm.npu.cache_form import LayersApartError
from pd_connector.vllm.npu.operators import attention_operators


class AscendAttentionBackendImpl:
    """As much of the implementation for keys and values of several heads as choosing needs."""

    def __init__(self, **numbers: Any) -> None:
        self.num_heads, self.num_kv_heads, self.head_size, self.sliding_window = 4, 2, 16, None
        self.__dict__.update(numbers)


class AscendMLAImpl:
    """As much of the implementation of MLA."""

    def __init__(self, **switches: Any) -> None:
        self.num_heads, self.num_kv_heads, self.head_size = 4, 1, 576
        self.fa_quant_layer = self.enable_kv_nz = self.enable_mlapo = False
        self.__dict__.update(switches)


class AscendSFAImpl:
    """Sparse attention, which nobody has looked at."""


class Layer(AttentionLayerBase):  # type: ignore[misc]  # vLLM is untyped here
    def __init__(self, impl: Any) -> None:
        self.impl = impl

    def get_attn_backend(self) -> Any:
        raise NotImplementedError

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        return None


@pytest.fixture(autouse=True)
def ascend_utils(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vllm-ascend's module that knows which layers need dense caches: none."""
    utils = ModuleType("vllm_ascend.attention.utils")
    utils.requires_contiguous_pa_kv_cache = lambda layer, config, spec: False  # type: ignore[attr-defined]
    package = ModuleType("vllm_ascend.attention")
    package.utils = utils  # type: ignore[attr-defined]
    for module in (ModuleType("vllm_ascend"), package, utils):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return utils


def chosen(*impls: Any) -> list[Any]:
    layers = {f"l{number}": Layer(impl) for number, impl in enumerate(impls)}
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        model_config=SimpleNamespace(dtype=torch.bfloat16),
    )
    return list(attention_operators(config, list(layers), torch.device("cpu")))


def test_one_layer_of_each_kind_is_checked() -> None:
    plain, window, sinks = AscendAttentionBackendImpl, {"sliding_window": 128}, {"sinks": torch.zeros(4)}
    assert len(chosen(plain(), plain(), plain(**window), plain(**sinks), plain(**window))) == 3
    assert len(chosen(AscendMLAImpl(), AscendMLAImpl())) == 1


@pytest.mark.parametrize(
    ("impl", "why"),
    [
        (AscendSFAImpl(), "the attention implementation AscendSFAImpl is not known to take them"),
        (AscendMLAImpl(fa_quant_layer=True), "the cache is quantized"),
        (AscendMLAImpl(enable_kv_nz=True), "the cache is in the fractal order of kv_nz"),
        (AscendMLAImpl(enable_mlapo=True), "before MLA (enable_mlapo)"),
    ],
)
def test_implementations_that_nobody_has_looked_at_are_left_alone(impl: Any, why: str) -> None:
    with pytest.raises(LayersApartError) as raised:
        chosen(AscendMLAImpl() if isinstance(impl, AscendMLAImpl) else AscendAttentionBackendImpl(), impl)
    assert why in str(raised.value)


def test_a_layer_for_which_vllm_ascend_itself_needs_a_dense_cache_is_left_alone(ascend_utils: Any) -> None:
    ascend_utils.requires_contiguous_pa_kv_cache = lambda layer, config, spec: True
    with pytest.raises(LayersApartError, match="pa_shape_list"):
        chosen(AscendAttentionBackendImpl())
