"""What of vllm-ascend cannot be served is refused by name with the way out; nothing of it concerns other platforms."""

import logging
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pd_connector.vllm import ascend_options
from pd_connector.vllm.ascend_options import (
    check_computes_prompts,
    has_ascend_store,
    log_ascend_release,
    unsupported_sibling,
)
from pd_connector.vllm.ascend_options import unsupported_ascend_option as unsupported
from pd_connector.vllm.engine_config import UnsupportedError
from pd_connector.vllm.releases.installed import TESTED_ASCEND


@pytest.fixture(autouse=True)
def _on_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ascend_options, "device_type", lambda: "npu")


def configured(
    *,
    scheduler: str = "vllm.v1.core.sched.scheduler.Scheduler",
    dtype: str = "auto",
    c8: bool = False,
    indexer: str = "auto",
    hybrid: bool = False,
    prefixes: bool = True,
    **options: object,
) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(is_hybrid=hybrid),
        additional_config=options,
        scheduler_config=SimpleNamespace(scheduler_cls=scheduler),
        cache_config=SimpleNamespace(cache_dtype=dtype, enable_prefix_caching=prefixes),
        quant_config=SimpleNamespace(enable_c8_quant=c8),
        attention_config=SimpleNamespace(indexer_kv_dtype=indexer),
    )


RECOMPUTE = "vllm_ascend.core.recompute_scheduler.AsyncRecomputeScheduler"


def in_multi_connector(*names: str, **settings: object) -> Any:
    """``settings``: of each of the connectors."""
    children = [{"kv_connector": name, "kv_connector_extra_config": settings} for name in names]
    transfer = SimpleNamespace(kv_connector="MultiConnector", kv_connector_extra_config={"connectors": children})
    return SimpleNamespace(kv_transfer_config=transfer)


def test_what_is_usual_is_served() -> None:
    assert unsupported(configured()) == ""
    assert unsupported(configured(dtype="bfloat16", enable_cpu_binding=True)) == ""
    assert unsupported(SimpleNamespace(**{**vars(configured()), "additional_config": None, "quant_config": None})) == ""
    for dtype in ("bf16", "int8", "fp8"):
        assert unsupported(configured(indexer=dtype)) == ""
    for dtype in ("int8", "fp8", "fp8_e4m3"):
        assert unsupported(configured(dtype=dtype)) == ""
    without_types = vars(configured()) | {"attention_config": SimpleNamespace()}  # as in vLLM 0.23
    assert unsupported(SimpleNamespace(**without_types)) == ""
    without_types["cache_config"] = SimpleNamespace(cache_dtype="fp8")
    assert unsupported(SimpleNamespace(**without_types)).startswith("kv_cache_dtype = fp8: ")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            configured(scheduler=RECOMPUTE, finegrained_tp_config={"oproj_tensor_parallel_size": 2}),
            "finegrained_tp_config.oproj_tensor_parallel_size = 2: .* PreemptOffloadConnector, .* set it to 1",
        ),
        (
            configured(scheduler=RECOMPUTE, finegrained_tp_config={"mlp_tensor_parallel_size": 8}),
            "finegrained_tp_config.mlp_tensor_parallel_size = 8: .* PreemptOffloadConnector, .* set it to 1",
        ),
        (configured(enable_kv_nz=True), "enable_kv_nz: it keeps KV caches in a private format .*; start without it"),
        (configured(enable_sparse_sfa_c8=True), "enable_sparse_sfa_c8: .* does not know, .*; start without it"),
        (configured(indexer="mxfp4"), "attention_config.indexer_kv_dtype = mxfp4: .* use auto, bf16, int8 or fp8"),
        (configured(enable_hamming_sparse=True), "enable_hamming_sparse: .* hashes .*; start without it"),
        (
            configured(sparse_kv_offload_config={"enabled": True, "topk_buffer_size": 4096}),
            r"sparse_kv_offload_config.enabled: .* host memory of its own.*; start without it",
        ),
        (
            configured(dtype="mxfp8"),
            "kv_cache_dtype = mxfp8: .*scales; use auto, float16 or bfloat16, or with .* int8 or fp8",
        ),
        (configured(c8=True), "enable_c8_quant: .*scales.*; serve a checkpoint without C8"),
    ],
)
def test_what_cannot_be_served_is_named(config: Any, says: str) -> None:
    assert re.match(says, unsupported(config))


def test_an_option_that_is_off_is_no_reason() -> None:
    assert unsupported(configured(enable_kv_nz=False, enable_sparse_li_c8=False, enable_hamming_sparse=False)) == ""
    assert unsupported(configured(sparse_kv_offload_config={"enabled": False})) == ""


def test_the_recompute_scheduler_may_be_on_unless_it_may_not_compute_again() -> None:
    assert unsupported(configured(scheduler=RECOMPUTE)) == ""
    sizes = {"lmhead_tensor_parallel_size": 16, "oproj_tensor_parallel_size": 1, "mlp_tensor_parallel_size": 0}
    assert unsupported(configured(scheduler=RECOMPUTE, finegrained_tp_config=sizes)) == ""
    assert unsupported(configured(finegrained_tp_config={"mlp_tensor_parallel_size": 2})) == ""


@pytest.mark.parametrize(
    "name", ["MooncakeConnectorV1", "MooncakeLayerwiseConnector", "MooncakeConnectorStoreV1", "PreemptOffloadConnector"]
)
def test_a_connector_of_vllm_ascend_beside_this_one_is_named(name: str) -> None:
    assert unsupported_sibling(in_multi_connector("PDConnector", name)).startswith(f"{name} beside PDConnector: ")


def test_other_connectors_may_be_beside_this_one() -> None:
    assert unsupported_sibling(in_multi_connector("PDConnector", "GreetingConnector")) == ""
    assert unsupported_sibling(in_multi_connector("AscendStoreConnector", "PDConnector")) == ""
    assert unsupported_sibling(SimpleNamespace(kv_transfer_config=None)) == ""
    assert unsupported_sibling(None) == ""


@pytest.mark.parametrize(
    ("names", "there"), [(("PDConnector", "AscendStoreConnector"), True), (("PDConnector", "GreetingConnector"), False)]
)
def test_the_pool_of_vllm_ascend_is_seen_beside_this_connector(
    names: tuple[str, ...], there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.config.get_current_vllm_config_or_none", lambda: in_multi_connector(*names))
    assert has_ascend_store() is there


def test_nothing_of_it_concerns_other_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ascend_options, "device_type", lambda: "cpu")
    assert unsupported(configured(enable_kv_nz=True)) == ""
    assert unsupported_sibling(in_multi_connector("PDConnector", "MooncakeConnectorV1")) == ""


@pytest.mark.parametrize(("installed", "warns"), [*((one, False) for one in TESTED_ASCEND), ("0.27.0", True)])
def test_another_release_is_warned_of(
    installed: str, warns: bool, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ascend_options, "version", lambda _: installed)
    log_ascend_release()
    assert bool(log.messages) is warns
    if warns:
        assert f"vllm-ascend {installed} is not among the releases" in log.messages[0]
        assert ", ".join(TESTED_ASCEND) in log.messages[0]


def test_a_pool_whose_layers_take_turns_in_buffers_is_refused() -> None:
    """A layer by layer mode alone shares nothing."""
    children = ("PDConnector", "AscendStoreConnector")
    assert unsupported_sibling(in_multi_connector(*children, use_layerwise=True)) == ""
    assert unsupported_sibling(in_multi_connector(*children, layerwise_num_shared_buffers=2)) == ""
    told = unsupported_sibling(in_multi_connector(*children, use_layerwise=True, layerwise_num_shared_buffers=2))
    assert told.startswith("layerwise_num_shared_buffers = 2 of AscendStoreConnector: ")
    assert told.endswith("leave layerwise_num_shared_buffers out")


def a_model(impl: str, weight: object, data_parallel: int = 1) -> Any:
    """A loaded model with one layer of attention, which works on up to 256 tokens a step."""
    layer = SimpleNamespace(impl=type(impl, (), {"q_proj": SimpleNamespace(weight=weight)})())
    context = {"layers.0.attn": layer, "layers.0.mlp": SimpleNamespace()}
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=context),
        parallel_config=SimpleNamespace(data_parallel_size=data_parallel),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=256),
    )


@pytest.mark.parametrize(
    "options", [{"enable_balance_scheduling": True}, {"scheduler_config": {"enable_balance_scheduling": True}}]
)
def test_a_scheduler_that_takes_states_for_found_is_refused(options: dict[str, Any]) -> None:
    assert "enable_balance_scheduling" in unsupported(configured(hybrid=True, **options))
    assert not unsupported(configured(hybrid=True, prefixes=False, **options))
    assert not unsupported(configured(**options))


@pytest.mark.parametrize("on_a5", [False, True])
@pytest.mark.parametrize("release", ["0.23", "0.30"])
def test_a_cache_that_prompts_are_not_written_to_is_refused(release: str, on_a5: bool) -> None:
    engine = a_model("AscendMLAImpl", object())
    (layer, _) = engine.compilation_config.static_forward_context.values()
    layer.impl.fa_quant_layer, layer.impl.dtype = True, torch.float8_e4m3fn if on_a5 else torch.int8
    if release == "0.30":
        layer.impl.support_fp8_attention = on_a5
    engine.cache_config = SimpleNamespace(cache_dtype="int8")
    if on_a5:
        check_computes_prompts(engine)
        return
    with pytest.raises(UnsupportedError, match=r"int8: .* layers\.0\.attn .* Start both sides without"):
        check_computes_prompts(engine)


@pytest.mark.parametrize(
    ("options", "way_out"),
    [
        ({"mlapo_keep_prefill_weights": False}, "Add 'mlapo_keep_prefill_weights': true"),
        ({}, "Add 'enable_mlapo': false"),  # of vllm-ascend 0.23
    ],
    ids=["with the option", "without"],
)
def test_a_decode_engine_that_has_dropped_the_weights_for_prompts_is_refused(
    options: dict[str, bool], way_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = SimpleNamespace(AscendConfig=SimpleNamespace(**options))
    monkeypatch.setitem(sys.modules, "vllm_ascend.ascend_config", loaded)
    check_computes_prompts(a_model("AscendMLAImpl", object()))
    check_computes_prompts(a_model("AscendSFAImpl", None))  # computes prompts with others
    with pytest.raises(UnsupportedError, match=rf"layers\.0\.attn .*{way_out}"):
        check_computes_prompts(a_model("AscendMLAImpl", None))


@pytest.mark.parametrize(
    ("data_parallel", "capacity", "asks", "stands_still"),
    [(1, 64, False, False), (8, 256, False, False), (8, 64, True, False), (8, 64, False, True)],
    ids=["one rank", "prompts fit", "ranks ask each other", "ranks choose for themselves"],
)
def test_data_parallel_ranks_that_do_not_meet_while_one_computes_a_prompt_are_refused(
    data_parallel: int, capacity: int, asks: bool, stands_still: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm-ascend's own choice: ``tests/ascend_sim/test_recipes.py``."""
    ways = {False: SimpleNamespace(name="ALLTOALL"), True: SimpleNamespace(name="MC2")}
    utils = SimpleNamespace(should_skip_allreduce_across_dp_group=lambda config: not asks)
    context = SimpleNamespace(
        select_moe_comm_method=lambda tokens, config: ways[tokens <= capacity],
        get_mc2_tokens_capacity=lambda: capacity,
    )
    monkeypatch.setitem(sys.modules, "vllm_ascend.utils", utils)
    monkeypatch.setitem(sys.modules, "vllm_ascend.ascend_forward_context", context)
    engine = a_model("AscendMLAImpl", object(), data_parallel)
    if not stands_still:
        check_computes_prompts(engine)
        return
    with pytest.raises(UnsupportedError, match=r"than 64 tokens a step.*'enable_prefill_mc2': true .* \(256\) to 64"):
        check_computes_prompts(engine)


def test_another_release_s_functions_do_not_end_an_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    utils = SimpleNamespace(should_skip_allreduce_across_dp_group=lambda config: True)
    context = SimpleNamespace(select_moe_comm_method=lambda tokens: None)
    monkeypatch.setitem(sys.modules, "vllm_ascend.utils", utils)
    monkeypatch.setitem(sys.modules, "vllm_ascend.ascend_forward_context", context)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    check_computes_prompts(a_model("AscendMLAImpl", object(), 8))
    assert "cannot tell whether data-parallel ranks go on beside a prompt" in caplog.text
