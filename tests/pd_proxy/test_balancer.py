"""Several servers behind one URL, as a Service of Kubernetes has them: which of them get requests."""

import math
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import aiohttp
import pytest

from pd_proxy import connection_pool
from tests.support.examples.balancer import Balancer
from tests.support.examples.fake_servers import FakeServer, decodes
from tests.support.examples.served_proxy import ProxySetup


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_a_server_that_has_left_gets_no_requests_over_old_connections(
    setup: ProxySetup, stack: ExitStack, p: FakeServer, d: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However busy these are. Kubernetes leaves them alone, and vLLM that drains takes requests, and aborts them."""
    monkeypatch.setattr(connection_pool, "_OLDEST_S", 0.0)
    new, balancer = setup.server(decodes), Balancer(stack, d.url)
    proxy = setup.proxy([p], [balancer.url])
    assert proxy.complete().status_code == 200
    balancer.servers = [new.url]
    assert [proxy.complete().status_code for _ in range(3)] == [200] * 3
    assert (len(d.received), len(new.received)) == (1, 3)


def test_one_that_has_come_gets_its_share(
    setup: ProxySetup, stack: ExitStack, p: FakeServer, d: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_pool, "_OLDEST_S", 0.0)
    new, balancer = setup.server(decodes), Balancer(stack, d.url)
    proxy = setup.proxy([p], [balancer.url])
    assert proxy.complete().status_code == 200
    balancer.servers.append(new.url)
    assert [proxy.complete().status_code for _ in range(4)] == [200] * 4
    assert len(new.received) == 2


def test_young_connections_are_used_again(
    setup: ProxySetup, stack: ExitStack, p: FakeServer, d: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_pool, "_OLDEST_S", math.inf)
    monkeypatch.setattr(connection_pool, "_IDLE_CONNECTION_S", 600.0)
    balancer = Balancer(stack, d.url)
    proxy = setup.proxy([p], [balancer.url])
    assert [proxy.complete().status_code for _ in range(3)] == [200] * 3
    assert balancer.taken == 1


def test_of_a_names_addresses_one_that_refuses_is_passed_over(
    setup: ProxySetup, p: FakeServer, d: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a headless Service. Each connection begins with the next address."""
    monkeypatch.setattr(connection_pool, "_OLDEST_S", 0.0)

    async def resolve(_: object, host: str, port: int, family: int) -> list[dict[str, Any]]:
        one = {"hostname": host, "port": port, "family": socket.AF_INET, "proto": 0, "flags": socket.AI_NUMERICHOST}
        return [one | {"host": address} for address in ("127.0.0.2", "127.0.0.1")]

    monkeypatch.setattr(aiohttp.DefaultResolver, "resolve", resolve)
    proxy = setup.proxy([p], [d.url.replace("127.0.0.1", "pd-decode")])
    assert [proxy.complete().status_code for _ in range(4)] == [200] * 4
    assert len(d.received) == 4
