"""A read whose peer cannot be reached any more ends long before its time; one whose peer is slow does not."""

import threading
import time

import pytest

from pd_connector.worker.peer_watch import PeerWatch
from tests.support.connector.engines import OURS, THEIRS, Site, an_order
from tests.support.connector.requests import RecordingClient
from tests.support.engine.in_process import Fault
from tests.support.waiting import ManualClock, holds_for, until
from transfer.control.client import ControlClient
from transfer.control.failures import PeerRefused, PeerUnreachable, TooManyPeers
from transfer.control.messages import ErrorCode, Renew, Renewed
from transfer.control.peer_sockets import ClientSettings
from transfer.peers import Address

AT = "engine-p", Address("10.0.0.5", 8998)
UNREACHABLE = PeerUnreachable(host="10.0.0.5", port=8998, request_type="renew", tried_s=4.0, attempts=1, reason="cut")
REPLACED, FAILED = (
    PeerRefused(host="10.0.0.5", port=8998, request_type="renew", code=code, reason="says P")
    for code in (ErrorCode.UNKNOWN_ENGINE, ErrorCode.INTERNAL)
)


class Watched:
    """A watch of two reads, of which one has asked."""

    def __init__(self) -> None:
        self.clock, self.client = ManualClock(), RecordingClient()
        self.engine = PeerWatch(self.client, *AT, 60.0, self.clock)
        self.watch, self.other = self.engine.of_read(), self.engine.of_read()
        self.clock.advance(0.5)
        assert self.watch() == self.other() == ""
        assert self.client.sent == [("10.0.0.5", 8998, Renew("engine-p", ()))], "for both"
        assert self.client.timeouts == [60.0]


def test_a_short_read_asks_nothing() -> None:
    clock, client = ManualClock(), RecordingClient()
    watch = PeerWatch(client, *AT, 60.0, clock).of_read()
    clock.advance(0.49)
    assert watch() == ""
    assert client.sent == []


def test_one_question_is_open_at_a_time_and_the_next_comes_half_a_second_after_it() -> None:
    watched = Watched()
    watched.clock.advance(30.0)
    assert watched.watch() == ""
    assert len(watched.client.sent) == 1
    watched.client.futures[0].set_result(Renewed(()))
    assert watched.watch() == ""
    assert len(watched.client.sent) == 2
    watched.client.futures[1].set_result(Renewed(()))
    watched.clock.advance(0.49)
    assert watched.watch() == ""
    assert len(watched.client.sent) == 2


@pytest.mark.parametrize("error", [UNREACHABLE, REPLACED], ids=["unreachable", "replaced"])
def test_a_read_from_an_engine_that_is_not_there_is_given_up(error: Exception) -> None:
    watched = Watched()
    watched.client.futures[0].set_exception(error)
    assert watched.watch() == watched.other() == watched.watch() == f"its engine was given up: {error}"
    assert len(watched.client.sent) == 1


def test_a_read_is_not_ended_by_the_answer_to_a_question_from_before_it() -> None:
    """The engine may have come back; the question may have been asked for as long as an earlier read was to take."""
    watched = Watched()
    watched.clock.advance(1.0)
    later = watched.engine.of_read()
    watched.client.futures[0].set_exception(UNREACHABLE)
    watched.clock.advance(0.5)
    assert later() == ""
    assert len(watched.client.sent) == 2, "it asks for itself"
    assert watched.watch() != ""
    watched.client.futures[1].set_exception(UNREACHABLE)
    assert later() != ""


@pytest.mark.parametrize("error", [TooManyPeers("256 peers"), FAILED], ids=["no room here", "a fault there"])
def test_what_does_not_say_that_the_engine_is_gone_ends_no_read(error: Exception) -> None:
    watched = Watched()
    watched.client.futures[0].set_exception(error)
    watched.clock.advance(0.5)
    assert watched.watch() == ""
    assert len(watched.client.sent) == 2


@pytest.mark.thorough
def test_a_pull_that_waits_for_bytes_ends_soon_after_its_engine_is_gone(site: Site) -> None:
    prefill, (worker,) = site.prefill(), site.decode()
    worker.client.close()
    worker.client = ControlClient(ClientSettings(retry_s=0.05, retry_cap_s=0.2, silent_s=1.0))
    site.fabric.inject(1, Fault(until=threading.Event()))
    remote = prefill.prefill("r", THEIRS)
    site.session(worker, remote).submit(an_order("r", remote, OURS))
    until(lambda: site.fabric.reads == 1)
    holds_for(worker.ends.empty, 1.5)
    prefill.close()
    began = time.monotonic()
    end = worker.next_end()
    assert time.monotonic() - began < 0.5 * worker.pull_timeout_s
    assert end.cause == "read"
    assert "its engine was given up: 127.0.0.1" in end.reason
    assert "there is no connection, for 1 s" in end.reason
    assert worker.untouched
