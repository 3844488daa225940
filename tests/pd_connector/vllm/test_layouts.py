"""Which layout the connector asks vLLM for: the best that the platform's backends declare.

Covers: pd_connector.vllm.layout_switch.
"""

import logging
import pickle
import re
import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.releases import INSTALLED, module_needs

if INSTALLED < (0, 30):
    module_needs((0, 30), "layouts that connectors ask for")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what torch and vLLM deprecate of each other is not ours
    import torch
    import vllm.platforms
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.utils import get_kv_connector_cache_layout
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.platforms.interface import Platform
    from vllm.v1.attention.backend import AttentionBackend, MultipleOf
    from vllm.v1.attention.backends import cpu_attn
    from vllm.v1.attention.backends.mla import flashmla_sparse
    from vllm.v1.attention.backends.mla.flashmla import FlashMLABackend
    from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend
    from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout, KVQuantMode, MLAAttentionSpec
    from vllm.v1.serial_utils import run_method
    from vllm.v1.worker.utils import select_common_block_size
    from vllm.v1.worker.worker_base import WorkerBase

from pd_connector.vllm import layouts
from pd_connector.vllm.layouts import log_layout, wanted_layout, worker_layers
from pd_connector.vllm.releases.release_030 import Release030
from pd_connector.vllm.releases.release_031 import Release031
from tests.support.connector.cpu_layers import OUR_CONNECTOR, cpu_only, layers_config
from tests.support.releases import since

pytestmark = cpu_only


class CUDA(Platform):  # type: ignore[misc]  # vLLM is untyped here
    """A platform that this machine does not have."""

    device_type = "cuda"
    is_cuda = classmethod(lambda cls: True)
    is_device_capability_family = classmethod(lambda cls, family, device_id=0: family == 100)


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


class CudaLayer(AttentionLayerBase):  # type: ignore[misc]
    """An attention layer, as far as vLLM asks it when it plans its cache; ``spec`` is None if it keeps nothing."""

    def __init__(self, backend: Any, spec: Any, shares: str | None = None) -> None:
        self.backend, self.spec, self.kv_sharing_target_layer_name = backend, spec, shares

    def get_attn_backend(self) -> Any:
        return self.backend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        return self.spec


class Worker(WorkerBase):  # type: ignore[misc]
    """A worker with a model of these layers, named by their places."""

    def __init__(self, *layers: CudaLayer) -> None:
        self.vllm_config = layers_config(OUR_CONNECTOR, *layers)

    def get_kv_cache_spec(self) -> dict[str, Any]:
        layers = self.vllm_config.compilation_config.static_forward_context
        return {name: layer.spec for name, layer in layers.items() if layer.spec is not None}


class Core(EngineCore):  # type: ignore[misc]
    """vLLM's engine core while it starts several workers: its own configuration has no layers."""

    def __init__(self, *workers: Worker) -> None:
        self.workers = workers
        self.config = self.vllm_config = layers_config(OUR_CONNECTOR)
        self.config.compilation_config.static_forward_context = {}

    def collective_rpc(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call the workers as vLLM's MultiprocExecutor does: all that passes is pickled."""
        sent = pickle.dumps(method)
        return [pickle.loads(pickle.dumps(run_method(worker, sent, (), {}))) for worker in self.workers]

    def wanted(self) -> str | None:
        return wanted_layout(self.config)

    def asked(self) -> str | None:
        layout: str | None = get_kv_connector_cache_layout(self.config)
        return layout

    def log(self, chosen: str | None) -> None:
        log_layout(self.config, chosen)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm.platforms, "current_platform", CUDA)
    monkeypatch.setattr(flashmla_sparse, "current_platform", CUDA)


def own(log: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What the module says: without what the process's attention backends say, if another test has replaced them."""
    return [record for record in log.records if record.name.endswith("pd_connector.vllm.layouts")]


def dense(tokens: int, heads: int = 2) -> Any:
    return FullAttentionSpec(block_size=tokens, num_kv_heads=heads, head_size=64, dtype=torch.bfloat16)


def latent(tokens: int, quantized: bool = False) -> Any:
    """The cache of DeepSeek's attention: with fp8_ds_mla, in rows of 656 bytes."""
    values: dict[str, Any] = {"head_size": 576, "dtype": torch.bfloat16}
    if quantized:
        values = {"head_size": 656, "dtype": torch.uint8, "cache_dtype_str": "fp8_ds_mla"}
        values["kv_quant_mode"] = KVQuantMode.FP8_PER_TENSOR
    return MLAAttentionSpec(block_size=tokens, num_kv_heads=1, **values)


def index_keys(tokens: int) -> Any:
    """The cache of DeepSeek-V3.2's indexer."""
    return MLAAttentionSpec(block_size=tokens, num_kv_heads=1, head_size=132, dtype=torch.uint8)


def is_split(layer: CudaLayer) -> bool:
    """Whether vLLM splits a block of the layer into kernel blocks, which it refuses to do in a block-outer layout."""
    specs = ([layer.spec],) if INSTALLED >= (0, 32) else ()
    tokens: int = layer.spec.block_size
    return bool(select_common_block_size(tokens, [layer.backend], *specs) != tokens)


@pytest.mark.parametrize(
    ("layers", "wanted"),
    [
        ([CudaLayer(AnyLayout, dense(64))], "BHLNC"),
        ([CudaLayer(AnyLayout, dense(64)), CudaLayer(AnyLayout, None)], "BHLNC"),
        ([CudaLayer(AnyLayout, dense(64)), CudaLayer(AnyLayout, dense(64, heads=4))], "BLHNC"),
        ([CudaLayer(FlashMLABackend, latent(64))], "BLHNC"),
        ([CudaLayer(TwoLayouts, dense(32))], "BLHNC"),
        ([CudaLayer(TwoLayouts, dense(64))], None),
        ([CudaLayer(TwoLayouts, dense(32)), CudaLayer(AnyLayout, dense(32))], "BLHNC"),
        ([CudaLayer(cpu_attn.CPUAttentionBackend, dense(64))], None),
    ],
)
@pytest.mark.usefixtures("cuda")
def test_on_cuda_the_best_layout_that_all_layers_take_is_wanted(layers: list[CudaLayer], wanted: str | None) -> None:
    assert Core(Worker(*layers)).wanted() == wanted
    assert Core(*(Worker(layer) for layer in layers)).wanted() == wanted, "on stages of a pipeline"
    if any(layer.spec is not None and is_split(layer) for layer in layers):
        assert wanted is None


@since((0, 32), "sparse kernels whose blocks it aligns")
@pytest.mark.parametrize(("tokens", "wanted"), [(64, "BLHNC"), (128, None), (256, None)])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.usefixtures("cuda")
def test_layers_that_only_the_workers_know_keep_their_blocks_whole(
    log: pytest.LogCaptureFixture, tokens: int, quantized: bool, wanted: str | None
) -> None:
    """DeepSeek-V3.2's indexer takes blocks of 64 tokens, whatever its attention takes."""
    attention = CudaLayer(FlashMLASparseBackend, latent(tokens, quantized))
    indexer = CudaLayer(DeepseekV32IndexerBackend, index_keys(tokens))
    core = Core(*[Worker(attention, indexer)] * 2)
    assert core.wanted() == wanted
    assert (wanted is None) == is_split(indexer)
    core.log(wanted or "LBNHC")
    (line,) = (record.getMessage() for record in own(log))
    if wanted is None:
        split = f"kernels of DEEPSEEK_V32_INDEXER do not take whole blocks of {tokens} tokens"
        assert line.endswith(f"keeps each layer apart: {split}: try another --block-size or --attention-backend")
    else:
        assert line.endswith("together: DEEPSEEK_V32_INDEXER, FLASHMLA_SPARSE takes it")


@since((0, 32), "kernels whose block sizes depend on the cache")
@pytest.mark.parametrize(("quantized", "wanted"), [(False, "BLHNC"), (True, None)])
@pytest.mark.usefixtures("cuda")
def test_block_sizes_are_those_of_the_layers_own_cache(quantized: bool, wanted: str | None) -> None:
    """On SM100, FlashMLA's sparse kernels take quantized caches in blocks of 64 tokens, and others in multiples."""
    layer = CudaLayer(FlashMLASparseBackend, latent(128, quantized))
    assert Core(Worker(layer)).wanted() == wanted
    assert is_split(layer) == quantized


@pytest.mark.parametrize("of", [Release030(), Release031()], ids=lambda of: type(of).__name__)
@pytest.mark.usefixtures("cuda")
def test_rows_that_are_counted_over_blocks_must_be_aligned(monkeypatch: pytest.MonkeyPatch, of: Release031) -> None:
    """Sparse kernels see a layer's cache as rows. Before 0.32, vLLM lays other layers' bytes between any two blocks."""
    monkeypatch.setattr(layouts, "current", lambda: of)
    for backend, wanted in ((FlashMLASparseBackend, None), (FlashMLABackend, "BLHNC")):
        assert Core(Worker(CudaLayer(backend, latent(64)))).wanted() == wanted
    aligned: Any = SimpleNamespace(block_stride_alignment=1152)
    assert of.aligns_rows(FlashMLASparseBackend, aligned)


@pytest.mark.usefixtures("cuda")
def test_a_layer_that_reads_anothers_cache_must_take_its_blocks_too() -> None:
    layers = CudaLayer(AnyLayout, dense(64)), CudaLayer(TwoLayouts, None, shares="0")
    assert Core(Worker(*layers)).wanted() is None
    assert Core(Worker(layers[0])).wanted() == "BHLNC"


@pytest.mark.parametrize(
    ("beside", "asked"),
    [("OffloadingConnector", "LBHNC"), ("MooncakeConnector", "LBHNC"), ("MooncakeStoreConnector", "BHLNC")],
)
@pytest.mark.usefixtures("cuda")
def test_beside_a_connector_that_asks_for_a_layout_none_is_wanted(beside: str, asked: str) -> None:
    """MultiConnector does not start with two layouts."""
    core = Core(Worker(CudaLayer(AnyLayout, dense(64))))
    config = core.config
    config.attention_config, config.model_config.use_mla = SimpleNamespace(hisparse_config=None), False
    both = {"kv_role": "kv_both", "kv_buffer_device": "cuda"}
    children = [OUR_CONNECTOR | both, {"kv_connector": beside} | both]
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_buffer_device="cuda",
        kv_connector_extra_config={"connectors": children},
    )  # fmt: skip
    assert core.asked() == asked


class Broken(Worker):
    def get_kv_cache_spec(self) -> dict[str, Any]:
        raise RuntimeError("no model")


@pytest.mark.usefixtures("cuda")
def test_a_worker_answers_whatever_happens() -> None:
    """Behind its error, vLLM would take the answers of the other workers for those to its next question."""
    assert worker_layers(Broken(CudaLayer(AnyLayout, dense(64)))) == "RuntimeError: no model"


@pytest.mark.parametrize("workers", [(), (Worker, Broken)])
@pytest.mark.usefixtures("cuda")
def test_where_the_layers_cannot_be_known_nothing_is_wanted(
    log: pytest.LogCaptureFixture, workers: Sequence[type[Worker]]
) -> None:
    core = Core(*(worker(CudaLayer(AnyLayout, dense(64))) for worker in workers))
    assert (core.wanted() if workers else wanted_layout(core.config)) is None
    (record,) = own(log)
    assert record.levelno == logging.WARNING
    told = "RuntimeError: no model" if workers else "no engine core is being constructed"
    assert re.search(f"cross-layer KV blocks are off: cannot tell the backends' layouts: {told}", record.getMessage())


@pytest.mark.parametrize(
    ("layer", "chosen", "reason"),
    [
        (CudaLayer(TwoLayouts, dense(64)), "LBHNC", "apart: kernels of ANY do not take whole blocks of 64 tokens"),
        (CudaLayer(AnyLayout, dense(64)), "LBNHC", r"apart: BHLNC was asked for \(.*\), and vLLM could not use it"),
        (CudaLayer(cpu_attn.CPUAttentionBackend, dense(64)), "LBHNC", "apart: .*CPU.* takes LBHNC only"),
        (CudaLayer(AnyLayout, dense(64)), "BHLNC", "together: ANY takes it"),
    ],
)
@pytest.mark.usefixtures("cuda")
def test_the_layout_that_was_chosen_is_explained(
    log: pytest.LogCaptureFixture, layer: CudaLayer, chosen: str, reason: str
) -> None:
    Core(Worker(layer)).log(chosen)
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
    npu = SimpleNamespace(device_type="", is_cuda=lambda: False)
    monkeypatch.setattr(vllm.platforms, "current_platform", npu)
    assert Core(Worker(CudaLayer(AnyLayout, dense(64)))).wanted() is None
