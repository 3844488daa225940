"""The pulls from one prefill engine: in order, each ends once, and none waits for what is known to fail.

What a pull does is scripted here; real ones are in ``test_pull`` and ``test_peer``, several at once in ``test_lanes``.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pd_connector.orders import Cause, Orders
from pd_connector.worker import pulls
from pd_connector.worker.lease_checksums import Interrupted
from pd_connector.worker.pull_end import PullFailed
from pd_connector.worker.pulls import Pulls
from pd_connector.worker.quarantine import LostPull
from tests.support.connector.engines import OURS, THEIRS, Site, an_order
from tests.support.connector.scripted_pulls import ScriptedPull, ScriptedSession, raising, scripted_session
from tests.support.waiting import WAIT_S, holds_for, until


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedSession]:
    """With one lane, so that the order of things is known."""
    with scripted_session(monkeypatch, 1) as world:
        yield world


def test_pulls_begin_in_the_order_of_their_submission(world: ScriptedSession) -> None:
    world.scripts["a"] = world.wait
    world.submit("a", "b", "c")
    until(lambda: world.began)
    holds_for(lambda: world.began == ["a"], 0.02)
    assert not world.session.idle
    world.go_on.set()
    assert world.ended() == [("a", ""), ("b", ""), ("c", "")]


def test_how_much_a_pull_reads_is_asked_no_more_often_where_many_wait(
    world: ScriptedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the interpreter from the model, and thousands may wait."""
    asked = Counter[str]()
    tokens = property(lambda pull: (asked.update([pull.order.request_id]), 32)[1])
    monkeypatch.setattr(ScriptedPull, "tokens_left", tokens)
    world.submit(*(f"r{number}" for number in range(200)))
    assert len(world.ended()) == 200
    assert max(asked.values()) == 2


def test_one_handshake_is_enough_for_all(world: ScriptedSession) -> None:
    world.submit("a", "b")
    world.ended()
    world.submit("c")
    world.ended()
    assert len(world.peers) == 1
    assert not world.peers[0].closed


def test_a_pull_that_failed_leaves_the_others_alone(world: ScriptedSession) -> None:
    world.scripts["b"] = raising(PullFailed(Cause.READ, "a read failed"))
    world.submit("a", "b", "c")
    assert world.ended() == [("a", ""), ("b", Cause.READ), ("c", "")]
    assert world.reasons()[1] == "a read failed"
    assert len(world.peers) == 1


@pytest.mark.parametrize("cause", list(Cause)[1:])
def test_an_engine_that_cannot_be_read_from_fails_what_waits_behind_at_once(
    world: ScriptedSession, cause: Cause
) -> None:
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
    world: ScriptedSession, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("pd_connector"), "propagate", True)
    world.scripts["a"] = raising(KeyError("a layer of theirs"))
    world.submit("a", "b")
    assert world.ended() == [("a", Cause.INTERNAL), ("b", "")]
    assert world.reasons()[0] == "KeyError: 'a layer of theirs'"
    assert "unexpected failure of the pull of request a" in caplog.text
    assert [peer.closed for peer in world.peers] == [True, False]


def test_a_pull_whose_clean_up_fails_is_reported_as_lost(
    world: ScriptedSession, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
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


def test_a_clean_up_that_fails_loses_what_waits_behind_too(world: ScriptedSession) -> None:
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


def test_an_interruption_that_nobody_asked_for_ends_its_pull(world: ScriptedSession) -> None:
    world.scripts["a"] = raising(Interrupted())
    world.submit("a", "b")
    assert world.ended() == [("a", Cause.INTERNAL), ("b", "")]


def test_no_kind_of_exception_ends_the_thread(world: ScriptedSession) -> None:
    world.scripts["a"] = raising(SystemExit("out"))
    world.submit("a", "b")
    assert world.ended() == [("b", "")]
    assert world.lost == [LostPull("a", "out")]


def test_closing_drops_what_waits_and_closes_the_links_after_the_pull_under_way(world: ScriptedSession) -> None:
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


def test_a_session_was_used_last_when_a_pull_was_submitted_last(world: ScriptedSession) -> None:
    world.session.last_used = -1.0
    world.submit("a")
    assert world.session.last_used > 0.0


def test_room_for_an_engine_is_made_at_its_host_if_that_has_too_many(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or there would be none after it."""
    monkeypatch.setattr(pulls, "MOST_UNMET", 2)
    (worker,), remote = site.decode(), site.prefill().prefill("r", THEIRS)

    def idle(*_: object) -> Any:
        return SimpleNamespace(idle=True, has_met=False, last_used=time.monotonic(), close=lambda: None)

    service = Pulls(worker.context(), 600.0, max_peers=3, open_session=idle)
    for host, port in (("127.0.0.1", 1), ("127.0.0.2", 1), ("127.0.0.2", 2), ("127.0.0.2", 3)):
        assert service._session(an_order("r", remote, OURS, remote_host=host, remote_port=port)) is not None
    assert [(peer.host, peer.port) for peer in service._sessions] == [
        ("127.0.0.1", 1), ("127.0.0.2", 2), ("127.0.0.2", 3),
    ]  # fmt: skip


def test_an_idle_session_is_closed_though_no_new_engine_comes(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulls, "_SWEEP_S", 0.01)
    (worker,), prefill = site.decode(), site.prefill()
    service = Pulls(worker.context(), 0.05)
    for name in ("first", "second"):
        service.execute(Orders(pulls=(an_order(name, prefill.prefill(name, THEIRS), OURS),)))
        (session,) = service._sessions.values()
        until(lambda: [end.cause for end in service.take_ends()] == [""])
        until(lambda: service.take_ends() == [] and not service._sessions)
        assert session.join(WAIT_S)
        assert all(link.closed for link in worker.engine._links)
    service.check_integrity()
    service.join()
