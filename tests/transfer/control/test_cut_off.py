"""A peer that cannot be reached is given up soon; one whose process is slow or stopped is not."""

import contextlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.control.samples import HELLO, WELCOME
from tests.support.e2e.hosts import Hosts, why_not
from tests.support.process import free_ports, stop
from tests.support.waiting import holds_for, until
from transfer.control.client import ControlClient
from transfer.control.connections import connection_of
from transfer.control.failures import PeerUnreachable
from transfer.control.messages import Request
from transfer.control.peer_sockets import ClientSettings
from transfer.control.server import ControlServer
from transfer.control.waiting_requests import NotYet

ROOT = Path(__file__).parents[3]
HERE = "127.0.0.1"
P, D = 1, 2
PATIENCE_S = 30.0
SERVER = """
import sys
from tests.support.control.samples import Handler
from transfer.control.server import ControlServer

server = ControlServer(Handler(), sys.argv[1])
server.start()
print(server.port, flush=True)
sys.stdin.read()
server.close()
"""


class Late:
    """Answers after some seconds."""

    def __init__(self, seconds: float = 0.01) -> None:
        self.seconds = seconds
        self.asked = 0

    def handle(self, request: Request) -> NotYet:
        self.asked += 1
        return NotYet("topic", self.seconds, WELCOME)


@pytest.fixture
def client() -> Iterator[ControlClient]:
    with contextlib.closing(ControlClient(ClientSettings(silent_s=1.0))) as client:
        yield client
        client.close()
        client.check_integrity()


@contextlib.contextmanager
def server(address: str, where: list[str]) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    with subprocess.Popen(
        [*where, sys.executable, "-c", SERVER, address],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def fails_within(client: ControlClient, host: str, port: int, seconds: float) -> str:
    """What a request's failure says, which comes long before its time is up."""
    began = time.monotonic()
    with pytest.raises(PeerUnreachable) as failure:
        client.request(host, port, HELLO, PATIENCE_S).result()
    assert 0.75 <= time.monotonic() - began < seconds
    return str(failure.value)


def answers(client: ControlClient, host: str, port: int) -> bool:
    """Whether a server answers; the system may have yet to find its neighbour."""
    with contextlib.suppress(PeerUnreachable):
        client.request(host, port, HELLO, PATIENCE_S).result()
        return True
    return False


def test_a_port_that_nobody_listens_on_is_given_up(client: ControlClient) -> None:
    assert "there is no connection, for 1 s" in fails_within(client, HERE, free_ports(1)[0], 5.0)


@pytest.mark.thorough
@pytest.mark.parametrize("is_known", [False, True], ids=["first contact", "connected"])
def test_a_process_that_is_stopped_is_waited_for(is_known: bool) -> None:
    """For longer than several probes and a silent system are: nor is its connection made again."""
    with contextlib.closing(ControlClient()) as client, server(HERE, []) as (process, port):
        if is_known:
            client.request(HERE, port, HELLO, PATIENCE_S).result()
        lost = client.until_lost(HERE, port)
        stop(process.pid)
        asked = client.request(HERE, port, HELLO, PATIENCE_S)
        time.sleep(6.0)
        assert not asked.done()
        assert lost.done() != is_known
        process.send_signal(signal.SIGCONT)
        asked.result()


@pytest.mark.hosts
@pytest.mark.thorough
@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize(
    "cut",
    [
        pytest.param(lambda hosts: hosts.unplugged(P), id="both ways"),
        pytest.param(lambda hosts: hosts.one_way(D, P, "blackhole"), id="to P"),
        pytest.param(lambda hosts: hosts.one_way(D, P, "prohibit"), id="to P, refused", marks=pytest.mark.slow),
        pytest.param(lambda hosts: hosts.one_way(P, D, "blackhole"), id="from P", marks=pytest.mark.slow),
        pytest.param(lambda hosts: hosts.one_way(P, D, "prohibit"), id="from P, refused", marks=pytest.mark.slow),
    ],
)
def test_a_network_that_is_cut_is_noticed_and_forgotten_when_it_is_back(
    cut: Callable[[Hosts], contextlib.AbstractContextManager[None]],
) -> None:
    host = Hosts.address(P)
    with contextlib.closing(Hosts()) as hosts, server(host, hosts.prefix(P)) as (_, port):
        with hosts.entered(D):
            client = ControlClient(ClientSettings(silent_s=1.0))
        with contextlib.closing(client):
            until(lambda: answers(client, host, port))
            with cut(hosts):
                assert "its system acknowledges nothing, for 1 s" in fails_within(client, host, port, 5.0)
                assert "there is no connection, for 1 s" in fails_within(client, host, port, 5.0)
            until(lambda: answers(client, host, port))


@pytest.mark.hosts
@pytest.mark.thorough
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_cut_is_noticed_within_5_s_while_nothing_but_an_answer_is_outstanding() -> None:
    """The request has arrived, is repeated ever more seldom, and P may take its time."""
    late, host = Late(), Hosts.address(P)
    with contextlib.closing(Hosts()) as hosts:
        with hosts.entered(P):
            there = ControlServer(late, host)
            there.start()
        with contextlib.closing(there), contextlib.closing(ControlClient()) as client:
            until(lambda: answers(client, host, there.port))
            late.seconds = PATIENCE_S
            asked = client.request(host, there.port, HELLO, PATIENCE_S)
            time.sleep(1.75)  # the second repetition has been acknowledged, the third is to come 1.75 s later
            with hosts.unplugged(P):
                began = time.monotonic()
                with pytest.raises(PeerUnreachable, match=r"its system acknowledges nothing, for 3\.75 s"):
                    asked.result()
                assert time.monotonic() - began < 5.0


@pytest.mark.hosts
@pytest.mark.thorough
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_packets_that_do_not_leave_this_machine_are_noticed(client: ControlClient) -> None:
    """They are not sent, so none is unacknowledged."""
    host = Hosts.address(P)
    with contextlib.closing(Hosts()) as hosts, server(host, hosts.prefix(P)) as (_, port):
        client.request(host, port, HELLO, PATIENCE_S).result()
        with hosts.forbidden(P):
            assert "its system acknowledges nothing, for 1 s" in fails_within(client, host, port, 5.0)


def test_what_a_peer_has_no_room_for_is_not_outstanding() -> None:
    with socket.create_server((HERE, 0)) as listener, socket.create_connection(listener.getsockname()) as sender:
        sender.setblocking(False)
        with listener.accept()[0], connection_of(sender.fileno()) as connection:
            assert connection is not None
            with contextlib.suppress(BlockingIOError):
                while True:
                    sender.send(bytes(1 << 20))
            until(lambda: connection.bytes_acknowledged is None)
            holds_for(lambda: connection.bytes_acknowledged is None, 1.0)


#: Run in a network of its own, which has one address.
STRANGER = """
import subprocess, sys
from tests.support.control.samples import HELLO
from transfer.control.client import ControlClient
from transfer.control.peer_sockets import ClientSettings

for command in ("link set lo up", f"address add {sys.argv[1]} dev lo"):
    subprocess.run(["ip", *command.split()], check=True)
client = ControlClient(ClientSettings(silent_s=0.5))
print(client.request(sys.argv[2], 5600, HELLO, 30.0).exception())
client.close()
"""
HAS_NETWORKS = all(map(shutil.which, ("ip", "unshare"))) and not subprocess.call(["unshare", "-rn", "true"])


@pytest.mark.thorough
@pytest.mark.skipif(not HAS_NETWORKS, reason="no network namespaces can be made here, or iproute2 is missing")
@pytest.mark.parametrize(
    ("ours", "theirs", "why"),
    [
        ("10.9.9.1/32", "fd99::7", "no route to fd99::7 (IPv6), as its own addresses are IPv4 only: let the"),
        ("fd99::1/128", "10.9.9.7", "no route to 10.9.9.7 (IPv4), as its own addresses are IPv6 only: let the"),
        ("10.9.9.1/32", "10.9.9.7", "no route to 10.9.9.7 (IPv4): check its addresses and routes"),
        (
            "10.9.9.1/32",
            "10.9.9.1",
            "is its network cut, the port closed, or the setting host there an address that only others reach",
        ),
    ],
)
def test_a_peer_of_the_other_address_family_is_said_to_be_one(ours: str, theirs: str, why: str) -> None:
    command = ["unshare", "-rn", sys.executable, "-c", STRANGER, ours, theirs]
    said = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert "there is no connection, for 0.5 s: " in said
    assert why in said


ASKER = """
import sys
from tests.support.control.samples import HELLO
from transfer.control.client import ControlClient

client = ControlClient()
asked = [client.request(sys.argv[1], int(sys.argv[2]), HELLO, 2.0) for _ in range(200)]
print("asked", flush=True)
print(sum(each.exception() is None for each in asked), flush=True)
client.close()
"""


@pytest.mark.thorough
def test_a_process_that_was_stopped_itself_takes_the_answers_that_have_come_meanwhile() -> None:
    """More of them than it reads at once."""
    late = Late(1.0)
    with contextlib.closing(ControlServer(late, HERE)) as there:
        there.start()
        command = [sys.executable, "-c", ASKER, HERE, str(there.port)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "asked\n"
            until(lambda: late.asked >= 200)
            stop(process.pid)
            time.sleep(4.0)
            process.send_signal(signal.SIGCONT)
            assert process.stdout.readline() == "200\n"
