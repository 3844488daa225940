"""What a request that fails, or whose client leaves, keeps in memory: nothing of its body. And of an answer: little.

Bodies may be images of many megabytes, and circles of objects are collected seldom in a proxy.
"""

import gc
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import AsyncGeneratorType, CoroutineType, FrameType, FunctionType

import httpx
import pytest

from tests.support.examples.fake_servers import (
    FakeServer,
    Received,
    Wire,
    answers,
    drops,
    opened,
    prefills_by_name,
    stalls,
    waits,
)
from tests.support.examples.harness import RawClient
from tests.support.examples.served_proxy import Proxy, ProxySetup
from tests.support.waiting import until

IMAGE = "an image of some kilobytes, " * 4096
CONTENT = json.dumps({"prompt": IMAGE, "stream": True}).encode()


async def breaks_a_stream(_: Received, wire: Wire) -> None:
    await wire.head()
    await wire.chunk(b"data: 1\n\n")
    wire.drop()


@contextmanager
def nothing_kept(proxy: Proxy, *servers: FakeServer) -> Iterator[None]:
    """Whatever is asked inside leaves no frame of the proxy with a body, though no circle is collected."""
    gc.collect()
    gc.disable()
    try:
        yield
        until(lambda: proxy.in_flight() == 0)
        for server in servers:
            server.received.clear()
        # Tasks that were cancelled may still be on their way out.
        until(lambda: not _kept(), lambda: f"kept: {_kept()}"[:500])
    finally:
        gc.enable()


def _kept() -> list[object]:
    """Bodies that the proxy's frames have in their local variables."""
    # isinstance wakes other modules' proxies. A generator that waits has no frame before somebody asks for it.
    found = gc.get_objects()
    waiting = [each.ag_frame for each in found if type(each) is AsyncGeneratorType]
    waiting += [each.cr_frame for each in found if type(each) is CoroutineType]
    frames = [each for each in (*found, *waiting) if type(each) is FrameType]
    ours = [frame for frame in frames if frame.f_globals["__name__"].startswith("pd_proxy.")]
    return [value for frame in ours for value in frame.f_locals.values() if _holds(value)]


def _holds(value: object) -> bool:
    """Whether a local variable is a body, or has its prompt."""
    prompt = value.get("prompt") if isinstance(value, dict) else value
    return prompt == IMAGE or (isinstance(prompt, bytes | bytearray) and IMAGE.encode() in prompt)


@pytest.mark.parametrize("legs", ["together", "in-turn"])
def test_a_request_leaves_no_circle_of_objects(setup: ProxySetup, p: FakeServer, d: FakeServer, legs: str) -> None:
    """So Python need not look for any, which takes longer the more requests are under way."""
    p.script = prefills_by_name
    proxy = setup.proxy([p], [d], legs=legs)
    assert proxy.complete().status_code == 200  # with new connections; and P's address is known
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        assert proxy.complete().status_code == 200
        until(lambda: proxy.in_flight() == 0)
        gc.collect()
        named = [each if type(each) is FunctionType else type(each) for each in gc.garbage]
        assert not [each for each in named if str(each.__module__).startswith("pd_proxy.")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


@pytest.mark.parametrize("fails", ["p refuses", "p drops", "p is down", "d breaks", "d drops", "no json"])
def test_a_failed_request(setup: ProxySetup, p: FakeServer, d: FakeServer, closed_port: str, fails: str) -> None:
    scripts = {"p refuses": answers(400, b'{"error": {}}'), "p drops": drops}
    p.script = scripts.get(fails, p.script)
    d.script = {"d breaks": breaks_a_stream, "d drops": drops}.get(fails, d.script)
    proxy = setup.proxy([closed_port if fails == "p is down" else p], [d])
    with nothing_kept(proxy, p, d), suppress(httpx.RemoteProtocolError):
        proxy.http.post("/v1/completions", content=CONTENT[: -1 if fails == "no json" else None])


@pytest.mark.parametrize("legs", ["together", "in-turn"])
def test_a_client_that_leaves_while_p_computes(setup: ProxySetup, p: FakeServer, d: FakeServer, legs: str) -> None:
    p.script = prefills_by_name
    proxy = setup.proxy([p], [d], legs=legs)
    assert proxy.complete().status_code == 200  # and P's address is known
    p.received.clear()
    p.script = d.script = stalls
    with nothing_kept(proxy, p, d):
        client = RawClient.completing(proxy, CONTENT)
        p.wait()
        client.leave()


def test_the_clients_own_bytes_are_let_go_when_they_are_parsed(setup: ProxySetup, p: FakeServer, d: FakeServer) -> None:
    """A stream lasts for minutes; what goes to the servers is another body."""
    d.script = stalls
    client = RawClient.completing(setup.proxy([p], [d]), CONTENT)
    d.wait()
    assert d.bodies[0].keys() > json.loads(CONTENT).keys()
    until(lambda: not any(isinstance(one, bytes | bytearray) and one == CONTENT for one in _kept()))
    client.leave()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions/batch"], ids=["two legs", "relayed"])
def test_what_d_has_been_sent_is_let_go_when_its_answer_begins(
    setup: ProxySetup, p: FakeServer, d: FakeServer, path: str
) -> None:
    async def begins(received: Received, wire: Wire) -> None:
        await wire.head()
        await wire.chunk(b"data: a\n\n")
        await stalls(received, wire)

    d.script = begins
    body = CONTENT.replace(b"{", b'{"stream": true, ', 1)
    head = b"POST %s HTTP/1.1\r\nHost: proxy\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(body))
    client = RawClient(setup.proxy([p], [d]), head, body)
    client.receive_until(b"data: a")
    until(lambda: not any(isinstance(one, bytes | bytearray) and len(one) >= len(body) for one in _kept()))
    client.leave()


def test_a_p_that_fails_beside_d_and_is_followed_by_another(setup: ProxySetup, p: FakeServer, d: FakeServer) -> None:
    other = setup.server(prefills_by_name)
    p.script = prefills_by_name
    proxy = setup.proxy([p, other], [d])
    for _ in range(2):
        assert proxy.complete().status_code == 200
    p.script = answers(502, b"gone")
    with nothing_kept(proxy, p, other, d):
        for _ in range(2):  # one of them goes to P first
            assert proxy.http.post("/v1/completions", content=CONTENT).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions/batch"], ids=["two legs", "relayed"])
def test_a_client_that_does_not_read_has_the_server_wait(setup: ProxySetup, p: FakeServer, path: str) -> None:
    """All that is taken from D is in the proxy, or in the buffers of the kernel, which have a limit."""
    piece, pieces = b"data: " + b"x" * 65528 + b"\n\n", 2048
    taken = 0

    async def floods(_: Received, wire: Wire) -> None:
        nonlocal taken
        await wire.head()
        while taken < len(piece) * pieces:
            await wire.chunk(piece)
            taken += len(piece)
        await wire.end()

    def stands_still() -> bool:
        before = taken
        time.sleep(0.5)
        return taken == before > 0

    proxy = setup.proxy([p], [setup.server(floods)])
    body = b'{"prompt": "a", "stream": true}'
    head = b"POST %s HTTP/1.1\r\nHost: proxy\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    client = RawClient(proxy, head % (path.encode(), len(body)), body)
    try:
        until(stands_still)
        assert taken < len(piece) * pieces / 4
        body = client.receive_all().partition(b"\r\n\r\n")[2]  # whose chunks may end inside of a word
        assert body.count(b"x") == piece.count(b"x") * pieces
    finally:
        client.leave()  # or the proxy, which is to end, waits for it


def test_of_a_bug_behind_an_answer_that_has_begun_the_log_tells_where_it_is(
    setup: ProxySetup, d: FakeServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its traceback is logged before it is dropped with the bodies."""
    begun, told = threading.Event(), threading.Event()

    async def streams(_: Received, wire: Wire) -> None:
        await wire.head()
        await wire.chunk(b"data: 1\n\n")
        await opened(told)
        await wire.end()

    p = setup.server(prefills_by_name)
    proxy = setup.proxy([p], [d])
    assert proxy.complete().status_code == 200  # both legs go at once from then on
    monkeypatch.setattr("pd_proxy.legs.address_in", lambda _: 1 / 0)
    p.script, d.script = waits(begun, prefills_by_name), streams
    with proxy.http.stream("POST", "/v1/completions", json={"prompt": "a"}) as response:
        pieces = response.iter_raw()
        assert next(pieces) == b"data: 1\n\n"
        begun.set()
        until(lambda: "after D had answered" in caplog.text)
        told.set()
        assert not list(pieces)
    assert "in _prefill_beside" in caplog.text
