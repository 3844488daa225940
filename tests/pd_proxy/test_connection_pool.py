"""Connections to servers: bursts, connections that a server closes, and limits of the proxy's own."""

import asyncio
import errno
import gc
import json
import resource
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop

from pd_proxy import connection_pool as connections
from pd_proxy.connection_pool import Connections, Response
from pd_proxy.settings import Settings
from tests.support.examples.fake_servers import (
    FakeServer,
    Received,
    Script,
    Wire,
    decodes,
    drops,
    opened,
    prefills,
    prefills_by_name,
    resets,
    stalls,
)
from tests.support.examples.harness import ProxyProcess, RawClient, ask_at_once, probed_after
from tests.support.examples.served_proxy import ProxySetup
from tests.support.sources import ROOT
from tests.support.waiting import until

ANSWER = {"choices": [{"text": " the answer"}]}


@pytest.mark.parametrize("named", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_no_request_of_a_burst_of_1000_fails(p: FakeServer, d: FakeServer, named: bool) -> None:
    p.script = prefills_by_name if named else prefills
    with ProxyProcess(["-m", "pd_proxy", "--prefill", p.url, "--decode", d.url]) as proxy:
        port = int(proxy.url.rpartition(":")[2])
        ask_at_once(port, ["a"])  # tells where P's control channel is
        answers = ask_at_once(port, [f"question {number}" for number in range(1000)])
    failed = [answer for answer in answers if not answer.startswith(b"HTTP/1.1 200")]
    assert failed == []
    assert all(json.loads(answer.partition(b"\r\n\r\n")[2]) == ANSWER for answer in answers)
    assert len(d.received) == 1001


# Connections that a server closes


@asynccontextmanager
async def connected(url: str, **options: Any) -> AsyncIterator[Callable[..., Awaitable[int]]]:
    """Asks a server, and returns the answer's status."""
    async with Connections(Settings(prefill=(url,), decode=(url,), **options)) as connections:

        async def post(content: bytes = b"{}") -> int:
            headers = [("content-type", "application/json")]
            response = await connections.send("POST", f"{url}/v1/completions", headers, content)
            await response.read()
            return response.status

        yield post


def test_a_connection_that_was_closed_while_the_loop_was_busy_is_not_used(setup: ProxySetup) -> None:
    gate, gone = threading.Event(), threading.Event()

    async def answers_and_closes(received: Received, wire: Wire) -> None:
        await decodes(received, wire)
        await opened(gate)
        wire.drop()
        gone.set()

    server = setup.server(answers_and_closes)

    async def scenario() -> None:
        async with connected(server.url) as post:
            assert await post() == 200
            server.script = decodes
            gate.set()
            gone.wait(30)
            time.sleep(0.05)  # the loop of the other thread closes the socket in its next turn
            assert await post() == 200

    asyncio.run(scenario())
    assert len(server.received) == 2


@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_a_request_that_was_reset_before_any_answer_is_sent_again(
    setup: ProxySetup, p: FakeServer, d: FakeServer, leg: str
) -> None:
    server, serves = (p, prefills) if leg == "prefill" else (d, decodes)

    async def resets_once(received: Received, wire: Wire) -> None:
        server.script = serves
        await resets(received, wire)

    server.script = resets_once
    assert setup.proxy([p], [d]).complete().json() == ANSWER
    assert len(server.received) == 2
    assert server.bodies[0] == server.bodies[1]


async def resets_late(_: Received, wire: Wire) -> None:
    await asyncio.sleep(0.5)
    wire.reset()


def test_a_late_reset_is_no_proof_that_a_request_was_not_read(
    setup: ProxySetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load balancer resets what has been silent for too long."""
    monkeypatch.setattr("pd_proxy.connection_pool._PROOF_S", 0.01)
    server = setup.server(resets_late)

    async def scenario() -> None:
        async with connected(server.url) as post:
            with pytest.raises(aiohttp.ClientOSError):
                await post()

    asyncio.run(scenario())
    assert len(server.received) == 1


@pytest.mark.parametrize(
    ("number", "times"),
    [(errno.ECONNRESET, 3), (errno.EPIPE, 3), (None, 3), (errno.ETIMEDOUT, 1), (errno.EHOSTUNREACH, 1)],
)
def test_only_a_reset_is_a_proof(
    monkeypatch: pytest.MonkeyPatch, d: FakeServer, number: int | None, times: int
) -> None:
    tried = 0

    async def start(*_: object) -> None:
        nonlocal tried
        tried += 1
        raise aiohttp.ClientOSError(number, "whatever")

    monkeypatch.setattr(aiohttp.ClientResponse, "start", start)

    async def scenario() -> None:
        async with connected(d.url) as post:
            with pytest.raises(aiohttp.ClientConnectionError):
                await post()

    asyncio.run(scenario())
    assert tried == times


@contextmanager
def closes_what_it_takes() -> Iterator[tuple[str, list[int]]]:
    """The URL of a port that closes each connection, as a tunnel without an end does; and a number for each."""
    taken: list[int] = []

    def serve() -> None:
        with suppress(OSError):
            while True:
                listener.accept()[0].close()
                taken.append(1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", taken
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_port_that_closes_new_connections_is_tried_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    is_closed = connections._is_closed

    def after_a_while(connection: Any) -> bool:
        until(lambda: is_closed(connection))  # it is about to be
        return True

    monkeypatch.setattr(connections, "_is_closed", after_a_while)

    async def scenario(url: str) -> None:
        async with connected(url) as post:
            with pytest.raises(connections.ClosedAtOnce):
                await post()

    with closes_what_it_takes() as (url, taken):
        asyncio.run(scenario(url))
        assert len(taken) == 3


def test_a_decode_server_that_takes_nothing_is_followed_by_another(
    setup: ProxySetup, p: FakeServer, d: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_closed = connections._is_closed

    with closes_what_it_takes() as (url, _):
        port = int(url.rpartition(":")[2])

        def after_a_while(connection: Any) -> bool:
            if connection._key.port == port:
                until(lambda: is_closed(connection))
            return is_closed(connection)

        monkeypatch.setattr(connections, "_is_closed", after_a_while)
        assert setup.proxy([p], [url, d]).complete().json() == ANSWER


async def begins_and_resets(_: Received, wire: Wire) -> None:
    await wire.head()
    wire.reset()


@pytest.mark.parametrize(("script", "times"), [(drops, 1), (begins_and_resets, 1), (resets, 3)])
def test_a_request_that_may_have_been_taken_is_not_sent_again_and_none_for_ever(
    setup: ProxySetup, p: FakeServer, d: FakeServer, script: Script, times: int
) -> None:
    d.script = script
    response = setup.proxy([p], [d]).complete()
    assert response.status_code == 502
    assert "broke off" in response.json()["error"]["message"]
    assert len(d.received) == times


def test_a_server_that_does_not_read_a_request_is_silent() -> None:
    """Its kernel takes the connection, and as much of the request as it has room for."""

    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            async with connected(url, request_timeout_s=0.5) as post:
                with pytest.raises(TimeoutError):
                    await post(b'"' + b"a" * (32 << 20) + b'"')

    asyncio.run(scenario())


def test_a_machine_that_vanishes_is_noticed_after_a_minute(d: FakeServer) -> None:
    """By the kernel, which asks it again and again whether it is there."""

    async def begins(received: Received, wire: Wire) -> None:
        await wire.head()
        await stalls(received, wire)

    async def scenario() -> None:
        async with Connections(Settings(prefill=(d.url,), decode=(d.url,))) as servers:
            answer = await servers.send("GET", f"{d.url}/", [], None)
            assert answer.connection is not None
            assert answer.connection.transport is not None
            connection = answer.connection.transport.get_extra_info("socket")
            assert probed_after(connection) <= 60
            # Also behind a request: the kernel does not probe while that is not acknowledged.
            assert 0 < connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 60_000
            answer.close()

    d.script = begins
    asyncio.run(scenario())


def test_so_is_a_clients(setup: ProxySetup, p: FakeServer, d: FakeServer) -> None:
    """Also in the middle of a request."""
    proxy = setup.proxy([p], [d])
    client = RawClient(proxy, b"POST /v1/completions HTTP/1.1\r\nHost: proxy\r\nContent-Length: 9\r\n\r\n{")
    until(lambda: len(proxy.clients_probed_after()) == 1)
    assert proxy.clients_probed_after()[0] <= 60
    client.leave()


def test_no_socket_is_left_of_a_server_that_stops_reading() -> None:
    def sockets() -> int:
        return sum(one.readlink().name.startswith("socket:") for one in Path("/proc/self/fd").iterdir() if one.exists())

    async def scenario(url: str) -> None:
        async with connected(url, request_timeout_s=0.2) as post:
            before = sockets()
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    await post(b"a" * (16 << 20))
            for _ in range(10):
                await asyncio.sleep(0)  # sockets are closed in the next turns of the loop
            assert sockets() == before

    with socket.create_server(("127.0.0.1", 0)) as listener:
        for run in (asyncio.run, uvloop.run):
            run(scenario(f"http://127.0.0.1:{listener.getsockname()[1]}"))


# Answers that end too early


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@pytest.mark.parametrize(
    ("head", "ending", "told"),
    [
        (b"Transfer-Encoding: chunked", b"no size\r\n", "what is not HTTP"),
        (b"Connection: close", b"", "reset inside"),
    ],
)
def test_the_reader_of_an_answer_is_told_of_its_early_end(
    setup: ProxySetup, run: Callable[[Any], None], head: bytes, ending: bytes, told: str
) -> None:
    gate = threading.Event()

    async def begins_and_ends(received: Received, wire: Wire) -> None:
        await wire.raw(b"HTTP/1.1 200 Whatever\r\n" + head + b"\r\n\r\n3\r\nabc\r\n")
        await opened(gate)
        if not ending:
            wire.reset()
        await wire.raw(ending)
        await stalls(received, wire)

    server = setup.server(begins_and_ends)

    async def scenario() -> None:
        async with Connections(Settings(prefill=(server.url,), decode=(server.url,))) as connections:
            response = await connections.send("POST", server.url, [], b"{}")
            assert b"abc" in await response.content.readany()
            gate.set()
            with pytest.raises(aiohttp.ClientPayloadError, match=told):
                await read_on(response)
            response.close()

    run(scenario())


async def read_on(response: Response) -> None:
    while await response.content.readany():
        pass
    response.check_whole()


def test_a_connection_that_is_kept_keeps_no_answers(d: FakeServer) -> None:
    gates: list[threading.Event] = []

    async def answers_when_the_head_is_read(_: Received, wire: Wire) -> None:
        await wire.head()
        await opened(gates[-1])
        await wire.end()

    d.script = answers_when_the_head_is_read

    async def scenario() -> None:
        async with Connections(Settings(prefill=(d.url,), decode=(d.url,))) as connections:
            answers = []
            for _ in range(3):
                gates.append(threading.Event())
                response = await connections.send("POST", f"{d.url}/v1/completions", [], b"{}")
                gates[-1].set()
                await read_on(response)
                answers.append(weakref.ref(response))
            del response
            gc.collect()
            assert [answer() for answer in answers] == [None] * 3

    asyncio.run(scenario())
    assert len(d.received) == 3


# Limits of the proxy's own


def test_a_connection_is_not_late_because_the_proxy_was(d: FakeServer) -> None:
    async def scenario() -> None:
        async with connected(d.url, connect_timeout_s=0.5) as post:
            asked = asyncio.ensure_future(post())
            await asyncio.sleep(0)
            time.sleep(0.6)  # busy with other requests
            assert await asked == 200

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("hard", "told"), [(900, "may open 900 files, enough for about 300 requests at once"), (3000, "")]
)
def test_the_limit_of_open_files_is_raised_and_a_low_one_said(hard: int, told: str) -> None:
    code = (
        "import logging, resource; from pd_proxy.connection_pool import raise_file_limit; logging.basicConfig(); "
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (100, {hard})); raise_file_limit(); "
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert int(ended.stdout) == hard
    assert told in ended.stderr
    assert bool(ended.stderr) is bool(told)


def test_a_proxy_without_ports_blames_no_server(
    setup: ProxySetup,
    p: FakeServer,
    d: FakeServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def start_connection(*_: object, **__: object) -> None:
        raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    monkeypatch.setattr("aiohttp.connector.aiohappyeyeballs.start_connection", start_connection)
    response = setup.proxy([p], [d]).complete()
    assert response.status_code == 503
    assert "was not asked: this proxy's machine has no port free for it" in response.text
    assert "tried last" not in caplog.text


def test_a_proxy_without_sockets_blames_no_server(p: FakeServer, d: FakeServer) -> None:
    with ProxyProcess(["-m", "pd_proxy", "--prefill", p.url, "--decode", d.url]) as proxy:
        port = int(proxy.url.rpartition(":")[2])
        ask_at_once(port, [["a", 7]])  # by D alone; what is imported on the first request is, then
        soft, hard = resource.prlimit(proxy.pid, resource.RLIMIT_NOFILE)
        numbers = {int(one.name) for one in Path(f"/proc/{proxy.pid}/fd").iterdir()}
        unused = min(set(range(max(numbers) + 2)) - numbers)
        resource.prlimit(proxy.pid, resource.RLIMIT_NOFILE, (unused + 1, hard))  # a file's number is below it
        (answer,) = ask_at_once(port, ["a"])
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"as many files and sockets open as it may" in answer
        resource.prlimit(proxy.pid, resource.RLIMIT_NOFILE, (soft, hard))
        assert ask_at_once(port, ["a"])[0].startswith(b"HTTP/1.1 200")
