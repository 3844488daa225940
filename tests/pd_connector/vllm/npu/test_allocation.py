"""When the caches of all layers are allocated together, what that makes of a pull, and what is said when they are not.

The runner is a stand-in, and so are the attention operators: tests/ascend_sim has the real ones.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from layout.geometry import WorkerGeometry
from layout.host_blocks import host_layout
from layout.plan import BlockTable, compile_plans
from layout.sharding import choose_sources
from pd_connector.config import ConnectorConfig
from pd_connector.scheduler.scheduler import ConnectorScheduler
from pd_connector.stats import StatsRecorder
from pd_connector.vllm import cross_layer_tensors, layouts
from pd_connector.vllm.cache_groups import GroupSpec, Ranks
from pd_connector.vllm.cross_layer_tensors import ALIGNMENT
from pd_connector.vllm.npu import allocation, cache_check, memory_watch, operators
from pd_connector.vllm.releases import installed
from pd_connector.vllm.releases.newest import VllmRelease
from pd_connector.vllm.releases.release_023 import Release023
from pd_connector.vllm.releases.release_030 import Release030
from pd_connector.worker.caches import describe_caches
from tests.support.connector.tensors import stated_of
from tests.support.connector.vllm_engine import CACHES, a_config
from tests.support.devices.ascend_runner import PD_CONNECTOR, RunnerModel, install

MLA = RunnerModel(content=(32, 4), heads=1)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    logger = logging.getLogger("vllm")
    propagates, logger.propagate = logger.propagate, True
    with caplog.at_level(logging.DEBUG, "vllm"):
        yield caplog
    logger.propagate = propagates


@pytest.fixture
def runner_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The runner's class, hooked, on a device whose operators pass."""
    operators_say(monkeypatch, "")
    runner = install(monkeypatch)
    allocation._hook_runner()
    return runner


def operators_say(monkeypatch: pytest.MonkeyPatch, found: str | Exception, *, at_end: bool = False) -> None:
    """Of small caches, or ``at_end`` of the caches that would serve."""

    def check(runner: Any, form: Any, caches: Any) -> str:
        if at_end and caches is None:
            return ""
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(allocation, "_failed_check", check)


def caches_of(runner: Any) -> dict[str, Any]:
    caches: dict[str, Any] = runner.initialize_kv_cache_tensors(runner.model.kv_cache_config())
    return caches


def geometry_of(model: RunnerModel, caches: dict[str, Any], names: tuple[str, str] = ("k", "v")) -> WorkerGeometry:
    parts = tuple(zip(names, model.content, strict=True))
    page_bytes = sum(model.content) * model.heads * model.tokens * 4
    stated = stated_of(caches["l0"][0], parts, heads_axis=2, page_bytes=page_bytes)
    group = GroupSpec(model.layers, model.tokens, 0, model.blocks, dict.fromkeys(model.layers, stated))
    return describe_caches(caches, [group], Ranks(0, 1, 0, 1), "a")


def descriptors(model: RunnerModel, caches: dict[str, Any]) -> list[int]:
    """The sizes of the runs of a pull of two blocks that are no neighbours, from an engine with the same layout."""
    geometry = geometry_of(model, caches)
    plans = compile_plans(geometry, [geometry], choose_sources(geometry, [geometry]))
    tables = BlockTable.of([1, 4]), BlockTable.of([3, 0])
    copies = plans[0].instantiate([tables[0]], [tables[1]], 0, 2 * model.tokens)
    return sorted(copies.sizes.tolist())


# Together


def test_a_runner_of_another_class_keeps_its_layers_apart(runner_class: Any) -> None:
    model = RunnerModel()
    other = type("XliteModelRunner", (runner_class,), {})
    together, apart = caches_of(runner_class(model)), caches_of(other(model))
    assert not together["l0"][0].is_contiguous()
    assert len(descriptors(model, apart)) > len(descriptors(model, together))


@pytest.mark.parametrize("model", [RunnerModel(), MLA])
def test_a_pull_has_one_descriptor_for_each_block_and_part(runner_class: Any, model: RunnerModel) -> None:
    together = caches_of(runner_class(model))
    apart = caches_of(runner_class(model, connector=None))
    part_bytes = [content * model.heads * model.tokens * 4 for content in model.content]
    assert descriptors(model, together) == sorted([len(model.layers) * size for size in part_bytes] * 2)
    assert descriptors(model, apart) == sorted(part_bytes * 2 * len(model.layers))


@pytest.mark.parametrize("model", [RunnerModel(), MLA])
def test_host_memory_has_one_copy_for_each_block_and_part(runner_class: Any, model: RunnerModel) -> None:
    together, apart = caches_of(runner_class(model)), caches_of(runner_class(model, connector=None))
    assert [len(runs) for runs in host_layout(geometry_of(model, together)).groups] == [len(model.content)]
    assert [len(runs) for runs in host_layout(geometry_of(model, apart)).groups] == [2 * len(model.layers)]


@pytest.mark.parametrize("model", [RunnerModel(), MLA])
def test_layers_have_views_of_the_shapes_that_the_runner_would_give(runner_class: Any, model: RunnerModel) -> None:
    together, apart = caches_of(runner_class(model)), caches_of(runner_class(model, connector=None))
    for layer in model.layers:
        assert [(part.shape, part.dtype) for part in together[layer]] == [
            (part.shape, part.dtype) for part in apart[layer]
        ]
        for number, part in enumerate(together[layer]):
            assert not part.any()
            assert part[0].is_contiguous()
            assert part.stride(0) == len(model.layers) * part[0].numel()
            assert together[model.layers[0]][number].data_ptr() % ALIGNMENT == 0


def test_no_two_elements_share_memory(runner_class: Any) -> None:
    caches = caches_of(runner_class(RunnerModel()))
    for layer in caches.values():
        for part in layer:
            part.add_(1)
    assert all(bool((part == 1).all()) for layer in caches.values() for part in layer)


def test_nothing_is_allocated_apart_on_the_way(runner_class: Any, log: pytest.LogCaptureFixture) -> None:
    runner = runner_class(RunnerModel())
    caches_of(runner)
    assert runner.allocated == []
    assert runner.device == torch.device("cpu")
    [line] = log.messages
    assert "the KV caches of 3 layers are allocated together, 6144 bytes of each block in 2 runs" in line


# Apart


def said_of_caches_apart(runner: Any, log: pytest.LogCaptureFixture) -> str:
    """What is said, in one line, of caches that are the runner's own."""
    caches = caches_of(runner)
    assert len(runner.allocated) == 2 * len(runner.model.layers)
    assert len({part.untyped_storage().data_ptr() for layer in caches.values() for part in layer}) == len(
        runner.allocated
    )
    [line] = log.messages
    start = "PDConnector: each layer's KV cache is allocated apart: "
    assert line.startswith(start)
    return line.removeprefix(start)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (RunnerModel(groups=2), "the model has 2 groups of layers with block tables of their own"),
        (RunnerModel(others={"l2": (16, 8)}), "the caches of layers 'l0' and 'l2' differ in shape or type"),
        (RunnerModel(layers=("l0",)), "this worker has 1 layer with a cache"),
    ],
)
def test_caches_without_a_common_form_stay_apart(
    runner_class: Any, log: pytest.LogCaptureFixture, model: RunnerModel, why: str
) -> None:
    assert said_of_caches_apart(runner_class(model), log) == why
    assert log.records[0].levelno == logging.INFO


@pytest.mark.parametrize(
    ("at_end", "where"),
    [(False, "caches of all layers together"), (True, "the last blocks of all layers' caches together")],
)
def test_caches_stay_apart_if_the_operators_fail_their_check(
    runner_class: Any, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture, *, at_end: bool, where: str
) -> None:
    operators_say(monkeypatch, "writing raises RuntimeError: 561002", at_end=at_end)
    assert said_of_caches_apart(runner_class(RunnerModel()), log) == (
        f"the attention operators fail their check on {where}: writing raises RuntimeError: 561002"
    )
    assert log.records[0].levelno == logging.WARNING


@pytest.mark.parametrize("at_end", [False, True])
def test_the_server_starts_if_the_check_cannot_be_made(
    runner_class: Any, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture, *, at_end: bool
) -> None:
    operators_say(monkeypatch, AttributeError("no attribute 'exec_kv_decode'"), at_end=at_end)
    said = said_of_caches_apart(runner_class(RunnerModel()), log)
    assert said == "the attention operators could not be checked (AttributeError: no attribute 'exec_kv_decode')"


def test_caches_stay_apart_if_there_is_no_room_in_one_piece(
    runner_class: Any, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    def no_room(*_: Any) -> Any:
        raise torch.OutOfMemoryError("NPU out of memory")

    monkeypatch.setattr(cross_layer_tensors, "allocate_cross_layer", no_room)
    assert said_of_caches_apart(runner_class(RunnerModel()), log) == (
        "30720 bytes cannot be allocated together (OutOfMemoryError: NPU out of memory)"
    )
    assert log.records[0].levelno == logging.WARNING


def test_caches_that_fail_are_let_go_before_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's allocator would keep them in one piece, in which fewer layers have room apart."""
    caches = allocation.JoinedCaches({"l0": ()})
    left: list[int] = []
    monkeypatch.setattr(operators, "attention_operators", lambda *_: ["one"])
    monkeypatch.setattr(cache_check, "difference_at_end", lambda *_: "other bits")
    watch = SimpleNamespace(give_back=lambda: left.append(len(caches)))
    monkeypatch.setattr(memory_watch, "DeviceMemoryWatch", lambda: watch)
    runner: Any = SimpleNamespace(vllm_config=None, device="cpu")
    form: Any = SimpleNamespace(layers=("l0",), block_tokens=16)
    assert allocation._failed_check(runner, form, caches) == "other bits"
    assert left == [0]


@pytest.mark.parametrize(
    "connector",
    [
        None,
        {"kv_connector": "ExampleConnector"},
        PD_CONNECTOR | {"kv_connector_extra_config": {"cross_layer_blocks": False}},
    ],
)
def test_without_our_connector_or_with_the_switch_off_nothing_changes(
    runner_class: Any, log: pytest.LogCaptureFixture, connector: dict[str, Any] | None
) -> None:
    runner = runner_class(RunnerModel(), connector)
    caches_of(runner)
    assert len(runner.allocated) == 6
    assert log.messages == []


# Hooks


def test_an_allocation_of_another_name_is_named(monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
    runner = install(monkeypatch)
    monkeypatch.delattr(runner.__mro__[1], "_reshape_kv_cache_tensors")
    monkeypatch.delattr(runner, "_reshape_kv_cache_tensors")
    allocation._hook_runner()
    assert "_reshape_kv_cache_tensors" in log.text
    assert runner._allocate_kv_cache_tensors.__module__ != allocation.__name__


def test_hooking_twice_hooks_once(runner_class: Any) -> None:
    before = runner_class._allocate_kv_cache_tensors
    allocation._hook_runner()
    assert runner_class._allocate_kv_cache_tensors is before


def test_a_worker_with_our_connector_hooks_its_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.worker_base import WorkerBase  # noqa: PLC0415  warns when it is imported

    def start(self: Any, vllm_config: Any) -> None:
        self.vllm_config = vllm_config

    monkeypatch.setattr(WorkerBase, "__init__", start)
    on_npu(monkeypatch)
    allocation.register()
    hooked = WorkerBase.__init__
    allocation.register()
    assert WorkerBase.__init__ is hooked
    for connector, expected in ((None, False), (PD_CONNECTOR, True)):
        runner = install(monkeypatch)
        started_worker(runner(RunnerModel(), connector))
        assert (runner._allocate_kv_cache_tensors.__module__ == allocation.__name__) is expected


def started_worker(runner: Any) -> Any:
    """A worker of vLLM with that model runner."""
    from vllm.v1.worker.worker_base import WorkerBase  # noqa: PLC0415

    class Worker(WorkerBase):  # type: ignore[misc]  # vLLM is not followed
        def initialize_from_config(self, kv_cache_config: Any) -> None:
            self.initialized_from = kv_cache_config

    worker = Worker(runner.vllm_config)
    worker.model_runner = runner
    return worker


def test_a_runner_that_is_not_hooked_is_named(monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
    from vllm.v1.worker.worker_base import WorkerBase  # noqa: PLC0415

    monkeypatch.setattr(WorkerBase, "__init__", lambda self, config: setattr(self, "vllm_config", config))
    on_npu(monkeypatch)
    allocation.register()
    hooked = install(monkeypatch)
    second: Any = type("NPUModelRunner", (), {"__module__": "vllm_ascend.worker.v2.model_runner"})
    for kind, connector, said in (
        (hooked, PD_CONNECTOR, []),
        (second, None, []),
        (second, PD_CONNECTOR, ["vllm_ascend.worker.v2.model_runner.NPUModelRunner"]),
    ):
        log.clear()
        worker = started_worker(hooked(RunnerModel(), connector))
        worker.model_runner = object.__new__(kind)
        worker.initialize_from_config("caches")
        assert worker.initialized_from == "caches"
        assert [line.split()[line.split().index("runner") + 1] for line in log.messages] == said
        assert all("KV cache is allocated apart" in line for line in log.messages)


def test_other_platforms_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.worker_base import WorkerBase  # noqa: PLC0415

    before = WorkerBase.__init__
    allocation.register()
    assert WorkerBase.__init__ is before


def on_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.platforms  # noqa: PLC0415

    platform = SimpleNamespace(device_type="npu")
    monkeypatch.setattr(vllm.platforms, "_current_platform", platform)


@pytest.mark.parametrize("of", [VllmRelease(), Release030(), Release023()], ids=lambda of: type(of).__name__)
def test_a_plugin_that_was_not_loaded_is_named_on_every_release(
    of: VllmRelease, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    on_npu(monkeypatch)
    monkeypatch.setattr(layouts, "current", lambda: of)
    layouts.warn_if_not_hooked(install(monkeypatch)(RunnerModel()).vllm_config)
    assert "did not load the plugin pd_connector" in log.text


def test_a_start_on_023_names_a_plugin_that_was_not_loaded(
    model: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    """Its connectors cannot ask for layouts, so the warning must not depend on that."""
    on_npu(monkeypatch)
    monkeypatch.setattr(layouts, "current", Release023)
    monkeypatch.setattr(installed, "current", Release023)
    config = a_config(model)
    for switch, warned in ((False, 0), (True, 1)):
        config.kv_transfer_config.kv_connector_extra_config["cross_layer_blocks"] = switch
        ConnectorScheduler(config, CACHES, ConnectorConfig(host="127.0.0.1"), StatsRecorder()).shutdown()
        assert len([line for line in log.messages if "did not load the plugin" in line]) == warned


def test_the_runners_caches_are_not_chosen_by_vllm(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    on_npu(monkeypatch)
    config = install(monkeypatch)(RunnerModel()).vllm_config
    assert layouts.wanted_layout(config) is None
    layouts.log_layout(config, "LBHNC")
    assert "the workers lay out their KV caches" in log.text
