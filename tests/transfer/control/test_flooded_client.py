"""A client whose peer sends what nobody asked for: its process must neither abort nor hold all of it.

libzmq aborts if a connection ends that it has stopped reading, and a ping is among what it has read already
(zeromq/libzmq#4364). What limits a flood counts the same at a server, so both are shown.
"""

import contextlib
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.control import zmtp
from tests.support.control.samples import HELLO, RELEASE, SERVED_MODEL, Start
from tests.support.waiting import WAIT_S, until
from transfer.control import peer_sockets
from transfer.control.client import ControlClient
from transfer.control.connections import CHECK_INTERVAL_S
from transfer.control.failures import PeerUnreachable
from transfer.control.keys import ControlKeys
from transfer.control.messages import MAX_FRAME_BYTES, Renew, Welcome, encode
from transfer.control.server import ControlServer

HERE = "127.0.0.1"
ROOT = Path(__file__).parents[3]
MIB = 1 << 20
EMPTY = b"\0\0"  # a whole message
PING = zmtp.command(b"\x04PING\0\0")
RESET = struct.pack("ii", 1, 0)  # for SO_LINGER
RESETS = 3
ROUNDS = 1000
#: Asks the first port, and when a line comes the second.
CLIENT = """
import sys
from tests.support.control.samples import HELLO
from transfer.control.client import ControlClient

client = ControlClient()
flooded = client.request("127.0.0.1", int(sys.argv[1]), HELLO, 60.0)
sys.stdin.readline()
print(client.request("127.0.0.1", int(sys.argv[2]), HELLO, 10.0).result().engine_id)
client.close()
"""


@contextlib.contextmanager
def connected(listener: socket.socket) -> Iterator[socket.socket]:
    """A connection that a client has made."""
    connection, _ = listener.accept()
    with connection:
        connection.settimeout(WAIT_S)
        connection.sendall(zmtp.greeting() + zmtp.ready())
        zmtp.await_ready(connection)
        yield connection


def test_a_peer_that_floods_it_pings_it_and_leaves_does_not_end_the_process(server: ControlServer) -> None:
    with socket.create_server((HERE, 0)) as listener:
        listener.settimeout(WAIT_S)
        ports = str(listener.getsockname()[1]), str(server.port)
        with subprocess.Popen(
            [sys.executable, "-c", CLIENT, *ports], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as client:
            try:
                for _ in range(RESETS):
                    with contextlib.suppress(OSError), connected(listener) as connection:
                        connection.sendall((EMPTY * 2500 + PING) * 4)
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                said, _ = client.communicate("\n", WAIT_S)
            finally:
                client.kill()
    assert (client.returncode, said.strip()) == (0, HELLO.engine_id)


def test_a_flood_of_complete_messages_is_ended(
    client: ControlClient, server: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_sockets, "_UNREAD_BYTES", MIB)
    with socket.create_server((HERE, 0)) as listener:
        asked = client.request(HERE, listener.getsockname()[1], HELLO, WAIT_S)
        with connected(listener) as connection, contextlib.suppress(OSError):
            while not asked.done():
                connection.sendall(EMPTY * 50_000)
    with pytest.raises(PeerUnreachable, match=r"it sent \d+ bytes .*faster than they are read"):
        asked.result()
    assert client.request(HERE, server.port, HELLO, WAIT_S).result().engine_id == HELLO.engine_id


def test_a_flood_of_complete_messages_costs_its_connection_at_a_server(start: Start) -> None:
    server = start(unread_bytes=MIB)
    with zmtp.connect(server.port) as connection, contextlib.suppress(OSError):
        connection.sendall(zmtp.greeting() + zmtp.ready())
        zmtp.await_ready(connection)
        ends_at = time.monotonic() + WAIT_S
        while time.monotonic() < ends_at:
            connection.sendall(EMPTY * 50_000)
    until(lambda: server.counters.admission.connections_cut == 1)


def test_the_largest_welcome_may_come_slowly(client: ControlClient) -> None:
    def welcome(padding: int) -> bytes:
        return encode(1, Welcome(HELLO.engine_id, replace(SERVED_MODEL, architecture="x" * padding), ()))

    with socket.create_server((HERE, 0)) as listener:
        asked = client.request(HERE, listener.getsockname()[1], HELLO, WAIT_S)  # its first one: number 1
        with connected(listener) as connection:
            frame = zmtp.frame(welcome(MAX_FRAME_BYTES - 2 * len(welcome(0))))
            connection.sendall(frame[:-1])
            time.sleep(3 * CHECK_INTERVAL_S)
            assert not asked.done()
            connection.sendall(frame[-1:])
            assert asked.result(WAIT_S).engine_id == HELLO.engine_id


@pytest.mark.thorough
@pytest.mark.parametrize("keys", [None, ControlKeys.derive(bytes(range(32)))], ids=["plain", "encrypted"])
def test_any_number_of_messages_may_come_one_after_another(
    start: Start, monkeypatch: pytest.MonkeyPatch, keys: ControlKeys | None
) -> None:
    """Were what ZeroMQ adds to each not counted as read, either end would cut the connection some time."""
    most = 2500
    monkeypatch.setattr(peer_sockets, "_UNREAD_BYTES", most)
    server = start(keys, unread_bytes=most)
    long = Renew(HELLO.engine_id, ("x" * 100, "y" * 100, "z" * 100))
    with contextlib.closing(ControlClient(keys=keys)) as client:
        for _ in range(ROUNDS):
            for request in (RELEASE, long):
                client.request(HERE, server.port, request, WAIT_S).result()
    assert client.counters.peers_opened == 1
    assert server.counters.admission.connections_cut == 0
