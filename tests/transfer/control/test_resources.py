"""Threads, file descriptors and places for peers: nothing is left after close, nobody takes all.

Covers: transfer.control.polling.
"""

import os
import socket
import threading

import pytest

from tests.support.control.samples import HELLO, WELCOME, Handler
from tests.support.process import OpenResources, free_port
from tests.support.waiting import until
from transfer.control import messages
from transfer.control.client import ControlClient
from transfer.control.connections import Connection
from transfer.control.failures import ControlStartError, TooManyPeers
from transfer.control.messages import MalformedMessage, decode_reply, encode
from transfer.control.peer_sockets import ClientSettings
from transfer.control.polling import Wakeup
from transfer.control.server import ControlServer


def test_close_leaves_no_threads_and_no_descriptors(handler: Handler) -> None:
    before, threads_before = OpenResources.now(), set(threading.enumerate())
    for _ in range(10):
        servers = [ControlServer(handler, "127.0.0.1") for _ in range(2)]
        client = ControlClient()
        for server in servers:
            server.start()
            assert client.request("127.0.0.1", server.port, HELLO, 5).result() == WELCOME
        assert client.request("localhost", servers[0].port, HELLO, 5).result() == WELCOME
        client.request("127.0.0.1", free_port(), HELLO, 30)
        with pytest.raises(ControlStartError):
            ControlServer(handler, "127.0.0.1", servers[0].port).start()
        client.close()
        for server in servers:
            server.close()
    assert set(threading.enumerate()) <= threads_before
    until(lambda: OpenResources.now().files <= before.files)


def test_unreachable_peers_leave_no_descriptors(client: ControlClient, server: ControlServer) -> None:
    assert client.request("127.0.0.1", server.port, HELLO, 5).result() == WELCOME
    before = OpenResources.now()
    futures = [client.request("127.0.0.1", free_port(), HELLO, 0.1) for _ in range(20)]
    for future in futures:
        assert future.exception(5) is not None
    until(lambda: OpenResources.now().files <= before.files)


def test_wrong_ports_of_one_host_do_not_keep_other_hosts_out(handler: Handler) -> None:
    """Clients of the service name them. Those that have answered do not count."""
    server = ControlServer(handler, "127.0.0.2")
    server.start()
    client = ControlClient(ClientSettings(max_silent=2))
    assert client.request("127.0.0.2", server.port, HELLO, 5).result() == WELCOME
    for host in ("127.0.0.1", "127.0.0.2"):
        waiting = [client.request(host, free_port(), HELLO, 30) for _ in range(2)]
        with pytest.raises(TooManyPeers, match=f"requests wait for 2 addresses of {host}"):
            client.request(host, free_port(), HELLO, 30).result(5)
        assert not any(future.done() for future in waiting)
    assert client.request("127.0.0.2", server.port, HELLO, 5).result() == WELCOME
    client.close()
    server.close()


def test_engines_that_have_gone_leave_room_for_others(handler: Handler) -> None:
    """Each has started again at another port, as vLLM's do where none is set."""
    client = ControlClient(ClientSettings(max_silent=2))
    for _ in range(4):
        server = ControlServer(handler, "127.0.0.1")
        server.start()
        assert client.request("127.0.0.1", server.port, HELLO, 5).result() == WELCOME
        ended = client.until_lost("127.0.0.1", server.port)
        server.close()
        ended.result(5)
    client.close()


def test_a_wakeup_is_readable_from_set_to_clear_however_often_it_was_set() -> None:
    wakeup = Wakeup()
    for _ in range(100):
        wakeup.set()
    wakeup.clear()
    with pytest.raises(BlockingIOError):
        os.eventfd_read(wakeup.fileno())
    wakeup.set()
    assert os.eventfd_read(wakeup.fileno()) == 1
    wakeup.close()
    wakeup.close()
    wakeup.set()
    assert wakeup.fileno() == -1


def test_a_system_that_tells_nothing_of_a_connection_is_no_failure() -> None:
    """A sandbox, say. Here it is a socket that is none of TCP's."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"unread")
        connection = Connection("peer", ours)
        assert (connection.bytes_received, connection.bytes_acknowledged) == (0, None)


def test_a_message_for_which_there_is_no_memory_is_malformed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def decode(self, _: object) -> None:
            raise MemoryError

    frame = encode(7, WELCOME)
    monkeypatch.setattr(messages, "_replies", Full())
    with pytest.raises(MalformedMessage, match="bad message body") as refused:
        decode_reply(frame)
    assert refused.value.message_id == 7
