"""How long a prompt takes to compute, judged by the steps that this engine makes."""

import pytest

from pd_connector.scheduler.decode.compute_rate import ComputeRate
from tests.support.waiting import ManualClock

IN_FLIGHT = 2


def test_without_a_step_nothing_is_known() -> None:
    assert ComputeRate(IN_FLIGHT, ManualClock()).seconds_for(10_000) == 1.0


def test_steps_that_are_scheduled_before_those_ahead_have_ended_are_not_taken_for_fast_ones() -> None:
    clock = ManualClock()
    rate = ComputeRate(IN_FLIGHT, clock)
    rate.step({"a": 1000})
    for _ in range(8):
        clock.advance(0.001)
        rate.step({"a": 1000})
        clock.advance(0.999)
    assert rate.seconds_for(4000) == pytest.approx(4.0, rel=0.01)


def test_prompts_with_long_pauses_between_them_are_as_fast_as_they_are() -> None:
    clock = ManualClock()
    rate = ComputeRate(IN_FLIGHT, clock)
    for number in range(20):
        rate.step({f"{number}": 1000, "decodes": 1})
        rate.step({"decodes": 1})
        clock.advance(0.25)
        rate.answered("decodes")
        rate.answered(f"{number}")
        clock.advance(60.0)
    assert rate.seconds_for(4000) == pytest.approx(1.0, rel=0.01)


def test_a_prompt_of_several_steps_has_taken_all_of_them() -> None:
    clock = ManualClock()
    rate = ComputeRate(3, clock)
    rate.step({"a": 1000})
    rate.step({"a": 1000})
    clock.advance(2.0)
    rate.step({"a": 100})
    clock.advance(0.1)
    rate.answered("a")
    assert rate.seconds_for(1000) == pytest.approx(1.0)


def test_the_fastest_steps_tell_and_a_slow_one_says_little() -> None:
    clock = ManualClock()
    rate = ComputeRate(1, clock)
    for took_s in (0.5, 0.25, 60.0):
        rate.step({"a": 1000})
        clock.advance(took_s)
    rate.step({})
    assert rate.seconds_for(4000) == pytest.approx(1.0, rel=0.15)


def test_steps_of_a_few_tokens_and_very_short_or_long_times_are_left_out() -> None:
    clock = ManualClock()
    rate = ComputeRate(1, clock)
    rate.step({"a": 8})
    clock.advance(10.0)
    rate.step({"a": 1000})
    clock.advance(1.0)
    rate.step({"a": 8})
    assert rate.seconds_for(2000) == pytest.approx(2.0)
    assert rate.seconds_for(1) == 0.05
    assert rate.seconds_for(10**6) == 10.0
