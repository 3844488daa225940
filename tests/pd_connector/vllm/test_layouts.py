"""Which layout the connector asks vLLM for: the best that the platform's backends declare.

Covers: pd_connector.vllm.layout_switch.
"""

import logging
import re
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.releases import INSTALLED, module_needs

if INSTALLED < (0, 30):
    module_needs((0, 30), "layouts that connectors ask for")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what torch and vLLM deprecate of each other is not ours
    import vllm.platforms
    from vllm.config import CacheConfig
    from vllm.platforms.interface import Platform
    from vllm.v1.attention.backend import AttentionBackend, MultipleOf
    from vllm.v1.attention.backends import cpu_attn
    from vllm.v1.attention.backends.mla.flashmla import FlashMLABackend
    from vllm.v1.kv_cache_interface import KVCacheLayout

from pd_connector.vllm.layouts import log_layout, wanted_layout
from tests.support.connector.cpu_layers import OUR_CONNECTOR, Layer, a_shape, cpu_only, layers_config

pytestmark = cpu_only


class CUDA(Platform):  # type: ignore[misc]
    """vLLM's own rules for the block size, of a platform that this machine does not have."""

    is_cpu = classmethod(lambda cls: False)
    is_cuda = classmethod(lambda cls: True)


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
        (TwoLayouts, {"is_hybrid": True}, 32, None),  # the workers make their blocks as large as a state
        (cpu_attn.CPUAttentionBackend, {}, 64, None),
    ],
)
def test_on_cuda_the_best_layout_that_the_backends_declare_is_wanted(
    monkeypatch: pytest.MonkeyPatch, backend: Any, model: dict[str, bool], block_tokens: int, wanted: str | None
) -> None:
    shape = a_shape(block_tokens=block_tokens)
    config = layers_config(OUR_CONNECTOR, Layer(shape, backend), shape=shape)
    vars(config.model_config).update(model)
    monkeypatch.setattr(vllm.platforms, "current_platform", CUDA)
    assert wanted_layout(config) == wanted


@pytest.mark.parametrize("resolved", [False, True])
@pytest.mark.parametrize(("backend", "block_tokens"), [(FlashMLABackend, 64), (TwoLayouts, 32), (AnyLayout, 16)])
def test_blocks_are_those_of_the_workers_even_where_the_engine_core_does_not_know_them_yet(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture, backend: Any, block_tokens: int, resolved: bool
) -> None:
    """With several workers, they choose their block size in configurations of their own."""
    config = layers_config(OUR_CONNECTOR, Layer(a_shape(), backend))
    config.model_config.use_mla = True
    config.cache_config.user_specified_block_size = False
    config.cache_config.block_size = block_tokens if resolved else CacheConfig.DEFAULT_BLOCK_SIZE
    monkeypatch.setattr(vllm.platforms, "current_platform", CUDA)
    assert wanted_layout(config) == "BLHNC"
    log_layout(config, "BLHNC")
    (line,) = [record.getMessage() for record in log.records if record.levelno == logging.INFO]
    assert line == (
        "PDConnector: the KV cache layout BLHNC keeps all layers of a block together: "
        f"{backend.get_name()} takes it, in blocks of {block_tokens} tokens"
    )


@pytest.mark.parametrize(
    ("backend", "block_tokens", "chosen", "reason"),
    [
        (TwoLayouts, 64, "LBHNC", "keeps each layer apart: kernels of ANY do not take whole blocks of 64 tokens"),
        (AnyLayout, 64, "LBNHC", r"apart: BHLNC was asked for \(ANY takes it, .*\), and vLLM could not use it"),
        (cpu_attn.CPUAttentionBackend, 64, "LBHNC", "apart: .*CPU.* takes LBHNC only"),
    ],
)
def test_a_layout_that_is_not_the_one_hoped_for_is_explained(
    monkeypatch: pytest.MonkeyPatch,
    log: pytest.LogCaptureFixture,
    backend: Any,
    block_tokens: int,
    chosen: str,
    reason: str,
) -> None:
    shape = a_shape(block_tokens=block_tokens)
    monkeypatch.setattr(vllm.platforms, "current_platform", CUDA)
    log_layout(layers_config(OUR_CONNECTOR, Layer(shape, backend), shape=shape), chosen)
    assert re.search(f"the KV cache layout {chosen} .*{reason}", log.text)


def test_the_users_own_choice_and_the_switch_are_told(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    off = OUR_CONNECTOR | {"kv_connector_extra_config": {"cross_layer_blocks": False}}
    log_layout(layers_config(off), "LBHNC")
    assert "apart: cross_layer_blocks is false" in log.text
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BLHNC")
    log_layout(layers_config(OUR_CONNECTOR), "BLHNC")
    assert "together: VLLM_KV_CACHE_LAYOUT is BLHNC" in log.text


def test_on_the_cpu_platform_the_workers_choose(log: pytest.LogCaptureFixture) -> None:
    log_layout(layers_config(OUR_CONNECTOR), "BHLNC")
    assert "together: the best that the workers offer, whose log says why" in log.text


def test_on_an_unknown_platform_nothing_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    config = layers_config(OUR_CONNECTOR, Layer(a_shape(), AnyLayout))
    npu = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: False)
    monkeypatch.setattr(vllm.platforms, "current_platform", npu)
    assert wanted_layout(config) is None
