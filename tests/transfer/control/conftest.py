from collections.abc import Iterator

import msgspec
import pytest

from tests.support.control.samples import Handler, Start
from transfer.control.client import ControlClient
from transfer.control.keys import ControlKeys
from transfer.control.limits import ServerLimits
from transfer.control.peer_sockets import ClientSettings
from transfer.control.server import ControlServer


@pytest.fixture
def handler() -> Handler:
    return Handler()


@pytest.fixture
def start(handler: Handler) -> Iterator[Start]:
    started: list[ControlServer] = []

    def start(keys: ControlKeys | None = None, **limits: float) -> ControlServer:
        server = ControlServer(handler, "127.0.0.1", keys=keys, limits=msgspec.convert(limits, ServerLimits))
        server.start()
        started.append(server)
        return server

    yield start
    for server in started:
        server.close()
        server.check_integrity()


@pytest.fixture
def server(start: Start) -> ControlServer:
    return start()


@pytest.fixture
def client() -> Iterator[ControlClient]:
    """Repeats nothing within a test, so that every frame can be counted."""
    client = ControlClient(ClientSettings(retry_s=60, retry_cap_s=60))
    yield client
    client.close()
    client.check_integrity()


@pytest.fixture
def impatient() -> Iterator[ControlClient]:
    """Repeats soon: for what gets lost."""
    client = ControlClient(ClientSettings(retry_s=0.05, retry_cap_s=0.2))
    yield client
    client.close()
    client.check_integrity()
