"""Both sides of two engines whose models are loaded, or change while they serve: what is pulled, what is refused."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers import rotary_embedding

from pd_connector.vllm.cache_groups import Ranks
from pd_connector.vllm.metadata import HandshakeMetadata
from pd_connector.worker import worker as worker_module
from tests.support.connector.requests import FakeRequest, a_prompt
from tests.support.connector.vllm_engine import EngineCoreUnderConstruction, EngineUnderTest, StartEngine


class Runner:
    """A model runner with a model of Phi-3's rotary embedding, which hands its caches over."""

    def __init__(self, max_model_len: int) -> None:
        longrope = {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 32,
            "long_factor": [1.0 + pair for pair in range(32)],
            "original_max_position_embeddings": 4096,
        }
        config = VllmConfig(device_config=DeviceConfig("cpu"))
        object.__setattr__(config, "model_config", SimpleNamespace(max_model_len=max_model_len))
        rotary_embedding._ROPE_DICT.clear()
        self.model = torch.nn.Module()
        with set_current_vllm_config(config):
            self.model.rotary_emb = rotary_embedding.get_rope(64, 8192, True, longrope, torch.float32)
        rotary_embedding._ROPE_DICT.clear()

    def get_model(self) -> torch.nn.Module:
        return self.model

    def hand_over(self, start: StartEngine, role: str) -> EngineUnderTest:
        return start(role)


def pull(d: EngineUnderTest, request_id: str, params: dict[str, Any], blocks: list[int]) -> dict[str, int]:
    """Have a prompt pulled; what the worker counts of it."""
    d.allocate(FakeRequest(request_id, a_prompt(70), params), blocks)
    d.steps_until(lambda results: request_id in results.finished_recving | results.failed_recving)
    counted = d.worker.get_kv_connector_stats()
    assert counted is not None
    return {name: number for name, number in counted.data["counts"].items() if name.startswith("pull")}


def refusals(counted: dict[str, int]) -> dict[str, int]:
    return {name: number for name, number in counted.items() if name.startswith("pull_failures")}


@pytest.mark.parametrize(("ours", "failures"), [(2048, {}), (8192, {"pull_failures:incompatible": 1})])
def test_a_model_that_was_built_with_other_factors_is_refused(
    start: StartEngine, ours: int, failures: dict[str, int]
) -> None:
    """The configuration file is one and the same; --max-model-len decides."""
    p = Runner(4096).hand_over(start, "kv_producer")
    d = Runner(ours).hand_over(start, "kv_consumer")
    assert refusals(pull(d, "r", p.prefill("r", [3, 1, 6])[1], [2, 7, 4])) == failures


@pytest.mark.parametrize(("rank", "reads"), [(0, True), (1, False)])
def test_the_first_worker_of_an_engine_reads_its_files(
    start: StartEngine, monkeypatch: pytest.MonkeyPatch, rank: int, reads: bool
) -> None:
    monkeypatch.setattr(worker_module, "worker_ranks", lambda: Ranks(rank, 2, 0, 1))
    handshake = start("kv_consumer").worker.get_handshake_metadata()
    assert isinstance(handshake, HandshakeMetadata)
    assert handshake.handshake.model is not None
    assert bool(handshake.handshake.model.weights_digest) == reads


def core_of(engine: EngineUnderTest) -> Any:
    """The engine core that has made an engine's scheduler; its workers do what they are told."""
    core = EngineCoreUnderConstruction(engine.scheduler, engine.cache_manager)
    core.model_executor = SimpleNamespace(collective_rpc=lambda *_: ["done"], add_lora=lambda _: True)
    return core


def by_update(core: Any, _: Path) -> None:
    core.collective_rpc("update_weights", None, (), {"update_info": {}})


def by_reload(core: Any, _: Path) -> None:
    core.collective_rpc("reload_weights")


def by_adapter(core: Any, path: Path) -> None:
    core.add_lora(LoRARequest("french", 1, str(path)))
    core.add_lora(LoRARequest("french", 1, str(path), load_inplace=True))


@pytest.mark.parametrize("change", [by_update, by_reload, by_adapter])
def test_a_prefill_engine_whose_model_changes_is_another_one(
    start: StartEngine, model: Path, change: Callable[[Any, Path], None]
) -> None:
    p, d = start("kv_producer"), start("kv_consumer")
    core = core_of(p)
    before = p.prefill("old", [3, 1, 6])[1]
    assert p.held
    change(core, model)
    assert not p.held
    after = p.prefill("new", [3, 1, 6])[1]
    assert after["remote_engine_id"] != before["remote_engine_id"]
    assert refusals(pull(d, "old", before, [2, 7, 4])) == {"pull_failures:refused": 1}
    assert refusals(pull(d, "new", after, [2, 7, 4])) == {}


@pytest.mark.parametrize("call", ["get_model_inspection", "compute_weight_checksums"])
def test_calls_of_the_workers_that_change_nothing_cost_no_lease(start: StartEngine, call: str) -> None:
    p, d = start("kv_producer"), start("kv_consumer")
    core = core_of(p)
    params = p.prefill("r", [3, 1, 6])[1]
    core.collective_rpc(call)
    core.add_lora(LoRARequest("french", 1, "nobody/no-such-adapter-of-these-tests"))
    assert refusals(pull(d, "r", params, [2, 7, 4])) == {}


def test_a_decode_engine_whose_weights_change_compares_every_prefill_engine_anew(
    start: StartEngine, model: Path
) -> None:
    """It was started with the old weights, gets the new ones without a restart, and pulls from who began with them."""
    d = start("kv_consumer")
    core = core_of(d)
    save_file({"model.embed_tokens.weight": np.arange(256, 0, -1, dtype=np.int16)}, model / "model.safetensors")
    p = start("kv_producer")
    first, second = (p.prefill(name, [3, 1, 6])[1] for name in ("first", "second"))
    assert refusals(pull(d, "first", first, [2, 7, 4])) == {"pull_failures:incompatible": 1}
    core.collective_rpc("reload_weights")
    assert refusals(pull(d, "second", second, [2, 7, 4])) == {}
