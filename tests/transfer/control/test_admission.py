"""Connections to a server: how many there may be, and what ends one. All the while others are served.

Other hosts are other loopback addresses of this machine.

Covers: transfer.control.connections.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import zmq

from tests.support.control import zmtp
from tests.support.control.samples import ENGINE, HELLO, WELCOME, Handler, Start, pack
from tests.support.waiting import WAIT_S, until
from transfer.control import admission as admission_module
from transfer.control import server as server_module
from transfer.control.client import ControlClient
from transfer.control.connections import UnreadBytes, bytes_received_by, connection_of
from transfer.control.failures import AuthenticationFailed
from transfer.control.keys import ControlKeys
from transfer.control.messages import PROTOCOL_VERSION, Error, ErrorCode, encode
from transfer.control.server import ControlServer


@contextlib.contextmanager
def dealer(server: ControlServer, host: str) -> Iterator[zmq.Socket[bytes]]:
    """A socket of another host, which reads what it gets."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = context.socket(zmq.DEALER)
    made.setsockopt(zmq.RCVHWM, 0)
    made.setsockopt(zmq.SNDTIMEO, 2000)
    made.setsockopt(zmq.RCVTIMEO, 2000)
    made.connect(f"tcp://{host}:0;127.0.0.1:{server.port}")
    try:
        yield made
    finally:
        context.destroy(linger=0)


def is_served(client: ControlClient, server: ControlServer) -> bool:
    return client.request("127.0.0.1", server.port, HELLO, 5).result() == WELCOME


def test_connections_are_counted_from_their_begin_to_their_end(start: Start, client: ControlClient) -> None:
    server = start()
    assert is_served(client, server)
    connections = [zmtp.connect(server.port) for _ in range(5)]
    until(lambda: server.counters.admission.connections == 6)
    for connection in connections:
        connection.close()
    until(lambda: server.counters.admission.connections == 1)
    assert server.counters.admission.connections_refused == 0


def test_the_log_names_once_who_connects_and_says_nothing(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    server = start()
    for _ in range(3):  # as a health check of the port does
        with socket.create_connection(("127.0.0.1", server.port), source_address=("127.0.0.9", 0)):
            until(lambda: server.counters.admission.connections == 1)
        until(lambda: server.counters.admission.connections == 0)
    assert server.counters.refusals["handshake"] == 3
    (record,) = caplog.records
    assert "from 127.0.0.9 to the control channel ended in its handshake" in record.getMessage()


def test_there_is_a_most_and_who_is_there_stays(start: Start, client: ControlClient) -> None:
    server = start(max_connections=10)
    assert is_served(client, server)
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(zmtp.connect(server.port)) for _ in range(14)]
        until(lambda: server.counters.admission.connections_refused == 5)
        assert sum(zmtp.is_ended(each) for each in connections[9:]) == 5
        assert is_served(client, server)
    until(lambda: server.counters.admission.connections == 1)
    with zmtp.connect(server.port) as again:
        again.settimeout(0.2)
        assert not zmtp.is_ended(again), "there is room again"


@pytest.mark.thorough
def test_a_client_for_which_there_is_no_room_says_so(start: Start) -> None:
    keys = ControlKeys.derive(b"correct horse battery staple")
    server = start(keys, max_connections=1)
    with zmtp.connect(server.port), contextlib.closing(ControlClient(keys=keys)) as client:
        until(lambda: server.counters.admission.connections == 1)
        with pytest.raises(AuthenticationFailed, match="because it has too many connections"):
            is_served(client, server)


def test_idle_connections_are_looked_at_without_a_copy_of_each(start: Start) -> None:
    """There may be thousands, and each is looked at four times a second."""
    server = start()
    with contextlib.ExitStack() as stack:
        for _ in range(50):
            stack.enter_context(zmtp.connect(server.port))
        until(lambda: server.counters.admission.connections == 50)
        with (
            patch.object(admission_module, "connection_of", wraps=connection_of) as copied,
            patch.object(admission_module, "bytes_received_by", wraps=bytes_received_by) as looked_at,
        ):
            until(lambda: looked_at.call_count >= 100)
        assert not copied.called


def test_to_look_at_a_connection_changes_nothing_of_it() -> None:
    """Its number may be anybody's by then, and anybody may have set a default timeout."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        here = stack.enter_context(socket.create_connection(listener.getsockname()))
        there = stack.enter_context(listener.accept()[0])
        unix = socket.socketpair()
        for each in unix:
            stack.enter_context(each)
        no_socket = stack.enter_context(open(os.devnull))
        stack.callback(socket.setdefaulttimeout, socket.getdefaulttimeout())
        socket.setdefaulttimeout(1.0)
        for (sender, receiver), expected in (((here, there), 100), (unix, 0)):
            sender.sendall(bytes(100))
            assert receiver.recv(100, socket.MSG_WAITALL) == bytes(100)
            assert bytes_received_by(receiver.fileno()) == expected
            assert os.get_blocking(receiver.fileno())
        assert bytes_received_by(no_socket.fileno()) == bytes_received_by(10**6) == 0


def test_a_message_that_never_ends_is_ended(
    start: Start, client: ControlClient, caplog: pytest.LogCaptureFixture
) -> None:
    server = start()
    part = zmtp.frame(bytes(1 << 20), zmtp.MORE)
    with zmtp.connect(server.port) as connection:
        connection.sendall(zmtp.greeting() + zmtp.ready())
        with pytest.raises(OSError, match=r"reset|pipe|timed out"):  # noqa: PT012  until it is ended
            for _ in range(10_000):
                connection.sendall(part)
    until(lambda: "without a complete message" in caplog.text)
    assert server.counters.admission.connections_cut == 1
    assert is_served(client, server)


def test_complete_messages_count_until_they_are_read() -> None:
    unread = UnreadBytes()
    assert 900_000 < unread.update(1_000_000) < 1_000_000
    unread.add_read([bytes(800_000)])
    assert 190_000 < unread.update(1_000_000) < 200_000
    unread.add_read([b""] * 50_000)  # 2 bytes each
    assert 90_000 < unread.update(1_000_000) < 100_000


def test_all_connections_together_may_not_bring_too_much_either(start: Start, client: ControlClient) -> None:
    server = start(unread_bytes=16 << 20)
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(zmtp.connect(server.port)) for _ in range(4)]
        until(lambda: server.counters.admission.connections == 4)
        for connection in connections:
            connection.sendall(zmtp.greeting() + zmtp.ready())
            for _ in range(6):
                connection.sendall(zmtp.frame(bytes(1 << 20), zmtp.MORE))
        until(lambda: server.counters.admission.connections_cut == 2)
        assert is_served(client, server)
        time.sleep(0.3)
        assert server.counters.admission.connections_cut == 2, "what is left is within the limit"


@pytest.mark.thorough
def test_a_message_of_a_million_frames_costs_its_connection(
    start: Start, client: ControlClient, caplog: pytest.LogCaptureFixture
) -> None:
    server = start()
    with zmtp.connect(server.port) as connection:
        connection.sendall(zmtp.greeting() + zmtp.ready())
        zmtp.await_ready(connection)
        with contextlib.suppress(OSError):  # it may be ended when the last has not left yet
            connection.sendall(bytes([zmtp.MORE, 0]) * 1_000_000 + bytes([0, 0]))
        until(lambda: server.counters.wrong_frames == 1)
        assert zmtp.is_ended(connection)
    assert is_served(client, server)
    assert server.counters.admission.connections_cut == 1
    assert server.counters.requests == 1, "what it consisted of was taken for nothing else"
    assert "a message of 16 or more frames" in caplog.text


def test_a_connection_that_brings_complete_messages_may_bring_any_number_of_bytes(start: Start) -> None:
    server = start(unread_bytes=1 << 20)
    request = pack([PROTOCOL_VERSION, 1, {"type": "hello", "engine_id": ENGINE, "unknown": bytes(500_000)}])
    with dealer(server, "127.0.0.2") as peer:
        for _ in range(40):
            peer.send(request)
            assert peer.recv()
            time.sleep(0.01)
    assert server.counters.admission.connections_cut == 0


def test_what_arrived_while_the_engine_was_busy_is_no_flood(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other threads may keep the server's from running for a while, and peers have much to ask."""
    server = start(unread_bytes=1 << 20)
    admission, usual = server._admission, server._turn
    assert admission is not None
    is_late, goes_on = threading.Event(), threading.Event()

    def turn(*arguments: Any) -> None:
        is_late.set()
        assert goes_on.wait(WAIT_S)
        usual(*arguments)

    request = pack([PROTOCOL_VERSION, 1, {"type": "hello", "engine_id": ENGINE, "unknown": bytes(500_000)}])
    with dealer(server, "127.0.0.2") as peer:
        peer.send(request)
        assert peer.recv()
        monkeypatch.setattr(server, "_turn", turn)
        assert is_late.wait(WAIT_S)
        for _ in range(8):
            peer.send(request)
        until(lambda: max(map(bytes_received_by, admission._connections)) > 9 * 500_000)
        admission._check_at = 0.0
        goes_on.set()
        assert all(peer.recv() for _ in range(8))
    assert server.counters.admission.connections_cut == 0


def test_what_libzmq_has_not_read_yet_at_one_look_is_no_flood(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread may have had no processor. At the next look it has."""
    server = start(unread_bytes=1 << 20)
    looks: list[int] = []

    def much_at_first(descriptor: int) -> int:
        looks.append(descriptor)
        return 64 if len(looks) > 1 else 1 << 22

    with dealer(server, "127.0.0.2") as peer:
        peer.send(encode(1, HELLO))
        assert peer.recv()
        monkeypatch.setattr(admission_module, "bytes_received_by", much_at_first)
        until(lambda: len(looks) > 2)
        peer.send(encode(2, HELLO))
        assert peer.recv()
    assert server.counters.admission.connections_cut == 0


def test_the_second_look_at_who_sends_too_much_is_soon(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends without limit until then, and nothing of it may be complete and wake the server."""
    server = start(unread_bytes=1 << 20)
    assert server._admission is not None
    with dealer(server, "127.0.0.2") as peer:
        peer.send(encode(1, HELLO))
        assert peer.recv()
        monkeypatch.setattr(admission_module, "CHECK_INTERVAL_S", 60.0)
        monkeypatch.setattr(admission_module, "bytes_received_by", lambda descriptor: 1 << 22)
        server._admission._check_at = 0.0
        peer.send(encode(2, HELLO))
        until(lambda: server.counters.admission.connections_cut == 1, within_s=5.0)


def test_replies_that_nobody_reads_are_dropped_and_those_of_one_who_reads_are_not(
    start: Start, handler: Handler
) -> None:
    """The first of 1 MB each fill the kernel's buffers, of both ends."""
    handler.answer = lambda request: Error(ErrorCode.UNKNOWN_ENGINE, "x" * 1_000_000)
    server = start()
    with zmtp.connect(server.port) as deaf, dealer(server, "127.0.0.3") as reading:
        deaf.sendall(zmtp.greeting() + zmtp.ready())
        zmtp.await_ready(deaf)
        deaf.sendall(100 * zmtp.frame(encode(7, HELLO)))
        until(lambda: server.counters.requests == 100)
        reading.send(encode(8, HELLO))
        assert reading.recv()  # so the last reply to the other is dropped, too: its request is counted before
        dropped = server.counters.replies_dropped
        assert dropped > 50
        for _ in range(20):
            reading.send(encode(8, HELLO))
            assert reading.recv()
        assert server.counters.replies_dropped == dropped


def test_a_reply_that_could_not_be_sent_is_none_that_nobody_reads(
    start: Start, handler: Handler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one to a connection that has ended, whose number another one has now."""
    handler.answer = lambda request: Error(ErrorCode.UNKNOWN_ENGINE, "x" * 1_000_000)
    server = start()
    send, refusals = server._send, [True] * 20
    monkeypatch.setattr(server, "_send", lambda *reply: not refusals.pop() if refusals else send(*reply))
    with dealer(server, "127.0.0.3") as peer:
        for _ in range(20):
            peer.send(encode(7, HELLO))
        until(lambda: not refusals)
        peer.send(encode(8, HELLO))
        assert peer.recv()
    assert server.counters.replies_dropped == 0


def test_a_connection_that_never_reads_is_closed(
    start: Start, handler: Handler, client: ControlClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_UNREAD_REPLIES_S", 0.5)
    handler.answer = lambda request: Error(ErrorCode.UNKNOWN_ENGINE, "x" * 1_000_000)
    server = start()
    with zmtp.connect(server.port) as deaf:
        deaf.sendall(zmtp.greeting() + zmtp.ready())
        zmtp.await_ready(deaf)
        until(lambda: server.counters.admission.connections == 1)
        deaf.sendall(50 * zmtp.frame(encode(7, HELLO)))
        until(lambda: server.counters.admission.connections == 0)
    handler.answer = handler.usual
    assert is_served(client, server)


def test_a_request_above_a_limit_is_answered_with_the_limit(start: Start, handler: Handler) -> None:
    server = start()
    with dealer(server, "127.0.0.2") as peer:
        peer.send(pack([PROTOCOL_VERSION, 9, {"type": "cancel", "engine_id": ENGINE, "lease_ids": ["a"] * 30_000}]))
        assert b"Expected `array` of length <= 20000 - at `$.lease_ids`" in peer.recv()
    assert handler.asked == []
    assert server.counters.malformed == 1
    assert server.counters.refusals["malformed"] == 1


def test_a_descriptor_that_is_not_the_servers_is_never_touched(start: Start) -> None:
    """libzmq's events come late: the number of a connection that is gone may be anybody's by then."""
    server = start()
    admission = server._admission
    assert admission is not None
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as ours:
        theirs, _ = listener.accept()
        unix = socket.socketpair()
        for here, there in ((ours, theirs), unix):
            admission._accepted(here.fileno())
            admission._cut(here.fileno(), "it is a test")
            here.sendall(b"still here")
            assert there.recv(100) == b"still here"
            admission._disconnected(here.fileno())
        with open(os.devnull) as no_socket:
            for number in (no_socket.fileno(), 10**6):
                admission._accepted(number)
                admission._disconnected(number)
    assert (server.counters.admission.connections, server.counters.admission.connections_cut) == (0, 0)
    for each in (theirs, *unix):
        each.close()


@pytest.mark.thorough
def test_a_fault_of_our_own_while_a_client_is_admitted_keeps_no_other_client_out(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keys = ControlKeys.derive(b"correct horse battery staple")
    faults = iter([RuntimeError("a fault")])
    usual = ControlKeys.admits

    def admits(self: ControlKeys, client_key: bytes) -> bool:
        for fault in faults:
            raise fault
        return usual(self, client_key)

    monkeypatch.setattr(ControlKeys, "admits", admits)
    server = start(keys)
    with contextlib.closing(ControlClient(keys=keys)) as first, contextlib.closing(ControlClient(keys=keys)) as second:
        waiting = first.request("127.0.0.1", server.port, HELLO, 60)
        until(lambda: "the control server failed and continues" in caplog.text)
        assert is_served(second, server)
        assert waiting.result() == WELCOME, "its handshake began anew"


def test_a_connection_that_is_ended_for_two_reasons_is_counted_once(start: Start) -> None:
    server = start()
    admission = server._admission
    assert admission is not None
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as here:
        admission.port = here.getsockname()[1]
        admission._accepted(here.fileno())
        for reason in ("bytes without end", "a message without end"):
            admission._cut(here.fileno(), reason)
        admission._disconnected(here.fileno())
    assert server.counters.admission.connections_cut == 1


def test_a_fault_of_our_own_does_not_end_the_server(
    start: Start, client: ControlClient, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start()
    admission = server._admission
    assert admission is not None
    faults = iter([RuntimeError("a fault")])
    usual = admission.serve

    def serve() -> None:
        for fault in faults:
            raise fault
        usual()

    monkeypatch.setattr(admission, "serve", serve)
    assert is_served(client, server)
    assert "the control server failed and continues" in caplog.text
