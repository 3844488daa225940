"""What is read from vLLM's configuration, where no test of a whole connector shows it."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm.platforms

from pd_connector.vllm.engine_config import (
    EngineRole,
    UnsupportedError,
    arithmetic,
    check_one_engine_per_url,
    check_outer_config,
    drafts_late,
    max_blocks_per_step,
)
from tests.support.connector.vllm_engine import a_config


@pytest.mark.parametrize(
    ("block_tokens", "blocks"),
    [
        ([16], 512 + 256 + 4 * 63),  # computed tokens, a begun block for each request, four prompts that are pulled
        ([16, 16], 2 * (512 + 256 + 4 * 63)),
        ([128], 64 + 256 + 4 * 8),
    ],
)
def test_a_step_takes_blocks_for_what_it_computes_and_for_prompts_that_are_pulled(
    block_tokens: list[int], blocks: int
) -> None:
    scheduler = SimpleNamespace(max_num_batched_tokens=8192, max_num_seqs=256)
    config: Any = SimpleNamespace(scheduler_config=scheduler, model_config=SimpleNamespace(max_model_len=1000))
    assert max_blocks_per_step(config, block_tokens) == blocks


def in_parallel(size: int, index: int, *, external: bool) -> Any:
    parallel = SimpleNamespace(data_parallel_size=size, data_parallel_index=index, data_parallel_external_lb=external)
    return SimpleNamespace(parallel_config=parallel)


@pytest.mark.parametrize(("size", "index"), [(2, 0), (2, 1), (1, 1)])
def test_routers_cannot_be_told_of_engines_that_share_a_url(size: int, index: int) -> None:
    with pytest.raises(UnsupportedError, match=f"bootstrap_port: .* engine {index} of several .*--data-parallel-rank"):
        check_one_engine_per_url(in_parallel(size, index, external=False))


@pytest.mark.parametrize(("size", "index", "external"), [(1, 0, False), (2, 0, True), (2, 1, True)])
def test_routers_may_be_told_of_an_engine_with_a_url_of_its_own(size: int, index: int, external: bool) -> None:
    check_one_engine_per_url(in_parallel(size, index, external=external))


@pytest.mark.parametrize(
    ("device", "method", "is_hybrid", "is_late"),
    [
        ("cuda", "eagle", False, True),
        ("npu", "mtp", False, True),
        ("cuda", "ngram", False, False),
        ("cuda", "ngram", True, True),  # its states are moved to their blocks there
        ("cuda", "", True, False),
        ("cpu", "eagle", True, False),
    ],
)
def test_drafts_are_late_where_a_draft_model_runs_behind_the_calls_that_launch_it(
    monkeypatch: pytest.MonkeyPatch, device: str, method: str, is_hybrid: bool, is_late: bool
) -> None:
    monkeypatch.setattr(vllm.platforms.current_platform, "device_type", device)
    speculative = SimpleNamespace(method=method) if method else None
    config: Any = SimpleNamespace(speculative_config=speculative, model_config=SimpleNamespace(is_hybrid=is_hybrid))
    assert drafts_late(config) is is_late


def test_what_an_engine_computes_with_are_its_quantization_and_the_kernels_for_its_device(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = vllm.platforms.current_platform

    def told(capability: tuple[int, int] | None = None, device: str = "cpu", **of_model: Any) -> str:
        monkeypatch.setattr(platform, "get_device_capability", lambda: capability)
        monkeypatch.setattr(platform, "get_device_name", lambda: device)
        config = a_config(model)
        vars(config.model_config).update(of_model)
        return arithmetic(config)

    others = [
        told(),
        told(quantization="fp8"),
        told(quantization="fp8", quantization_config={"ignore": ["lm_head"]}),
        told((9, 0), "NVIDIA H100 PCIe"),
        told((12, 0), "NVIDIA RTX PRO 6000"),
        told(None, "Ascend910B3"),
    ]
    assert len(set(others)) == len(others)
    assert told((9, 0), "NVIDIA H100 PCIe") == told((9, 0), "NVIDIA H200")


@pytest.mark.parametrize(
    ("ours", "outer", "why"),
    [
        (("kv_consumer", "fail"), ("kv_both", "fail"), ""),
        (("kv_consumer", "fail"), ("kv_consumer", "recompute"), ""),
        (("kv_producer", "fail"), ("kv_both", "fail"), ""),
        (("kv_both", "fail"), ("kv_producer", "fail"), "kv_role = kv_both of PDConnector, inside .* kv_producer"),
        (("kv_consumer", "recompute"), ("kv_both", "fail"), "kv_load_failure_policy = recompute of .* = fail"),
    ],
)
def test_inside_multi_connector_the_outer_role_and_policy_count(
    model: Path, monkeypatch: pytest.MonkeyPatch, ours: tuple[str, str], outer: tuple[str, str], why: str
) -> None:
    config = a_config(model, *ours)
    monkeypatch.setattr("vllm.config.get_current_vllm_config_or_none", lambda: a_config(model, *outer))
    assert EngineRole.of(config).recomputes == (outer[1] == "recompute")
    with pytest.raises(UnsupportedError, match=why) if why else nullcontext():
        check_outer_config(config)


def test_an_engine_whose_outer_configuration_is_not_known_goes_by_its_own(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.config.get_current_vllm_config_or_none", lambda: None)
    config = a_config(model, "kv_consumer", "recompute")
    check_outer_config(config)
    assert EngineRole.of(config).recomputes
