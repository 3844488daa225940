"""A client that leaves: the server of the leg under way sees its connection closed, and nothing else is begun."""

import asyncio
import threading
from collections.abc import Callable

import anyio
import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message

import pd_proxy.http_client
from pd_proxy.http_client import Client, while_connected
from pd_proxy.journal import Record
from tests.support.examples.fake_servers import FakeServer, Received, Wire, decodes, prefills, stalls
from tests.support.examples.harness import RawClient
from tests.support.examples.served_proxy import Proxy, ProxySetup
from tests.support.waiting import until

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
    assert received.left.wait(30)
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
    assert received.left.wait(30)
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
    assert begun.wait(30)
    if pieces:
        client.receive_until(b"data: 1\n\n")
    client.leave()
    assert received.left.wait(30)
    assert "status=499" in access_lines(1)[0]
    settled(proxy, p, d)


def test_when_it_has_sent_more_than_its_request(
    monkeypatch: pytest.MonkeyPatch, proxy: Proxy, p: FakeServer, d: FakeServer
) -> None:
    """Such as the next one, before it has the answer: the server reads no further until it is asked again."""
    monkeypatch.setattr(pd_proxy.http_client, "_LOOK_AGAIN_S", 0.2)
    p.script = stalls
    client = RawClient.completing(proxy, REQUEST)
    received = p.wait()
    client.send(b"POST /v1/completions HTTP/1.1\r\n")
    client.leave()
    assert received.left.wait(30)
    settled(proxy, p, d)


def test_while_the_decode_server_sends_faster_than_the_client_reads(
    setup: ProxySetup, p: FakeServer, access_lines: Callable[[int], list[str]]
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
    assert d.wait().left.wait(30)
    assert "status=499" in access_lines(1)[0]
    settled(proxy, p, d)


def test_a_client_that_stays_is_not_taken_for_one_that_left(
    proxy: Proxy, access_lines: Callable[[int], list[str]]
) -> None:
    for _ in range(20):
        proxy.complete()
    assert all("status=200" in line and "problem" not in line for line in access_lines(20))


async def gone() -> Message:
    return {"type": "http.disconnect"}


async def silent() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def nowhere(_: Message) -> None:
    pass


@pytest.mark.parametrize("announced", [True, False])
def test_with_its_last_byte_it_has_left_only_if_it_could_not_know_the_length(announced: bool) -> None:
    """The work after the last byte is ended in peace, and the request counts as served, where the client had it all."""
    ended = False

    async def serve(client: Client) -> None:
        nonlocal ended
        await client.start(200, [(b"content-length", b"5")] if announced else [])
        await client.send_piece(b"a")
        await client.send_piece(b"bcde")
        await asyncio.sleep(0.01)
        ended = True

    async def scenario() -> None:
        client = Client({"type": "http", "headers": []}, nowhere, Record("/"))
        await while_connected(gone, client, serve(client))

    if announced:
        asyncio.run(scenario())
    else:
        with pytest.raises(ClientDisconnect):
            asyncio.run(scenario())
    assert ended is announced


def test_it_is_sent_no_more_where_the_work_is_not_cancelled_yet() -> None:
    """Where the next piece has come whenever anyio looks, it does not cancel a task."""

    async def flood(client: Client) -> None:
        await client.start(200, [])
        with anyio.CancelScope(shield=True):
            while True:
                await client.send_piece(b"x")
                await asyncio.sleep(0)

    async def scenario() -> None:
        client = Client({"type": "http", "headers": []}, nowhere, Record("/"))
        await while_connected(gone, client, flood(client))

    with pytest.raises(ClientDisconnect):
        asyncio.run(scenario())


def test_an_error_of_the_work_is_raised_as_it_is() -> None:
    async def fails() -> None:
        raise KeyError("a programming error")

    async def scenario() -> None:
        client = Client({"type": "http", "headers": []}, nowhere, Record("/"))
        await while_connected(silent, client, fails())

    with pytest.raises(KeyError, match="a programming error"):
        asyncio.run(scenario())
