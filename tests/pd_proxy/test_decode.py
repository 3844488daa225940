"""The decode leg by itself: what is withdrawn in the last moment, and the beginning of a stream, however long."""

import asyncio
import time
from collections.abc import AsyncIterator, MutableMapping
from typing import Any

import anyio
import pytest

from pd_proxy.apis import COMPLETIONS
from pd_proxy.connection_pool import Connections
from pd_proxy.control import CircuitBreaker, ControlAddresses
from pd_proxy.decode import begun, run_decode
from pd_proxy.detour import Detour
from pd_proxy.http_client import Client
from pd_proxy.journal import Record
from pd_proxy.servers import Leg, Servers
from pd_proxy.settings import Settings
from pd_proxy.upstream import Upstream
from tests.support.examples.fake_servers import MESSAGE_START, ROLE_CHUNK, FakeServer
from tests.support.waiting import WAIT_S


@pytest.mark.parametrize("withdrawn", [True, False])
def test_who_cancels_it_while_the_client_has_nothing_can_be_sure_that_it_gets_nothing(
    d: FakeServer, withdrawn: bool
) -> None:
    """Even where the answer is there already, so that nothing is left to wait for."""
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async def scenario() -> None:
        settings = Settings(prefill=(d.url,), decode=(d.url,))
        async with Connections(settings) as connections:
            servers = Servers(Leg.DECODE, [d.url], connections, 1.0)
            known = ControlAddresses(), CircuitBreaker(), Detour(0)
            upstream = Upstream(COMPLETIONS, servers, servers, *known, settings)
            client = Client({"type": "http", "headers": []}, send, Record("/"))
            with anyio.CancelScope() as decoding:

                async def may_answer(_: int) -> None:
                    if withdrawn:
                        decoding.cancel()

                await run_decode(upstream, client, {}, may_answer=may_answer)
            assert decoding.cancelled_caught is withdrawn
            assert client.started is not withdrawn

    asyncio.run(scenario())
    assert bool(sent) is not withdrawn


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_a_comment_is_no_answer_and_stays_before_it(size: int) -> None:
    """vLLM sends some while nothing is computed, if its operator says so."""
    comments, event = 2 * b": keep-alive\n\n", b'data: {"error": {"code": 500}}\n\n'

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(whole), size):
            yield whole[start : start + size]

    for whole in (comments + event, comments):
        first, rest = asyncio.run(begun(pieces(), ()))
        assert first == comments
        assert whole.startswith(first + rest)
        assert bool(rest) is (whole != comments)


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize(
    ("begun_with", "event"),
    [
        (2 * ROLE_CHUNK, ROLE_CHUNK.replace(b'"role":"assistant","content":""', b'"content":"a"')),
        (MESSAGE_START, b"event: content_block_start\ndata: {}\n\n"),
        (b"", b'data: {"id":"a","choices":[{"text":"\\"delta\\":{\\"role\\":\\"a\\",\\"content\\":\\"\\"}"}]}\n\n'),
    ],
    ids=["chat", "message", "text"],
)
def test_what_comes_with_an_engines_first_news_is_no_answer_yet(size: int, begun_with: bytes, event: bytes) -> None:
    """Of a chat, each choice has one. Nothing that a client can have written into a text looks like it."""
    whole = begun_with + event

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(whole), size):
            yield whole[start : start + size]

    first, rest = asyncio.run(begun(pieces(), ()))
    assert first == begun_with
    assert rest
    assert whole.startswith(first + rest)


@pytest.mark.parametrize("begun_with", [2 * ROLE_CHUNK, MESSAGE_START], ids=["chat", "message"])
def test_a_comment_behind_the_first_news_is_passed_on_at_once(begun_with: bytes) -> None:
    """A parser may hide what D computes for minutes, and clients wait no longer than comments tell them to."""

    async def pieces() -> AsyncIterator[bytes]:
        yield b": keep-alive\n\n" + begun_with
        yield b": keep-alive\n\n"
        raise AssertionError

    first, rest = asyncio.run(begun(pieces(), ()))
    assert (first, rest) == (b": keep-alive\n\n" + begun_with, b": keep-alive\n\n")


CREATED = b"event: response.created\ndata: "
PRELUDES = (b"response.created", b"response.in_progress")


@pytest.mark.parametrize(
    ("prelude", "piece_bytes"),
    [(CREATED + b"x" * 2**24 + b"\n\n", 128), ((CREATED + b"\n\n") * 2**18, 2**24)],
    ids=["one long event in small pieces", "many events in one piece"],
)
def test_the_beginning_of_a_stream_is_searched_once(prelude: bytes, piece_bytes: int) -> None:
    """Searched anew for each piece or event, it would hold all other answers for many minutes."""
    whole = prelude + b"event: response.output_text.delta\n"

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(whole), piece_bytes):
            yield whole[start : start + piece_bytes]

    started = time.monotonic()
    first, rest = asyncio.run(begun(pieces(), PRELUDES))
    assert time.monotonic() - started < WAIT_S
    assert first == prelude
    assert whole.startswith(first + rest)
    assert rest.startswith(b"event")
