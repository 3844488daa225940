"""A proxy and its fake servers, for tests to ask for."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.support.examples import harness
from tests.support.examples.fake_servers import FakeServer, decodes, prefills
from tests.support.examples.served_proxy import Proxy, ProxySetup
from tests.support.waiting import until


@pytest.fixture
def setup() -> Iterator[ProxySetup]:
    with ExitStack() as stack:
        yield ProxySetup(stack)


@pytest.fixture
def p(setup: ProxySetup) -> FakeServer:
    """A prefill server."""
    return setup.server(prefills)


@pytest.fixture
def d(setup: ProxySetup) -> FakeServer:
    """A decode server."""
    return setup.server(decodes)


@pytest.fixture
def proxy(setup: ProxySetup, p: FakeServer, d: FakeServer) -> Proxy:
    """A proxy in front of ``p`` and ``d``."""
    return setup.proxy([p], [d])


@pytest.fixture
def access_lines(caplog: pytest.LogCaptureFixture) -> Callable[[int], list[str]]:
    """Waits for so many access lines and returns all there are."""
    caplog.set_level(logging.INFO)

    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "pd_proxy.journal"]

    def wait(count: int) -> list[str]:
        until(lambda: len(lines()) >= count)
        return lines()

    return wait


@pytest.fixture
def closed_port() -> str:
    """The URL of a port that nobody listens on."""
    return harness.unused_url()


@pytest.fixture
def full_backlog() -> Iterator[str]:
    """The URL of a server that takes no connection."""
    with harness.full_backlog() as url:
        yield url


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[str], str]:
    """Waits for a line of the log that has this in it."""
    caplog.set_level(logging.INFO)
    return lambda part: until(lambda: next((line for line in caplog.messages if part in line), ""))
