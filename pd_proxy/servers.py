"""The servers of one leg: which one gets the next request, and the HTTP exchange with it.

Nothing here knows what a leg's request or answer means. Everything runs on one event loop: the counts need no lock.

Retries. A server that refuses the connection has not seen the request, so the next one is tried, on either leg. A
request that may have reached a decode server is never sent to another: it may have begun to read and release the
blocks that ``kv_transfer_params`` names. What becomes of a request that a prefill server failed is not decided here.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from enum import StrEnum
from http import HTTPStatus

import httpx

from pd_proxy.errors import LegFailed, Retry

logger = logging.getLogger(__name__)

#: A character for each byte (Latin-1), as Starlette has them.
HeaderList = list[tuple[str, str]]


class Leg(StrEnum):
    """The two halves of a request."""

    PREFILL = "prefill"
    DECODE = "decode"


class Server:
    """One upstream server, and what the proxy knows of it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.in_flight = 0  # requests sent and not yet answered to the end
        self.last_chosen = 0  # counter value; breaks ties in turn
        self.skip_until = 0.0  # monotonic seconds


class Answer:
    """A server's answer: status and headers are there, the body is still to be read."""

    def __init__(self, leg: Leg, server: Server, response: httpx.Response) -> None:
        self._leg = leg
        self._server = server
        self._response = response
        self.url = server.url
        self.status = response.status_code
        self.raw_headers = response.headers.raw
        self.is_encoded = response.headers.get("content-encoding", "identity") != "identity"
        self.has_length = "content-length" in response.headers

    async def read(self) -> bytes:
        """The whole body.

        Raises:
            LegFailed: the server broke off or fell silent.
        """
        return b"".join([piece async for piece in self.pieces()])

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """The body as it comes in, byte for byte, not decoded.

        Raises:
            LegFailed: the server broke off or fell silent.
        """
        try:
            async for piece in self._response.aiter_raw():
                yield piece
        except httpx.TransportError as error:
            raise _failed(self._leg, self._server, error) from error


class Servers:
    """The servers of one leg. Chooses the one with the fewest requests in flight."""

    def __init__(self, leg: Leg, urls: Sequence[str], client: httpx.AsyncClient, skip_s: float) -> None:
        self.leg = leg
        self.members = tuple(Server(url) for url in urls)
        self._client = client
        self._skip_s = skip_s
        self._choices = 0

    def in_order(self) -> list[Server]:
        """Return all servers, the one to ask first at the beginning."""
        # A server that just refused comes last instead of being left out: it may be the only one, and back again.
        now = time.monotonic()
        return sorted(self.members, key=lambda one: (one.skip_until > now, one.in_flight, one.last_chosen))

    @asynccontextmanager
    async def request(
        self,
        method: str,
        path: str,
        headers: HeaderList,
        content: bytes | None = None,
        *,
        chosen: Callable[[Server], None] = lambda _: None,
    ) -> AsyncIterator[Answer]:
        """Send a request to the best server that takes the connection; the answer is closed on leaving.

        ``chosen`` is called with every server before it is tried.

        Raises:
            LegFailed: no server could be reached, or the one that was reached gave no answer.
        """
        untried = self.in_order()
        async with AsyncExitStack() as stack:
            while True:
                server = untried.pop(0)
                chosen(server)
                try:
                    answer = await stack.enter_async_context(self.ask(server, method, path, headers, content))
                    break
                except LegFailed as failure:
                    if failure.retry is not Retry.FREELY or not untried:
                        raise
            yield answer

    @asynccontextmanager
    async def ask(
        self, server: Server, method: str, path: str, headers: HeaderList, content: bytes | None = None
    ) -> AsyncIterator[Answer]:
        """Send a request to one server; the answer is closed on leaving.

        Leaving early, by an error or a cancellation, closes the connection, so that vLLM aborts the request.

        Raises:
            LegFailed: it could not be reached, or gave no answer.
        """
        self._choices += 1
        server.last_chosen = self._choices
        server.in_flight += 1
        try:
            response = await self._send(server, method, path, headers, content)
            try:
                yield Answer(self.leg, server, response)
            finally:
                await response.aclose()
        finally:
            server.in_flight -= 1

    async def healthy(self, timeout_s: float) -> dict[str, bool]:
        """Of every server's URL, whether its ``/health`` answers 200 within ``timeout_s`` seconds."""

        async def answers(server: Server) -> bool:
            try:
                response = await self._client.get(f"{server.url}/health", timeout=timeout_s)
            except httpx.HTTPError:
                return False
            return response.status_code == HTTPStatus.OK

        states = await asyncio.gather(*(answers(server) for server in self.members))
        return {server.url: state for server, state in zip(self.members, states, strict=True)}

    async def _send(
        self, server: Server, method: str, path: str, headers: HeaderList, content: bytes | None
    ) -> httpx.Response:
        # As bytes, each of them as the client sent it: the HTTP client would refuse what is not ASCII.
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        request = self._client.build_request(method, server.url + path, headers=raw, content=content)
        try:
            response = await self._client.send(request, stream=True)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            server.skip_until = time.monotonic() + self._skip_s
            failure = _failed(self.leg, server, error)
            logger.warning("%s; tried last for %g s", failure, self._skip_s)
            raise failure from error
        except httpx.TransportError as error:
            raise _failed(self.leg, server, error) from error
        server.skip_until = 0.0
        return response


def _failed(leg: Leg, server: Server, error: httpx.TransportError) -> LegFailed:
    status, detail, retry = HTTPStatus.BAD_GATEWAY, str(error) or type(error).__name__, Retry.NO
    match error:
        case httpx.ConnectTimeout():
            status, detail, retry = HTTPStatus.GATEWAY_TIMEOUT, "", Retry.FREELY
            what = "did not take the connection within the time limit"
        case httpx.TimeoutException():
            status, detail, what = HTTPStatus.GATEWAY_TIMEOUT, "", "was silent for longer than the time limit"
        case httpx.ConnectError():
            what, retry = "cannot be reached", Retry.FREELY
        case _:
            what, retry = "broke off", Retry.ONCE
    return LegFailed(status, leg, server.url, what, detail, retry)
