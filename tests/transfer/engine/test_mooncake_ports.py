"""Which of a peer's two ports is closed, and how that is said: a firewall drops packets, or refuses connections."""

import json
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress

import pytest

from tests.support.engine.peer_process import PeerProcess
from tests.support.process import free_port
from transfer.engine import mooncake_ports
from transfer.engine.interface import ReadFailed
from transfer.engine.mooncake import MooncakeEngine, MooncakeOptions
from transfer.engine.mooncake_ports import closed_port

HERE = "127.0.0.1"
REFUSED, DROPPED = "Connection refused", "nothing comes back, as where a firewall drops packets"


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_ports, "_PATIENCE_S", 0.2)


@contextmanager
def silent_port() -> Iterator[int]:
    """A port whose packets are dropped: the system does so where more connections wait than a listener wants."""
    with socket.socket() as listener, ExitStack() as waiting:
        listener.bind((HERE, 0))
        listener.listen(0)
        port = int(listener.getsockname()[1])
        waiting.enter_context(socket.create_connection((HERE, port)))
        yield port


def receive(connection: socket.socket) -> bytes:
    """The JSON of a question or of an answer."""
    size, _ = struct.unpack("<QB", connection.recv(9, socket.MSG_WAITALL))
    return connection.recv(size - 1, socket.MSG_WAITALL)


@pytest.mark.usefixtures("_impatient")
def test_an_answer_that_comes_byte_by_byte_is_waited_for_no_longer() -> None:
    ours, theirs = socket.socketpair()
    over = threading.Event()

    def trickle() -> None:
        with suppress(OSError):
            theirs.sendall(struct.pack("<QB", 1 << 19, 0))
            while not over.wait(0.05):
                theirs.sendall(b" ")

    thread = threading.Thread(target=trickle)
    with ours, theirs:
        thread.start()
        began = time.monotonic()
        assert mooncake_ports._data_port(ours, lambda: False) == 0
        took_s = time.monotonic() - began
        over.set()
        thread.join()
    assert took_s < 10.0


@contextmanager
def handshakes(said: bytes) -> Iterator[str]:
    """Where every question gets this answer."""
    with socket.create_server((HERE, 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection, suppress(struct.error, OSError):  # it may have asked nothing
                    receive(connection)
                    connection.sendall(said)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"{HERE}:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def answer(text: str) -> bytes:
    return struct.pack("<QB", len(text) + 1, 1) + text.encode()


def naming(port: object) -> bytes:
    return answer(json.dumps({"name": "", "protocol": "tcp", "tcp_data_port": port}))


def look(address: str, *, moves_data: bool = True) -> str:
    return closed_port(address, moves_data=moves_data, unwanted=lambda: False)


def test_a_peer_whose_ports_are_open_has_none_closed(peer: PeerProcess) -> None:
    assert look(peer.address) == ""


def test_a_real_peers_data_port_is_learnt_from_it(peer: PeerProcess) -> None:
    host, port = peer.address.split(":")
    with socket.create_connection((host, int(port))) as connection:
        assert mooncake_ports._data_port(connection, lambda: False) == peer.data_port


@pytest.mark.usefixtures("_impatient")
def test_the_first_port_is_closed() -> None:
    port = free_port()
    assert look(f"{HERE}:{port}") == f"its port {port} takes no connection ({REFUSED})"
    with silent_port() as port:
        assert look(f"{HERE}:{port}") == f"its port {port} takes no connection ({DROPPED})"


@pytest.mark.usefixtures("_impatient")
def test_the_second_port_is_closed() -> None:
    said = "it answers there, but its second port, which moves the data, takes no connection: "
    port = free_port()
    with handshakes(naming(port)) as address:
        assert look(address) == f"{said}{HERE}:{port} ({REFUSED})"
        assert look(address, moves_data=False) == ""
    with silent_port() as port, handshakes(naming(port)) as address:
        assert look(address) == f"{said}{HERE}:{port} ({DROPPED})"


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize(
    "said",
    [
        *(b"", b"\x01", b"HTTP/1.1 400 Bad Request\r\n\r\n", answer("[]"), answer("{"), naming("x"), naming(70000)),
        pytest.param(answer("[" * 100_000), id="nested deeply"),
    ],
)
def test_an_answer_that_names_no_port_leaves_it_at_the_first(said: bytes) -> None:
    with handshakes(said) as address:
        assert look(address) == ""


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("is_dropped", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_link_names_the_port_that_is_closed(peer: PeerProcess, is_dropped: bool) -> None:
    """Mooncake learns of it by the peer's own answer, in which another port stands."""
    host, first = peer.address.split(":")
    with socket.create_connection((host, int(first))) as connection:
        connection.sendall(mooncake_ports._QUESTION)
        real = receive(connection)
    with ExitStack() as open_:
        port = open_.enter_context(silent_port()) if is_dropped else free_port()
        told = re.sub(rb'"tcp_data_port":\d+', b'"tcp_data_port":%d' % port, real)
        address = open_.enter_context(handshakes(answer(told.decode())))
        engine = open_.enter_context(closing(MooncakeEngine(MooncakeOptions(HERE, connect_timeout_s=1.0))))
        with pytest.raises(ReadFailed) as failure:
            engine.open(address, [peer.region], peer.identity)
    assert failure.value.settled
    said = str(failure.value)
    assert f"cannot reach the transfer engine at {address}" in said
    assert f"its second port, which moves the data, takes no connection: {HERE}:{port} (" in said
    assert (DROPPED if is_dropped else REFUSED) in said
    assert "accepts connections" not in said
    assert "two, each from 15000 to 17000" in said
