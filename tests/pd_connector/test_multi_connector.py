"""Ours as a child of vLLM's MultiConnector, first or last, beside a child that has a handshake and statistics."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.v1.request import RequestStatus

from pd_connector.connector import PDConnector
from pd_connector.scheduler.prefill.producer import Producer
from tests.support.connector.greeting import GreetingConnector
from tests.support.connector.requests import FakeRequest, a_prompt
from tests.support.connector.vllm_calls import as_sent, bind_cache_manager, take_output, wants_step
from tests.support.connector.vllm_engine import BLOCK_TOKENS, CACHES, LAYERS, StartEngine, a_config
from tests.support.engine.in_process import InProcessFabric
from tests.support.host_tier.setup import Setup, make_manager, make_request
from tests.support.releases import INSTALLED

GREETING = {"kv_connector": "GreetingConnector", "kv_connector_module_path": GreetingConnector.__module__}
both_orders = pytest.mark.parametrize("ours_first", [True, False], ids=["ours first", "ours last"])


def children_of(multi: Any) -> Any:
    return multi.sub_connectors if INSTALLED >= (0, 30) else multi._connectors


class MultiEngine:
    """Both sides of an engine with MultiConnector, made and called as vLLM does."""

    def __init__(self, config: Any, manager: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.config = config
        self.worker: Any = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, CACHES)
        monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", self.worker)
        self.caches = {name: torch.rand(8, 2, BLOCK_TOKENS, 128) for name in LAYERS}
        self.worker.register_kv_caches(self.caches)
        self.scheduler: Any = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, CACHES)
        bind_cache_manager(self.scheduler, manager)
        if metadata := self.worker.get_handshake_metadata():
            self.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): metadata})

    def child(self, kind: type[Any]) -> Any:
        """The scheduler side's child of a kind."""
        (child,) = (child for child in children_of(self.scheduler) if isinstance(child, kind))
        return child

    def step(self) -> None:
        self.worker.bind_connector_metadata(
            self.scheduler.build_connector_meta(SimpleNamespace(num_scheduled_tokens={}))
        )
        output = take_output(self.worker)
        self.worker.clear_connector_metadata()
        self.scheduler.update_connector_output(output)

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()


Start = Callable[..., MultiEngine]


@pytest.fixture
def start_multi(model: Path, fabric: InProcessFabric, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    started: list[MultiEngine] = []

    def start(role: str, manager: Any, *, ours_first: bool, **extra: Any) -> MultiEngine:
        config = a_config(model, role)
        ours = {
            "kv_connector": "PDConnector",
            "kv_role": role,
            "kv_connector_extra_config": {"host": "127.0.0.1", "protocol": "tcp", **extra},
        }
        children = [ours, GREETING | {"kv_role": role}]
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role=role,
            kv_connector_extra_config={"connectors": children if ours_first else children[::-1]},
        )
        config.scheduler_config = SimpleNamespace(
            disable_hybrid_kv_cache_manager=False, max_num_batched_tokens=64, max_num_seqs=4
        )
        config.cache_config.enable_prefix_caching = True
        config.max_in_flight_tokens, config.num_prefill_lookahead_tokens = 64, 0
        config.model_config.max_model_len = 64
        started.append(MultiEngine(config, manager, monkeypatch))
        return started[-1]

    yield start
    for engine in started:
        engine.close()


@both_orders
def test_a_prefill_engine_is_ready_after_a_step_and_the_other_child_gets_its_own_handshake(
    start: StartEngine, start_multi: Start, ours_first: bool
) -> None:
    d = start("kv_consumer")
    p = start_multi("kv_producer", d.cache_manager, ours_first=ours_first)
    assert p.child(GreetingConnector).greetings == ["hello"]
    early = FakeRequest("early", a_prompt(70), {"do_remote_decode": True})
    p.scheduler.on_new_request(early)
    assert p.scheduler.get_num_new_matched_tokens(early, 0) == (None, False)
    assert wants_step(p.scheduler), "vLLM steps although nothing can be scheduled"
    p.step()
    assert p.scheduler.get_num_new_matched_tokens(early, 0) == (0, False)
    assert not wants_step(p.scheduler)
    early.status = RequestStatus.FINISHED_LENGTH_CAPPED
    d.tables["early"] = [3, 1, 6]
    frees_later, params = p.scheduler.request_finished_all_groups(early, ([3, 1, 6],))
    del d.tables["early"]
    assert not frees_later
    d.allocate(FakeRequest("r", a_prompt(70), params), [2, 7, 4])
    d.steps_until(lambda results: results.finished_recving)
    assert d.results.failed_recving == set()
    for name in LAYERS:
        assert torch.equal(d.caches[name][[2, 7, 4]], p.caches[name][[3, 1, 6]])
    p.step()


@both_orders
@pytest.mark.parametrize("sleeps", [True, False, None])
def test_requests_wait_for_a_step_after_the_engine_has_woken(
    start: StartEngine, start_multi: Start, ours_first: bool, sleeps: bool | None
) -> None:
    """MultiConnector passes on the other child's handshake again, and nothing of ours.

    ``sleeps`` is None: vLLM's executor asks no worker to wake up, as none sleeps.
    """
    p = start_multi("kv_producer", start("kv_consumer").cache_manager, ours_first=ours_first)
    p.step()
    ours = p.child(PDConnector)
    (producer,) = (role for role in ours._scheduler._roles if isinstance(role, Producer))
    service = producer._service
    old = service.engine_id
    workers = [child for child in children_of(p.worker) if isinstance(child, PDConnector)]
    for worker in workers if sleeps is not None else ():
        if sleeps:
            worker.unregister_kv_caches()
        worker.restore_kv_caches()
    p.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): p.worker.get_handshake_metadata()})
    request = FakeRequest("r", a_prompt(70), {"do_remote_decode": True})
    p.scheduler.on_new_request(request)
    assert p.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    assert wants_step(p.scheduler)
    p.step()
    assert p.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    assert (service.engine_id != old) == bool(sleeps)


@both_orders
def test_host_memory_opens_with_the_first_step(start_multi: Start, ours_first: bool) -> None:
    setup = Setup()
    engine = start_multi("kv_consumer", make_manager(setup), ours_first=ours_first, cpu_bytes_to_use=1 << 22)
    request = make_request(setup, "r", range(9))
    engine.scheduler.on_new_request(request)
    assert engine.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    engine.step()
    assert engine.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    stats = engine.child(PDConnector).get_kv_connector_stats()
    assert stats.data["gauges"]["host_blocks_capacity"] > 0


@both_orders
def test_statistics_of_both_children_are_rebuilt_in_the_api_server(start_multi: Start, ours_first: bool) -> None:
    engine = start_multi("kv_producer", make_manager(Setup()), ours_first=ours_first)
    engine.step()
    collected = engine.worker.get_kv_connector_stats()
    sent = as_sent(collected)
    assert set(sent) == {"PDConnector", "GreetingConnector"}
    log = KVConnectorLogging(engine.config.kv_transfer_config)
    log.observe(sent)
    lines: list[str] = []
    log.log(lambda text, metrics: lines.append(text % metrics))
    assert "GreetingConnector={'steps': 1}" in lines[0]
    assert "PDConnector=" in lines[0]
