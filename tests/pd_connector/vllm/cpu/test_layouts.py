"""Which layouts a CPU worker offers, what the start-up check catches, and that a real model agrees in all of them."""

import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what torch and vLLM deprecate of each other is not ours
    import torch
    import vllm._custom_ops as ops
    import vllm.platforms
    from vllm.config import set_current_vllm_config
    from vllm.distributed.kv_transfer.kv_connector import utils as kv_connector_utils
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.attention.backend import AttentionBackend, MultipleOf
    from vllm.v1.attention.backends import cpu_attn
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout
    from vllm.v1.worker.worker_base import WorkerBase

from pd_connector.vllm.cache_groups import head_order
from pd_connector.vllm.cpu import layout_check, layouts
from pd_connector.vllm.layouts import wanted_layout

OURS = {"kv_connector": "PDConnector", "kv_connector_module_path": "pd_connector"}

cpu_only = pytest.mark.skipif(not vllm.platforms.current_platform.is_cpu(), reason="needs vLLM's CPU kernels")
pytestmark = cpu_only


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


def a_config(
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
        speculative_config=None,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        compilation_config=SimpleNamespace(static_forward_context={str(i): layer for i, layer in enumerate(held)}),
        model_config=SimpleNamespace(dtype=shape.dtype, is_hybrid=False, use_mla=False),
        cache_config=SimpleNamespace(cache_dtype=kv_cache_dtype(shape), block_size=shape.block_tokens),
    )


@pytest.fixture(autouse=True)
def hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerBase, "get_supported_kv_cache_layouts", WorkerBase.get_supported_kv_cache_layouts)
    layouts.register()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.LogCaptureFixture]:
    """Each record once, whether or not vLLM has kept its loggers from propagating to the root."""
    monkeypatch.setattr(layouts.logger, "propagate", False)
    layouts.logger.addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, logger=layouts.logger.name):
        yield caplog
    layouts.logger.removeHandler(caplog.handler)


def asked(config: Any) -> list[str]:
    """What a worker of this configuration answers when the engine core asks for its layouts."""
    answer: list[str] = WorkerBase.get_supported_kv_cache_layouts(SimpleNamespace(vllm_config=config))
    return answer


# ---- what is offered, to whom


def test_our_connector_is_offered_the_block_outer_layouts_first(log: pytest.LogCaptureFixture) -> None:
    assert asked(a_config(OURS)) == ["BHLNC", "BLHNC", "LBHNC"]
    assert "work in BHLNC, BLHNC" in log.text


def test_our_connector_inside_a_multi_connector_is_found() -> None:
    children = [{"kv_connector": "ExampleConnector"}, OURS]
    config = a_config({"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": children}})
    assert asked(config) == ["BHLNC", "BLHNC", "LBHNC"]


@pytest.mark.parametrize(
    "connector",
    [
        None,
        {"kv_connector": "ExampleConnector"},
        {"kv_connector": "PDConnector"},
        {"kv_connector": "PDConnector", "kv_connector_module_path": "pd_connector_of_others"},
        {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [{"kv_connector": "Other"}]}},
        OURS | {"kv_connector_extra_config": {"cross_layer_blocks": False}},
    ],
)
def test_without_our_connector_or_with_the_switch_off_nothing_changes(
    connector: dict[str, Any] | None, log: pytest.LogCaptureFixture
) -> None:
    config = a_config(connector)
    assert asked(config) == ["LBHNC"]
    assert wanted_layout(config) is None
    assert log.text == ""


def test_two_workers_of_one_process_get_an_answer_each() -> None:
    ours, other = a_config(OURS), a_config(None)
    assert asked(other) == ["LBHNC"]
    assert asked(ours)[0] == "BHLNC"
    assert asked(other) == ["LBHNC"]


def test_the_backend_itself_still_declares_what_vllm_says() -> None:
    asked(a_config(OURS))
    assert cpu_attn.CPUAttentionBackend.supported_kv_cache_layouts() == (KVCacheLayout.LBHNC,)


def test_a_backend_that_is_not_known_keeps_its_own_layouts(log: pytest.LogCaptureFixture) -> None:
    ours, foreign = Layer(a_shape(), cpu_attn.CPUAttentionBackend), Layer(a_shape(), CPUMLABackend)
    assert asked(a_config(OURS, ours, foreign)) == ["LBHNC"]
    assert "CPU_MLA" in log.text


def test_registering_twice_hooks_once() -> None:
    before = WorkerBase.get_supported_kv_cache_layouts
    layouts.register()
    assert WorkerBase.get_supported_kv_cache_layouts is before


def test_importing_the_plugin_loads_neither_torch_nor_vllm() -> None:
    code = "import pd_connector.vllm.cpu.layouts, sys; print(sorted({'torch', 'vllm', 'numpy'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


# ---- the check, on the real kernels


@pytest.mark.parametrize(
    "shape",
    [
        a_shape(),
        a_shape(heads=7, kv_heads=1, head_size=128, dtype=torch.bfloat16),
        a_shape(heads=4, kv_heads=4, head_size=80, dtype=torch.float16),
        a_shape(block_tokens=128, head_size=64, dtype=torch.bfloat16),
    ],
    ids=str,
)
def test_the_real_kernels_work_in_block_outer_layouts(shape: layout_check.CacheShape) -> None:
    assert asked(a_config(OURS, shape=shape))[:2] == ["BHLNC", "BLHNC"]


def test_layers_of_different_shapes_and_windows_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    difference = layout_check.difference

    def record(kernels: Any, shape: layout_check.CacheShape, order: tuple[int, ...]) -> str:
        checked.append(shape)
        return difference(kernels, shape, order)

    monkeypatch.setattr(layout_check, "difference", record)
    shapes = [a_shape(), a_shape(head_size=64)]
    layers = [Layer(shape, cpu_attn.CPUAttentionBackend, window=40) for shape in (*shapes, *shapes)]
    assert asked(a_config(OURS, *layers))[0] == "BHLNC"
    assert checked == shapes * 2  # each shape once a layout


def ignore_stride(cache: Any, axis: int) -> Any:
    """The cache as a kernel sees it that takes block (0) or head (1) to be dense."""
    _, heads, rows, columns = cache.shape  # K or V alone: its rows are half of the page
    strides = list(cache.stride())
    strides[axis] = (heads if axis == 0 else 1) * 2 * rows * columns
    return cache.as_strided(cache.shape, strides)


def sabotage(monkeypatch: pytest.MonkeyPatch, axis: int, *, writing: bool, attention: bool) -> None:
    write, attend = ops.cpu_attn_reshape_and_cache, ops.cpu_attention_with_kv_cache

    def bad_write(key: Any, value: Any, key_cache: Any, value_cache: Any, *rest: Any, **more: Any) -> None:
        write(key, value, ignore_stride(key_cache, axis), ignore_stride(value_cache, axis), *rest, **more)

    def bad_attend(*, key_cache: Any, value_cache: Any, **more: Any) -> None:
        attend(key_cache=ignore_stride(key_cache, axis), value_cache=ignore_stride(value_cache, axis), **more)

    if writing:
        monkeypatch.setattr(ops, "cpu_attn_reshape_and_cache", bad_write)
    if attention:
        monkeypatch.setattr(ops, "cpu_attention_with_kv_cache", bad_attend)


@pytest.mark.parametrize(
    ("writing", "attention", "found"),
    [
        (True, False, "after writing in step 0"),
        (False, True, "the attention output of layer 0 in step 0"),
        (True, True, "after writing in step 0"),
    ],
)
def test_a_kernel_that_ignores_the_block_stride_is_caught(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture, writing: bool, attention: bool, found: str
) -> None:
    sabotage(monkeypatch, 0, writing=writing, attention=attention)
    assert asked(a_config(OURS)) == ["LBHNC"]
    left_out = [record.getMessage() for record in log.records if "left out" in record.getMessage()]
    assert [line.split()[4] for line in left_out] == ["BHLNC", "BLHNC"]
    assert all(found in line and "head size 32" in line and "Using LBHNC instead" in line for line in left_out)


def test_only_the_layout_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
    sabotage(monkeypatch, 1, writing=True, attention=True)  # heads are dense in BLHNC, not in BHLNC
    assert asked(a_config(OURS)) == ["BLHNC", "LBHNC"]
    assert "KV cache layout BHLNC is left out" in log.text
    assert "Using BLHNC instead" in log.text


def test_a_kernel_that_refuses_the_view_is_left_out(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    write = ops.cpu_attn_reshape_and_cache

    def picky(key: Any, value: Any, key_cache: Any, *rest: Any, **more: Any) -> None:
        if key_cache.stride(0) != 2 * key_cache.shape[1] * key_cache[0, 0].numel():
            raise RuntimeError("view size is not compatible")
        write(key, value, key_cache, *rest, **more)

    monkeypatch.setattr(ops, "cpu_attn_reshape_and_cache", picky)
    assert asked(a_config(OURS)) == ["LBHNC"]
    assert "writing raises RuntimeError: view size is not compatible" in log.text


def test_attention_that_writes_to_the_cache_is_caught(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    attend = ops.cpu_attention_with_kv_cache

    def scribbling(*, query: Any, key_cache: Any, **more: Any) -> None:
        attend(query=query, key_cache=key_cache, **more)
        dense = key_cache.stride(0) == 2 * key_cache.shape[1] * key_cache[0, 0].numel()
        if len(query) == 2 and not dense:  # in the last step, where no later check can notice
            key_cache[4] = 0  # a block of nobody

    monkeypatch.setattr(ops, "cpu_attention_with_kv_cache", scribbling)
    assert asked(a_config(OURS)) == ["LBHNC"]
    assert "attention changed the cache" in log.text


# ---- a vLLM whose internals differ


def test_a_missing_private_name_is_named_and_the_server_starts(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    config = a_config(OURS)
    monkeypatch.delattr(cpu_attn, "CPUAttentionMetadata")
    assert asked(config) == ["LBHNC"]
    [record] = log.records
    assert record.levelno == logging.WARNING
    assert "CPUAttentionMetadata" in record.getMessage()
    assert "LBHNC" in record.getMessage()


def test_a_worker_that_is_asked_otherwise_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    config = a_config(OURS)
    monkeypatch.delattr(WorkerBase, "get_supported_kv_cache_layouts")
    layouts.register()
    assert log.text == ""  # whoever does not use the connector need not know
    assert wanted_layout(config) is None
    assert "get_supported_kv_cache_layouts" in log.text


def test_a_plugin_that_was_not_loaded_is_named(monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
    config = a_config(OURS)
    monkeypatch.setattr(WorkerBase, "get_supported_kv_cache_layouts", kv_connector_utils.get_current_attn_backends)
    assert wanted_layout(config) is None
    assert "pd_connector_cpu_layouts" in log.text
    assert "VLLM_PLUGINS" in log.text


# ---- what the connector asks for


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
    config = a_config(OURS, Layer(shape, backend), shape=shape)
    vars(config.model_config).update(model)
    cuda = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: True)
    monkeypatch.setattr(vllm.platforms, "current_platform", cuda)
    assert wanted_layout(config) == wanted


def test_on_an_unknown_platform_nothing_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    config = a_config(OURS)
    npu = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: False)
    monkeypatch.setattr(vllm.platforms, "current_platform", npu)
    assert wanted_layout(config) is None


# ---- how the kernels order a block


@pytest.mark.parametrize("head_size", [64, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_order_that_is_found_is_where_the_kernels_put_each_item(head_size: int, dtype: torch.dtype) -> None:
    shape = a_shape(kv_heads=2, head_size=head_size, dtype=dtype)
    order = head_order(a_config(OURS, shape=shape), shape.block_tokens, head_size, dtype)
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
        head_order(a_config(OURS), 32, 64, torch.float32)


# ---- a real model

#: Runs several engines in one process: the first without our connector, the others with it.
ENGINES = """
import json, os, sys
import pd_connector
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from pd_connector.layouts import wanted_layout


class PDConnector(KVConnectorBase_V1, SupportsHMA):
    '''Moves nothing: only the layout is asked for.'''

    get_required_kvcache_layout = staticmethod(wanted_layout)

    def nothing(self, *args, **kwargs):
        return None

    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = update_state_after_alloc = nothing

    def get_num_new_matched_tokens(self, request, computed):
        return 0, False

    def build_connector_meta(self, scheduler_output):
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request, block_ids):
        return False, None


pd_connector.PDConnector = PDConnector
prompts = [{"prompt_token_ids": [(7 * i + 3 * j * j) % 500 + 3 for i in range(n)]} for j, n in enumerate((40, 150, 77))]
sampling = SamplingParams(max_tokens=12, temperature=0, logprobs=3, ignore_eos=True)
answers = []
for forced in ("", "default", "BLHNC", "LBHNC"):
    os.environ.pop("VLLM_KV_CACHE_LAYOUT", None)
    if forced.isupper():
        os.environ["VLLM_KV_CACHE_LAYOUT"] = forced
    ours = dict(kv_connector="PDConnector", kv_connector_module_path="pd_connector", kv_role="kv_both")
    llm = LLM(
        model=sys.argv[1], dtype="float32", enforce_eager=True, block_size=32, max_model_len=256,
        skip_tokenizer_init=True, kv_cache_memory_bytes=8 << 20,
        kv_transfer_config=KVTransferConfig(**ours) if forced else None,
    )
    outputs = [output.outputs[0] for output in llm.generate(prompts, sampling, use_tqdm=False)]
    answers.append({
        "layout": llm.llm_engine.vllm_config.cache_config.kv_cache_layout,
        "tokens": [list(output.token_ids) for output in outputs],
        "logprobs": [[[(k, v.logprob) for k, v in step.items()] for step in output.logprobs] for output in outputs],
    })
    del llm
json.dump(answers, open(sys.argv[2], "w"))
"""

#: Untied embeddings and a wide initialisation: the tokens depend on every block.
MODEL = """
import sys
import torch, transformers
torch.manual_seed(0)
sizes = dict(vocab_size=512, hidden_size=256, intermediate_size=512, num_attention_heads=8, num_key_value_heads=4,
             head_dim=32, tie_word_embeddings=False, initializer_range=0.15, max_position_embeddings=512)
if sys.argv[2] == "full":
    config = transformers.Qwen3Config(num_hidden_layers=4, **sizes)
    model = transformers.Qwen3ForCausalLM(config)
else:
    config = transformers.Gemma3TextConfig(num_hidden_layers=6, sliding_window_pattern=3, sliding_window=128,
                                           query_pre_attn_scalar=32, **sizes)
    model = transformers.Gemma3ForCausalLM(config)
model.save_pretrained(sys.argv[1])
"""


def run_python(code: str, *arguments: str) -> str:
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    environment.pop("VLLM_KV_CACHE_LAYOUT", None)
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.mark.e2e
@pytest.mark.parametrize("attention", ["full", pytest.param("sliding window and full", marks=pytest.mark.slow)])
def test_a_model_gives_the_same_tokens_and_logprobs_in_every_layout(tmp_path: Path, attention: str) -> None:
    run_python(MODEL, str(tmp_path / "model"), attention)
    output = run_python(ENGINES, str(tmp_path / "model"), str(tmp_path / "answers.json"))
    plain, *others = json.loads((tmp_path / "answers.json").read_text())
    assert [answer.pop("layout") for answer in (plain, *others)] == ["LBHNC", "BHLNC", "BLHNC", "LBHNC"]
    assert all(answer == plain for answer in others)
    assert all(len(set(tokens)) > 3 for tokens in plain["tokens"])  # not one token over and over
    assert output.count("work in BHLNC, BLHNC") == 3  # once for each engine with the connector
    assert "does not satisfy every supported set" not in output
