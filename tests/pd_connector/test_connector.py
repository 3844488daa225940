"""``PDConnector`` as vLLM meets it: what it implements and exports, and a request's way through four of them.

The four (scheduler and worker side of a prefill and of a decode engine) are in one process, with the control channel
between them and the in-process transfer engine. The configurations hold what the connector reads of vLLM's.
"""

import contextlib
import inspect
import json
import logging
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import create_autospec

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

import pd_connector
from layout.geometry import WorkerGeometry
from layout.sharding import Source, choose_sources
from pd_connector.config import ConfigError
from pd_connector.connector import PDConnector
from pd_connector.orders import Orders
from pd_connector.scheduler.consumer import Consumer
from pd_connector.scheduler.host_tier import HostTier
from pd_connector.scheduler.producer import Producer
from pd_connector.scheduler.roles import SchedulerRole
from pd_connector.vllm.cache_groups import Ranks
from pd_connector.vllm.engine_config import UnsupportedError
from pd_connector.worker import peer
from pd_connector.worker import worker as worker_half
from tests.pd_connector.support import FakeRequest, a_prompt, cache_manager, until
from tests.support.in_process_engine import Fault, InProcessEngine, InProcessFabric

Role = TypeVar("Role", bound=SchedulerRole)

BLOCK_TOKENS = 32
LAYERS = ("l0", "l1")
SPEC = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=64, dtype=torch.float32)
CACHES = KVCacheConfig(8, [], [KVCacheGroupSpec(list(LAYERS), SPEC)])


def transfer_config(role: str = "kv_both", policy: str = "fail", **extra: Any) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="PDConnector",
        kv_connector_module_path="pd_connector",
        kv_role=role,
        kv_load_failure_policy=policy,
        kv_connector_extra_config={"host": "127.0.0.1", **extra},
    )


def a_config(model: Path, role: str = "kv_both", policy: str = "fail", **extra: Any) -> Any:
    return SimpleNamespace(
        kv_transfer_config=transfer_config(role, policy, **extra),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_index=0, decode_context_parallel_size=1
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        shutdown_timeout=60,
        model_config=SimpleNamespace(
            model=str(model),
            dtype=torch.float32,
            architecture="LlamaForCausalLM",
            use_mla=False,
            enable_sleep_mode=False,
            revision=None,
            hf_overrides=None,
            get_total_num_hidden_layers=lambda: len(LAYERS),
            get_total_num_kv_heads=lambda: 2,
            get_head_size=lambda: 64,
        ),
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 128, "_name_or_path": "here"}))
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 64)
    return tmp_path


# The class


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


def test_one_name_is_exported() -> None:
    assert pd_connector.__all__ == ["PDConnector"]
    assert pd_connector.PDConnector is PDConnector
    with pytest.raises(AttributeError, match="module 'pd_connector' has no attribute 'Connector'"):
        _ = pd_connector.Connector


def test_importing_the_package_loads_neither_torch_nor_vllm() -> None:
    """vLLM loads the package's plugin in all of its processes."""
    script = (
        "import sys, pd_connector, pd_connector.vllm.cpu.layouts\n"
        "print([name for name in ('torch', 'vllm', 'mooncake', 'zmq', 'numpy') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.strip() == "[]"


# What the constructor refuses


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_an_unknown_setting_is_refused_by_the_constructor(model: Path, role: KVConnectorRole) -> None:
    with pytest.raises(ConfigError, match="unknown key 'lease_ttl', did you mean 'lease_ttl_s'"):
        PDConnector(a_config(model, lease_ttl=1), role, CACHES)


def test_context_parallelism_is_refused_by_the_constructor(model: Path) -> None:
    config = a_config(model)
    config.parallel_config.decode_context_parallel_size = 2
    with pytest.raises(UnsupportedError, match=r"decode_context_parallel_size = 2: .* set it to 1"):
        PDConnector(config, KVConnectorRole.SCHEDULER, CACHES)


def test_an_engine_that_only_decodes_opens_no_control_endpoint(model: Path) -> None:
    before = set(threading.enumerate())
    connector = PDConnector(a_config(model, "kv_consumer"), KVConnectorRole.SCHEDULER, CACHES)
    names = {thread.name for thread in set(threading.enumerate()) - before}
    connector.shutdown()
    assert names == {"pd-control-client", "pd-lease-renewal"}


@pytest.mark.parametrize(("role", "leg"), [("kv_consumer", "do_remote_decode"), ("kv_producer", "do_remote_prefill")])
def test_a_request_for_the_other_role_is_served_without_a_transfer(
    model: Path, role: str, leg: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = PDConnector(a_config(model, role), KVConnectorRole.SCHEDULER, CACHES)
    monkeypatch.setattr(logging.getLogger("pd_connector"), "propagate", True)
    request = FakeRequest("r", a_prompt(70), {leg: True}, status=RequestStatus.FINISHED_LENGTH_CAPPED)
    connector.on_new_request(request)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert connector.request_finished_all_groups(request, ([1, 2, 3],)) == (False, None)
    connector.shutdown()
    assert f"request r asks for {leg}" in caplog.text


# A request's way


@dataclass
class EngineUnderTest:
    """Both sides of one engine's connector, its caches, and what its worker has reported."""

    scheduler: PDConnector
    worker: PDConnector
    caches: dict[str, torch.Tensor]
    pool: BlockPool
    tables: dict[str, list[int]] = field(default_factory=dict)
    results: KVConnectorTransferResults = field(default_factory=KVConnectorTransferResults)

    def step(self) -> None:
        """What vLLM calls in one step without a model."""
        orders = self.scheduler.build_connector_meta(SimpleNamespace(num_scheduled_tokens={}))
        self.worker.bind_connector_metadata(orders)
        results = self.worker.get_transfer_results(set())
        report = self.worker.build_connector_worker_meta()
        self.worker.clear_connector_metadata()
        assert not results.finished_sending
        for name in ("finished_recving", "failed_recving"):
            before, new = getattr(self.results, name), getattr(results, name)
            assert not before & new, "vLLM's scheduler dies of an id that it no longer holds"
            before |= new
        self.scheduler.update_connector_output(
            KVConnectorOutput(
                finished_recving=results.finished_recving,
                failed_recving=results.failed_recving,
                kv_connector_worker_meta=report,
            )
        )

    @property
    def held(self) -> list[int]:
        """Blocks that somebody has references to."""
        return [block.block_id for block in self.pool.blocks if block.ref_cnt and not block.is_null]

    def steps_until(self, condition: Callable[[KVConnectorTransferResults], object]) -> None:
        def reached() -> bool:
            self.step()
            return bool(condition(self.results))

        assert until(reached)
        self.step()

    def prefill(self, request_id: str, blocks: list[int], status: Any = RequestStatus.FINISHED_LENGTH_CAPPED) -> Any:
        """A prefill leg, computed and finished: what the connector tells vLLM."""
        request = FakeRequest(request_id, a_prompt(70), {"do_remote_decode": True}, status=status)
        self.scheduler.on_new_request(request)
        assert self.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        self.tables[request_id] = blocks
        answer = self.scheduler.request_finished_all_groups(request, (blocks,))
        del self.tables[request_id]
        return answer

    def allocate(self, request: FakeRequest, blocks: list[int]) -> None:
        """A decode leg that arrives and gets its blocks."""
        self.scheduler.on_new_request(request)
        tokens, is_async = self.scheduler.get_num_new_matched_tokens(request, 0)
        assert is_async
        assert tokens is not None
        assert tokens == request.num_prompt_tokens - 1
        allocated = SimpleNamespace(get_block_ids=lambda: (blocks,))
        self.scheduler.update_state_after_alloc(request, allocated, tokens)

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()


def _manager(engine: EngineUnderTest) -> Any:
    return cache_manager(engine.pool, engine.tables)


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> InProcessFabric:
    fabric = InProcessFabric()
    monkeypatch.setattr(worker_half, "_mooncake", lambda config: InProcessEngine(fabric))
    monkeypatch.setattr(worker_half, "worker_ranks", lambda: Ranks(0, 1, 0, 1))
    return fabric


def role_of(engine: EngineUnderTest, kind: type[Role]) -> Role:
    """The scheduler side's role of a kind."""
    (role,) = (role for role in engine.scheduler._scheduler._roles if isinstance(role, kind))
    return role


Start = Callable[..., EngineUnderTest]


@pytest.fixture
def start(model: Path, fabric: InProcessFabric) -> Iterator[Start]:
    """Starts an engine as vLLM does."""
    before = set(threading.enumerate())
    started: list[EngineUnderTest] = []

    def start(role: str, policy: str = "fail", **extra: Any) -> EngineUnderTest:
        config = a_config(model, role, policy, **extra)
        generator = torch.Generator().manual_seed(len(started))
        caches = {name: torch.rand(8, 2, BLOCK_TOKENS, 128, generator=generator) for name in LAYERS}
        worker = PDConnector(config, KVConnectorRole.WORKER, CACHES)
        worker.register_kv_caches(caches)
        scheduler = PDConnector(config, KVConnectorRole.SCHEDULER, CACHES)
        pool = BlockPool(8, enable_caching=True, hash_block_size=BLOCK_TOKENS)
        engine = EngineUnderTest(scheduler, worker, caches, pool)
        scheduler.bind_kv_cache_manager(_manager(engine))
        scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): worker.get_handshake_metadata()})
        started.append(engine)
        return engine

    yield start
    for engine in started:
        engine.close()
    assert set(threading.enumerate()) <= before


def test_a_prompt_is_computed_on_one_engine_and_used_on_the_other(start: Start) -> None:
    p, d = start("kv_producer"), start("kv_consumer")
    frees_later, params = p.prefill("at p", [3, 1, 6])
    assert not frees_later
    assert p.held == [1, 3, 6]
    d.allocate(FakeRequest("at d", a_prompt(70), json.loads(json.dumps(params))), [2, 7, 4])
    untouched = {name: cache[[0, 1, 3, 5, 6]].clone() for name, cache in d.caches.items()}
    d.steps_until(lambda results: results.finished_recving)
    assert d.results == KVConnectorTransferResults(finished_recving={"at d"})
    for name in LAYERS:
        assert torch.equal(d.caches[name][[2, 7, 4]], p.caches[name][[3, 1, 6]])
        assert torch.equal(d.caches[name][[0, 1, 3, 5, 6]], untouched[name])
    assert p.scheduler.has_pending_push_work()
    p.step()
    assert p.held == []
    assert not p.scheduler.has_pending_push_work()


def test_a_wrong_setting_is_refused_where_vllm_asks_before_it_loads_a_model() -> None:
    assert not PDConnector.requires_piecewise_for_cudagraph({"cpu_bytes_to_use": 1 << 30})
    with pytest.raises(ConfigError, match="cpu_bytes_to_use = '1GiB'"):
        PDConnector.requires_piecewise_for_cudagraph({"cpu_bytes_to_use": "1GiB"})


def test_both_sides_count_what_happened(start: Start) -> None:
    p, d = start("kv_producer"), start("kv_consumer")
    d.allocate(FakeRequest("r", a_prompt(70), p.prefill("r", [3, 1, 6])[1]), [2, 7, 4])
    d.steps_until(lambda results: results.finished_recving)
    pulled, leased = d.worker.get_kv_connector_stats(), p.scheduler.get_kv_connector_stats()
    assert pulled is not None
    assert leased is not None
    counts = pulled.data["counts"]
    assert (counts["pulls"], counts["pull_tokens"]) == (1, 69)
    assert counts["pull_bytes"] == 3 * len(LAYERS) * SPEC.page_size_bytes
    assert leased.data["counts"] == {"leases:granted": 1, "leases:released": 1}
    assert "worker.get_transfer_results" in pulled.data["calls"]
    assert "scheduler.request_finished_all_groups" in leased.data["calls"]


def test_a_failed_pull_is_reported_as_failed_and_as_finished(
    start: Start, fabric: InProcessFabric, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = start("kv_producer"), start("kv_consumer", "recompute")
    monkeypatch.setattr(logging.getLogger("pd_connector"), "propagate", True)
    fabric.inject(1, Fault(settled=False))
    d.allocate(FakeRequest("r", a_prompt(70), p.prefill("r", [3, 1, 6])[1]), [2, 7, 4])
    d.steps_until(lambda results: results.failed_recving)
    assert d.results == KVConnectorTransferResults(finished_recving={"r"}, failed_recving={"r"})
    assert "request r: pull from engine" in caplog.text
    assert "Its prompt is computed here instead" in caplog.text
    counted = d.worker.get_kv_connector_stats()
    assert counted is not None
    assert counted.data["counts"] == {"pull_failures:read": 1}


def test_what_host_memory_has_is_loaded_and_only_the_rest_is_pulled(start: Start) -> None:
    p, d = start("kv_producer"), start("kv_consumer")
    tier = create_autospec(HostTier, instance=True)
    tier.missing_tokens.return_value = tier.allocated.return_value = BLOCK_TOKENS
    tier.step_orders.return_value = Orders()
    d.scheduler._scheduler._roles.insert(0, tier)
    d.allocate(FakeRequest("r", a_prompt(70), p.prefill("r", [3, 1, 6])[1]), [2, 7, 4])
    (pull,) = d.scheduler._scheduler.step_orders({}).pulls
    assert (pull.first_token, pull.end_token) == (BLOCK_TOKENS, 69)


def test_params_that_cannot_be_used_fail_the_request_instead_of_hanging_it(start: Start) -> None:
    d = start("kv_consumer")
    d.allocate(FakeRequest("r", a_prompt(70), {"do_remote_prefill": True}), [2, 7, 4])
    d.step()
    assert d.results == KVConnectorTransferResults(finished_recving={"r"}, failed_recving={"r"})


def test_an_expired_lease_frees_the_blocks_of_the_prefill_engine(start: Start) -> None:
    p = start("kv_producer", lease_ttl_s=0.1)
    p.prefill("r", [3, 1, 6])
    assert p.held == [1, 3, 6]
    p.steps_until(lambda _: not p.held)


def test_blocks_of_ended_leases_are_free_before_blocks_are_looked_for(start: Start) -> None:
    p = start("kv_producer", lease_ttl_s=0.1)
    p.prefill("r", [3, 1, 6])
    request = FakeRequest("next", a_prompt(70))
    assert until(lambda: p.scheduler.get_num_new_matched_tokens(request, 0) == (0, False) and not p.held)


def test_a_block_that_two_leases_hold_is_free_after_both(start: Start) -> None:
    p = start("kv_producer")
    p.prefill("a", [3, 1])
    p.prefill("b", [3, 2])
    assert p.held == [1, 2, 3]
    p.scheduler.reset_cache()
    assert p.held == []
    assert p.pool.get_num_free_blocks() == 7


# Verified


def test_a_prompt_is_verified_where_both_sides_do(start: Start) -> None:
    p, d = start("kv_producer", verify=True), start("kv_consumer", verify=True)
    params = p.prefill("r", [3, 1, 6])[1]
    assert p.scheduler.has_pending_push_work(), "nobody would take the checksums"
    d.allocate(FakeRequest("r", a_prompt(70), params), [2, 7, 4])

    def settled() -> object:
        p.step()
        d.step()
        return d.results.finished_recving

    assert until(lambda: bool(settled()))
    assert d.results == KVConnectorTransferResults(finished_recving={"r"})
    for name in LAYERS:
        assert torch.equal(d.caches[name][[2, 7, 4]], p.caches[name][[3, 1, 6]])
    counted = d.worker.get_kv_connector_stats()
    assert counted is not None
    assert len(counted.data["seconds"]["verify"]) == 1


def test_a_byte_that_changes_under_its_lease_fails_the_pull_and_is_named(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = start("kv_both", verify=True), start("kv_both", verify=True)
    monkeypatch.setattr(logging.getLogger("pd_connector"), "propagate", True)
    params = p.prefill("r", [3, 1, 6])[1]
    checksums = role_of(p, Producer)._service.checksums

    def summed() -> bool:
        p.step()
        return not checksums.wants_step

    assert until(summed)
    p.caches["l1"][1, 1, 0, 0] += 1  # the second block of the prompt
    d.allocate(FakeRequest("r", a_prompt(70), params), [2, 7, 4])
    d.steps_until(lambda results: results.failed_recving)
    assert d.results == KVConnectorTransferResults(finished_recving={"r"}, failed_recving={"r"})
    assert "request r: pull from engine" in caplog.text
    assert "checksums of what has arrived differ" in caplog.text
    assert "layer 'l1'" in caplog.text
    assert "KV head 1, tokens 32 to " in caplog.text
    counted = d.worker.get_kv_connector_stats()
    assert counted is not None
    assert counted.data["counts"] == {"pull_failures:checksum": 1}


def test_an_engine_that_need_not_verify_starts_no_thread_and_orders_nothing(start: Start) -> None:
    p = start("kv_producer")
    p.prefill("r", [3, 1, 6])
    orders = p.scheduler.build_connector_meta(SimpleNamespace(num_scheduled_tokens={}))
    assert orders.orders == Orders()
    assert "pd-checksums" not in {thread.name for thread in threading.enumerate()}
    assert p.worker.build_connector_worker_meta() is None


class EngineCoreUnderConstruction(EngineCoreProc):  # type: ignore[misc]  # vLLM is untyped here
    """vLLM's engine core at the moment at which it makes its scheduler, which binds the connector."""

    def __init__(self, connector: PDConnector, manager: Any) -> None:
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.shutdown_state = EngineShutdownState.RUNNING
        connector.bind_kv_cache_manager(manager)


@pytest.mark.parametrize("ttl_s", [0.1, 30.0])
def test_an_idle_engine_sleeps_while_it_has_leases_and_is_woken_when_one_ends(start: Start, ttl_s: float) -> None:
    """Awake it would step a thousand times a second, and on few cores keep the pull that it waits for from running."""
    p, d = start("kv_producer", lease_ttl_s=ttl_s), start("kv_consumer")
    core = EngineCoreUnderConstruction(p.scheduler, _manager(p))
    params = p.prefill("r", [3, 1, 6])[1]
    assert not p.scheduler.has_pending_push_work()
    assert core.input_queue.empty()
    if ttl_s > 1.0:  # released, where the other one expires
        d.allocate(FakeRequest("r", a_prompt(70), params), [2, 7, 4])
        d.steps_until(lambda results: results.finished_recving)
    assert core.input_queue.get(timeout=5.0) == (EngineCoreRequestType.WAKEUP, None)
    assert p.scheduler.has_pending_push_work()
    p.step()
    assert p.held == []
    assert not p.scheduler.has_pending_push_work()


def test_an_engine_that_cannot_be_woken_stays_awake_while_it_has_leases(start: Start) -> None:
    p = start("kv_producer")
    assert not p.scheduler.has_pending_push_work()
    p.prefill("r", [3, 1, 6])
    assert p.scheduler.has_pending_push_work()
    p.scheduler.reset_cache()
    assert not p.scheduler.has_pending_push_work()


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR])
def test_a_prefill_that_did_not_complete_is_not_leased(start: Start, status: Any) -> None:
    p = start("kv_producer")
    assert p.prefill("r", [3, 1, 6], status) == (False, None)
    assert p.held == []


def test_a_prefill_without_blocks_is_not_leased(start: Start) -> None:
    assert start("kv_producer").prefill("r", []) == (False, None)


def test_a_request_of_no_leg_is_not_touched(start: Start) -> None:
    both = start("kv_both")
    request = FakeRequest("r", a_prompt(70), status=RequestStatus.FINISHED_STOPPED)
    both.scheduler.on_new_request(request)
    assert both.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    both.step()
    assert both.results == KVConnectorTransferResults()
    assert both.scheduler.request_finished_all_groups(request, ([1, 2],)) == (False, None)


def test_models_of_other_weights_are_told_apart(start: Start, model: Path) -> None:
    p = start("kv_producer")
    (model / "model.safetensors").write_bytes(bytes(reversed(range(256))) * 64)
    d = start("kv_consumer")
    params = p.prefill("r", [3, 1, 6])[1]
    d.allocate(FakeRequest("r", a_prompt(70), params), [2, 7, 4])
    d.steps_until(lambda results: results.failed_recving)
    counted = d.worker.get_kv_connector_stats()
    assert counted is not None
    assert counted.data["counts"] == {"pull_failures:incompatible": 1}


# An engine that is told to stop


def test_an_engine_that_is_told_to_stop_stays_until_its_leases_have_ended(start: Start) -> None:
    p, d = start("kv_producer"), start("kv_consumer")
    core = EngineCoreUnderConstruction(p.scheduler, _manager(p))
    params = p.prefill("r", [3, 1, 6])[1]
    core.shutdown_state = EngineShutdownState.SHUTTING_DOWN
    assert p.scheduler.has_pending_push_work()
    d.allocate(FakeRequest("r", a_prompt(70), params), [2, 7, 4])
    d.steps_until(lambda results: results.finished_recving)
    assert d.results == KVConnectorTransferResults(finished_recving={"r"})
    p.step()
    assert p.held == []
    assert not p.scheduler.has_pending_push_work()


def test_an_engine_that_is_told_to_stop_does_not_stay_for_ever(start: Start) -> None:
    p = start("kv_producer", drain_timeout_s=0.1)
    core = EngineCoreUnderConstruction(p.scheduler, _manager(p))
    p.prefill("r", [3, 1, 6])
    core.shutdown_state = EngineShutdownState.REQUESTED
    assert p.scheduler.has_pending_push_work()
    assert until(lambda: not p.scheduler.has_pending_push_work())
    assert p.held == [1, 3, 6]


def test_the_time_of_an_engine_that_is_told_to_stop_begins_after_its_last_request(start: Start) -> None:
    p = start("kv_producer", drain_timeout_s=0.5)
    core = EngineCoreUnderConstruction(p.scheduler, _manager(p))
    p.prefill("r", [3, 1, 6])
    core.shutdown_state = EngineShutdownState.REQUESTED
    assert until(lambda: not p.scheduler.has_pending_push_work())
    p.scheduler.build_connector_meta(SimpleNamespace(num_scheduled_tokens={}))
    assert not p.scheduler.has_pending_push_work()
    p.scheduler.build_connector_meta(SimpleNamespace(num_scheduled_tokens={"r": 7}))
    assert p.scheduler.has_pending_push_work()


def test_decode_engines_begin_at_different_replicas(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[int] = []

    def recorded(local: WorkerGeometry, remotes: Sequence[WorkerGeometry], turn: int) -> tuple[Source, ...]:
        turns.append(turn)
        return choose_sources(local, remotes, turn)

    monkeypatch.setattr(peer, "choose_sources", recorded)
    p, first, second = start("kv_producer"), start("kv_consumer"), start("kv_consumer")
    for number, d in enumerate((first, second)):
        d.allocate(FakeRequest("r", a_prompt(70), p.prefill(f"r{number}", [3, 1, 6])[1]), [2, 7, 4])
        d.steps_until(lambda results: results.finished_recving)
    assert len(set(turns)) == 2


def test_a_late_sibling_is_computed_on_the_decode_engine(start: Start) -> None:
    """One of ``n`` choices that arrives when the pull of the first has ended: its lease is spent."""
    p, d = start("kv_producer"), start("kv_consumer")
    params = p.prefill("r", [3, 1, 6])[1]
    d.allocate(FakeRequest("first", a_prompt(70), params), [2, 7, 4])
    d.steps_until(lambda results: results.finished_recving)
    sibling = FakeRequest("sibling", a_prompt(70), params)
    d.scheduler.on_new_request(sibling)
    assert d.scheduler.get_num_new_matched_tokens(sibling, 64) == (0, False)
    d.step()
    assert d.results == KVConnectorTransferResults(finished_recving={"first"})


def test_a_request_whose_lease_is_known_to_have_ended_fails_without_a_read(
    start: Start, fabric: InProcessFabric, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = start("kv_producer", lease_ttl_s=0.3), start("kv_consumer")
    monkeypatch.setattr(logging.getLogger("pd_connector"), "propagate", True)
    request = FakeRequest("r", a_prompt(70), p.prefill("r", [3, 1, 6])[1])
    d.scheduler.on_new_request(request)
    p.scheduler.reset_cache()
    renewals = role_of(d, Consumer)._renewals
    assert until(lambda: renewals.lost("r") is not None)
    allocated = SimpleNamespace(get_block_ids=lambda: ([2, 7, 4],))
    d.scheduler.update_state_after_alloc(request, allocated, 69)
    d.steps_until(lambda results: results.finished_recving)
    assert d.results == KVConnectorTransferResults(finished_recving={"r"}, failed_recving={"r"})
    assert fabric.reads == 0
    assert "has ended: it expired or was cancelled before its blocks were read" in caplog.text
    counted = d.worker.get_kv_connector_stats()
    assert counted is not None
    assert counted.data["counts"] == {"pull_failures:lease": 1}


def open_ends() -> set[str]:
    """Sockets, event counters and shared memory of this process."""
    descriptors = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the directory itself
            descriptors.add(str(path.readlink()))
    return {name for name in descriptors if name.startswith(("socket:", "anon_inode:", "/dev/shm/", "/memfd:"))}


def test_nothing_is_left_after_the_shutdown_of_engines_with_leases_and_a_pull_under_way(
    start: Start, fabric: InProcessFabric
) -> None:
    ends, before = open_ends(), set(threading.enumerate())
    p, d = start("kv_producer"), start("kv_consumer")
    d.allocate(FakeRequest("r", a_prompt(70), p.prefill("r", [3, 1, 6])[1]), [2, 7, 4])
    d.steps_until(lambda results: results.finished_recving)
    p.prefill("never read", [2, 4])
    reading = threading.Event()
    fabric.inject(fabric.reads + 1, Fault(until=reading))
    d.allocate(FakeRequest("under way", a_prompt(70), p.prefill("r", [5, 7, 1])[1]), [1, 3, 5])
    d.step()
    assert until(lambda: fabric.reads == 2)
    reading.set()
    p.close()
    d.close()
    assert until(lambda: set(threading.enumerate()) <= before)
    assert open_ends() <= ends
