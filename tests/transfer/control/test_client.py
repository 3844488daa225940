"""One client, well-behaved and misbehaving peers.

Covers: transfer.control.client_loop, transfer.control.failures, transfer.control.peer_sockets.
"""

import contextlib
import math
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, wait

import pytest
import zmq

from tests.support.control import zmtp
from tests.support.control.samples import (
    CANCEL,
    HELLO,
    RELEASE,
    RENEW,
    REPLIES,
    REQUESTS,
    WELCOME,
    Handler,
    pack,
    unpack,
)
from tests.support.process import free_port
from tests.support.waiting import until
from transfer.control import look_ups
from transfer.control import peer_sockets as peers_module
from transfer.control.client import ControlClient
from transfer.control.failures import BadRequest, ClientClosed, PeerRefused, PeerUnreachable, TooManyPeers
from transfer.control.messages import (
    MAX_REQUEST_BYTES,
    PROTOCOL_VERSION,
    Error,
    ErrorCode,
    Hello,
    Released,
    Renew,
    Renewed,
    Reply,
    Request,
    encode,
)
from transfer.control.peer_sockets import ClientSettings
from transfer.control.server import ControlServer
from transfer.errors import BadAddress

HERE = "127.0.0.1"
MIB = 1 << 20


@contextlib.contextmanager
def raw_router() -> Iterator[tuple[zmq.Socket[bytes], int]]:
    """A peer that answers by hand."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.RCVTIMEO, 5000)
    port = router.bind_to_random_port(f"tcp://{HERE}")
    try:
        yield router, port
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize(
    ("request_", "reply"),
    [(request, reply) for request, reply in zip(REQUESTS, REPLIES, strict=True) if request != RENEW],
    ids=lambda message: type(message).__name__,
)
def test_every_request_gets_its_answer(
    client: ControlClient, server: ControlServer, handler: Handler, request_: Request, reply: Reply
) -> None:
    handler.answer = lambda _: reply
    assert client.request(HERE, server.port, request_, 5).result() == reply
    assert handler.asked == [request_]


def test_answers_match_their_requests_when_many_are_pending(client: ControlClient, server: ControlServer) -> None:
    futures = [client.request(HERE, server.port, Renew("e", (f"lease-{i}",)), 10) for i in range(2000)]
    assert [future.result() for future in futures] == [Renewed((f"lease-{i}",)) for i in range(2000)]


def test_many_threads_may_ask(client: ControlClient, server: ControlServer) -> None:
    answers: dict[int, list[Reply]] = {}

    def ask(who: int) -> None:
        requests = [Renew("e", (f"{who}-{i}",)) for i in range(100)]
        answers[who] = [client.request(HERE, server.port, request, 10).result() for request in requests]

    threads = [threading.Thread(target=ask, args=(who,)) for who in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {who: [Renewed((f"{who}-{i}",)) for i in range(100)] for who in range(8)}


def test_a_callback_may_ask_again(client: ControlClient, server: ControlServer) -> None:
    second: list[Reply] = []
    done = threading.Event()

    def finish(reply: Reply) -> None:
        second.append(reply)
        done.set()

    first = client.request(HERE, server.port, HELLO, 5)
    first.add_done_callback(
        lambda _: client.request(HERE, server.port, RELEASE, 5).add_done_callback(lambda f: finish(f.result()))
    )
    assert done.wait(5)
    assert second == [Released(True)]


def test_the_books_balance_whenever_a_request_ends(client: ControlClient, server: ControlServer) -> None:
    busy, finish, failures = threading.Event(), threading.Event(), list[AssertionError]()

    def hold_the_thread(_: object) -> None:
        busy.set()
        finish.wait(10)

    def check(_: object) -> None:
        try:
            client.check_integrity()
        except AssertionError as error:
            failures.append(error)

    client.request(HERE, free_port(), HELLO, 0.05).add_done_callback(hold_the_thread)
    assert busy.wait(5)
    places = [(HERE, server.port, 10.0), (HERE, free_port(), 0.2), ("no-such-host.invalid", 1, 20.0)]
    asked = [client.request(*place[:2], HELLO, place[2]) for place in places for _ in range(5)]
    for future in asked:
        future.add_done_callback(check)
    asked[0].cancel()
    finish.set()
    assert not wait(asked, 20).not_done
    assert failures == []


# -- peers that cannot be reached


@pytest.mark.parametrize(
    ("host", "port"), [("", 1), (HERE, 0), (HERE, 65536), (None, 1), ("a;b", 1), ("0.0.0.0", 1), (HERE, "80")]
)
def test_a_bad_address_fails_the_future(client: ControlClient, host: str, port: int) -> None:
    with pytest.raises(BadAddress):
        client.request(host, port, HELLO, 1).result(1)


def test_a_closed_port_is_unreachable_and_says_so(client: ControlClient) -> None:
    port = free_port()
    told = rf"127\.0\.0\.1:{port} did not answer 'hello' in [0-4]\.\d\d s, sent 0 times: no connection could be made"
    with pytest.raises(PeerUnreachable, match=told):
        client.request(HERE, port, HELLO, 0.2).result(5)


def test_a_peer_that_never_answers_is_asked_several_times(impatient: ControlClient) -> None:
    with raw_router() as (router, port):
        with pytest.raises(PeerUnreachable, match="sent over a connection but never answered") as caught:
            impatient.request(HERE, port, HELLO, 1.0).result(5)
        frames = [router.recv_multipart()[1] for _ in range(caught.value.attempts)]
    assert 2 <= caught.value.attempts <= 10  # after 0.05, 0.15, 0.35 s and every 0.2 s from then on
    assert len(set(frames)) == 1  # the same message id each time


def test_a_listener_that_is_no_control_server_is_unreachable(client: ControlClient) -> None:
    with socket.create_server((HERE, 0)) as listener, pytest.raises(PeerUnreachable):
        client.request(HERE, listener.getsockname()[1], HELLO, 0.2).result(5)


def test_an_unknown_host_name_is_unreachable_and_named(client: ControlClient) -> None:
    with pytest.raises(PeerUnreachable, match=r"no-such-host\.invalid.*could not be looked up"):
        client.request("no-such-host.invalid", 1, HELLO, 30).result(20)


def test_a_peer_that_comes_up_late_is_reached(client: ControlClient, handler: Handler) -> None:
    port = free_port()
    waiting = client.request(HERE, port, HELLO, 10)
    time.sleep(0.3)
    with contextlib.closing(ControlServer(handler, HERE, port)) as server:
        server.start()
        assert waiting.result() == WELCOME
    assert len(handler.asked) == 1  # nothing had piled up for it


def test_a_peer_that_comes_back_at_another_address_under_its_name_is_found_at_once(
    monkeypatch: pytest.MonkeyPatch, client: ControlClient, handler: Handler
) -> None:
    """While nobody asks it, libzmq tries the old address again and again."""
    address, looked_up = HERE, list[str]()

    def resolve(name: str) -> str:
        looked_up.append(name)
        return address

    monkeypatch.setattr(look_ups, "resolve", resolve)
    first = ControlServer(handler, HERE)
    first.start()
    for _ in range(2):
        assert client.request("p.example", first.port, HELLO, 10).result() == WELCOME
    assert looked_up == ["p.example"]
    first.close()
    address = "127.0.0.2"
    (peer,) = client._loop._peers._peers.values()
    until(lambda: peer.descriptor < 0)
    with contextlib.closing(ControlServer(handler, address, first.port)) as second:
        second.start()
        assert client.request("p.example", first.port, HELLO, 2).result() == WELCOME


def test_a_look_up_for_which_there_is_no_thread_fails_alone(
    monkeypatch: pytest.MonkeyPatch, client: ControlClient, server: ControlServer
) -> None:
    start, refused = threading.Thread.start, list[str]()

    def without_one(thread: threading.Thread) -> None:
        if "look-up" in thread.name and not refused:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", without_one)
    with pytest.raises(TooManyPeers, match="localhost cannot be looked up now: can't start new thread"):
        client.request("localhost", server.port, HELLO, 10).result()
    assert client.request("localhost", server.port, HELLO, 10).result() == WELCOME


def test_dead_peers_do_not_delay_a_live_one(client: ControlClient, server: ControlServer) -> None:
    client.request(HERE, server.port, HELLO, 5).result()
    with socket.create_server((HERE, 0)) as silent, raw_router() as (_, deaf_port):
        hosts = [(HERE, free_port()), ("192.0.2.1", 9), (HERE, silent.getsockname()[1]), (HERE, deaf_port)]
        hosts.append(("no-such-host.invalid", 9))
        dead = [client.request(host, port, HELLO, 20) for host, port in hosts for _ in range(50)]
        started = time.monotonic()
        for _ in range(50):
            client.request(HERE, server.port, HELLO, 5).result()
        assert time.monotonic() - started < 15  # none has waited for one of the dead
        client.close()
        for future in dead:
            assert isinstance(future.exception(), (PeerUnreachable, ClientClosed))


# -- peers that refuse


@pytest.mark.parametrize("code", [ErrorCode.UNKNOWN_ENGINE, "of_a_later_version"])
def test_an_error_reply_fails_the_future_with_code_and_words(
    client: ControlClient, server: ControlServer, handler: Handler, code: str
) -> None:
    handler.answer = lambda request: Error(code, "this is engine-2")
    with pytest.raises(PeerRefused, match=f"{code}: this is engine-2") as caught:
        client.request(HERE, server.port, HELLO, 5).result()
    assert (caught.value.code, caught.value.reason) == (code, "this is engine-2")
    assert len(handler.asked) == 1


def test_a_peer_that_is_not_ready_is_asked_again(
    impatient: ControlClient, server: ControlServer, handler: Handler
) -> None:
    handler.answer = lambda request: (
        Error(ErrorCode.NOT_READY, "loading") if len(handler.asked) < 3 else handler.usual(request)
    )
    assert impatient.request(HERE, server.port, HELLO, 5).result() == WELCOME
    assert len(handler.asked) >= 3


def test_a_peer_that_never_gets_ready_has_refused(
    impatient: ControlClient, server: ControlServer, handler: Handler
) -> None:
    handler.answer = lambda request: Error(ErrorCode.NOT_READY, "loading")
    with pytest.raises(PeerRefused, match="not_ready: loading"):
        impatient.request(HERE, server.port, HELLO, 1.0).result(5)


def test_a_peer_of_another_version_is_refused_at_once(client: ControlClient) -> None:
    with raw_router() as (router, port):
        future = client.request(HERE, port, HELLO, 30)
        peer, frame = router.recv_multipart()
        router.send_multipart([peer, pack([PROTOCOL_VERSION + 1, unpack(frame)[1], {"type": "new"}])])
        with pytest.raises(PeerRefused, match=f"version {PROTOCOL_VERSION + 1}"):
            future.result(5)


# -- replies that must not count


def test_what_is_not_the_answer_is_ignored_and_the_request_repeated(
    impatient: ControlClient, caplog: pytest.LogCaptureFixture
) -> None:
    with raw_router() as (router, port):
        future = impatient.request(HERE, port, RELEASE, 10)
        peer, frame = router.recv_multipart()
        message_id = unpack(frame)[1]
        good = encode(message_id, Released(True))
        router.send_multipart([peer, good[:-1]])
        router.send_multipart([peer, good, b""])
        router.send_multipart([peer, b"\xc1"])
        router.send_multipart([peer, encode(message_id, WELCOME)])
        router.send_multipart([peer, encode(message_id + 1, Released(False))])
        assert router.recv_multipart()[1] == frame
        assert not future.done()
        router.send_multipart([peer, good])
        router.send_multipart([peer, good])
        assert future.result() == Released(True)
        until(lambda: impatient.counters.late_replies == 2)
    assert impatient.counters.malformed_replies == 4
    assert len(caplog.records) == 1  # whatever a peer sends, it does not fill the log


@pytest.mark.thorough
def test_a_peer_that_answers_with_a_message_of_a_million_frames_is_given_up(
    client: ControlClient, server: ControlServer
) -> None:
    with raw_router() as (router, port):
        future = client.request(HERE, port, RELEASE, 60)
        peer, _ = router.recv_multipart()
        router.send_multipart([peer, *[b""] * 1_000_000])
        with pytest.raises(PeerUnreachable, match="a message of 16 or more frames"):
            future.result(30)
    assert client.request(HERE, server.port, HELLO, 10).result() == WELCOME


@pytest.mark.parametrize(
    ("peers", "most", "ended"),
    [(1, 4 * MIB, 1), (8, 25 * MIB, 4)],
    ids=["of one peer", "of all together"],
)
def test_replies_that_have_no_end_are_ended(
    client: ControlClient,
    server: ControlServer,
    monkeypatch: pytest.MonkeyPatch,
    peers: int,
    most: int,
    ended: int,
) -> None:
    monkeypatch.setattr(peers_module, "_UNREAD_BYTES", most)
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server((HERE, 0))) for _ in range(peers)]
        asked = [client.request(HERE, listener.getsockname()[1], RELEASE, 60) for listener in listeners]
        for listener in listeners:
            connection = stack.enter_context(listener.accept()[0])
            connection.settimeout(5)
            with contextlib.suppress(OSError):  # it may be ended when the last has not left yet
                connection.sendall(zmtp.greeting() + zmtp.ready())
                zmtp.await_ready(connection)
                for _ in range(6):
                    connection.sendall(zmtp.frame(bytes(MIB), zmtp.MORE))
        until(lambda: sum(future.done() for future in asked) == ended)
        assert client.request(HERE, server.port, HELLO, 10).result() == WELCOME
        failures = [future.exception() for future in asked if future.done()]
    assert len(failures) == ended, "what is left is within the limit"
    assert all("bytes without a complete reply" in str(failure) for failure in failures)


def test_a_peer_cannot_answer_for_another(client: ControlClient) -> None:
    with raw_router() as (asked, asked_port), raw_router() as (other, other_port):
        future = client.request(HERE, asked_port, RELEASE, 10)
        client.request(HERE, other_port, RELEASE, 10)
        peer, frame = asked.recv_multipart()
        impostor, _ = other.recv_multipart()
        other.send_multipart([impostor, encode(unpack(frame)[1], Released(True))])
        until(lambda: client.counters.late_replies == 1)
        assert not future.done()
        asked.send_multipart([peer, encode(unpack(frame)[1], Released(False))])
        assert future.result() == Released(False)


# -- requests that cannot be sent


def test_too_large_a_request_is_refused_here(client: ControlClient) -> None:
    with pytest.raises(BadRequest, match=rf"'renew'.*{MAX_REQUEST_BYTES}.*split"):
        client.request(HERE, 1, Renew("e", ("x" * MAX_REQUEST_BYTES,)), 1).result(1)


def test_a_name_that_no_wire_can_carry_is_refused_here(client: ControlClient, server: ControlServer) -> None:
    with pytest.raises(BadRequest, match="'hello'"):
        client.request(HERE, server.port, Hello("\ud800"), 1).result(1)
    assert client.request(HERE, server.port, HELLO, 5).result() == WELCOME


@pytest.mark.parametrize("timeout_s", [0, -1, math.inf, math.nan])
def test_a_timeout_must_be_positive_and_finite(client: ControlClient, timeout_s: float) -> None:
    with pytest.raises(ValueError, match="timeout_s"):
        client.request(HERE, 1, HELLO, timeout_s)


# -- cancelling, closing, holding few sockets


def test_a_cancelled_future_is_forgotten(client: ControlClient) -> None:
    with raw_router() as (router, port):
        future = client.request(HERE, port, CANCEL, 30)
        peer, frame = router.recv_multipart()
        assert future.cancel()
        assert wait([future], 5).done == {future}
        sent = client.counters.sent
        router.send_multipart([peer, encode(unpack(frame)[1], Released(True))])
        until(lambda: client.counters.late_replies == 1)
        assert client.counters.sent == sent
        with pytest.raises(CancelledError):
            future.result()


def test_close_fails_what_is_pending_and_what_comes_after(client: ControlClient) -> None:
    pending = [client.request(HERE, free_port(), HELLO, 30) for _ in range(3)]
    client.close()
    client.close()
    later = client.request(HERE, 1, HELLO, 30)
    for future in [*pending, later]:
        with pytest.raises(ClientClosed, match="'hello'"):
            future.result(1)


def test_a_request_that_was_not_taken_up_yet_fails_at_close(client: ControlClient) -> None:
    busy, finish = threading.Event(), threading.Event()

    def hold_the_thread(_: object) -> None:
        busy.set()
        finish.wait(10)

    client.request(HERE, free_port(), HELLO, 0.05).add_done_callback(hold_the_thread)
    assert busy.wait(5)
    waiting = client.request(HERE, 1, HELLO, 30)
    closer = threading.Thread(target=client.close)
    closer.start()
    until(lambda: client.request(HERE, 1, HELLO, 30).done())  # refused: close has begun
    finish.set()
    closer.join()
    with pytest.raises(ClientClosed):
        waiting.result(1)


def test_no_request_is_left_behind_by_a_close_at_the_same_time(server: ControlServer) -> None:
    for _ in range(20):
        client = ControlClient()
        closer = threading.Thread(target=client.close)
        futures = [client.request(HERE, server.port, HELLO, 30) for _ in range(20)]
        closer.start()
        futures += [client.request(HERE, server.port, HELLO, 30) for _ in range(20)]
        closer.join()
        for future in futures:
            error = future.exception(5)
            assert error is None or isinstance(error, ClientClosed)


def test_an_idle_peer_is_closed_and_reached_again(server: ControlServer) -> None:
    client = ControlClient(ClientSettings(idle_s=0.1))
    assert client.request(HERE, server.port, HELLO, 5).result() == WELCOME
    until(lambda: client.counters.peers_closed == 1)
    assert client.request(HERE, server.port, HELLO, 5).result() == WELCOME
    assert client.counters.peers_opened == 2
    client.close()


def test_a_peer_that_is_being_asked_is_not_idle() -> None:
    client = ControlClient(ClientSettings(idle_s=0.05))
    with raw_router() as (router, port):
        waiting = client.request(HERE, port, RELEASE, 10)
        peer, frame = router.recv_multipart()
        time.sleep(0.2)
        router.send_multipart([peer, encode(unpack(frame)[1], Released(True))])
        assert waiting.result() == Released(True)
        assert client.counters.peers_opened == 1
    client.close()


def test_the_peer_that_was_not_used_for_longest_makes_room(handler: Handler) -> None:
    servers = [ControlServer(handler, HERE) for _ in range(3)]
    client = ControlClient(ClientSettings(max_peers=2))
    for server in servers:
        server.start()
        assert client.request(HERE, server.port, HELLO, 5).result() == WELCOME
    assert (client.counters.peers_opened, client.counters.peers_closed) == (3, 1)
    assert client.request(HERE, servers[1].port, HELLO, 5).result() == WELCOME
    assert client.counters.peers_opened == 3
    client.close()
    for server in servers:
        server.close()


def test_more_peers_than_may_be_held_are_refused_while_all_are_asked(handler: Handler) -> None:
    client = ControlClient(ClientSettings(max_peers=2))
    waiting = [client.request(HERE, free_port(), HELLO, 30) for _ in range(2)]
    with pytest.raises(TooManyPeers, match="requests wait for 2 engines, which is the maximum at a time"):
        client.request(HERE, free_port(), HELLO, 30).result(5)
    assert not any(future.done() for future in waiting)
    client.close()
