"""vLLM's engine core, found by a walk up the stack while it makes its scheduler, woken, and known to stop."""

import gc
import queue
from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState

from pd_connector.vllm.engine_core import EngineLoop


class Core(EngineCoreProc):  # type: ignore[misc]  # vLLM is untyped here
    """An engine core of which nothing is there but what is asked for; it does ``work`` while it is constructed."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.shutdown_state = EngineShutdownState.RUNNING
        self.deeply(work, 5)

    def deeply(self, work: Callable[[], object], calls: int) -> None:
        """vLLM makes its scheduler some calls below the constructor, in methods of other objects too."""
        if calls:
            Other().pass_on(lambda: self.deeply(work, calls - 1))
        else:
            work()


class Other:
    def pass_on(self, work: Callable[[], object]) -> None:
        work()


def test_the_core_under_construction_is_found_however_deep_the_call_is() -> None:
    loop = EngineLoop()
    core = Core(loop.find)
    assert loop.can_be_woken
    loop.wake()
    assert core.input_queue.get_nowait() == (EngineCoreRequestType.WAKEUP, None)


def test_the_innermost_of_two_cores_is_found() -> None:
    loop, inner = EngineLoop(), []
    outer = Core(lambda: inner.append(Core(loop.find)))
    loop.wake()
    assert outer.input_queue.empty()
    assert not inner[0].input_queue.empty()


def test_where_there_is_no_core_nothing_can_be_woken_and_nothing_stops() -> None:
    loop = EngineLoop()
    for _ in range(2):
        assert not loop.can_be_woken
        assert not loop.is_stopping()
        loop.wake()
        loop.find()


def test_a_later_search_without_a_core_forgets_the_one_before() -> None:
    loop = EngineLoop()
    core = Core(loop.find)
    loop.find()
    loop.wake()
    assert core.input_queue.empty()


@pytest.mark.parametrize("state", list(EngineShutdownState))
def test_a_core_stops_as_soon_as_it_was_told_to(state: EngineShutdownState) -> None:
    loop = EngineLoop()
    core = Core(loop.find)
    core.shutdown_state = state
    assert loop.is_stopping() == (state is not EngineShutdownState.RUNNING)


def test_a_core_that_is_gone_is_not_kept_and_has_stopped() -> None:
    loop = EngineLoop()
    core = Core(loop.find)
    assert not loop.is_stopping()
    del core
    gc.collect()
    assert loop.is_stopping()
    loop.wake()
