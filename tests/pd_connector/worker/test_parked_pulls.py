"""Pulls that wait for the prefill engine: they take no lane, keep nobody waiting, and end once like all others.

What a pull does is scripted here; real ones are in ``test_followed_pulls``.
"""

import queue
import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from pd_connector.orders import Cause
from pd_connector.worker import session as module
from pd_connector.worker.pull_end import PullFailed
from pd_connector.worker.quarantine import LostPull
from tests.support.connector.scripted_pulls import (
    PullScript,
    ScriptedPull,
    ScriptedSession,
    parking,
    raising,
    scripted_session,
)
from tests.support.waiting import WAIT_S, holds_for, until


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedSession]:
    """With one lane, so that the order of things is known."""
    with scripted_session(monkeypatch, 1) as world:
        yield world


def parked(world: ScriptedSession, number: int) -> None:
    until(lambda: len(world.session._parked) == number)
    world.session.check_integrity()


def test_a_parked_pull_leaves_the_lane_to_others_and_goes_on_when_it_is_answered(world: ScriptedSession) -> None:
    world.scripts["a"] = parking()
    world.submit("a")
    parked(world, 1)
    world.submit("b")
    until(lambda: world.ends)
    assert world.began == ["a", "b"]
    assert not world.session.idle
    world.questions[0].set_result(None)
    assert world.ended() == [("b", ""), ("a", "")]
    assert world.began == ["a", "b", "a"]
    assert len(world.peers) == 1


def test_a_pull_may_be_parked_again_and_again(world: ScriptedSession) -> None:
    world.scripts["a"] = parking(3)
    world.submit("a")
    for number in range(3):
        parked(world, 1)
        world.questions[number].set_result(None)
    assert world.ended() == [("a", "")]
    assert world.began == ["a"] * 4


def test_a_question_that_is_answered_before_the_pull_is_parked_is_not_lost(world: ScriptedSession) -> None:
    def answered_at_once(pull: ScriptedPull) -> Future[Any] | None:
        if pull.answers:
            pull.end_well()
            return None
        answer = pull.park()
        answer.set_result(None)
        return answer

    world.scripts["a"] = answered_at_once
    world.submit("a")
    assert world.ended() == [("a", "")]


def test_a_question_that_fails_lets_the_pull_go_on_too(world: ScriptedSession) -> None:
    world.scripts["a"] = parking()
    world.submit("a")
    parked(world, 1)
    world.questions[0].set_exception(OSError("no answer"))
    assert world.ended() == [("a", "")]


@pytest.mark.parametrize("is_ahead", [True, False])
def test_pulls_of_complete_prompts_go_before_those_that_wait_for_p(world: ScriptedSession, is_ahead: bool) -> None:
    world.scripts["a"] = parking(is_ahead=is_ahead)
    world.scripts["b"] = world.wait
    world.submit("a")
    parked(world, 1)
    world.submit("b")
    until(lambda: world.began == ["a", "b"])
    world.questions[0].set_result(None)
    parked(world, 0)
    world.submit("c", "d")
    world.go_on.set()
    world.ended()
    assert world.began == ["a", "b", *("cda" if is_ahead else "acd")]


def test_a_pull_that_is_answered_gets_a_lane_though_the_spare_one_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LANE_IDLE_S", 0.02)
    with scripted_session(monkeypatch, 2) as world:
        world.scripts["a"] = parking()
        world.scripts["b"] = world.wait
        world.submit("a")
        parked(world, 1)
        world.submit("b")
        until(lambda: "b" in world.began and len(world.session._lanes) == 1)
        world.questions[0].set_result(None)
        until(lambda: world.ends)
        assert world.began == ["a", "b", "a"]
        world.go_on.set()
        assert world.ended() == [("a", ""), ("b", "")]


@pytest.mark.parametrize("cause", [Cause.UNREACHABLE, Cause.DENIED, Cause.READ])
def test_an_engine_that_cannot_be_read_from_fails_what_is_parked(world: ScriptedSession, cause: Cause) -> None:
    world.scripts["a"] = world.scripts["b"] = parking()
    world.scripts["c"] = raising(PullFailed(cause, "why"))
    world.submit("a", "b")
    parked(world, 2)
    world.submit("c")
    if cause is Cause.READ:
        until(lambda: world.ends)
        parked(world, 2)
    else:
        assert sorted(world.ended()) == [(name, cause) for name in "abc"]
        parked(world, 0)
    for question in world.questions:
        question.set_result(None)
    ended = world.ended()
    holds_for(lambda: len(world.ends) == 3, 0.02)
    assert sorted(ended) == [("a", "" if cause is Cause.READ else cause), ("b", ended[1][1]), ("c", cause)]


def test_a_parked_pull_whose_clean_up_fails_is_lost(world: ScriptedSession) -> None:
    def cannot_end_the_parked_one(error: PullFailed) -> None:
        if world.failed:
            raise OSError("it cannot be ended")
        world.failed.append(error)

    world.scripts["a"], world.failing = parking(), cannot_end_the_parked_one
    world.scripts["b"] = raising(PullFailed(Cause.UNREACHABLE, "why"))
    world.submit("a")
    parked(world, 1)
    world.submit("b")
    assert world.ended() == [("b", Cause.UNREACHABLE)]
    assert world.lost == [LostPull("a", "it cannot be ended")]


def test_closing_drops_what_is_parked(world: ScriptedSession) -> None:
    world.scripts["a"] = world.scripts["b"] = parking()
    world.submit("a", "b")
    parked(world, 2)
    world.session.close()
    assert world.session.join(WAIT_S)
    assert world.peers[0].closed
    for question in world.questions:
        question.set_result(None)
    holds_for(lambda: world.began == ["a", "b"] and not world.ends, 0.02)
    world.session.check_integrity()


class Answerers:
    """Threads that answer the questions of parked pulls as they come. A context manager."""

    def __init__(self, number: int) -> None:
        self.questions: queue.SimpleQueue[Future[Any] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._answer) for _ in range(number)]

    def __enter__(self) -> "Answerers":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for _thread in self._threads:
            self.questions.put(None)
        for thread in self._threads:
            thread.join()

    def _answer(self) -> None:
        while (question := self.questions.get()) is not None:
            if question.set_running_or_notify_cancel():
                question.set_result(None)

    def parking(self, times: int, fate: BaseException | None, *, is_ahead: bool) -> PullScript:
        """A script: be parked so many times, and then end well or with ``fate``."""

        def script(pull: ScriptedPull) -> Future[Any] | None:
            pull.is_ahead = is_ahead
            if len(pull.answers) < times:
                self.questions.put(answer := pull.park())
                return answer
            if fate is not None:
                raise fate
            pull.end_well()
            return None

        return script


@pytest.mark.parametrize("lanes", [1, 2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_every_pull_ends_once_whenever_it_is_answered(monkeypatch: pytest.MonkeyPatch, seed: int, lanes: int) -> None:
    chance, names = random.Random(seed), [f"r{number}" for number in range(120)]
    errors = PullFailed(Cause.READ, "why"), PullFailed(Cause.UNREACHABLE, "why"), KeyError("k")
    with scripted_session(monkeypatch, lanes) as world, Answerers(2) as answerers:
        for name in names:
            fate = chance.choice([None] * 4 + list(errors))
            world.scripts[name] = answerers.parking(chance.randrange(5), fate, is_ahead=chance.random() < 0.5)
            world.submit(name)
            world.session.check_integrity()
        assert sorted(name for name, _ in world.ended()) == sorted(names)
