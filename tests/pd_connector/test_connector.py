"""``PDConnector`` as vLLM meets it: what it implements and exports, and which settings it refuses.

Covers: pd_connector, pd_connector.aliases.
"""

import inspect
import logging
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import CrossAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec

import pd_connector
from pd_connector.aliases import NixlConnector
from pd_connector.config import ConfigError
from pd_connector.connector import PDConnector
from pd_connector.vllm import ascend_options, engine_config
from pd_connector.vllm.engine_config import UnsupportedError, check_supported
from tests.support.connector.requests import a_decode_request
from tests.support.connector.vllm_engine import CACHES, SPEC, a_config, transfer_config
from tests.support.releases import INSTALLED, since


def test_every_abstract_method_of_vllms_base_is_implemented() -> None:
    assert PDConnector.__abstractmethods__ == frozenset()
    assert issubclass(PDConnector, KVConnectorBase_V1)
    assert issubclass(PDConnector, SupportsHMA)


def test_every_method_that_is_overridden_takes_what_vllm_passes() -> None:
    bases = (KVConnectorBase_V1, SupportsHMA)
    for name, method in vars(PDConnector).items():
        base = next((getattr(base, name) for base in bases if hasattr(base, name)), None)
        if name.startswith("_") or base is None or not callable(base):
            continue
        ours = inspect.signature(getattr(method, "__func__", method)).parameters
        theirs = inspect.signature(getattr(base, "__func__", base)).parameters
        assert list(ours) == list(theirs), name


def test_vllm_finds_the_connector_by_its_name() -> None:
    assert KVConnectorFactory.get_connector_class(transfer_config()) is PDConnector


def test_vllm_finds_the_connector_under_the_name_that_routers_look_for() -> None:
    """vLLM has a connector of that name itself."""
    config = transfer_config()
    config.kv_connector, config.kv_connector_module_path = "NixlConnector", "pd_connector.aliases"
    assert KVConnectorFactory.get_connector_class(config) is NixlConnector is PDConnector
    config.kv_connector_module_path = None
    assert KVConnectorFactory.get_connector_class(config) is not PDConnector


def test_vllms_own_offloading_connector_in_the_place_of_this_one_is_named() -> None:
    """vLLM exchanges the name, and leaves the path of the module."""
    config = transfer_config()
    offloading = SimpleNamespace(kv_offloading_size=4.0, kv_offloading_backend="native")
    engine: Any = SimpleNamespace(cache_config=offloading, kv_transfer_config=config)
    VllmConfig._post_init_kv_transfer_config(engine)
    with pytest.raises(Exception, match=config.kv_connector or "") as refused:
        KVConnectorFactory.get_connector_class(config)
    assert "--kv-offloading-size puts OffloadingConnector in the place of PDConnector" in str(refused.value.__cause__)


def test_one_name_is_exported() -> None:
    assert pd_connector.__all__ == ["PDConnector"]
    assert pd_connector.PDConnector is PDConnector
    with pytest.raises(AttributeError, match="module 'pd_connector' has no attribute 'Connector'"):
        _ = pd_connector.Connector


def test_importing_the_package_loads_neither_torch_nor_vllm() -> None:
    """vLLM loads the package's plugin in all of its processes."""
    script = (
        "import sys, pd_connector, pd_connector.vllm.plugin\n"
        "print([name for name in ('torch', 'vllm', 'mooncake', 'zmq', 'numpy') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.strip() == "[]"


# What is refused, and what is opened


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_an_unknown_setting_is_refused_by_the_constructor(model: Path, role: KVConnectorRole) -> None:
    with pytest.raises(ConfigError, match="unknown key 'lease_ttl', did you mean 'lease_ttl_s'"):
        PDConnector(a_config(model, lease_ttl=1), role, CACHES)


@pytest.mark.parametrize("name", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallelism_is_refused_where_vllm_has_none(model: Path, name: str) -> None:
    if not current_platform.is_cpu():
        pytest.skip("vLLM's files alone have no platform")
    config = a_config(model)
    setattr(config.parallel_config, name, 2)
    with pytest.raises(UnsupportedError, match=f"{name} = 2: vLLM's CPU attention .* set it to 1"):
        PDConnector(config, KVConnectorRole.SCHEDULER, CACHES)


@pytest.mark.parametrize(
    ("sizes", "role", "message"),
    [
        ((2, 1), "kv_both", ""),
        ((1, 2), "kv_producer", ""),
        ((2, 2), "kv_producer", ""),
        ((1, 2), "kv_both", "prefill_context_parallel_size = 2: .* on prefill engines only; start with kv_role"),
    ],
)
def test_context_parallelism_is_served_on_devices(
    model: Path, sizes: tuple[int, int], role: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(current_platform), "device_type", "npu")
    config = a_config(model, role)
    parallel = config.parallel_config
    parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size = sizes
    if INSTALLED < (0, 30):
        message = "use vLLM 0.30 or later"
    with pytest.raises(UnsupportedError, match=message) if message else nullcontext():
        engine_config.check_supported(config)


@pytest.mark.parametrize(("cache_dtype", "refused"), [("fp8", True), ("fp8_e5m2", True), ("auto", False)])
def test_scales_of_a_quantised_cache_that_are_found_on_the_fly_are_refused(
    model: Path, cache_dtype: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option of vLLM 0.23, whose configuration has it among the cache's."""
    config = a_config(model)
    monkeypatch.setattr(
        config, "cache_config", SimpleNamespace(cache_dtype=cache_dtype, calculate_kv_scales=True), raising=False
    )
    with pytest.raises(UnsupportedError, match=r"^calculate_kv_scales: ") if refused else nullcontext():
        engine_config.check_supported(config)


@pytest.mark.parametrize("is_on", [True, False])
def test_an_engine_that_forgets_what_workers_have_reported_is_refused(
    model: Path, is_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option of vLLM 0.32: after a fault, it drops the outputs of steps, and aborts all requests."""
    config = a_config(model)
    monkeypatch.setattr(config.parallel_config, "enable_fault_tolerance", is_on, raising=False)
    with pytest.raises(UnsupportedError, match=r"^enable_fault_tolerance: .*restarted") if is_on else nullcontext():
        engine_config.check_supported(config)


def test_ranks_with_a_scheduler_each_are_refused(model: Path) -> None:
    """Each scheduler would wait for the handshakes of all workers for ever."""
    config = a_config(model)
    config.parallel_config.distributed_executor_backend = "external_launcher"
    engine_config.check_supported(config)
    config.parallel_config.tensor_parallel_size = 2
    with pytest.raises(UnsupportedError, match=r"external_launcher: .* one worker of 2; use mp or ray, or one rank"):
        engine_config.check_supported(config)


@pytest.mark.parametrize(("stages", "switch", "refused"), [(2, False, True), (1, False, False), (2, True, False)])
def test_ray_with_stages_whose_reports_it_drops_is_refused(
    model: Path, stages: int, switch: bool, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", switch, raising=False)
    config = a_config(model)
    config.parallel_config.use_ray, config.parallel_config.pipeline_parallel_size = True, stages
    match = "VLLM_USE_RAY_V2_EXECUTOR_BACKEND = 0: .* unset it"
    with pytest.raises(UnsupportedError, match=match) if refused else nullcontext():
        engine_config.check_supported(config)


@pytest.fixture
def on_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What vllm-ascend's options and release are judged by."""
    monkeypatch.setattr(ascend_options, "device_type", lambda: "npu")


def an_ascend_config(model: Path, **options: object) -> Any:
    config = a_config(model)
    config.additional_config, config.quant_config = options, None
    config.scheduler_config = SimpleNamespace(scheduler_cls="vllm.v1.core.sched.scheduler.Scheduler")
    return config


@pytest.mark.usefixtures("on_npu")
@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_an_option_of_vllm_ascend_is_refused_by_the_constructor(model: Path, role: KVConnectorRole) -> None:
    with pytest.raises(UnsupportedError, match="enable_kv_nz: it keeps KV caches in a private format"):
        PDConnector(an_ascend_config(model, enable_kv_nz=True), role, CACHES)


@pytest.mark.usefixtures("on_npu")
def test_a_release_of_vllm_ascend_that_is_not_tested_is_warned_of_by_the_engine_core(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ascend_options, "version", lambda _: "0.27.0")
    monkeypatch.setattr(ascend_options.logger, "handlers", [caplog.handler])
    PDConnector(an_ascend_config(model), KVConnectorRole.SCHEDULER, CACHES).shutdown()
    assert any("vllm-ascend 0.27.0 is not among the releases" in message for message in caplog.messages)


COMPRESSED: dict[str, Any] = {"tokens_per_state" if INSTALLED >= (0, 30) else "compress_ratio": 5}


@pytest.mark.parametrize(
    "spec",
    [
        MLAAttentionSpec(32, num_kv_heads=1, head_size=64, dtype=SPEC.dtype, **COMPRESSED),
        CrossAttentionSpec(32, num_kv_heads=2, head_size=64, dtype=SPEC.dtype),
    ],
)
def test_a_cache_that_is_not_served_is_refused_in_the_engine_core(model: Path, spec: Any) -> None:
    caches = KVCacheConfig(8, [], [*CACHES.kv_cache_groups, KVCacheGroupSpec(["l2"], spec)])
    with pytest.raises(UnsupportedError, match="the KV cache of layer 'l2' is a"):
        PDConnector(a_config(model), KVConnectorRole.SCHEDULER, caches)


@since((0, 30), "blocks that it zeroes, unless a connector says that it writes them,")
def test_vllm_leaves_new_blocks_of_every_group_as_they_are_for_pulls_and_loads(model: Path) -> None:
    """Zeroing them would race with what writes them. All groups of what is served can be written."""
    from vllm.v1.kv_cache_interface import SlidingWindowSpec, replace_as  # noqa: PLC0415  not in all releases

    windowed = replace_as(SPEC, SlidingWindowSpec, drop=("attention_chunk_size", "non_causal"), sliding_window=64)
    caches = KVCacheConfig(8, [], [*CACHES.kv_cache_groups, KVCacheGroupSpec(["l2"], windowed)])
    connector = PDConnector(a_config(model, "kv_consumer"), KVConnectorRole.SCHEDULER, caches)
    try:
        assert connector.get_loaded_kv_cache_group_ids(a_decode_request("r")) == (0, 1)
    finally:
        connector.shutdown()


@since((0, 31), "a switch for routed experts that it does not refuse with every connector")
@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_routed_experts_are_refused_by_the_constructor(model: Path, role: KVConnectorRole) -> None:
    """vLLM refuses them with connectors that it knows by name."""
    from vllm.config.aux_output import AuxOutputConfig  # noqa: PLC0415  earlier releases do not have it

    config = a_config(model)
    config.aux_output_config = AuxOutputConfig(enable_return_routed_experts=True)
    with pytest.raises(UnsupportedError, match=r"enable_return_routed_experts: .* start without"):
        PDConnector(config, role, CACHES)
    config.aux_output_config = AuxOutputConfig()
    PDConnector(config, role, CACHES).shutdown()


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_pruned_videos_are_refused_where_positions_depend_on_them(model: Path, role: KVConnectorRole) -> None:
    config = a_config(model)
    config.model_config.multimodal_config = SimpleNamespace(video_pruning_rate=0.5)
    config.model_config.uses_mrope = False
    check_supported(config)
    config.model_config.uses_mrope = True
    with pytest.raises(UnsupportedError, match=r"video_pruning_rate = 0.5: .* start without --video-pruning-rate"):
        PDConnector(config, role, CACHES)


def test_routed_experts_are_refused_where_the_models_configuration_asks_for_them(model: Path) -> None:
    """As in vLLM 0.23."""
    config = a_config(model)
    config.model_config.enable_return_routed_experts = True
    with pytest.raises(UnsupportedError, match=r"enable_return_routed_experts: .* start without"):
        PDConnector(config, KVConnectorRole.SCHEDULER, CACHES)


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_an_untested_release_is_named_before_anything_can_fail_on_it(
    model: Path, role: KVConnectorRole, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Workers start before the engine core."""
    monkeypatch.setattr("vllm.version.__version__", "0.99.0")
    monkeypatch.setattr("vllm.version.__version_tuple__", (0, 99, 0))
    monkeypatch.setattr("pd_connector.connector.share_logging", lambda: None)  # so that records reach the root
    for name in ("vllm", "vllm.pd_connector"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    with pytest.raises(ConfigError):
        PDConnector(a_config(model, lease_ttl=1), role, CACHES)
    assert "vLLM 0.99.0 is not among the releases that this connector is tested with: 0.23, 0.30" in caplog.text


def test_an_engine_that_only_decodes_opens_no_control_endpoint(model: Path) -> None:
    before = set(threading.enumerate())
    connector = PDConnector(a_config(model, "kv_consumer"), KVConnectorRole.SCHEDULER, CACHES)
    names = {thread.name for thread in set(threading.enumerate()) - before}
    connector.shutdown()
    assert names == {"pd-control-client", "pd-lease-renewal"}


def test_a_wrong_setting_is_refused_where_vllm_asks_before_it_loads_a_model() -> None:
    assert not PDConnector.requires_piecewise_for_cudagraph({"cpu_bytes_to_use": 1 << 30})
    with pytest.raises(ConfigError, match="cpu_bytes_to_use = '1GiB'"):
        PDConnector.requires_piecewise_for_cudagraph({"cpu_bytes_to_use": "1GiB"})
