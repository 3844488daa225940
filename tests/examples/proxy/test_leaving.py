"""A client that leaves: the server of the leg under way sees its connection closed, and nothing else is begun."""

import threading
from collections.abc import Callable

import pytest

from tests.examples.proxy.conftest import Proxy, RawClient, Setup, until
from tests.examples.proxy.fakes import FakeServer, Received, Wire, decodes, prefills, stalls

REQUEST = b'{"model": "tiny", "prompt": "a", "stream": true}'


def settled(proxy: Proxy, p: FakeServer, d: FakeServer) -> None:
    """Nothing of the gone request is left, and the next one is served."""
    until(lambda: proxy.in_flight() == 0)
    p.script, d.script = prefills, decodes
    assert proxy.complete().status_code == 200


def test_while_it_sends_its_request(
    proxy: Proxy, p: FakeServer, d: FakeServer, access_lines: Callable[[int], list[str]]
) -> None:
    client = RawClient(proxy, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n", b'{"prompt')
    client.leave()
    assert "status=499" in access_lines(1)[0]
    assert p.received == d.received == []
    settled(proxy, p, d)


def test_during_the_prefill_leg(
    proxy: Proxy, p: FakeServer, d: FakeServer, access_lines: Callable[[int], list[str]]
) -> None:
    p.script = stalls
    client = RawClient.completing(proxy, REQUEST)
    received = p.wait()
    client.leave()
    assert received.left.wait(5)
    (line,) = access_lines(1)
    assert f"status=499 P={p.url} D=- " in line
    assert line.endswith("problem: the client left")
    assert d.received == []
    settled(proxy, p, d)


def test_while_the_decode_server_has_not_answered(
    proxy: Proxy, p: FakeServer, d: FakeServer, access_lines: Callable[[int], list[str]]
) -> None:
    d.script = stalls
    client = RawClient.completing(proxy, REQUEST)
    received = d.wait()
    client.leave()
    assert received.left.wait(5)
    assert f"status=499 P={p.url} D={d.url} " in access_lines(1)[0]
    settled(proxy, p, d)


@pytest.mark.parametrize("pieces", [0, 1])
def test_in_the_middle_of_the_answer(
    proxy: Proxy, p: FakeServer, d: FakeServer, access_lines: Callable[[int], list[str]], pieces: int
) -> None:
    begun = threading.Event()

    async def begins(received: Received, wire: Wire) -> None:
        await wire.head()
        for _ in range(pieces):
            await wire.chunk(b"data: 1\n\n")
        begun.set()
        await stalls(received, wire)

    d.script = begins
    client = RawClient.completing(proxy, REQUEST)
    received = d.wait()
    assert begun.wait(5)
    if pieces:
        client.receive_until(b"data: 1\n\n")
    client.leave()
    assert received.left.wait(5)
    assert "status=499" in access_lines(1)[0]
    settled(proxy, p, d)


def test_while_the_decode_server_sends_faster_than_the_client_reads(
    setup: Setup, p: FakeServer, access_lines: Callable[[int], list[str]]
) -> None:
    async def floods(_: Received, wire: Wire) -> None:
        await wire.head()
        while True:
            await wire.chunk(b"x" * 65536)

    d = setup.server(floods)
    proxy = setup.proxy([p], [d])
    client = RawClient.completing(proxy, REQUEST)
    client.receive_until(b"xxx")
    client.leave()
    assert d.wait().left.wait(5)
    assert "status=499" in access_lines(1)[0]
    settled(proxy, p, d)


def test_a_client_that_stays_is_not_taken_for_one_that_left(
    proxy: Proxy, access_lines: Callable[[int], list[str]]
) -> None:
    for _ in range(20):
        proxy.complete()
    assert all("status=200" in line and "problem" not in line for line in access_lines(20))
