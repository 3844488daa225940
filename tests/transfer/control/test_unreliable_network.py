"""Messages may be lost, repeated, late or reordered: requests are answered all the same, each with its own answer."""

import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

import msgspec
import pytest

from tests.support.control.faulty_network import (
    Delivery,
    Direction,
    FaultyNetwork,
    chaos,
    deliver,
    lose_everything,
    lose_first,
)
from tests.support.control.samples import (
    FIND,
    FOLLOW,
    FOLLOWED,
    FOUND,
    HELLO,
    LOCATE,
    LOCATED,
    RELEASE,
    RENEW,
    WELCOME,
    Handler,
)
from tests.support.waiting import until
from transfer.control import look_ups
from transfer.control.client import ControlClient
from transfer.control.failures import PeerRefused, PeerUnreachable
from transfer.control.messages import (
    Error,
    ErrorCode,
    Followed,
    Release,
    Released,
    Renew,
    Renewed,
    Reply,
    Request,
    encode,
    message_id_of,
)
from transfer.control.peer_sockets import ClientSettings
from transfer.control.server import ControlServer

HERE = "127.0.0.1"


def test_a_lost_request_is_sent_again(impatient: ControlClient, server: ControlServer, handler: Handler) -> None:
    with FaultyNetwork(server.port, lose_first(2, Direction.REQUEST)) as network:
        assert impatient.request(HERE, network.port, HELLO, 10).result() == WELCOME
    assert handler.asked[0] == HELLO
    assert impatient.counters.sent >= 3


def test_the_waits_between_two_tries_double_from_a_short_one(server: ControlServer) -> None:
    came: list[float] = []

    def only_the_fourth(way: Direction, frame: bytes) -> list[Delivery]:
        if way is Direction.REQUEST:
            came.append(time.monotonic())
        return [(0.0, frame)] if len(came) > 3 else []

    client = ControlClient(ClientSettings(retry_s=0.02, retry_cap_s=60))
    with closing(client), FaultyNetwork(server.port, only_the_fourth) as network:
        began = time.monotonic()
        assert client.request(HERE, network.port, HELLO, 20).result() == WELCOME
    assert came[3] - began >= 0.9 * (0.02 + 0.04 + 0.08)  # each wait is up to a tenth shorter or longer


def test_a_peer_that_never_answered_is_looked_up_and_connected_anew(
    client: ControlClient, server: ControlServer
) -> None:
    with FaultyNetwork(server.port, lose_everything) as network:
        with pytest.raises(PeerUnreachable):
            client.request(HERE, network.port, HELLO, 0.05).result()
        until(lambda: client.counters.peers_closed == 1)
        network.rule = deliver
        assert client.request(HERE, network.port, HELLO, 10).result() == WELCOME
    assert client.counters.peers_opened == 2


def test_a_lost_reply_makes_the_handler_see_the_request_again(
    impatient: ControlClient, server: ControlServer, handler: Handler
) -> None:
    with FaultyNetwork(server.port, lose_first(2, Direction.REPLY)) as network:
        assert impatient.request(HERE, network.port, RELEASE, 10).result() == Released(True)
    assert handler.asked[:3] == [RELEASE] * 3


def test_repeated_replies_are_ignored(client: ControlClient, server: ControlServer) -> None:
    with FaultyNetwork(server.port, lambda way, frame: [(0.0, frame)] * 3) as network:
        for _ in range(20):
            assert client.request(HERE, network.port, HELLO, 10).result() == WELCOME
        until(lambda: client.counters.late_replies == 20 * (3 * 3 - 1))
    assert client.counters.answered == 20


def test_a_reply_after_the_timeout_is_ignored(client: ControlClient, server: ControlServer) -> None:
    def slow_replies(way: Direction, frame: bytes) -> list[Delivery]:
        return [(0.3 if way is Direction.REPLY else 0.0, frame)]

    with FaultyNetwork(server.port, slow_replies) as network:
        assert client.request(HERE, network.port, HELLO, 10).result() == WELCOME  # connects
        kept = client.request(HERE, network.port, HELLO, 10)  # keeps the connection beyond the other's timeout
        with pytest.raises(PeerUnreachable):
            client.request(HERE, network.port, RELEASE, 0.1).result(5)
        assert kept.result() == WELCOME
        until(lambda: client.counters.late_replies >= 1)


def test_a_garbled_reply_is_ignored_and_the_next_one_taken(impatient: ControlClient, server: ControlServer) -> None:
    damage = lose_first(1, Direction.REPLY)

    def garble_first(way: Direction, frame: bytes) -> list[Delivery]:
        return list(damage(way, frame)) or [(0.0, b"\x93\x01" + frame[3:])]

    with FaultyNetwork(server.port, garble_first) as network:
        assert impatient.request(HERE, network.port, HELLO, 10).result() == WELCOME
    assert impatient.counters.malformed_replies == 1


def test_a_large_reply_to_what_has_none_is_not_even_decoded(
    impatient: ControlClient, server: ControlServer, caplog: pytest.LogCaptureFixture
) -> None:
    """All other threads would stand still for it."""
    damage = lose_first(1, Direction.REPLY)

    def swell_first(way: Direction, frame: bytes) -> list[Delivery]:
        large = encode(message_id_of(frame), Followed("p", "queued", block_ids=((0,) * 5_000_000,)))
        return list(damage(way, frame)) or [(0.0, large)]

    with FaultyNetwork(server.port, swell_first) as network:
        assert impatient.request(HERE, network.port, RELEASE, 30).result() == Released(True)
    assert impatient.counters.malformed_replies == 1
    assert "has no such replies" in caplog.text, "not that it is of another type, which decoding tells"


@pytest.mark.parametrize("asked", [FOLLOW, LOCATE, FIND])
def test_a_table_of_many_cache_groups_is_taken(
    impatient: ControlClient, server: ControlServer, handler: Handler, asked: Request
) -> None:
    table = ((2**31 - 1,) * 70_000,) * 14  # of a million tokens in each group
    answers: dict[Request, Reply] = {
        FOLLOW: msgspec.structs.replace(FOLLOWED, block_ids=table),
        LOCATE: msgspec.structs.replace(LOCATED, slots=table),
        FIND: msgspec.structs.replace(FOUND, block_ids=table),
    }
    handler.answer = answers.__getitem__
    assert impatient.request(HERE, server.port, asked, 20).result() == answers[asked]


@pytest.mark.parametrize("is_watched", [False, True])
def test_an_engine_that_has_got_the_address_of_another_is_not_asked_for_it_again(
    monkeypatch: pytest.MonkeyPatch, client: ControlClient, server: ControlServer, handler: Handler, is_watched: bool
) -> None:
    """The connection is sound, and the name has moved. Unless somebody reads there: then a request has a wrong id."""
    address = HERE

    def is_another(request: Request) -> Reply:
        return Error(ErrorCode.UNKNOWN_ENGINE, "this is another engine") if address != HERE else handler.usual(request)

    monkeypatch.setattr(look_ups, "resolve", lambda name: address)
    handler.answer = is_another
    assert client.request("p.example", server.port, RENEW, 10).result() == Renewed(RENEW.lease_ids)
    watcher = client.until_lost("p.example", server.port) if is_watched else None
    address = "127.0.0.2"
    with closing(ControlServer(Handler(), address, server.port)) as moved:
        moved.start()
        with pytest.raises(PeerRefused):
            client.request("p.example", server.port, RENEW, 10).result()
        if watcher is not None:
            with pytest.raises(PeerRefused):
                client.request("p.example", server.port, RENEW, 10).result()
            assert not watcher.done()
            return
        assert client.request("p.example", server.port, RENEW, 10).result() == Renewed(RENEW.lease_ids)


def test_another_program_that_answers_and_stays_connected_is_no_engine(impatient: ControlClient) -> None:
    def answer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
            while connection.recv(4096):
                pass

    with socket.create_server((HERE, 0)) as listener, ThreadPoolExecutor(1) as threads:
        threads.submit(answer, listener)
        with pytest.raises(PeerUnreachable, match="does not speak ZeroMQ's protocol: it is not an engine"):
            impatient.request(HERE, listener.getsockname()[1], HELLO, 1.0).result()
        impatient.close()


def test_an_engine_that_does_not_run_is_not_taken_for_another_program(impatient: ControlClient) -> None:
    """The system takes its connections."""
    with socket.create_server((HERE, 0)) as listener, pytest.raises(PeerUnreachable) as failure:
        impatient.request(HERE, listener.getsockname()[1], HELLO, 0.5).result()
    assert "it is not an engine" not in str(failure.value)


def test_a_network_that_is_cut_and_mended(impatient: ControlClient, server: ControlServer) -> None:
    with FaultyNetwork(server.port) as network:
        assert impatient.request(HERE, network.port, HELLO, 5).result() == WELCOME
        network.rule = lose_everything
        with pytest.raises(PeerUnreachable):
            impatient.request(HERE, network.port, HELLO, 0.2).result(5)
        waiting = impatient.request(HERE, network.port, HELLO, 10)
        time.sleep(0.1)
        network.rule = deliver
        assert waiting.result() == WELCOME


@pytest.mark.parametrize("seed", range(3))
def test_every_request_gets_its_own_answer_through_chaos(server: ControlServer, handler: Handler, seed: int) -> None:
    released: dict[str, int] = {}

    def release_once(request: Request) -> Reply:
        if isinstance(request, Release):
            first = released.setdefault(request.lease_id, request.reader)
            return Released(first == request.reader)
        return handler.usual(request)

    handler.answer = release_once
    client = ControlClient(ClientSettings(retry_s=0.03, retry_cap_s=0.06))
    with FaultyNetwork(server.port, chaos(seed, lose=0.3, repeat=0.3, longest_delay_s=0.05)) as network:
        asked: list[tuple[Future[Reply], Reply]] = []
        for i in range(150):
            renew, release = Renew("e", (f"lease-{i}",)), Release("e", f"lease-{i}", i, 200, "pull", "c")
            asked.append((client.request(HERE, network.port, renew, 20), Renewed((f"lease-{i}",))))
            asked.append((client.request(HERE, network.port, release, 20), Released(True)))
        for future, answer in asked:
            assert future.result(20) == answer
    assert client.counters.sent > 300
    assert len(handler.asked) > 300
    client.close()
