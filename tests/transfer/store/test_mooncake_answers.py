"""A connection is tried only where a client process answers: Mooncake's own try holds the GIL until it gives up.

Covers: transfer.store.mooncake_store.
"""

import socket
import threading
from collections.abc import Iterator

import pytest

from tests.support.process import free_port
from tests.support.store.mooncake_processes import MooncakeProcesses
from transfer.peers import Address
from transfer.store import mooncake_store
from transfer.store.interface import StoreFailed
from transfer.store.mooncake_store import MooncakeStore


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeProcesses]:
    processes = MooncakeProcesses(tmp_path_factory.mktemp("store"), 64 << 20)
    yield processes
    processes.close()


def test_a_client_that_is_stopped_is_not_waited_for(store: MooncakeProcesses) -> None:
    with store.client_stopped(), pytest.raises(StoreFailed, match="does not answer within 1 s: it is stopped"):
        MooncakeStore(store.address, 1 << 20)
    opened = MooncakeStore(store.address, 1 << 20)  # it has closed the connections of those that asked
    assert opened.exist(["nothing"]) == [False]
    opened.close()


def test_where_nothing_listens_the_client_to_start_is_named() -> None:
    port = free_port()
    said = rf"no mooncake_client listens at 127\.0\.0\.1:{port} \(Connection refused\); start one with --host=127"
    with pytest.raises(StoreFailed, match=said):
        MooncakeStore(Address("127.0.0.1", port), 0)


def test_another_server_at_the_port_is_no_client() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(64)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(StoreFailed, match="is no mooncake_client: pool names the client's --host and --port"):
            MooncakeStore(Address("127.0.0.1", server.getsockname()[1]), 0)
        thread.join()


def test_a_connection_for_which_there_is_no_thread_fails(
    store: MooncakeProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refused:
        def setup_dummy(self, *_: object) -> int:
            raise RuntimeError("Resource temporarily unavailable")

    monkeypatch.setattr(mooncake_store, "load", lambda: Refused)
    with pytest.raises(StoreFailed, match="could not be set up: Resource temporarily unavailable"):
        MooncakeStore(store.address, 0)
