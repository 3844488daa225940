"""A server that reads slower than clients send, who ping it and leave: libzmq must not abort its process for it.

It does if it has stopped reading a connection that then ends, and a ping is among what it has read already
(zeromq/libzmq#4364).
"""

import contextlib
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tests.support.control import zmtp
from tests.support.control.junk import HANDSHAKE
from tests.support.control.samples import HELLO
from transfer.control.client import ControlClient
from transfer.control.messages import encode

HERE = "127.0.0.1"
ROOT = Path(__file__).parents[3]
MESSAGES, STRANGERS = 60, 100
PING = zmtp.command(b"\x04PING\0\0")
RESET = struct.pack("ii", 1, 0)  # for SO_LINGER
#: Its first request takes until a line comes.
SERVER = """
import sys, threading
from tests.support.control.samples import Handler
from transfer.control.server import ControlServer

told = threading.Event()

class Stalled(Handler):
    def handle(self, request):
        if not self.asked:
            told.wait()
        return super().handle(request)

server = ControlServer(Stalled(), "127.0.0.1")
server.start()
print(server.port, flush=True)
sys.stdin.readline()
told.set()
sys.stdin.read()
server.close()
"""


@pytest.fixture
def stalled() -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        yield server
        server.kill()


def port_of(server: "subprocess.Popen[str]") -> int:
    assert server.stdout is not None
    return int(server.stdout.readline())


def go_on(server: "subprocess.Popen[str]") -> None:
    assert server.stdin is not None
    server.stdin.write("\n")
    server.stdin.flush()


def assert_serves(server: "subprocess.Popen[str]", port: int) -> None:
    """It answers, and ends as it should when it is told to."""
    with contextlib.closing(ControlClient()) as client:
        client.request(HERE, port, HELLO, 10.0).result()
    assert server.stdin is not None
    server.stdin.close()
    assert server.wait(10.0) == 0


@pytest.mark.thorough
def test_clients_that_have_left_while_it_stood_still_do_not_end_the_process(stalled: "subprocess.Popen[str]") -> None:
    port = port_of(stalled)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    leaving = context.socket(zmq.DEALER)
    leaving.setsockopt(zmq.HEARTBEAT_IVL, 20)
    leaving.setsockopt(zmq.HEARTBEAT_TIMEOUT, 60_000)
    leaving.connect(f"tcp://{HERE}:{port}")
    for number in range(1, MESSAGES):
        leaving.send(encode(number, HELLO))
        time.sleep(0.02)  # so that there are pings between them
    context.destroy(linger=0)
    time.sleep(0.5)  # the server's side of the connection has to end before anything is read
    go_on(stalled)
    assert_serves(stalled, port)


def test_strangers_who_ping_and_leave_do_not_end_the_process(stalled: "subprocess.Popen[str]") -> None:
    port = port_of(stalled)
    go_on(stalled)
    messages = (zmtp.frame(bytes(20)) * MESSAGES + PING) * 4
    for number in range(STRANGERS):
        with contextlib.suppress(OSError), zmtp.connect(port, f"127.0.1.{1 + number}") as stranger:
            stranger.sendall(HANDSHAKE)
            zmtp.await_ready(stranger)
            stranger.sendall(messages)
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    assert_serves(stalled, port)
