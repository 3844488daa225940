"""The servers of one leg: which one gets the next request, and the HTTP exchange with it.

Nothing here knows what a leg's request or answer means. Everything runs on one event loop: the counts need no lock.

Retries. A server that refuses the connection has not seen the request, so the next one is tried, on either leg. A
request that may have reached a decode server is never sent to another: it may have begun to read and release the
blocks that ``kv_transfer_params`` names. What becomes of a request that a prefill server failed is not decided here.
The rest of an answer that moves is another request: see ``moves``.
"""

import asyncio
import errno
import json
import logging
import math
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import StrEnum
from http import HTTPStatus
from typing import Self

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError

from pd_proxy.connection_pool import ClosedAtOnce, Connections, Response
from pd_proxy.error_answers import LegFailed, Retry
from pd_proxy.headers import HeaderList

logger = logging.getLogger(__name__)

#: How long what a server has said of its model is believed, after how long another request asks if the one that asked
#: was told nothing (its client may have left, or had no key), and how long one waits for it before its legs.
_ROOM_S, _ROOM_AGAIN_S, _ROOM_WAIT_S = 60.0, 1.0, 5.0
#: How vLLM's metrics say that no request finds what another has computed.
_NO_PREFIX_CACHE = re.compile(rb'^vllm:cache_config_info\{.*enable_prefix_caching="False"', re.MULTILINE)
#: So many failures in a row put a server last. One that fails at once has few requests in flight, and would get all.
_MOST_FAILURES = 3
_FAILURES = frozenset({500, 502, 503, 504})  # statuses; 501 is of the request


class Leg(StrEnum):
    """The two halves of a request."""

    PREFILL = "prefill"
    DECODE = "decode"


class Server:
    """One upstream server, and what the proxy knows of it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.in_flight = 0  # requests sent and not yet answered to the end
        self.last_chosen = 0.0  # monotonic seconds; breaks ties in turn
        self.skip_until = 0.0  # monotonic seconds
        self.failures = 0  # in a row, of requests that it has taken
        self.is_leaving = False  # it is to be restarted
        self.prefixes_at = ""  # then, where others find what it holds; empty if that is not known


class Answer:
    """A server's answer: status and headers are there, the body is still to be read, in this context.

    Leaving it early, by an error or a cancellation, closes the connection, so that vLLM aborts the request.
    """

    def __init__(self, leg: Leg, server: Server, response: Response) -> None:
        self._leg = leg
        self._response = response
        self._next = b""  # that was put back
        self.server = server
        self.url = server.url
        self.status = response.status
        self.raw_headers = response.raw_headers
        self.is_encoded = response.headers.get("content-encoding", "identity") != "identity"
        self.has_length = "content-length" in response.headers

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._response.close()  # the connection too, if the answer is not whole
        self.server.in_flight -= 1

    async def read(self) -> bytes:
        """The whole body.

        Raises:
            LegFailed: the server broke off or fell silent.
        """
        return b"".join([piece async for piece in self])

    def put_back(self, piece: bytes) -> None:
        """Have the next piece of the body be this one."""
        self._next = piece

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        """Return the next piece of the body as it comes in, byte for byte, not decoded.

        Raises:
            LegFailed: the server broke off or fell silent.
        """
        piece, self._next = self._next, b""
        try:
            if piece or (piece := await self._response.content.readany()):
                return piece
            self._response.check_whole()
        # Without its C extension, aiohttp raises the second one for what is not HTTP.
        except (aiohttp.ClientError, HttpProcessingError, TimeoutError) as error:
            raise _failed(self._leg, self.server, error) from error
        raise StopAsyncIteration


class Servers:
    """The servers of one leg. Chooses the one with the fewest requests in flight."""

    def __init__(self, leg: Leg, urls: Sequence[str], connections: Connections, skip_s: float) -> None:
        self.leg = leg
        self.members = tuple(Server(url) for url in urls)
        self._connections = connections
        self._skip_s = skip_s
        self._room: int | None = None
        self._room_until = 0.0  # monotonic seconds
        self._shares, self._shares_until = True, 0.0  # monotonic seconds

    def in_order(self, failed: str = "") -> list[Server]:
        """Return all servers, the one to ask first at the beginning, and at the end the one that has just failed."""
        # A server that refused or keeps failing comes last, but is not left out: it may be the only one, and back.
        now = time.monotonic()
        return sorted(
            self.members,
            key=lambda one: (one.url == failed, one.is_leaving, one.skip_until > now, one.in_flight, one.last_chosen),
        )

    def can_spare(self, server: Server, failed: str = "") -> bool:
        """Return whether a server is leaving, and one that has not just ``failed`` is there for its requests."""
        # One that came last is not there until a new request has found it: time alone says nothing.
        gone = (one.is_leaving or one.skip_until > 0 or one.url == failed for one in self.members)
        return server.is_leaving and not all(gone)

    async def room(self, headers: HeaderList) -> int | None:
        """Return how many tokens a prompt and its answer may have, by what one server says; None: it is not known."""
        if time.monotonic() > self._room_until:
            self._room_until = time.monotonic() + _ROOM_AGAIN_S
            with suppress(LegFailed, TimeoutError, LookupError, ValueError, TypeError, AttributeError):
                async with asyncio.timeout(_ROOM_WAIT_S), await self.request("GET", "/v1/models", headers) as answer:
                    models = json.loads(await answer.read())["data"]
                    self._room = min(room for model in models if (room := model.get("max_model_len")))
                    self._room_until = time.monotonic() + _ROOM_S
        return self._room

    async def shares_prompts(self, headers: HeaderList) -> bool:
        """Return whether requests find a prompt that another has computed, by what one server's metrics say, if any."""
        if time.monotonic() > self._shares_until:
            self._shares_until = time.monotonic() + _ROOM_AGAIN_S
            with suppress(LegFailed, TimeoutError):
                async with asyncio.timeout(_ROOM_WAIT_S), await self.request("GET", "/metrics", headers) as answer:
                    self._shares = not _NO_PREFIX_CACHE.search(await answer.read())
                    self._shares_until = time.monotonic() + _ROOM_S
        return self._shares

    async def request(
        self,
        method: str,
        path: str,
        headers: HeaderList,
        content: bytes | None = None,
        *,
        chosen: Callable[[Server], None] = lambda _: None,
        failed: str = "",
    ) -> Answer:
        """Send a request to the best server that takes the connection; return its answer, which is to be entered.

        ``chosen`` is called with every server before it is tried. ``failed``: the URL of the one to be tried last.

        Raises:
            LegFailed: no server could be reached, or the one that was reached gave no answer.
        """
        untried = self.in_order(failed)
        while True:
            server = untried.pop(0)
            chosen(server)
            try:
                return await self.ask(server, method, path, headers, content)
            except LegFailed as failure:
                if failure.retry is not Retry.FREELY or not untried:
                    raise

    async def ask(
        self, server: Server, method: str, path: str, headers: HeaderList, content: bytes | None = None
    ) -> Answer:
        """Send a request to one server; return its answer, which is to be entered.

        Raises:
            LegFailed: it could not be reached, or gave no answer.
        """
        server.last_chosen = time.monotonic()
        finds_out = 0 < server.skip_until < math.inf  # whether it is back: no other request waits for that
        if finds_out:
            server.skip_until = math.inf
        server.in_flight += 1
        try:
            return Answer(self.leg, server, await self._send(server, method, path, headers, content))
        except BaseException:
            server.in_flight -= 1
            raise
        finally:
            if finds_out and server.skip_until == math.inf:  # it has not
                server.skip_until = time.monotonic() + self._skip_s

    async def healthy(self, timeout_s: float) -> dict[str, bool]:
        """Of every server's URL, whether its ``/health`` answers 200 within ``timeout_s`` seconds."""
        asked = (self._connections.is_well(f"{server.url}/health", timeout_s) for server in self.members)
        return {server.url: state for server, state in zip(self.members, await asyncio.gather(*asked), strict=True)}

    async def _send(
        self, server: Server, method: str, path: str, headers: HeaderList, content: bytes | None
    ) -> Response:
        try:
            response = await self._connections.send(method, server.url + path, headers, content)
        except (aiohttp.ClientError, TimeoutError) as error:
            failure = _failed(self.leg, server, error)
            server.failures += failure.retry is Retry.ONCE
            if failure.retry is Retry.FREELY or server.failures >= _MOST_FAILURES:
                server.skip_until = time.monotonic() + self._skip_s
                logger.warning("%s; tried last for %g s", failure, self._skip_s)
            raise failure from error
        server.failures = server.failures + 1 if response.status in _FAILURES else 0
        server.skip_until = time.monotonic() + self._skip_s if server.failures >= _MOST_FAILURES else 0.0
        return response


def _failed(leg: Leg, server: Server, error: aiohttp.ClientError | HttpProcessingError | TimeoutError) -> LegFailed:
    status, detail, retry = HTTPStatus.BAD_GATEWAY, str(error) or type(error).__name__, Retry.NO
    match error:
        case aiohttp.ConnectionTimeoutError():
            status, detail, retry = HTTPStatus.GATEWAY_TIMEOUT, "", Retry.FREELY
            what = "did not take the connection within the time limit"
        case TimeoutError():
            status, detail, what = HTTPStatus.GATEWAY_TIMEOUT, "", "was silent for longer than the time limit"
        case aiohttp.ClientConnectorError() if error.errno in (errno.EMFILE, errno.ENFILE):
            status, detail = HTTPStatus.SERVICE_UNAVAILABLE, ""
            what = "was not asked: this proxy has as many files and sockets open as it may (ulimit -n)"
        case aiohttp.ClientConnectorError() if error.errno == errno.EADDRNOTAVAIL:
            status, what = HTTPStatus.SERVICE_UNAVAILABLE, "was not asked: this proxy's machine has no port free for it"
            detail = "see net.ipv4.ip_local_port_range; or the machine has no address of the server's family"
        case aiohttp.ClientConnectorCertificateError():
            what, retry = "has a certificate that cannot be verified", Retry.FREELY
            detail = f"{error.certificate_error}. If its CA is your own, name it with --ca-file"
        case aiohttp.ClientConnectorError():
            what, detail, retry = "cannot be reached", error.strerror or detail, Retry.FREELY
        case ClosedAtOnce():
            what, detail, retry = "closes new connections at once", "", Retry.FREELY
        case _:
            what, retry = "broke off", Retry.ONCE
    return LegFailed(status, leg, server.url, what, detail, retry)
