"""Followed pulls that wait: what fails them, who takes the lanes meanwhile, and for how long they wait.

Real leases and real bytes; the transfer engine is the in-process one, and the test says when P answers what.
"""

import random
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from pd_connector.orders import Cause
from pd_connector.worker import remote_reader
from pd_connector.worker.pull_end import PullEnd
from pd_connector.worker.session import LANES
from tests.support.connector.chunked_prompts import TRANSFER_ID, ChunkedPrompt, follow
from tests.support.connector.engines import (
    DECODE,
    OURS,
    PREFILL,
    THEIRS,
    Blocks,
    Site,
    an_order,
)
from tests.support.connector.followed_legs import ELSEWHERE, FollowedLegs, legs_of
from tests.support.engine.in_process import Fault
from tests.support.waiting import WAIT_S, ManualClock, holds_for, until
from transfer.control.failures import AuthenticationFailed, PeerRefused, PeerUnreachable
from transfer.control.messages import Cancel, ErrorCode, TransferState

UNREACHABLE = PeerUnreachable(host="127.0.0.1", port=1, request_type="follow", tried_s=12.0, attempts=3)


@pytest.fixture(autouse=True)
def everything_is_worth_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_reader, "RANGE_S", 0.0)


@pytest.fixture
def legs(site: Site) -> FollowedLegs:
    return legs_of(site)


# What goes wrong


REFUSED = PeerRefused(host="h", port=1, request_type="follow", code=ErrorCode.UNKNOWN_ENGINE, reason="restarted")


@pytest.mark.parametrize(
    ("error", "cause", "told"),
    [
        (UNREACHABLE, Cause.UNREACHABLE, False),
        (AuthenticationFailed("other secret"), Cause.DENIED, False),
        (REFUSED, Cause.REFUSED, True),
    ],
)
def test_a_question_that_is_not_answered_fails_the_pull(
    legs: FollowedLegs, error: Exception, cause: Cause, told: bool
) -> None:
    legs.prompt.compute(16)
    legs.submit()
    legs.reads(1)
    legs.prompt.fail_all(error)
    end = legs.end()
    assert (end.cause, str(error) in end.reason) == (cause, True)
    assert len(legs.client.cancels) == told


@pytest.mark.parametrize("settled", [True, False])
def test_a_range_that_cannot_be_read_fails_the_pull_when_nothing_writes_any_more(
    legs: FollowedLegs, settled: bool
) -> None:
    ends: list[Any] = []
    legs.session = legs.site.session(legs.worker, legs.prompt.remote(), settle=ends.append)
    legs.prompt.compute(32)
    legs.site.fabric.closing_settles = False
    legs.site.fabric.inject(2, Fault(settled=settled))
    legs.submit()
    legs.reads(1)
    legs.prompt.compute(64)
    until(lambda: ends)
    (end,) = ends
    assert isinstance(end, PullEnd) == settled
    assert (end if settled else end.end).cause == Cause.READ
    assert legs.client.cancels == [Cancel(legs.prefill.service.engine_id, (), (TRANSFER_ID,))]
    if not settled:
        (late,) = end.reads
        assert not late.release()
        legs.site.fabric.deliver_late_bytes()
        assert late.release()


def test_a_link_that_fails_under_another_pull_does_not_hold_a_pull_that_has_read(site: Site) -> None:
    """The reads of a parked pull have settled, whatever becomes of the links that it had."""
    legs = legs_of(site)
    site.fabric.closing_settles = False
    legs.prompt.compute(48)
    legs.submit()
    legs.reads(1)
    other = legs.prefill.prefill("other", ELSEWHERE)
    site.fabric.inject(2, Fault(settled=False))
    legs.session.submit(an_order("other", other, ((4, 5, 6, 7, 9),)))
    until(lambda: not legs.worker.ends.empty())
    assert not isinstance(legs.worker.next_end(), PullEnd), "it is unsettled"
    legs.prompt.end()
    end = legs.end()
    assert isinstance(end, PullEnd)
    assert end.cause == Cause.TRANSFER


def test_a_prefill_engine_that_is_gone_fails_the_parked_pulls_with_the_first_that_notices(site: Site) -> None:
    source, (worker,) = site.prefill(replace(PREFILL, blocks=64)), site.decode(replace(DECODE, blocks=64))
    prompts = [
        ChunkedPrompt(source, (tuple(range(1 + 5 * number, 6 + 5 * number)),), transfer_id=f"t{number}")
        for number in range(6)
    ]
    follow(worker, *prompts)
    session = site.session(worker, prompts[0].remote())
    for number, prompt in enumerate(prompts):
        prompt.compute(32)
        session.submit(prompt.order(f"r{number}", prompt.blocks))
    until(lambda: len(session._parked) == len(prompts))  # a pull is parked just after it has asked
    session.check_integrity()
    prompts[3].fail_all(UNREACHABLE)
    ends = [worker.next_end() for _ in prompts]
    assert {end.cause for end in ends} == {Cause.UNREACHABLE}
    assert sorted(end.request_id for end in ends) == [f"r{number}" for number in range(6)]
    until(lambda: session.idle)
    assert [prompt.waiting for prompt in prompts] == [0] * 6, "questions that nobody needs are given up"
    for prompt in prompts:
        prompt.complete()
    holds_for(lambda: worker.ends.empty() and session.idle, 0.02)


# Who takes a lane


def test_pulls_that_wait_for_p_leave_the_lanes_to_others(site: Site) -> None:
    source, (worker,) = site.prefill(replace(PREFILL, blocks=64)), site.decode(replace(DECODE, blocks=64))
    number_of_prompts = 2 * LANES
    prompts = [
        ChunkedPrompt(source, (tuple(range(6 + 5 * number, 11 + 5 * number)),), transfer_id=f"t{number}")
        for number in range(number_of_prompts)
    ]
    follow(worker, *prompts)
    session = site.session(worker, prompts[0].remote())
    for number, prompt in enumerate(prompts):
        prompt.compute(16)
        session.submit(prompt.order(f"r{number}", prompt.blocks))
    until(lambda: all(prompt.waiting == 1 for prompt in prompts))
    whole: Blocks = ((1, 2, 3, 4, 5),)
    session.submit(an_order("whole", source.prefill("whole", whole), whole))
    assert worker.next_end().request_id == "whole"
    dice = random.Random(7)
    while open_prompts := [prompt for prompt in prompts if prompt.state != TransferState.COMPLETE]:
        prompt = dice.choice(open_prompts)
        if prompt.tokens < 64:
            prompt.compute(prompt.tokens + 16)
        else:
            prompt.complete()
    ends = [worker.next_end() for _ in prompts]
    assert [end.cause for end in ends] == [""] * number_of_prompts
    until(lambda: session.idle)
    session.check_integrity()
    assert worker.holds([(blocks, 0, 69) for blocks in (whole, *(prompt.blocks for prompt in prompts))])
    assert all(end.seconds["wait"] > 0 for end in ends)


def test_a_session_with_parked_pulls_closes_at_once_and_drops_them(legs: FollowedLegs) -> None:
    legs.prompt.compute(48)
    legs.submit()
    legs.reads(1)
    legs.session.close()
    assert legs.session.join(WAIT_S)
    legs.prompt.complete()
    holds_for(legs.worker.ends.empty, 0.02)
    assert legs.worker.holds([(OURS, 0, 48)])
    legs.session.check_integrity()


# Deadlines


def test_news_of_p_give_a_pull_more_time(site: Site) -> None:
    clock = ManualClock()
    legs = legs_of(site, clock=clock)
    legs.prompt.compute(16)
    legs.submit()
    legs.reads(1)
    for tokens in (17, 32, 48):
        clock.advance(19.0)
        legs.prompt.compute(tokens)
        until(lambda tokens=tokens: legs.prompt.waiting == 1 and legs.prompt.asked[-1].tokens == tokens)  # type: ignore[misc]
    clock.advance(19.0)
    legs.prompt.complete()
    end = legs.end()
    assert end.cause == ""
    assert end.seconds["wait"] == pytest.approx(76.0)


def test_a_prompt_of_which_there_is_no_news_fails_and_says_how_far_p_was(site: Site) -> None:
    clock = ManualClock()
    legs = legs_of(site, clock=clock)
    legs.prompt.compute(16)
    legs.submit()
    legs.reads(1)
    for seconds in (2.0, 17.5):
        clock.advance(seconds)
        legs.prompt.answer_all()
        until(lambda: legs.prompt.waiting == 1)
    assert [asked.wait_s for asked in legs.prompt.asked] == [2.0, 2.0, pytest.approx(0.5)]
    assert legs.client.timeouts == [7.0, 7.0, pytest.approx(5.5)]
    clock.advance(0.5)
    legs.prompt.answer_all()
    end = legs.end()
    assert end.cause == Cause.TIMEOUT
    assert end.reason.endswith(
        "has announced nothing new for the pull timeout of 20.0 s: its request is 'computing', 16 of 70 prompt tokens "
        "are computed"
    )
    assert legs.client.cancels == [Cancel(legs.prefill.service.engine_id, (), (TRANSFER_ID,))]


def test_a_prompt_that_p_starts_over_again_and_again_is_given_up(site: Site) -> None:
    """Each attempt is read, but none gets further than the first."""
    clock = ManualClock()
    legs = legs_of(site, clock=clock)
    legs.prompt.compute(32)
    legs.submit()
    legs.reads(1)
    for attempt in range(1, 4):
        clock.advance(6.0)
        legs.prompt.preempt(ELSEWHERE if attempt % 2 else THEIRS)
        legs.prompt.compute(32)
        legs.reads(attempt + 1)
        until(lambda: legs.prompt.waiting == 1)
    clock.advance(2.0)
    legs.prompt.answer_all()
    end = legs.end()
    assert end.cause == Cause.PREEMPTED
    assert end.restarts == 3
    assert (
        "started it over (attempt 4), and has not got beyond 32 of 70 prompt tokens for the pull timeout of 20.0 s"
        in (end.reason)
    )


def test_a_prompt_that_gets_further_after_it_was_started_over_is_waited_for(site: Site) -> None:
    clock = ManualClock()
    legs = legs_of(site, clock=clock)
    legs.prompt.compute(16)
    legs.submit()
    legs.reads(1)
    for attempt in range(1, 4):
        clock.advance(19.0)
        legs.prompt.preempt(ELSEWHERE if attempt % 2 else THEIRS)
        legs.prompt.compute(16 + 16 * attempt)
        legs.reads(attempt + 1)
        until(lambda: legs.prompt.waiting == 1)
    clock.advance(19.0)
    legs.prompt.complete()
    assert legs.end().cause == ""


def test_a_range_that_took_long_gives_p_time_to_say_more(site: Site) -> None:
    clock = ManualClock()
    legs = legs_of(site, clock=clock)
    legs.prompt.compute(16)
    hung = threading.Event()
    site.fabric.inject(1, Fault(until=hung, fails=False))
    legs.submit()
    until(lambda: site.fabric.reads == 1)
    clock.advance(19.0)
    hung.set()
    legs.reads(1)
    clock.advance(19.0)
    legs.prompt.complete()
    assert legs.end().cause == ""


def test_p_is_not_asked_in_a_hurry_if_it_answers_at_once_that_there_is_nothing_new(legs: FollowedLegs) -> None:
    legs.prompt.answers_at_once = True
    legs.prompt.compute(16)
    started = time.monotonic()
    legs.submit()
    until(lambda: len(legs.prompt.asked) > 5)
    assert time.monotonic() - started > 4 * 0.05
    legs.prompt.complete()
    assert legs.end().cause == ""
