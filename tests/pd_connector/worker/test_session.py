"""The pulls from one prefill engine: one after another, each ends once, and none waits for what is known to fail.

What a pull does is scripted here; real ones are in ``test_pull`` and ``test_peer``.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pd_connector.orders import Cause, PullOrder
from pd_connector.worker import session as module
from pd_connector.worker.checksums import Interrupted
from pd_connector.worker.peer import Peer, PeerAddress
from pd_connector.worker.pull import AnyEnd
from pd_connector.worker.pull_end import PullEnd, PullFailed
from pd_connector.worker.quarantine import LostPull
from pd_connector.worker.session import PeerSession
from tests.support.connector.requests import a_prompt, a_remote
from tests.support.waiting import WAIT_S, holds_for, until

REMOTE = a_remote(a_prompt(70))
ADDRESS = PeerAddress("engine-p", "10.0.0.5", 8998)

Script = Callable[["ScriptedPull"], None]


class ScriptedPull:
    """Does what the test says for its request, else shakes hands and ends well."""

    def __init__(self, world: "World", order: PullOrder, report: Callable[[AnyEnd], None], closing: Any) -> None:
        self.world, self.order, self.report, self.closing = world, order, report, closing

    def run(self, meet: Callable[[float], Peer]) -> None:
        self.world.began.append(self.order.request_id)
        self.meet = meet
        self.world.scripts.get(self.order.request_id, ScriptedPull.end_well)(self)

    def end_well(self) -> None:
        self.meet(5.0)
        self.report(PullEnd(self.order.request_id))

    def fail(self, error: PullFailed) -> None:
        self.world.failing(error)
        self.report(PullEnd(self.order.request_id, error.cause, str(error)))

    def lose(self, error: BaseException) -> None:
        self.report(LostPull(self.order.request_id, str(error)))


class HandMade:
    """What a handshake returns."""

    closed = False

    def close(self) -> None:
        self.closed = True


class World:
    """A session, what its pulls are to do, and what they did."""

    def __init__(self) -> None:
        self.scripts: dict[str, Script] = {}
        self.began: list[str] = []
        self.ends: list[AnyEnd] = []
        self.peers: list[HandMade] = []
        self.go_on = threading.Event()
        self.failed: list[PullFailed] = []
        self.failing: Callable[[PullFailed], None] = lambda error: None
        context: Any = None
        self.session = PeerSession(context, self.ends.append, ADDRESS)

    def connect_peer(self, *_: object) -> HandMade:
        self.peers.append(HandMade())
        return self.peers[-1]

    def submit(self, *request_ids: str) -> None:
        for request_id in request_ids:
            self.session.submit(PullOrder(request_id, REMOTE, ((1, 2),), 0, 32, f"pull of {request_id}"))

    def wait(self, pull: ScriptedPull) -> None:
        """A script: stand still until the test goes on."""
        assert self.go_on.wait(WAIT_S)
        pull.end_well()

    def ended(self) -> list[tuple[str, Cause]]:
        """How all that was submitted has ended, awaited."""
        until(lambda: self.session.idle)
        self.session.check_integrity()
        return [(end.request_id, end.cause) for end in self.ends if isinstance(end, PullEnd)]

    @property
    def lost(self) -> list[LostPull]:
        """Those whose clean-up failed."""
        return [end for end in self.ends if isinstance(end, LostPull)]

    def reasons(self) -> list[str]:
        return [end.reason for end in self.ends if isinstance(end, PullEnd)]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World()
    monkeypatch.setattr(module, "Pull", lambda _, *rest: ScriptedPull(world, *rest))
    monkeypatch.setattr(module, "connect_peer", world.connect_peer)
    yield world
    world.go_on.set()
    world.session.close()
    assert world.session.join(WAIT_S)


def raising(error: BaseException) -> Script:
    def script(pull: ScriptedPull) -> None:
        pull.meet(5.0)
        raise error

    return script


def test_pulls_are_carried_out_one_after_another_in_the_order_of_their_submission(world: World) -> None:
    world.scripts["a"] = world.wait
    world.submit("a", "b", "c")
    until(lambda: world.began)
    holds_for(lambda: world.began == ["a"], 0.02)
    assert not world.session.idle
    world.go_on.set()
    assert world.ended() == [("a", ""), ("b", ""), ("c", "")]


def test_one_handshake_is_enough_for_all(world: World) -> None:
    world.submit("a", "b")
    world.ended()
    world.submit("c")
    world.ended()
    assert len(world.peers) == 1
    assert not world.peers[0].closed


def test_a_pull_that_failed_leaves_the_others_alone(world: World) -> None:
    world.scripts["b"] = raising(PullFailed(Cause.READ, "a read failed"))
    world.submit("a", "b", "c")
    assert world.ended() == [("a", ""), ("b", Cause.READ), ("c", "")]
    assert world.reasons()[1] == "a read failed"
    assert len(world.peers) == 1


@pytest.mark.parametrize("cause", list(Cause)[1:])
def test_an_engine_that_cannot_be_read_from_fails_what_waits_behind_at_once(world: World, cause: Cause) -> None:
    def fail(pull: ScriptedPull) -> None:
        assert world.go_on.wait(WAIT_S)
        raise PullFailed(cause, "why")

    world.scripts["a"] = fail
    world.submit("a", "b", "c")
    world.go_on.set()
    cut_off = cause in {Cause.UNREACHABLE, Cause.DENIED}
    others = cause if cut_off else Cause.NONE
    assert world.ended() == [("a", cause), ("b", others), ("c", others)]
    assert world.began == (["a"] if cut_off else ["a", "b", "c"])
    world.submit("later")  # it may be there again
    assert world.ended()[3:] == [("later", "")]


def test_a_surprise_ends_its_pull_and_the_next_one_shakes_hands_anew(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("pd_connector"), "propagate", True)
    world.scripts["a"] = raising(KeyError("a layer of theirs"))
    world.submit("a", "b")
    assert world.ended() == [("a", Cause.INTERNAL), ("b", "")]
    assert world.reasons()[0] == "KeyError: 'a layer of theirs'"
    assert "unexpected failure of the pull of request a" in caplog.text
    assert [peer.closed for peer in world.peers] == [True, False]


def test_a_pull_whose_clean_up_fails_is_reported_as_lost(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for ever, and nobody takes its blocks for unwritten."""
    monkeypatch.setattr(logging.getLogger("pd_connector"), "propagate", True)

    def cannot_close(error: PullFailed) -> None:
        raise OSError("the link cannot be closed")

    world.failing = cannot_close
    world.scripts["a"] = raising(PullFailed(Cause.READ, "a read failed"))
    world.submit("a", "b")
    assert world.ended() == [("b", "")]
    assert world.lost == [LostPull("a", "the link cannot be closed")]
    assert "the clean-up of the pull of request a has failed" in caplog.text


def test_a_clean_up_that_fails_loses_what_waits_behind_too(world: World) -> None:
    def cannot_fail(error: PullFailed) -> None:
        if len(world.failed) == 1:
            raise OSError("b cannot be ended")
        world.failed.append(error)

    def fail(pull: ScriptedPull) -> None:
        assert world.go_on.wait(WAIT_S)
        raise PullFailed(Cause.UNREACHABLE, "why")

    world.failing, world.scripts["a"] = cannot_fail, fail
    world.submit("a", "b")
    world.go_on.set()
    assert world.ended() == [("a", Cause.UNREACHABLE)]
    assert world.lost == [LostPull("b", "b cannot be ended")]


def test_an_interruption_that_nobody_asked_for_ends_its_pull(world: World) -> None:
    world.scripts["a"] = raising(Interrupted())
    world.submit("a", "b")
    assert world.ended() == [("a", Cause.INTERNAL), ("b", "")]


def test_no_kind_of_exception_ends_the_thread(world: World) -> None:
    world.scripts["a"] = raising(SystemExit("out"))
    world.submit("a", "b")
    assert world.ended() == [("b", "")]
    assert world.lost == [LostPull("a", "out")]


def test_closing_drops_what_waits_and_closes_the_links_after_the_pull_under_way(world: World) -> None:
    def interrupted(pull: ScriptedPull) -> None:
        pull.meet(5.0)
        assert world.go_on.wait(WAIT_S)
        assert pull.closing.is_set()
        raise Interrupted

    world.scripts["a"] = interrupted
    world.submit("a", "b")
    until(lambda: world.peers)
    world.session.close()
    assert not world.session.join(0.01)
    assert not world.peers[0].closed
    world.go_on.set()
    assert world.session.join(WAIT_S)
    assert (world.began, world.ends) == (["a"], [])
    assert world.peers[0].closed
    world.session.check_integrity()


def test_a_session_was_used_last_when_a_pull_was_submitted_last(world: World) -> None:
    world.session.last_used = -1.0
    world.submit("a")
    assert world.session.last_used > 0.0
