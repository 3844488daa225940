from collections.abc import Iterator

import pytest

from tests.transfer.control.support import Handler
from transfer.control.client import ControlClient
from transfer.control.server import ControlServer


@pytest.fixture
def handler() -> Handler:
    return Handler()


@pytest.fixture
def server(handler: Handler) -> Iterator[ControlServer]:
    server = ControlServer(handler, "127.0.0.1")
    server.start()
    yield server
    server.close()


@pytest.fixture
def client() -> Iterator[ControlClient]:
    """Repeats nothing within a test, so that every frame can be counted."""
    client = ControlClient(retry_s=60, retry_cap_s=60)
    yield client
    client.close()


@pytest.fixture
def impatient() -> Iterator[ControlClient]:
    """Repeats soon: for what gets lost."""
    client = ControlClient(retry_s=0.05, retry_cap_s=0.2)
    yield client
    client.close()
