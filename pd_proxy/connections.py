"""The HTTP connections to the servers: how they are opened, kept, and looked at before they are used again.

A request that a server has not taken is sent once more. It has not taken one that was to go over a connection which it
had closed before, or which it resets without a byte of an answer: a server that has read a whole request and then ends,
by whatever way, closes the connection in order. So a prompt that kills a server is not sent to it again.
"""

import asyncio
import logging
import resource
import select
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import BytesIO
from types import TracebackType
from typing import Any, Self

import aiohttp
import anyio

from pd_proxy.settings import Settings

logger = logging.getLogger(__name__)

#: A character for each byte (Latin-1), as Starlette has them.
HeaderList = list[tuple[str, str]]

#: Idle connections are given up before vLLM's HTTP server gives them up (5 s).
_IDLE_CONNECTION_S = 2.0
#: In so many parts a time limit for a connection passes: a loop that is held up loses one.
_TICKS = 10
#: How often a request that was not taken is sent. One that was reset has met a server that was just closing.
_ATTEMPTS = 3
#: Sockets of one request: the client's, and one for each leg.
_REQUEST_FILES = 3
#: For which number of requests at once the limit of open files should do.
_ENOUGH_REQUESTS = 1000
_CLOSED = select.POLLRDHUP | select.POLLHUP | select.POLLERR


class Connections:
    """All connections to servers. An async context: open while it is entered."""

    def __init__(self, settings: Settings) -> None:
        """Prepare; nothing is opened."""
        self._answer_timeout_s = settings.request_timeout_s
        self._connect_timeout_s = settings.connect_timeout_s
        self._tls = settings.tls()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            # No limit: one would make requests wait for each other. The servers have their own queues.
            connector=_Connector(
                self._connect_timeout_s, limit=0, keepalive_timeout=_IDLE_CONNECTION_S, ssl=self._tls or True
            ),
            timeout=aiohttp.ClientTimeout(sock_read=self._answer_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept"),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def send(self, method: str, url: str, headers: HeaderList, content: bytes | None) -> aiohttp.ClientResponse:
        """Send a request; return when the answer's head is here. Close the answer.

        Raises:
            aiohttp.ClientError: there is no answer.
            TimeoutError: the server does not take the connection (``aiohttp.ConnectionTimeoutError``), or is silent.
        """
        assert self._session is not None
        left = _ATTEMPTS
        # aiohttp writes UTF-8, and has no way to write other bytes than these.
        as_text = [(name, value.encode("latin-1").decode("utf-8", "replace")) for name, value in headers]
        # aiohttp's own limit begins when the request is sent: a server might not read it.
        with anyio.fail_after(self._answer_timeout_s):
            while True:
                left -= 1
                body = None if content is None else BytesIO(content)
                try:
                    return await self._session.request(method, url, headers=as_text, data=body, allow_redirects=False)
                except aiohttp.ClientConnectorError:
                    raise
                except (aiohttp.ClientOSError, aiohttp.ClientConnectionResetError):
                    if not left:
                        raise

    async def is_well(self, url: str, timeout_s: float) -> bool:
        """Return whether a page answers 200 within so many seconds."""
        assert self._session is not None
        try:
            limit = aiohttp.ClientTimeout(timeout_s)
            async with self._session.get(url, timeout=limit, allow_redirects=False) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False


class _Connector(aiohttp.TCPConnector):
    """Opens connections within a time limit, and hands out none that its server has closed."""

    def __init__(self, timeout_s: float, **options: Any) -> None:
        super().__init__(**options)
        self._timeout_s = timeout_s

    async def connect(
        self, req: aiohttp.ClientRequest, traces: "list[aiohttp.tracing.Trace]", timeout: aiohttp.ClientTimeout
    ) -> "aiohttp.connector.Connection":
        async with _turning_for(self._timeout_s):
            # The event loop may not have seen the end of an idle connection: while it is busy, it sees nothing.
            while _is_closed(connection := await super().connect(req, traces, timeout)):
                connection.close()
            return connection


@asynccontextmanager
async def _turning_for(seconds: float) -> AsyncIterator[None]:
    """Limit what is done inside to so many seconds of an event loop that turns.

    In a burst, the loop is busy for seconds, and sees only then that a server has taken a connection at once.

    Raises:
        TimeoutError: they are over.
    """
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None

    def tick(left: int) -> None:
        nonlocal timer
        if left:
            timer = loop.call_later(seconds / _TICKS, tick, left - 1)  # from now on, however late it is
        else:
            limit.reschedule(loop.time())

    async with asyncio.timeout(None) as limit:
        tick(_TICKS)
        try:
            yield
        finally:
            assert timer is not None
            timer.cancel()


def _is_closed(connection: "aiohttp.connector.Connection") -> bool:
    """Return whether the server has closed a connection, as the kernel knows it now."""
    transport = connection.transport
    if transport is None or transport.is_closing():
        return True
    look = select.poll()
    look.register(transport.get_extra_info("socket").fileno(), _CLOSED)
    return bool(look.poll(0))


def raise_file_limit() -> None:
    """Let this process open as many files as it may; say so if these are few. A socket is a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < _REQUEST_FILES * _ENOUGH_REQUESTS:
        logger.warning(
            "this process may open %d files, enough for about %d requests at once (%d sockets each): raise the hard "
            "limit (ulimit -Hn, LimitNOFILE of systemd, --ulimit nofile of docker)",
            hard, hard // _REQUEST_FILES, _REQUEST_FILES,
        )  # fmt: skip
