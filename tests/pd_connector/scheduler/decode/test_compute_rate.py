"""How long a prompt takes to compute, judged by the steps that this engine makes."""

import pytest

from pd_connector.scheduler.decode.compute_rate import ComputeRate
from tests.support.waiting import ManualClock


def test_without_a_step_nothing_is_known() -> None:
    assert ComputeRate(ManualClock()).seconds_for(10_000) == 1.0


def test_the_fastest_steps_tell_and_a_pause_says_little() -> None:
    clock = ManualClock()
    rate = ComputeRate(clock)
    for pause_s in (0.5, 0.25, 60.0):
        rate.step(1000)
        clock.advance(pause_s)
    rate.step(0)
    assert rate.seconds_for(4000) == pytest.approx(1.0, rel=0.15)


def test_steps_of_a_few_tokens_and_very_short_or_long_times_are_left_out() -> None:
    clock = ManualClock()
    rate = ComputeRate(clock)
    rate.step(8)
    clock.advance(10.0)
    rate.step(1000)
    clock.advance(1.0)
    rate.step(8)
    assert rate.seconds_for(2000) == pytest.approx(2.0)
    assert rate.seconds_for(1) == 0.05
    assert rate.seconds_for(10**6) == 10.0
