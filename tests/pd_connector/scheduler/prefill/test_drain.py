"""How long a prefill engine that was told to stop stays: for leases only, within both timeouts."""

import pytest

from pd_connector.scheduler.prefill.drain import Drain
from tests.support.waiting import ManualClock


class Stop:
    """A drain, the clock that it looks at, and whether its engine was told to stop."""

    def __init__(self, timeout_s: float = 5.0, engine_timeout_s: float = 60.0) -> None:
        self.clock = ManualClock()
        self.told = True
        self.drain = Drain(timeout_s, engine_timeout_s, lambda: self.told, self.clock)


def test_an_engine_that_runs_stays_for_nobody() -> None:
    stop = Stop()
    stop.told = False
    assert not stop.drain.must_stay(3)


def test_an_engine_that_stops_stays_for_leases_only() -> None:
    stop = Stop()
    assert stop.drain.must_stay(1)
    assert not stop.drain.must_stay(0)
    assert stop.drain.must_stay(1)  # of a request that was still under way


@pytest.mark.parametrize(
    ("timeout_s", "engine_timeout_s", "stays_s"),
    [(5.0, 60.0, 5.0), (60.0, 10.0, 7.0), (5.0, 0.0, 0.0), (0.0, 60.0, 0.0)],
)
def test_it_stays_as_long_as_both_timeouts_allow(timeout_s: float, engine_timeout_s: float, stays_s: float) -> None:
    """vLLM needs the last 3 s of its own to stop its workers."""
    stop = Stop(timeout_s, engine_timeout_s)
    assert stop.drain.must_stay(1) is (stays_s > 0)
    stop.clock.advance(stays_s)
    assert not stop.drain.must_stay(1)
    if stays_s:
        stop.clock.advance(-0.001)
        assert stop.drain.must_stay(1)


def test_its_time_begins_after_the_last_request_and_ends_before_vllms() -> None:
    stop = Stop(timeout_s=5.0, engine_timeout_s=20.0)
    stop.drain.must_stay(0, busy=True)
    stop.clock.advance(10.0)
    stop.drain.must_stay(0, busy=True)
    stop.clock.advance(4.9)
    assert stop.drain.must_stay(1)
    stop.drain.must_stay(1, busy=True)
    stop.clock.advance(2.1)
    assert not stop.drain.must_stay(1)
