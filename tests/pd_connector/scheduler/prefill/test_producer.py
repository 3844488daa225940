"""The role of a prefill engine: what it leases and holds, when it wakes the engine, and how it ends."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import RequestStatus

from pd_connector.orders import Orders
from pd_connector.params import parse_remote_prefill
from pd_connector.scheduler.external_loads import ExternalLoads
from pd_connector.scheduler.prefill.drain import Drain
from pd_connector.scheduler.prefill.lease_service import LeaseService
from pd_connector.scheduler.prefill.leased_states import LeasedStates
from pd_connector.scheduler.prefill.leases import LeaseTable
from pd_connector.scheduler.prefill.producer import Producer
from pd_connector.stats import StatsRecorder
from pd_connector.vllm.block_pools import Leased
from pd_connector.vllm.device_blocks import DeviceBlocks
from pd_connector.vllm.engine_core import EngineLoop
from pd_connector.vllm.prompts import Prompts
from tests.support.connector.engines import IDENTITY
from tests.support.connector.requests import FakeRequest, a_prompt, cache_manager
from transfer.control.failures import ControlStartError

DONE = RequestStatus.FINISHED_LENGTH_CAPPED


class Loop(EngineLoop):
    """An engine core's loop that counts how often it is woken."""

    def __init__(self) -> None:
        super().__init__()
        self.woken = threading.Event()

    @property
    def can_be_woken(self) -> bool:
        return True

    def wake(self) -> None:
        self.woken.set()


class Engine:
    """A prefill engine's role, the block pool that it holds blocks of, and requests with their block tables."""

    def __init__(self, ttl_s: float = 30.0, port: int = 0) -> None:
        self.pool = BlockPool(8, enable_caching=True, hash_block_size=16)
        self.tables: dict[str, list[int]] = {}
        self.loop = Loop()
        blocks = DeviceBlocks()
        blocks.bind(cache_manager(self.pool, self.tables))
        self.leases: LeaseTable[Leased] = LeaseTable(ttl_s, time.monotonic)
        service = LeaseService(self.leases, IDENTITY, 2, self.loop.wake)
        drain = Drain(5.0, 60.0, self.loop.is_stopping)
        external, states = ExternalLoads(blocks, (), 2), LeasedStates(blocks, (), Prompts())
        self.role = Producer(service, "127.0.0.1", port, blocks, self.loop, drain, external, states)

    def prefill(self, request_id: str, blocks: list[int], **changes: Any) -> dict[str, Any] | None:
        """A prefill leg that has been computed into blocks."""
        self.tables[request_id] = blocks
        request = FakeRequest(request_id, a_prompt(70), {"do_remote_decode": True}, status=DONE)
        for name, value in changes.items():
            setattr(request, name, value)
        return self.role.finish(request, (blocks,))

    @property
    def held(self) -> list[int]:
        return [block.block_id for block in self.pool.blocks if block.ref_cnt and not block.is_null]


Start = Callable[..., Engine]


@pytest.fixture
def start() -> Iterator[Start]:
    before, started = set(threading.enumerate()), []

    def start(**options: Any) -> Engine:
        started.append(Engine(**options))
        return started[-1]

    yield start
    for engine in started:
        engine.role.check_integrity()
        engine.role.close()
        engine.role.check_integrity()
    assert set(threading.enumerate()) <= before


def test_a_finished_prompt_is_leased_and_its_blocks_are_held_until_the_lease_ends(start: Start) -> None:
    engine = start()
    params = engine.prefill("r", [3, 1, 6])
    assert params is not None
    remote = parse_remote_prefill(params)
    assert (remote.remote_port, remote.remote_block_ids) == (engine.role.port, ((3, 1, 6),))
    engine.role.free_blocks()
    assert engine.held == [1, 3, 6]
    assert engine.role.reset()
    assert engine.held == []


@pytest.mark.parametrize(
    "changes",
    [
        {"status": RequestStatus.FINISHED_ABORTED},
        {"kv_transfer_params": None},
        {"kv_transfer_params": {}},
        {"resumable": True},  # a session: its blocks are of more than the prompt that came first
    ],
)
def test_what_was_not_computed_for_another_engine_is_not_leased(start: Start, changes: dict[str, Any]) -> None:
    engine = start()
    assert engine.prefill("r", [3, 1, 6], **changes) is None
    assert engine.held == []


def test_what_is_being_computed_again_is_not_leased_for_a_token_from_before(start: Start) -> None:
    engine = start()
    again: dict[str, Any] = {"num_preemptions": 1, "num_computed_tokens": 70, "num_in_flight_tokens": 22}
    assert engine.prefill("r", [3, 1, 6], **again) is None
    assert engine.prefill("s", [3, 1, 6], **{**again, "num_in_flight_tokens": 0}) is not None


def test_what_two_models_have_computed_is_not_leased(start: Start) -> None:
    engine = start()
    before = engine.role._service.engine_id
    half, whole = (
        FakeRequest(name, a_prompt(70), {"do_remote_decode": True}, status=DONE) for name in ("half", "whole")
    )
    for request in (half, whole):
        engine.role.add(request)
    half.num_computed_tokens = 32
    engine.role.model_changed()
    assert engine.role._service.engine_id != before
    engine.tables |= {"half": [3, 1, 6], "whole": [2, 4, 5]}
    assert engine.role.finish(half, ([3, 1, 6],)) is None
    assert engine.role.finish(whole, ([2, 4, 5],)) is not None
    assert engine.prefill("half", [3, 1, 6]) is not None


def test_the_engine_is_woken_when_a_lease_expires_though_no_message_comes(start: Start) -> None:
    """The scheduler of an idle engine sleeps: somebody has to wake it when blocks can be freed."""
    engine = start(ttl_s=1.0)
    engine.prefill("r", [3, 1, 6])
    assert not engine.loop.woken.is_set()
    assert not engine.role.wants_step
    assert engine.loop.woken.wait(5.0)
    assert engine.role.wants_step
    engine.role.free_blocks()
    assert engine.held == []
    assert not engine.role.wants_step


@pytest.mark.parametrize("change", ["age", "reset"])
def test_an_idle_engine_is_woken_so_that_metrics_know_its_leases(start: Start, change: str) -> None:
    engine, stats = start(ttl_s=60.0), StatsRecorder()
    engine.prefill("r", [3, 1, 6])
    engine.role.update_stats(stats)
    later = time.monotonic() + (31.0 if change == "age" else 29.0)
    with patch.object(engine.leases, "_clock", lambda: later):
        engine.loop.woken.clear()
        assert not engine.loop.woken.wait(1.0) or change == "age"
        if change == "reset":
            engine.role.reset()
            engine.role.free_blocks()
        assert engine.loop.woken.wait(5.0)
        assert engine.role.wants_step
        engine.role.update_stats(stats)
        assert not engine.role.wants_step


def test_leases_are_counted_by_how_they_ended(start: Start) -> None:
    engine, stats = start(), StatsRecorder()
    engine.prefill("r", [3, 1, 6])
    engine.role.reset()
    engine.role.update_stats(stats)
    engine.role.update_stats(stats)
    data = stats.take()
    assert data is not None
    assert data["counts"] == {"leases:granted": 1, "leases:cancelled": 1}


def test_leases_alive_their_age_and_their_blocks_are_gauges(start: Start) -> None:
    engine, stats = start(), StatsRecorder()

    def gauges() -> dict[str, int]:
        engine.role.update_stats(stats)
        report = stats.take()
        assert report is not None
        return dict(report["gauges"])

    engine.prefill("a", [3, 1])
    engine.prefill("b", [3, 2])
    now = time.monotonic()
    with patch.object(engine.leases, "_clock", lambda: now + 10.0):
        assert gauges() == {"leases_active": 2, "lease_oldest_age_seconds": 10, "leased_blocks": 3}
    engine.role.reset()
    engine.role.free_blocks()
    assert gauges() == {"leases_active": 0, "lease_oldest_age_seconds": 0, "leased_blocks": 0}


def test_nothing_is_ordered_of_the_workers_of_an_engine_that_need_not_verify(start: Start) -> None:
    engine = start()
    engine.prefill("r", [3, 1, 6])
    assert engine.role.step_orders({}) == Orders()


def test_a_lease_that_was_not_released_is_mentioned_at_shutdown(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    engine = start()
    engine.prefill("r", [3, 1, 6])
    with caplog.at_level(logging.WARNING):
        engine.role.close()
    assert "shutting down with 1 leases that were not released" in caplog.text


def test_a_port_that_is_taken_is_refused_by_name(start: Start) -> None:
    port = start().role.port
    with pytest.raises(ControlStartError, match=f"127.0.0.1:{port}.*another process holds the port"):
        Engine(port=port)
