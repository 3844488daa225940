"""Several pulls from one prefill engine at once: none waits for a longer one, and none pays for another's failure.

First with scripted pulls, as in ``test_session``, then with real ones over the in-process engine.
"""

import logging
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pd_connector.orders import Cause
from pd_connector.worker import session as module
from pd_connector.worker.pull_end import PullEnd, PullFailed
from tests.support.connector.engines import THEIRS, PrefillEngine, Site, an_order
from tests.support.connector.scripted_pulls import ScriptedPull, ScriptedSession, raising, scripted_session
from tests.support.engine.in_process import Fault, InProcessEngine
from tests.support.waiting import WAIT_S, holds_for, until
from transfer.engine.base import ReadFailed


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
    assert [peer.closed for peer in world.peers] == [False, False]
    assert [other.closed for other in world.others] == [True]
    world.go_on.set()
    assert sorted(world.ended()) == [("a", ""), ("b", Cause.INTERNAL), ("c", "")]
    world.submit("d")  # on the first lane, which belonged to the first handshake
    assert world.ended()[3:] == [("d", "")]
    assert [peer.closed for peer in world.peers] == [True, False]


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
    world.opening, world.session._rests_until = tries.append, 0.0
    world.submit("d")
    until(lambda: is_ready(world, 2))


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
        world.scripts[name] = chance.choice([slow, slow, *map(raising, failures), raising(KeyError("k"))])
    for name in names:
        world.submit(name)
        world.session.check_integrity()
        if chance.random() < 0.2:
            time.sleep(0.002)
    assert sorted(name for name, _ in world.ended()) == sorted(names)


# Real pulls


FIRST, SECOND, THIRD = (((1, 2, 8, 3, 11),), ((7, 4, 10, 9, 6),), ((5,),))


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    gate = threading.Event()
    yield gate
    gate.set()


@pytest.mark.parametrize(
    "fault", [Fault(fails=False), Fault(settled=True), Fault(settled=False, landed=2)], ids=["hangs", "fails", "late"]
)
def test_pulls_go_on_beside_one_that_hangs_or_fails(site: Site, gate: threading.Event, fault: Fault) -> None:
    prefill, (worker,) = site.prefill(), site.decode()
    fault = Fault(fault.settled, fault.landed, fault.fails, gate)
    site.fabric.inject(1, fault)
    long, short, last = (prefill.prefill(name, THEIRS) for name in ("long", "short", "last"))
    session = site.session(worker, long)
    session.submit(an_order("long", long, FIRST))
    until(lambda: site.fabric.reads == 1)
    session.submit(an_order("short", short, SECOND))
    end = worker.next_end()
    assert (end.request_id, end.cause) == ("short", "")
    gate.set()
    end = worker.next_end()
    assert (end.request_id, end.cause) == ("long", Cause.READ if fault.fails else "")
    site.fabric.deliver_late_bytes()
    session.submit(an_order("last", last, THIRD, 0, 16))
    assert worker.next_end().cause == ""
    pulled = [(SECOND, 0, 69), (THIRD, 0, 16)] + ([] if fault.fails else [(FIRST, 0, 69)])
    assert fault.landed or worker.holds(pulled)
    assert worker.client.counters.requests == 1 + 3, "a hello, and a release each"


def test_the_next_pull_has_links_of_its_own_that_were_opened_before(site: Site, gate: threading.Event) -> None:
    prefill, (worker,) = site.prefill(), site.decode()
    site.fabric.inject(1, Fault(until=gate, fails=False))
    long, short = (prefill.prefill(name, THEIRS) for name in ("long", "short"))
    session = site.session(worker, long)
    session.submit(an_order("long", long, FIRST))
    until(lambda: site.fabric.reads == 1 and len(worker.engine._links) == 2)
    session.submit(an_order("short", short, SECOND))
    assert worker.next_end().request_id == "short"
    gate.set()
    assert worker.next_end().cause == ""
    assert worker.holds([(FIRST, 0, 69), (SECOND, 0, 69)])


def test_a_process_that_took_the_address_while_lanes_read_fails_them_and_no_other_lane_is_opened_to_it(
    site: Site, gate: threading.Event
) -> None:
    prefill, (worker,) = site.prefill(), site.decode()
    remotes = [prefill.prefill(f"r{number}", THEIRS) for number in range(4)]
    for read in (1, 2):
        site.fabric.inject(read, Fault(until=gate, fails=False))
    session = site.session(worker, remotes[0])
    for number, blocks in enumerate((FIRST, SECOND)):
        session.submit(an_order(f"r{number}", remotes[number], blocks))
    until(lambda: site.fabric.reads == 2)
    take_address(site, prefill)
    gate.set()
    ends = [worker.next_end() for _ in range(2)]
    assert {end.cause for end in ends} == {Cause.READ}
    session.submit(an_order("r2", remotes[2], THIRD, 0, 16))
    assert worker.next_end().cause == Cause.UNREACHABLE


def take_address(site: Site, prefill: PrefillEngine) -> None:
    """Let another process answer at the address of the prefill engine's worker."""
    usurper = site.add(InProcessEngine(site.fabric))
    usurper.register(prefill.ranks[0].geometry.regions)
    site.fabric.replace(prefill.engines[0].address, usurper)
