"""Several pulls from one prefill engine at once: none waits for a longer one, and none pays for another's failure.

With scripted pulls, as in ``test_session``. ``test_lanes_reading`` has real ones.
"""

import itertools
import logging
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pd_connector.orders import Cause
from pd_connector.worker import session as module
from pd_connector.worker.pull_end import PullEnd, PullFailed
from tests.support.connector.scripted_pulls import (
    ScriptedPull,
    ScriptedSession,
    leaving_a_stale_link,
    losing_a_link,
    needing_links,
    raising,
    scripted_session,
)
from tests.support.waiting import WAIT_S, holds_for, until
from transfer.engine.interface import ReadFailed


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, lanes: int) -> Iterator[ScriptedSession]:
    with scripted_session(monkeypatch, lanes) as world:
        yield world


def two_lanes(test: Any) -> Any:
    return pytest.mark.parametrize("lanes", [2])(test)


def three_lanes(test: Any) -> Any:
    return pytest.mark.parametrize("lanes", [3])(test)


def connects_and_waits(pull: ScriptedPull) -> None:
    pull.meet(5.0)
    pull.world.wait(pull)


def is_ready(world: ScriptedSession, lanes: int) -> bool:
    """Whether so many lanes wait for a pull."""
    return len(world.session._idle) == lanes


@three_lanes
def test_so_many_pulls_run_at_once_and_the_next_one_when_one_has_ended(world: ScriptedSession) -> None:
    for request_id in "abcd":
        world.scripts[request_id] = connects_and_waits
    world.submit("a", "b", "c", "d")
    until(lambda: len(world.began) == 3)
    holds_for(lambda: world.began == ["a", "b", "c"], 0.02)
    world.session.check_integrity()
    world.go_on.set()
    assert sorted(world.ended()) == [("a", ""), ("b", ""), ("c", ""), ("d", "")]
    assert len(world.peers) == 1, "one handshake is enough for all lanes"


@three_lanes
def test_the_links_of_the_next_lane_are_open_before_a_second_pull_comes(world: ScriptedSession) -> None:
    world.scripts["long"] = connects_and_waits
    world.submit("long")
    until(lambda: world.others and is_ready(world, 1))
    (spare,) = world.others
    assert spare.opened == [0, 1]
    world.submit("short")
    until(lambda: world.ends)
    assert world.ends == [PullEnd("short")]


@three_lanes
def test_one_lane_more_than_is_needed_is_enough(world: ScriptedSession) -> None:
    for request_id in "abc":
        world.submit(request_id)
        world.ended()
    until(lambda: is_ready(world, 2))
    assert len(world.others) == 1


@two_lanes
def test_while_a_lane_shakes_hands_no_other_takes_a_pull_and_all_fail_with_it_once(
    world: ScriptedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.scripts["a"] = raising(KeyError("a"))  # so that two lanes are there, and nobody is known
    world.submit("a")
    world.ended()
    until(lambda: is_ready(world, 2))
    tries = []

    def refuse(*_: object) -> None:
        tries.append(1)
        assert world.go_on.wait(WAIT_S)
        raise PullFailed(Cause.UNREACHABLE, "nobody is there")

    monkeypatch.setattr(module, "connect_peer", refuse)
    world.submit("b", "c", "d")
    until(lambda: tries)
    holds_for(lambda: world.began == ["a", "b"], 0.02)
    world.session.check_integrity()
    world.go_on.set()
    assert world.ended()[1:] == [(name, Cause.UNREACHABLE) for name in "bcd"]
    assert len(tries) == 1
    monkeypatch.setattr(module, "connect_peer", world.connect_peer)
    world.submit("later")
    assert world.ended()[4:] == [("later", "")]


@two_lanes
def test_a_pull_whose_handshake_fails_for_itself_alone_leaves_the_next_to_another_lane(
    world: ScriptedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handshake failed because of the pull, not because of the peer."""
    causes = [Cause.INCOMPATIBLE, Cause.NONE]

    def connect(*_: object) -> Any:
        if cause := causes.pop(0):
            raise PullFailed(cause, "why")
        return world.connect_peer()

    monkeypatch.setattr(module, "connect_peer", connect)
    world.submit("a", "b")
    assert world.ended() == [("a", Cause.INCOMPATIBLE), ("b", "")]


@two_lanes
def test_links_that_another_pull_uses_are_not_closed_by_a_surprise(world: ScriptedSession) -> None:
    world.scripts["a"], world.scripts["b"] = connects_and_waits, raising(KeyError("b"))
    world.submit("a")
    until(lambda: world.others and is_ready(world, 1))
    world.submit("b")
    until(lambda: len(world.ends) == 1)
    world.submit("c")  # shakes hands anew
    until(lambda: len(world.ends) == 2)
    until(lambda: [other.closed for other in world.others] == [True])
    assert [peer.closed for peer in world.peers] == [False, False]
    world.go_on.set()
    assert sorted(world.ended()) == [("a", ""), ("b", Cause.INTERNAL), ("c", "")]
    world.submit("d")  # on the first lane, which belonged to the first handshake
    assert world.ended()[3:] == [("d", "")]
    until(lambda: [peer.closed for peer in world.peers] == [True, False])


@two_lanes
def test_a_lane_whose_links_cannot_be_opened_leaves_the_pulls_to_the_others(
    world: ScriptedSession, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("pd_connector"), "propagate", True)
    tries: list[int] = []

    def refuse(rank: int) -> None:
        tries.append(rank)
        raise ReadFailed("no socket is left", settled=True)

    world.opening = refuse
    world.scripts["a"] = connects_and_waits
    world.submit("a", "b")
    until(lambda: tries and len(world.session._lanes) == 1)
    world.submit("c")
    holds_for(lambda: world.began == ["a"], 0.02)
    world.go_on.set()
    assert world.ended() == [("a", ""), ("b", ""), ("c", "")]
    assert tries == [0], "it is not tried again and again"
    assert "one more pull at once from engine engine-p at 10.0.0.5:8998 is not possible now: no socket" in caplog.text
    world.opening, world.session._rests_until = tries.append, time.monotonic()
    world.submit("d")
    until(lambda: is_ready(world, 2))


@two_lanes
def test_a_lane_that_cannot_open_its_lost_links_again_leaves_the_pulls_to_one_that_has_its_own(
    world: ScriptedSession,
) -> None:
    """The first lane too, which would take every pull before the others."""
    world.scripts |= {"a": connects_and_waits, "lost": losing_a_link, "b": needing_links, "c": needing_links}
    tries: list[int] = []

    def refuse(rank: int) -> None:
        tries.append(rank)
        raise ReadFailed("no socket is left", settled=True)

    both_lanes_have_links(world)
    world.opening = refuse
    world.submit("lost")
    until(lambda: tries and world.session.idle)
    world.submit("b", "c")
    assert world.ended()[-3:] == [("lost", Cause.READ), ("b", ""), ("c", "")]
    until(lambda: world.peers[0].closed)
    assert (tries, list(world.session._lanes)) == ([1], [1])
    world.opening, world.session._rests_until = tries.append, 0.0
    world.submit("d")
    until(lambda: is_ready(world, 2))
    assert sorted(world.session._lanes) == [0, 1]


@two_lanes
def test_a_lane_opens_its_lost_links_again_before_the_next_pull_comes(world: ScriptedSession) -> None:
    world.scripts |= {"lost": losing_a_link, "b": needing_links}
    both_lanes_have_links(world)
    opened: list[int] = []
    world.opening = opened.append
    world.submit("lost")
    until(lambda: opened and is_ready(world, 2))
    world.submit("b")
    assert world.ended()[-2:] == [("lost", Cause.READ), ("b", "")]
    assert opened == [1]


@two_lanes
def test_while_a_lane_opens_its_lost_links_another_takes_the_pulls(world: ScriptedSession) -> None:
    world.scripts |= {"lost": losing_a_link, "b": needing_links}
    both_lanes_have_links(world)
    began = threading.Event()

    def opens(rank: int) -> None:
        began.set()
        assert world.go_on.wait(WAIT_S)

    world.opening = opens
    world.submit("lost")
    assert began.wait(WAIT_S)
    world.submit("b")
    assert world.ended()[-2:] == [("lost", Cause.READ), ("b", "")]
    world.go_on.set()
    until(lambda: is_ready(world, 2))


@two_lanes
def test_pulls_fail_and_do_not_wait_when_no_lane_can_open_its_links(world: ScriptedSession) -> None:
    for name in ("lost", "lost too"):
        world.scripts[name] = losing_a_link
    world.scripts["b"] = needing_links
    both_lanes_have_links(world)

    world.opening = refuse_a_socket
    world.submit("lost")
    until(lambda: len(world.session._lanes) == 1)
    world.submit("lost too")
    until(lambda: world.session.idle)
    world.submit("b", "c")
    assert [cause for _, cause in world.ended()[-4:]] == [Cause.READ] * 2 + [Cause.UNREACHABLE] * 2
    world.opening = lambda rank: None
    world.scripts["d"] = needing_links
    world.submit("d")
    assert world.ended()[-1] == ("d", ""), "it may be there again"


@three_lanes
def test_the_last_lane_stays_whichever_it_is(world: ScriptedSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LANE_IDLE_S", 0.01)
    monkeypatch.setattr(module, "_REST_S", WAIT_S)

    def losing_in_the_end(pull: ScriptedPull) -> None:
        assert world.go_on.wait(WAIT_S)
        losing_a_link(pull)

    world.scripts |= {"a": connects_and_waits, "b": connects_and_waits, "lost": losing_in_the_end}
    world.submit("a", "b", "lost")
    until(lambda: len(world.session._lanes) == 3 and len(world.began) == 3)

    world.opening = refuse_a_socket
    world.go_on.set()
    world.ended()
    until(lambda: len(world.session._lanes) == 1)
    holds_for(lambda: len(world.session._lanes) == 1, 0.05)
    world.session.check_integrity()
    world.submit("c")
    assert world.ended()[-1] == ("c", "")


@two_lanes
def test_a_lane_that_is_left_alone_while_it_opens_its_links_stays(
    world: ScriptedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.scripts |= {"lost": losing_a_link, "b": needing_links}
    both_lanes_have_links(world)
    began = threading.Event()

    def refuse(rank: int) -> None:
        began.set()
        assert world.go_on.wait(WAIT_S)
        raise ReadFailed("nobody is there", settled=True)

    world.opening = refuse
    monkeypatch.setattr(module, "_LANE_IDLE_S", 0.01)
    world.submit("lost")
    assert began.wait(WAIT_S)
    world.submit("c")  # the other lane waits anew after it, and not for long
    until(lambda: list(world.session._lanes) == [0])
    world.go_on.set()
    world.submit("b")
    assert world.ended()[-1] == ("b", Cause.UNREACHABLE)


@two_lanes
def test_a_lane_whose_links_are_older_than_the_last_handshake_opens_new_ones_or_ends(world: ScriptedSession) -> None:
    """Though the lane that has shaken hands is still busy with the pull for which it did."""
    world.scripts |= {"surprise": raising(KeyError("why")), "long": connects_and_waits, "b": needing_links}
    both_lanes_have_links(world)
    world.submit("surprise")
    world.ended()
    world.opening = refuse_a_socket
    world.submit("long", "b")
    until(lambda: len(world.session._lanes) == 1)
    world.go_on.set()
    assert world.ended()[-2:] == [("long", ""), ("b", "")]


def refuse_a_socket(rank: int) -> None:
    raise ReadFailed("no socket is left", settled=True)


def both_lanes_have_links(world: ScriptedSession) -> None:
    world.scripts["first"] = connects_and_waits
    world.submit("first")
    until(lambda: world.others and is_ready(world, 1))
    world.go_on.set()
    until(lambda: is_ready(world, 2))
    world.go_on.clear()


@two_lanes
def test_a_system_without_a_thread_for_a_lane_runs_pulls_one_after_another(
    world: ScriptedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    world.submit("a", "b", "c")
    assert world.ended() == [("a", ""), ("b", ""), ("c", "")]


@three_lanes
def test_lanes_that_have_nothing_to_do_end_and_the_first_one_stays(
    world: ScriptedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LANE_IDLE_S", 0.02)
    world.submit("a", "b", "c")
    world.ended()
    until(lambda: list(world.session._lanes) == [0])
    until(lambda: all(other.closed for other in world.others))
    assert not world.peers[0].closed
    world.submit("d")
    assert world.ended()[3:] == [("d", "")]
    assert len(world.peers) == 1


@pytest.mark.parametrize("lanes", [4])
def test_closing_ends_lanes_in_every_state(world: ScriptedSession) -> None:
    """One is idle, one opens its links, one pulls; more pulls wait than there are lanes."""
    opening = threading.Event()

    def opens(rank: int) -> None:
        if len(world.others) == 3:
            opening.set()
            assert world.go_on.wait(WAIT_S)

    world.opening = opens
    world.scripts["a"] = world.scripts["b"] = world.scripts["c"] = connects_and_waits
    world.submit("a", "b", "c", "d", "e")
    assert opening.wait(WAIT_S)
    until(lambda: len(world.began) == 3)
    world.session.close()
    assert not world.session.join(0.01)
    world.go_on.set()
    assert world.session.join(WAIT_S)
    assert world.began == ["a", "b", "c"]
    assert all(peer.closed for peer in (*world.peers, *world.others))
    world.session.check_integrity()


@two_lanes
def test_closing_during_the_handshake_ends_all_lanes(world: ScriptedSession, monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = threading.Event()

    def connect(*_: object) -> Any:
        meeting.set()
        assert world.go_on.wait(WAIT_S)
        return world.connect_peer()

    monkeypatch.setattr(module, "connect_peer", connect)
    world.submit("a", "b")
    assert meeting.wait(WAIT_S)
    world.session.close()
    world.go_on.set()
    assert world.session.join(WAIT_S)
    assert world.began == ["a"]
    assert [peer.closed for peer in world.peers] == [True]


@pytest.mark.parametrize("lanes", [1, 2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_every_pull_ends_once_whatever_the_others_do(
    world: ScriptedSession, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LANE_IDLE_S", 0.001)
    monkeypatch.setattr(module, "_REST_S", 0.001)
    chance, names = random.Random(seed), [f"r{number}" for number in range(150)]

    def maybe_refuse(rank: int) -> None:
        if chance.random() < 0.3:
            raise ReadFailed("no link", settled=True)

    def slow(pull: ScriptedPull) -> None:
        pull.meet(5.0)
        time.sleep(0.001)
        pull.end_well()

    world.opening = maybe_refuse
    failures = [PullFailed(cause, "why") for cause in (Cause.READ, Cause.UNREACHABLE, Cause.LEASE)]
    for name in names:
        world.scripts[name] = chance.choice(
            [slow, leaving_a_stale_link, losing_a_link, needing_links, *map(raising, failures), raising(KeyError("k"))]
        )
    for name in names:
        world.submit(name)
        world.session.check_integrity()
        if chance.random() < 0.2:
            time.sleep(0.002)
    assert sorted(name for name, _ in world.ended()) == sorted(names)


# Short pulls beside long ones


@pytest.mark.parametrize("lanes", [4])
def test_a_short_pull_ends_while_long_ones_stand_still(world: ScriptedSession) -> None:
    for request_id in "abcd":
        world.scripts[request_id] = connects_and_waits
    world.submit(*"abcd", tokens=20_000)
    until(lambda: len(world.began) == 3)
    world.submit("short", tokens=100)
    until(lambda: world.ends)
    assert world.ends == [PullEnd("short")]
    assert world.began == ["a", "b", "c", "short"], "the last lane is not for long ones"
    world.session.check_integrity()
    world.submit("a quarter", tokens=5_000)
    until(lambda: len(world.ends) == 2)
    world.submit("more than a quarter", tokens=5_001)
    holds_for(lambda: len(world.began) == 5, 0.02)
    world.go_on.set()
    assert len(world.ended()) == 7


@two_lanes
def test_the_shortest_of_those_that_wait_is_next(world: ScriptedSession) -> None:
    world.scripts["first"] = world.scripts["second"] = connects_and_waits
    world.submit("first", "second")
    until(lambda: len(world.began) == 2)
    for request_id, tokens in (("long", 900), ("short", 100), ("middle", 500)):
        world.submit(request_id, tokens=tokens)
    world.scripts["short"] = world.scripts["middle"] = world.scripts["long"] = connects_and_waits
    world.go_on.set()
    world.ended()
    assert world.began.index("long") == 4, "two lanes may take the others at once"


@two_lanes
def test_no_stream_of_short_pulls_starves_a_long_one(world: ScriptedSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE_S", 0.05)
    deadline = time.monotonic() + WAIT_S
    numbers = itertools.count()

    def one_more(pull: ScriptedPull) -> None:
        time.sleep(0.002)
        if "long" not in world.began and time.monotonic() < deadline:
            for _ in range(2):
                submit_short()
        pull.end_well()

    def submit_short() -> None:
        name = f"short {next(numbers)}"
        world.scripts[name] = one_more
        world.submit(name)

    with ThreadPoolExecutor(1) as threads:  # a session belongs to one thread
        submit = world.submit
        monkeypatch.setattr(
            world, "submit", lambda *names, **options: threads.submit(submit, *names, **options).result()
        )
        for _ in range(4):
            submit_short()
        world.submit("long", tokens=900)
        until(lambda: "long" in world.began)
        world.ended()
    assert world.began.index("long") >= 4, "the shorter ones went first at first"
