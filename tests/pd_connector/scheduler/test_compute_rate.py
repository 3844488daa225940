"""How long a prompt takes to compute, judged by the prompts that this engine has computed."""

from types import SimpleNamespace
from typing import Any

import pytest

from pd_connector.scheduler.compute_rate import ComputeRate
from tests.support.waiting import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def rate(clock: ManualClock) -> ComputeRate:
    return ComputeRate(clock)


def test_without_a_prompt_nothing_is_known(rate: ComputeRate) -> None:
    assert rate.seconds_for(10_000) == 1.0
    assert rate.least_tokens == 128


def test_steps_that_are_scheduled_before_those_ahead_have_ended_are_not_taken_for_fast_ones(
    rate: ComputeRate, clock: ManualClock
) -> None:
    rate.step({"a": 1000, "d": 1})
    rate.step({"a": 1000, "d": 1})
    clock.advance(1.0)
    rate.step({"a": 1, "d": 1})  # while the second one is computed
    clock.advance(1.0)
    rate.answered("a")
    for _ in range(10):
        rate.step({"a": 1, "d": 1})
        clock.advance(0.01)
    assert rate.seconds_for(4000) == pytest.approx(4.0, rel=0.01)


def test_pauses_between_prompts_are_no_part_of_them(rate: ComputeRate, clock: ManualClock) -> None:
    for number in range(20):
        rate.step({f"{number}": 1000})
        clock.advance(0.25)
        rate.answered(f"{number}")
        clock.advance(60.0)
    assert rate.seconds_for(4000) == pytest.approx(1.0)
    assert rate.least_tokens == pytest.approx(80, abs=1)


def test_the_last_part_of_a_prompt_counts_though_it_is_small(rate: ComputeRate, clock: ManualClock) -> None:
    rate.step({"a": 1000})
    rate.step({"a": 1000})
    clock.advance(2.0)
    rate.step({"a": 100})
    clock.advance(0.1)
    rate.step({"a": 1})
    rate.answered("a")
    assert rate.seconds_for(2100) == pytest.approx(2.1)


def test_prompts_that_overlap_are_timed_once(rate: ComputeRate, clock: ManualClock) -> None:
    rate.step({"a": 1000})
    clock.advance(0.5)
    rate.step({"a": 500, "b": 500})  # 1000 tokens a second
    clock.advance(0.5)
    rate.step({"b": 1000})
    clock.advance(1.0)
    rate.answered("a")
    clock.advance(1.0)
    rate.answered("b")
    assert rate.seconds_for(1000) == pytest.approx(1.0)


def test_the_fastest_prompts_tell_and_a_slow_one_says_little(rate: ComputeRate, clock: ManualClock) -> None:
    for number, took_s in enumerate((0.5, 0.25, 60.0)):
        rate.step({f"{number}": 1000})
        clock.advance(took_s)
        rate.answered(f"{number}")
    assert rate.seconds_for(4000) == pytest.approx(1.0, rel=0.15)


def test_short_prompts_and_those_that_have_left_say_nothing_and_there_are_limits(
    rate: ComputeRate, clock: ManualClock
) -> None:
    rate.step({"short": 8, "left": 1000})
    clock.advance(0.001)
    rate.answered("short")
    rate.forget("left")
    rate.answered("left")
    assert rate.seconds_for(1) == 1.0
    rate.step({"a": 1000})
    clock.advance(1.0)
    rate.answered("a")
    assert rate.seconds_for(2000) == pytest.approx(2.0)
    assert rate.seconds_for(1) == 0.05
    assert rate.seconds_for(10**6) == 10.0


class TestSearching:
    """How long a request may wait for what others hold of its prompt. Computing 1000 tokens takes a second."""

    @pytest.fixture(autouse=True)
    def pace(self, rate: ComputeRate) -> None:
        rate._per_second = 1000.0
        rate.step_orders({})

    def left(self, rate: ComputeRate, clock: ManualClock, missing_tokens: int) -> float:
        return rate.deadline_of("r", missing_tokens) - clock.now

    def ask(self, rate: ComputeRate) -> None:
        """VLLM asks about the request, for which no role before has it wait."""
        request: Any = SimpleNamespace(request_id="r")
        assert not rate.must_wait(request, 0)

    def test_what_it_has_waited_in_steps_is_gone(self, rate: ComputeRate, clock: ManualClock) -> None:
        assert self.left(rate, clock, 2000) == pytest.approx(2.0)
        for _ in range(3):
            rate.step_orders({})
            clock.advance(0.4)
            self.ask(rate)
        rate.step_orders({})
        assert self.left(rate, clock, 2000) == pytest.approx(2.0 - 3 * 0.4)

    def test_steps_in_which_it_is_not_asked_about_are_none_of_it(self, rate: ComputeRate, clock: ManualClock) -> None:
        self.left(rate, clock, 2000)
        for asks in (False, False, True, False):
            rate.step_orders({})
            clock.advance(0.4)
            if asks:
                self.ask(rate)
        rate.step_orders({})
        clock.advance(0.4)
        rate.step_orders({})
        assert self.left(rate, clock, 2000) == pytest.approx(2.0 - 2 * 0.4), "those behind the first and the fourth"

    def test_the_less_it_lacks_the_less_it_waits(self, rate: ComputeRate, clock: ManualClock) -> None:
        assert [self.left(rate, clock, tokens) for tokens in (2000, 500, 1500)] == pytest.approx([2.0, 0.5, 0.5])

    def test_one_that_waits_for_nothing_here_is_not_remembered(self, rate: ComputeRate, clock: ManualClock) -> None:
        self.ask(rate)
        assert not rate._searching
        self.left(rate, clock, 2000)
        request: Any = SimpleNamespace(request_id="r", num_output_tokens=0)
        rate.finish(request, ())
        for _ in range(2):
            rate.step_orders({})
        assert not rate._left_s
        assert not rate._searched
