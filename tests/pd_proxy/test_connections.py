"""Connections to servers: bursts, connections that a server closes, and limits of the proxy's own."""

import asyncio
import json
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pd_proxy.connections import Connections
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
)
from tests.support.examples.harness import ProxyProcess, ask_at_once
from tests.support.examples.served_proxy import ProxySetup
from tests.support.sources import ROOT

ANSWER = {"choices": [{"text": " the answer"}]}


@pytest.mark.parametrize("named", [True, False])
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
        "import logging, resource; from pd_proxy.connections import raise_file_limit; logging.basicConfig(); "
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (100, {hard})); raise_file_limit(); "
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert int(ended.stdout) == hard
    assert told in ended.stderr
    assert bool(ended.stderr) is bool(told)


def test_a_proxy_without_sockets_blames_no_server(p: FakeServer, d: FakeServer) -> None:
    with ProxyProcess(["-m", "pd_proxy", "--prefill", p.url, "--decode", d.url]) as proxy:
        port = int(proxy.url.rpartition(":")[2])
        ask_at_once(port, [["a", "b"]])  # by D alone; what is imported on the first request is, then
        soft, hard = resource.prlimit(proxy.pid, resource.RLIMIT_NOFILE)
        numbers = {int(one.name) for one in Path(f"/proc/{proxy.pid}/fd").iterdir()}
        unused = min(set(range(max(numbers) + 2)) - numbers)
        resource.prlimit(proxy.pid, resource.RLIMIT_NOFILE, (unused + 1, hard))  # a file's number is below it
        (answer,) = ask_at_once(port, ["a"])
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"as many files and sockets open as it may" in answer
        resource.prlimit(proxy.pid, resource.RLIMIT_NOFILE, (soft, hard))
        assert ask_at_once(port, ["a"])[0].startswith(b"HTTP/1.1 200")
