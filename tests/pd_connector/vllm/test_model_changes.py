"""What may change an engine's model while it serves is noticed where vLLM's engine core is told to do it."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.engine.core import EngineCore, EngineCoreProc

from pd_connector.vllm.model_changes import may_change_weights, watch_model
from pd_connector.vllm.releases import installed


class Executor:
    """The workers, who do as they are told, or fail."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.fails = False

    def collective_rpc(self, method: Any, *rest: Any) -> list[str]:
        self.told.append(method)
        if self.fails:
            raise RuntimeError("a worker has failed")
        return ["done"]

    def add_lora(self, lora_request: LoRARequest) -> bool:
        self.told.append(lora_request)
        return True


class Core(EngineCore):  # type: ignore[misc]  # vLLM is untyped here
    """An engine core of which only the workers are there; it does ``work`` while it is constructed."""

    def __init__(self, work: Callable[[], object], *, cumem: bool = False) -> None:
        self.model_executor = Executor()
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(enable_cumem_allocator=cumem))
        work()


@pytest.fixture
def changes() -> list[str]:
    return []


@pytest.fixture
def core(changes: list[str]) -> Core:
    """A core that is watched. Of its adapters, those with an even number replace others."""
    return Core(lambda: watch_model(changes.append, lambda adapter: adapter.lora_int_id % 2 == 0))


@pytest.mark.parametrize(
    "method",
    ["start_weight_update", "update_weights", "finish_weight_update", "reload_weights", "reset_weights", "mine"],
)
def test_calls_that_may_change_weights_are_told_when_they_have_ended(
    core: Core, changes: list[str], method: str
) -> None:
    assert core.collective_rpc(method, None, (), {"update_info": {}}) == ["done"]
    assert core.model_executor.told == [method]
    assert changes == [method]


def test_a_call_that_fails_may_have_changed_some(core: Core, changes: list[str]) -> None:
    core.model_executor.fails = True
    with pytest.raises(RuntimeError, match="a worker has failed"):
        core.collective_rpc("update_weights")
    assert changes == ["update_weights"]


@pytest.mark.parametrize("method", ["get_model_inspection", "compute_weight_checksums", "init_weight_transfer_engine"])
def test_calls_that_change_none_end_no_lease(core: Core, changes: list[str], method: str) -> None:
    core.collective_rpc(method)
    assert changes == []


def test_code_of_a_users_own_is_told_by_its_name(core: Core, changes: list[str]) -> None:
    def load_mine(worker: object) -> None:
        """Whatever."""

    core.collective_rpc(load_mine)
    assert changes == ["load_mine"]
    assert may_change_weights(object())


def test_an_adapter_that_replaces_another_is_told_by_its_name(core: Core, changes: list[str]) -> None:
    assert core.add_lora(LoRARequest("french", 1, "/french"))
    assert changes == []
    assert core.add_lora(LoRARequest("french", 2, "/french"))
    assert changes == ["loading LoRA adapter 'french' in the place of another"]
    assert len(core.model_executor.told) == 2


def test_vllm_still_converts_the_arguments_of_its_clients(core: Core, changes: list[str]) -> None:
    """They arrive as plain data, and vLLM looks at the method's signature."""
    (adapter,) = EngineCoreProc._convert_msgspec_args(core.add_lora, (["german", 2, "/german"],))
    assert isinstance(adapter, LoRARequest)
    core.add_lora(adapter)
    assert changes


def test_where_no_core_is_under_construction_nothing_is_watched(changes: list[str]) -> None:
    watch_model(changes.append, lambda _: True)
    core = Core(lambda: None)
    core.collective_rpc("reload_weights")
    assert changes == []


@pytest.mark.skipif(installed.current().tells_of_sleep, reason="vLLM tells of it")
@pytest.mark.parametrize("cumem", [True, False])
def test_the_cache_is_not_unmapped_where_nobody_is_told(cumem: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --enable-cumem-allocator, vLLM sleeps without --enable-sleep-mode, too."""
    slept: list[int] = []
    monkeypatch.setattr(Core, "sleep", lambda self, level=1, mode="abort": slept.append(level))
    core = Core(lambda: watch_model(lambda by: None, lambda adapter: False), cumem=cumem)
    with pytest.raises(RuntimeError, match="registered for transfers") if cumem else nullcontext():
        core.sleep(1, "wait")
    core.sleep(level=0)
    assert slept == ([0] if cumem else [1, 0])
