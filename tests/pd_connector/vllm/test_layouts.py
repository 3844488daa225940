"""Which layout the connector asks vLLM for: the best that the platform's backends declare."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what torch and vLLM deprecate of each other is not ours
    import vllm.platforms
    from vllm.v1.attention.backend import AttentionBackend, MultipleOf
    from vllm.v1.attention.backends import cpu_attn
    from vllm.v1.kv_cache_interface import KVCacheLayout

from pd_connector.vllm.layouts import wanted_layout
from tests.support.connector.cpu_layers import OUR_CONNECTOR, Layer, a_shape, cpu_only, layers_config

pytestmark = cpu_only


class AnyLayout(AttentionBackend):  # type: ignore[misc]
    """Like FlashAttention: no restriction."""

    get_name = get_impl_cls = get_builder_cls = staticmethod(lambda: "ANY")

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]


class TwoLayouts(AnyLayout):
    """Like FlashInfer on SM100, with kernels for blocks of 32 tokens."""

    @classmethod
    def supported_kv_cache_layouts(cls) -> Any:
        return (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [32]


@pytest.mark.parametrize(
    ("backend", "model", "block_tokens", "wanted"),
    [
        (AnyLayout, {}, 64, "BHLNC"),
        (AnyLayout, {"use_mla": True}, 64, "BLHNC"),
        (AnyLayout, {"is_hybrid": True}, 64, "BLHNC"),
        (TwoLayouts, {}, 32, "BLHNC"),
        (TwoLayouts, {}, 64, None),
        (cpu_attn.CPUAttentionBackend, {}, 64, None),
    ],
)
def test_on_cuda_the_best_layout_that_the_backends_declare_is_wanted(
    monkeypatch: pytest.MonkeyPatch, backend: Any, model: dict[str, bool], block_tokens: int, wanted: str | None
) -> None:
    shape = a_shape(block_tokens=block_tokens)
    config = layers_config(OUR_CONNECTOR, Layer(shape, backend), shape=shape)
    vars(config.model_config).update(model)
    cuda = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: True)
    monkeypatch.setattr(vllm.platforms, "current_platform", cuda)
    assert wanted_layout(config) == wanted


def test_on_an_unknown_platform_nothing_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    config = layers_config(OUR_CONNECTOR, Layer(a_shape(), AnyLayout))
    npu = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: False)
    monkeypatch.setattr(vllm.platforms, "current_platform", npu)
    assert wanted_layout(config) is None
