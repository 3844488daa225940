"""When the scheduler side lets its engine rest: while all requests wait for prefill engines, and it need not step.

Covers: pd_connector.scheduler.scheduler.
"""

from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any

import pytest

from layout.geometry import CacheGroup, WorkerGeometry
from pd_connector.orders import WorkerHandshake
from pd_connector.scheduler.scheduler import ConnectorScheduler
from pd_connector.scheduler.scheduler_role import SchedulerRole
from pd_connector.vllm.engine_core import EngineLoop
from tests.support.connector.requests import FakeRequest, a_prompt

Open = Callable[..., ConnectorScheduler]


class RecordedLoop(EngineLoop):
    """Writes down for how many requests the engine may rest."""

    def __init__(self) -> None:
        super().__init__()
        self.rests: list[int] = []

    def rest(self, seconds: float, requests: int, answers: Collection[Future[Any]] = ()) -> bool:
        assert 0 < seconds <= 0.1, "it would notice a pull that has failed too late"
        self.rests.append(requests)
        return not answers


PLAIN: Any = FakeRequest("plain", a_prompt(70), None)
NAMED: Any = FakeRequest(
    "named", a_prompt(70),
    {"do_remote_prefill": True, "transfer_id": "T", "remote_host": "127.0.0.1", "remote_port": 9},
)  # fmt: skip


GEOMETRY = WorkerGeometry(0, 1, 0, 1, "10.0.0.5:15000", (CacheGroup(32, 0, ()),), ())


def a_resting_side(side: ConnectorScheduler) -> RecordedLoop:
    side._engine = loop = RecordedLoop()
    return loop


@pytest.mark.parametrize("kv_role", ["kv_consumer", "kv_both"])
def test_an_engine_rests_while_its_requests_wait_for_prefill_engines(side_of: Open, kv_role: str) -> None:
    side = side_of(kv_role)
    side.set_workers({(0, 0): WorkerHandshake(GEOMETRY)})
    loop = a_resting_side(side)
    side.rest()
    assert loop.rests == []
    side.add(NAMED)
    side.rest()
    assert loop.rests == [1]
    side.finish(NAMED, ())
    side.rest()
    assert loop.rests == [1]


def test_engines_that_step_together_do_not_rest(side_of: Open) -> None:
    side = side_of("kv_consumer", lambda config: vars(config.parallel_config).update(data_parallel_size=2))
    loop = a_resting_side(side)
    side.add(NAMED)
    side.rest()
    assert loop.rests == []


class Asking(SchedulerRole):
    """Has requests wait for an answer."""

    def must_wait(self, request: Any, computed_tokens: int) -> bool:
        return True

    def answers(self, request: Any) -> tuple[Future[Any]]:
        return (Future(),)


@pytest.mark.parametrize("engines", [1, 2])
def test_only_an_engine_that_steps_alone_may_rest_for_answers(
    side_of: Open, engines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = side_of("kv_both", lambda config: vars(config.parallel_config).update(data_parallel_size=engines))
    side.set_workers({(0, 0): WorkerHandshake(GEOMETRY)})
    side._roles.append(Asking())
    resting: list[EngineLoop] = []
    monkeypatch.setattr(EngineLoop, "rest", lambda loop, *_: resting.append(loop))
    side.add(PLAIN)
    assert side.missing_tokens(PLAIN, 0) is None
    assert [loop is side._engine for loop in resting] == [engines == 1]
    side.finish(PLAIN, ())


class Stepping(SchedulerRole):
    """Wants a step, or not."""

    wants = False

    @property
    def wants_step(self) -> bool:
        return self.wants


def test_an_engine_that_must_step_does_not_rest(side_of: Open) -> None:
    side = side_of("kv_consumer")
    loop, other = a_resting_side(side), Stepping()
    side._roles.append(other)
    side.add(NAMED)
    other.wants = True
    side.rest()
    assert loop.rests == []
    other.wants = False
    side.rest()
    assert loop.rests == [1]


def test_an_engine_without_the_role_does_not_rest(side_of: Open) -> None:
    side = side_of("kv_producer")
    loop = a_resting_side(side)
    side.rest()
    assert loop.rests == []
