"""vLLM's engine core, found by a walk up the stack while it makes its scheduler, woken, resting, and known to stop."""

import gc
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
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


def a_loop_with(requests: int) -> tuple[EngineLoop, Core]:
    loop = EngineLoop()
    core = Core(loop.find)
    core.scheduler = SimpleNamespace(requests=dict.fromkeys(range(requests)))
    return loop, core


def test_a_rest_ends_when_its_time_is_over() -> None:
    loop, _core = a_loop_with(2)
    before = time.monotonic()
    loop.rest(0.05, 2)
    assert time.monotonic() - before >= 0.05


@pytest.mark.parametrize("requests", [0, 1, 3])
def test_an_engine_with_other_requests_does_not_rest(requests: int) -> None:
    loop, _core = a_loop_with(requests)
    before = time.monotonic()
    loop.rest(60, 2)
    assert time.monotonic() - before < 30


def test_nothing_that_comes_is_slept_through_or_taken() -> None:
    loop, core = a_loop_with(2)
    core.input_queue.put_nowait("a request")
    loop.rest(60, 2)
    assert core.input_queue.get_nowait() == "a request"
    threading.Timer(0.05, loop.wake).start()
    loop.rest(60, 2)
    assert core.input_queue.get_nowait() == (EngineCoreRequestType.WAKEUP, None)


def an_answer(*, is_there: bool = False) -> Future[int]:
    answer: Future[int] = Future()
    if is_there:
        answer.set_result(1)
    return answer


def test_a_rest_ends_with_the_last_answer() -> None:
    loop, core = a_loop_with(1)
    answers = [an_answer(is_there=True), an_answer(), an_answer()]
    threading.Timer(0.02, answers[2].set_result, (1,)).start()
    threading.Timer(0.05, answers[1].set_exception, (ValueError("a test"),)).start()
    before = time.monotonic()
    assert loop.rest(60, 1, answers)
    assert time.monotonic() - before < 30
    assert all(answer.done() for answer in answers)
    assert core.input_queue.empty()


def test_a_rest_for_answers_that_do_not_come_ends_with_its_time_or_with_news() -> None:
    loop, core = a_loop_with(1)
    answers = [an_answer(is_there=True), an_answer()]
    before = time.monotonic()
    assert not loop.rest(0.05, 1, answers)
    assert time.monotonic() - before >= 0.05
    threading.Timer(0.05, core.input_queue.put_nowait, ("a request",)).start()
    assert not loop.rest(60, 1, answers)
    assert not loop.rest(60, 1, answers)
    assert core.input_queue.get_nowait() == "a request"


@pytest.mark.parametrize("requests", [0, 2])
def test_an_engine_with_other_requests_takes_only_answers_that_are_there(requests: int) -> None:
    loop, _core = a_loop_with(requests)
    assert loop.rest(60, 1, [an_answer(is_there=True)])
    before = time.monotonic()
    assert not loop.rest(60, 1, [an_answer()])
    assert not EngineLoop().rest(60, 1, [an_answer()])
    assert time.monotonic() - before < 30


def test_without_a_core_there_is_no_rest() -> None:
    loop = EngineLoop()
    before = time.monotonic()
    loop.rest(60, 0)
    _, core = a_loop_with(0)
    del core
    loop.rest(60, 0)
    assert time.monotonic() - before < 30
