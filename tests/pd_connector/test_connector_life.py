"""An engine that holds leases and nothing else: it sleeps and is woken, stays when told to stop, and leaves nothing."""

import threading
from types import SimpleNamespace

import pytest
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineShutdownState

from tests.support.connector.requests import FakeRequest, a_prompt
from tests.support.connector.vllm_calls import Results
from tests.support.connector.vllm_engine import EngineCoreUnderConstruction, StartEngine
from tests.support.engine.in_process import Fault, InProcessFabric
from tests.support.process import open_ends
from tests.support.waiting import until

# Idle


@pytest.mark.thorough
@pytest.mark.parametrize("ttl_s", [1.0, 30.0])
def test_an_idle_engine_sleeps_while_it_has_leases_and_is_woken_when_one_ends(start: StartEngine, ttl_s: float) -> None:
    """Awake it would step a thousand times a second, and on few cores keep the pull that it waits for from running."""
    p, d = start("kv_producer", lease_ttl_s=ttl_s, claim_timeout_s=ttl_s), start("kv_consumer")
    core = EngineCoreUnderConstruction(p.scheduler, p.cache_manager)
    params = p.prefill("r", [3, 1, 6])[1]
    assert not p.scheduler.has_pending_push_work()
    assert core.input_queue.empty()
    if ttl_s > 5.0:  # released, where the other one expires
        d.allocate(FakeRequest("r", a_prompt(70), params), [2, 7, 4])
        d.steps_until(lambda results: results.finished_recving)
    assert core.input_queue.get(timeout=5.0) == (EngineCoreRequestType.WAKEUP, None)
    assert p.scheduler.has_pending_push_work()
    p.step()
    assert p.held == []
    assert not p.scheduler.has_pending_push_work()


def test_an_engine_that_cannot_be_woken_stays_awake_while_it_has_leases(start: StartEngine) -> None:
    p = start("kv_producer")
    assert not p.scheduler.has_pending_push_work()
    p.prefill("r", [3, 1, 6])
    assert p.scheduler.has_pending_push_work()
    p.scheduler.reset_cache()
    assert not p.scheduler.has_pending_push_work()


def test_only_a_step_without_work_may_be_held_back(start: StartEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = start("kv_producer"), start("kv_consumer")
    rests: list[None] = []
    monkeypatch.setattr(d.scheduler._scheduler, "rest", lambda: rests.append(None))
    params = p.prefill("r", [3, 1, 6])[1]
    d.allocate(FakeRequest("r", a_prompt(70), params), [2, 7, 4])
    for scheduled, expected in (({}, 0), ({"other": 1}, 0), ({}, 1)):  # the first one orders the pull
        d.scheduler.build_connector_meta(SimpleNamespace(num_scheduled_tokens=scheduled))
        assert len(rests) == expected


# An engine that is told to stop


def test_an_engine_that_is_told_to_stop_stays_until_its_leases_have_ended(start: StartEngine) -> None:
    p, d = start("kv_producer"), start("kv_consumer")
    core = EngineCoreUnderConstruction(p.scheduler, p.cache_manager)
    params = p.prefill("r", [3, 1, 6])[1]
    core.shutdown_state = EngineShutdownState.SHUTTING_DOWN
    assert p.scheduler.has_pending_push_work()
    d.allocate(FakeRequest("r", a_prompt(70), params), [2, 7, 4])
    d.steps_until(lambda results: results.finished_recving)
    assert d.results == Results(finished_recving={"r"})
    p.step()
    assert p.held == []
    assert not p.scheduler.has_pending_push_work()


def test_an_engine_that_is_told_to_stop_does_not_stay_for_ever(start: StartEngine) -> None:
    p = start("kv_producer", drain_timeout_s=0.1)
    core = EngineCoreUnderConstruction(p.scheduler, p.cache_manager)
    p.prefill("r", [3, 1, 6])
    core.shutdown_state = EngineShutdownState.REQUESTED
    assert p.scheduler.has_pending_push_work()
    until(lambda: not p.scheduler.has_pending_push_work())
    assert p.held == [1, 3, 6]


def test_the_time_of_an_engine_that_is_told_to_stop_begins_after_its_last_request(start: StartEngine) -> None:
    p = start("kv_producer", drain_timeout_s=0.5)
    core = EngineCoreUnderConstruction(p.scheduler, p.cache_manager)
    p.prefill("r", [3, 1, 6])
    core.shutdown_state = EngineShutdownState.REQUESTED
    until(lambda: not p.scheduler.has_pending_push_work())
    p.scheduler.build_connector_meta(SimpleNamespace(num_scheduled_tokens={}))
    assert not p.scheduler.has_pending_push_work()
    p.scheduler.build_connector_meta(SimpleNamespace(num_scheduled_tokens={"r": 7}))
    assert p.scheduler.has_pending_push_work()


def test_nothing_is_left_after_the_shutdown_of_engines_with_leases_and_a_pull_under_way(
    start: StartEngine, fabric: InProcessFabric
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
    until(lambda: fabric.reads == 2)
    reading.set()
    p.close()
    d.close()
    until(lambda: set(threading.enumerate()) <= before)
    assert open_ends() <= ends
