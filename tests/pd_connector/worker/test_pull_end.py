"""What a prefill engine's answer to a release makes of a pull: good in one case, failed for a reason in all others."""

from collections.abc import Callable
from concurrent.futures import Future

import pytest

from pd_connector.orders import Cause, PullOrder
from pd_connector.traces import Lap
from pd_connector.worker.pull_end import PullEnd, Stopwatch, verdict
from tests.support.connector.requests import a_prompt, a_remote
from tests.support.waiting import ManualClock
from transfer.control.failures import ClientClosed
from transfer.control.messages import InvalidReason, Released

REMOTE = a_remote(a_prompt(70))
ORDER = PullOrder("r", REMOTE, ((1, 2, 3, 4, 5),), 0, 69, "pull")


def answered(reply: Released) -> "Future[Released]":
    answer: Future[Released] = Future()
    answer.set_result(reply)
    return answer


def test_what_a_prefill_engine_takes_for_a_prompt_is_no_part_of_a_pulls_time() -> None:
    clock = ManualClock()
    watch = Stopwatch(clock)
    for phase, seconds in (("read", 0.5), ("wait", 60.0), ("read", 0.25), ("wait", 8.0), ("release", 0.125)):
        clock.advance(seconds)
        watch.lap(phase)
    assert watch.total() == {"read": 0.75, "wait": 68.0, "release": 0.125, "total": 0.875}


def test_a_phase_may_have_ended_earlier_and_never_before_it_began() -> None:
    clock = ManualClock()
    laps: list[Lap] = []
    watch = Stopwatch(clock, laps)
    start = clock()
    clock.advance(1.0)
    watch.lap("read", start + 0.75)
    watch.lap("reshape", start + 0.5)
    watch.lap("read")
    assert laps == [
        Lap("read", start, start + 0.75),
        Lap("reshape", start + 0.75, start + 0.75),
        Lap("read", start + 0.75, start + 1.0),
    ]


def test_a_pull_is_good_only_if_its_release_was_valid() -> None:
    assert verdict(ORDER, answered(Released(True))) == ("", "")


@pytest.mark.parametrize("reason", [*InvalidReason, "what a later version says"])
def test_a_release_that_was_not_valid_says_which_lease_and_why(reason: str) -> None:
    cause, words = verdict(ORDER, answered(Released(False, reason)))
    assert cause == "lease"
    assert words.startswith(f"lease {REMOTE.lease_id} ")
    assert len({verdict(ORDER, answered(Released(False, other)))[1] for other in [*InvalidReason, "later"]}) == 10
    assert isinstance(reason, InvalidReason) or reason in words


def given_up(answer: "Future[Released]") -> None:
    answer.cancel()


def closed(answer: "Future[Released]") -> None:
    answer.set_exception(ClientClosed("the control client was closed"))


@pytest.mark.parametrize("end", [given_up, closed])
def test_without_an_answer_the_pull_is_unconfirmed(end: Callable[["Future[Released]"], None]) -> None:
    answer: Future[Released] = Future()
    end(answer)
    cause, words = verdict(ORDER, answer)
    assert cause == "unconfirmed"
    assert words


@pytest.mark.parametrize("cause", list(Cause))
def test_only_a_prompt_given_up_and_a_lease_that_has_ended_come_of_a_client_that_leaves(cause: Cause) -> None:
    assert PullEnd("r", cause).comes_of_leaving is (cause in (Cause.TRANSFER, Cause.LEASE))
