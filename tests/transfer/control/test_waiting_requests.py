"""Requests that wait for an answer: by themselves, and on a server, over the real socket."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from unittest.mock import patch

import pytest
import zmq
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.support.control.samples import FOLLOW, HELLO, WELCOME, Handler, Start
from tests.support.waiting import until
from transfer.control import admission, waiting_requests
from transfer.control.client import ControlClient
from transfer.control.messages import (
    Follow,
    Followed,
    Reply,
    Request,
    TransferState,
    encode,
)
from transfer.control.server import ControlServer
from transfer.control.waiting_requests import NotYet, WaitingRequest, WaitingRequests

NOTHING_NEW = Followed("engine", TransferState.UNKNOWN)


def waiting(topic: str, message_id: int = 1, due_at: float = 100.0, peer: bytes = b"peer") -> WaitingRequest:
    return WaitingRequest(peer, message_id, FOLLOW, topic, due_at, NOTHING_NEW)


def test_what_waits_for_a_topic_is_taken_once_it_has_changed() -> None:
    held = WaitingRequests()
    first, second, other = waiting("a", 1), waiting("a", 2), waiting("b", 3)
    assert all(map(held.add, (first, second, other)))
    assert held.take_changed() == []
    assert held.changed("a")
    assert held.take_changed() == [first, second]
    assert held.take_changed() == []
    assert len(held) == 1
    held.check_integrity()


def test_the_server_is_woken_by_the_first_change_that_it_has_not_seen() -> None:
    held = WaitingRequests()
    assert [held.changed("a"), held.changed("a"), held.changed("b")] == [True, False, False]
    held.take_changed()
    assert held.changed("b")


def test_a_change_is_not_kept_for_those_who_come_later() -> None:
    """They have been answered with what there is."""
    held = WaitingRequests()
    held.changed("a")
    held.take_changed()
    held.add(waiting("a"))
    assert held.take_changed() == []


def test_a_change_before_the_next_look_counts_for_those_who_have_come_since() -> None:
    """It may have happened while the handler found nothing new."""
    held = WaitingRequests()
    held.changed("a")
    held.add(waiting("a"))
    assert held.take_changed() == [waiting("a")]


def test_what_has_waited_long_enough_is_taken_in_the_order_of_its_time() -> None:
    held = WaitingRequests()
    for number, due_at in enumerate((3.0, 1.0, 2.0, 9.0)):
        held.add(waiting(f"topic {number}", number + 1, due_at))
    assert [each.due_at for each in held.take_late(3.0)] == [1.0, 2.0, 3.0]
    assert held.take_late(8.9) == []
    assert len(held) == 1
    held.check_integrity()


def test_a_repetition_takes_no_place_and_keeps_the_first_time() -> None:
    held = WaitingRequests()
    assert held.add(waiting("a", due_at=5.0))
    assert held.add(waiting("a", due_at=9.0))
    assert len(held) == 1
    assert [each.due_at for each in held.take_late(5.0)] == [5.0]
    assert held.take_late(9.0) == []


def test_the_same_number_from_another_connection_is_another_request() -> None:
    held = WaitingRequests()
    held.add(waiting("a", peer=b"one"))
    held.add(waiting("a", peer=b"two"))
    assert len(held) == 2


def test_no_more_wait_than_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_requests, "MAX_WAITING", 3)
    held = WaitingRequests()
    assert [held.add(waiting("a", number)) for number in range(1, 6)] == [True, True, True, False, False]
    assert held.add(waiting("a", 2)), "a repetition waits already"
    held.changed("a")
    held.take_changed()
    assert held.add(waiting("a", 7))


def test_the_time_to_the_next_is_known() -> None:
    held = WaitingRequests()
    assert held.timeout_ms is None
    held.add(waiting("a", due_at=time.monotonic() + 5))
    assert 0 < (held.timeout_ms or 0) <= 5001
    held.add(waiting("b", due_at=time.monotonic() - 5))
    assert held.timeout_ms == 0


def test_what_is_answered_again_and_again_does_not_pile_up() -> None:
    """A peer may ask a hundred times a second, and wait for half a minute each time."""
    held = WaitingRequests()
    for number in range(1, 20_000):
        held.add(waiting("a", number))
        held.changed("a")
        held.take_changed()
    assert len(held._due) < 5000
    held.add(waiting("a", 1, due_at=1.0))
    assert len(held.take_late(2.0)) == 1


class AnyOrder(RuleBasedStateMachine):
    """Requests that come, are repeated, and are answered, against a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.held = WaitingRequests()
        self.now = 0.0
        self.expected: dict[tuple[str, bytes, int], WaitingRequest] = {}
        self.topics: set[str] = set()

    @rule(
        topic=st.sampled_from("abc"),
        number=st.integers(1, 4),
        peer=st.sampled_from([b"p", b"q"]),
        wait_s=st.integers(1, 9),
    )
    def add(self, topic: str, number: int, peer: bytes, wait_s: int) -> None:
        new = waiting(topic, number, self.now + wait_s, peer)
        assert self.held.add(new)
        self.expected.setdefault((topic, peer, number), new)

    @rule(topic=st.sampled_from("abcd"))
    def change(self, topic: str) -> None:
        assert self.held.changed(topic) is not bool(self.topics)
        self.topics.add(topic)

    @rule()
    def take_changed(self) -> None:
        due = [each for each in self.expected.values() if each.topic in self.topics]
        assert Counter(self.held.take_changed()) == Counter(due)
        self._forget(due)
        self.topics.clear()

    @rule(seconds=st.integers(0, 5))
    def take_late(self, seconds: int) -> None:
        self.now += seconds
        due = [each for each in self.expected.values() if each.due_at <= self.now]
        assert Counter(self.held.take_late(self.now)) == Counter(due)
        self._forget(due)

    @invariant()
    def books_balance(self) -> None:
        self.held.check_integrity()
        assert len(self.held) == len(self.expected)

    def _forget(self, taken: list[WaitingRequest]) -> None:
        self.expected = {key: each for key, each in self.expected.items() if each not in taken}


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


# On a server


class Board:
    """A handler that knows how many tokens each topic has, and answers whoever knows fewer."""

    def __init__(self) -> None:
        self.tokens: Counter[str] = Counter()
        self.asked: list[Request] = []
        self.has_looked: Callable[[], None] = lambda: None  # between its look and its answer

    def handle(self, request: Request) -> Reply | NotYet:
        if not isinstance(request, Follow):
            return WELCOME
        self.asked.append(request)
        tokens = self.tokens[request.transfer_id]
        self.has_looked()
        reply = Followed("engine", TransferState.COMPUTING, tokens=tokens)
        return reply if tokens > request.tokens else NotYet(request.transfer_id, request.wait_s, reply)


@pytest.fixture
def board(handler: Handler, monkeypatch: pytest.MonkeyPatch) -> Board:
    """Of a server that looks at nothing unless it is woken."""
    monkeypatch.setattr(admission, "CHECK_INTERVAL_S", 60.0)
    board = Board()
    handler.handle = board.handle  # type: ignore[method-assign, assignment]
    return board


def follow(topic: str = "t", tokens: int = 0, wait_s: float = 30.0) -> Follow:
    return Follow("", topic, 0, tokens, TransferState.COMPUTING, wait_s)


def told(tokens: int) -> Followed:
    return Followed("engine", TransferState.COMPUTING, tokens=tokens)


def test_an_answer_comes_as_soon_as_there_is_news(server: ControlServer, client: ControlClient, board: Board) -> None:
    started = time.monotonic()
    answer = client.request("127.0.0.1", server.port, follow(), 60)
    until(lambda: board.asked)
    assert not answer.done()
    board.tokens["t"] = 5
    server.changed("t")
    assert answer.result(30) == told(5)
    assert time.monotonic() - started < 25, "it came when the wait was over"


def test_who_has_waited_long_enough_is_told_that_there_is_nothing_new(
    server: ControlServer, client: ControlClient, board: Board
) -> None:
    started = time.monotonic()
    answer = client.request("127.0.0.1", server.port, follow(tokens=3, wait_s=0.3), 60)
    assert answer.result(30) == told(0)
    assert time.monotonic() - started >= 0.3
    assert len(server._waiting) == 0


def test_who_does_not_want_to_wait_is_answered_at_once(
    server: ControlServer, client: ControlClient, board: Board
) -> None:
    assert client.request("127.0.0.1", server.port, follow(wait_s=0.0), 60).result(30) == told(0)
    assert len(server._waiting) == 0


def test_news_of_another_topic_is_no_answer(server: ControlServer, client: ControlClient, board: Board) -> None:
    answers = [client.request("127.0.0.1", server.port, follow(topic), 60) for topic in "ab"]
    until(lambda: len(board.asked) == 2)
    board.tokens["b"] = 1
    server.changed("b")
    assert answers[1].result(30) == told(1)
    assert not answers[0].done()
    board.tokens["a"] = 1
    server.changed("a")
    assert answers[0].result(30) == told(1)


def test_a_change_that_is_no_news_to_somebody_lets_him_wait_on(
    server: ControlServer, client: ControlClient, board: Board
) -> None:
    behind, ahead = (client.request("127.0.0.1", server.port, follow(tokens=each), 60) for each in (0, 9))
    until(lambda: len(board.asked) == 2)
    board.tokens["t"] = 5
    server.changed("t")
    assert behind.result(30) == told(5)
    until(lambda: len(board.asked) == 4)
    assert not ahead.done()
    board.tokens["t"] = 10
    server.changed("t")
    assert ahead.result(30) == told(10)


def test_changes_that_are_no_news_do_not_lengthen_the_wait(
    server: ControlServer, client: ControlClient, board: Board
) -> None:
    answer = client.request("127.0.0.1", server.port, follow(wait_s=0.5), 60)

    def is_answered() -> bool:
        server.changed("t")
        return answer.done()

    until(is_answered, within_s=20)
    assert answer.result() == told(0)
    assert len(board.asked) > 2


def test_others_are_served_while_somebody_waits(server: ControlServer, client: ControlClient, board: Board) -> None:
    answer = client.request("127.0.0.1", server.port, follow(), 60)
    until(lambda: board.asked)
    assert client.request("127.0.0.1", server.port, HELLO, 60).result(30) == WELCOME
    assert not answer.done()


def test_a_message_that_is_repeated_while_it_waits_gets_one_answer(
    server: ControlServer, impatient: ControlClient, board: Board
) -> None:
    answer = impatient.request("127.0.0.1", server.port, follow(), 60)
    until(lambda: len(board.asked) >= 3)
    assert len(server._waiting) == 1
    board.tokens["t"] = 5
    server.changed("t")
    assert answer.result(30) == told(5)


def test_a_repetition_does_not_lengthen_the_wait(server: ControlServer, impatient: ControlClient, board: Board) -> None:
    """It is sent every 0.2 s here, so that it would wait for ever."""
    assert impatient.request("127.0.0.1", server.port, follow(wait_s=0.5), 60).result(30) == told(0)
    assert len(board.asked) >= 2


def test_a_peer_that_has_left_is_answered_into_the_void(start: Start, client: ControlClient, board: Board) -> None:
    server = start()
    context = zmq.Context()
    with closing(context.socket(zmq.DEALER)) as socket:
        socket.connect(f"tcp://127.0.0.1:{server.port}")
        socket.send(encode(7, follow()))
        until(lambda: board.asked)
        answer = client.request("127.0.0.1", server.port, follow(), 60)
        until(lambda: len(board.asked) == 2)
        socket.close(linger=0)
    context.term()
    board.tokens["t"] = 5
    server.changed("t")
    assert answer.result(30) == told(5)
    until(lambda: len(server._waiting) == 0)
    assert server.counters.handler_failures == 0


def test_further_ones_than_may_wait_are_answered_at_once(
    server: ControlServer, client: ControlClient, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting_requests, "MAX_WAITING", 2)
    waiting = [client.request("127.0.0.1", server.port, follow(), 60) for _ in range(2)]
    until(lambda: len(board.asked) == 2)
    assert client.request("127.0.0.1", server.port, follow(), 60).result(30) == told(0)
    assert not any(each.done() for each in waiting)
    board.tokens["t"] = 5
    server.changed("t")
    assert [each.result(30) for each in waiting] == [told(5), told(5)]


def test_a_change_while_the_handler_looks_is_not_lost(
    server: ControlServer, client: ControlClient, board: Board
) -> None:
    looked, changed = threading.Event(), threading.Event()

    def wait_for_the_change() -> None:
        looked.set()
        assert changed.wait(30)

    board.has_looked = wait_for_the_change
    answer = client.request("127.0.0.1", server.port, follow(), 60)
    assert looked.wait(30)
    board.tokens["t"] = 5
    server.changed("t")
    changed.set()
    assert answer.result(20) == told(5)


def test_no_change_is_lost_however_fast_they_come(server: ControlServer, client: ControlClient, board: Board) -> None:
    """One thread announces, others ask for what they do not know: nobody waits for the end of his wait."""
    topics, most = ("a", "b", "c"), 300

    def announce() -> None:
        for tokens in range(1, most + 1):
            for topic in topics:
                board.tokens[topic] = tokens
                server.changed(topic)
            if tokens % 10 == 0:
                time.sleep(0.001)

    thread = threading.Thread(target=announce)
    thread.start()
    known = dict.fromkeys(topics, 0)
    while unfinished := [topic for topic in topics if known[topic] < most]:
        answers = {
            topic: client.request("127.0.0.1", server.port, follow(topic, known[topic]), 60) for topic in unfinished
        }
        for topic, answer in answers.items():
            reply = answer.result(20)
            assert isinstance(reply, Followed)
            assert reply.tokens > known[topic]
            known[topic] = reply.tokens
    thread.join()


def test_a_change_is_seen_although_the_server_fails_in_between(
    server: ControlServer, client: ControlClient, board: Board
) -> None:
    """What has changed stays to be looked at, although the server was woken for it already."""
    answer = client.request("127.0.0.1", server.port, follow(), 60)
    until(lambda: board.asked)
    failed = threading.Event()
    serve = server._serve_queued

    def fail(*arguments: object) -> None:
        if not failed.is_set():
            failed.set()
            raise RuntimeError("a bug")
        serve(*arguments)  # type: ignore[arg-type]

    with patch.object(server, "_serve_queued", fail):
        board.tokens["t"] = 5
        server.changed("t")
        assert answer.result(20) == told(5)
        until(failed.is_set)


def test_a_handler_that_fails_for_somebody_who_waits_answers_him_with_an_error(
    server: ControlServer, client: ControlClient, board: Board
) -> None:
    answer = client.request("127.0.0.1", server.port, follow(), 60)
    until(lambda: board.asked)

    def fail() -> None:
        raise KeyError("lost transfer")

    board.has_looked = fail
    server.changed("t")
    with pytest.raises(Exception, match=r"internal.*'follow'.*KeyError"):
        answer.result(30)
    assert len(server._waiting) == 0


def test_close_does_not_wait_for_those_who_wait(start: Start, client: ControlClient, board: Board) -> None:
    server = start()
    client.request("127.0.0.1", server.port, follow(), 60)
    until(lambda: board.asked)
    started = time.monotonic()
    server.close()
    assert time.monotonic() - started < 10
    server.changed("t")
