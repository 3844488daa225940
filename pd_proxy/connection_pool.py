"""The HTTP connections to the servers: how they are opened, kept, and looked at before they are used again.

A request that a server has not taken is sent again, twice at most. It has not taken one that was to go over a
connection which it had closed before, or which it resets without a byte of an answer, within 2 s after the request was
sent: a server that has read a whole request and then ends, by whatever way, closes the connection in order. So a prompt
that kills a server is not sent to it again. A later reset proves nothing: load balancers and NAT reset connections that
have been silent for too long, also of a request that is being served. Nor does any other error of a connection.
"""

import asyncio
import errno
import logging
import resource
import select
import socket
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from io import BytesIO
from typing import Any, Self

import aiohttp

from pd_proxy import headers as passed
from pd_proxy.headers import HeaderList
from pd_proxy.settings import Settings

logger = logging.getLogger(__name__)

#: Idle connections are given up before vLLM's HTTP server gives them up (5 s).
_IDLE_CONNECTION_S = 2.0
#: No request is sent over one that is older: behind a load balancer, it stays with one of several servers. So a new one
#: soon gets requests, and one that leaves gets none by the time it stops, which in Kubernetes ``preStop`` puts off.
_OLDEST_S = 5.0
#: In so many parts a time limit passes: a loop that is held up loses one.
_TICKS = 10
#: How often a request that was not taken is sent. One that was reset has met a server that was just closing.
_ATTEMPTS = 3
#: Until so long after it was sent, a reset proves that a request was not read.
_PROOF_S = 2.0
#: Errors that are resets. None: aiohttp could not write all of the request, because the connection was closed.
_RESETS = (errno.ECONNRESET, errno.EPIPE, None)
#: Sockets of one request: the client's, and one for each leg.
_REQUEST_FILES = 3
#: For which number of requests at once the limit of open files should do.
_ENOUGH_REQUESTS = 1000
#: A peer whose machine has vanished says nothing more: after 30 s of silence, and 3 probes in 30 s, it has gone.
_PROBES = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
#: While something sent is not acknowledged, the kernel does not probe: it tries for 15 minutes. A server has these ms.
_UNACKNOWLEDGED = (socket.TCP_USER_TIMEOUT, 60_000)
_CLOSED = select.POLLRDHUP | select.POLLHUP | select.POLLERR


class ClosedAtOnce(aiohttp.ClientConnectionResetError):
    """A server has closed a new connection before anything was sent over it."""


class Response(aiohttp.ClientResponse):
    """An answer whose reader is told of every end that comes too early.

    aiohttp does not tell it of two: of bytes that are not HTTP, after which nothing comes and no time limit runs; and
    of a reset, where the end of the connection is the end of the body.
    """

    _lost: asyncio.Future[None] | None = None  # done when the connection is closed

    async def start(self, connection: "aiohttp.connector.Connection") -> Self:
        """Read the head. aiohttp calls this when it has sent the request.

        Raises:
            aiohttp.ClientConnectionResetError: the server has not taken the request.
            aiohttp.ClientError: there is no answer, for another reason.
        """
        assert connection.protocol is not None
        self._lost = lost = connection.protocol.closed
        try:
            with _Turns(_PROOF_S) as until_too_late:
                await super().start(connection)
        except aiohttp.ClientOSError as error:
            if error.errno in _RESETS and until_too_late.left:
                raise aiohttp.ClientConnectionResetError(*error.args) from error
            raise
        if lost is not None and self.connection is not None:  # else the answer is whole, and its connection given back
            lost.add_done_callback(self._tell)
            self.connection.add_callback(self._forget)
        return self

    def check_whole(self) -> None:
        """Raise unless a body that has been read to its end is all of the answer.

        Raises:
            aiohttp.ClientPayloadError: it is not.
        """
        if self._lost is not None and self._lost.done():
            self._tell(self._lost)
        if (problem := self.content.exception()) is not None:
            raise problem

    def _forget(self) -> None:
        """Leave nothing of this answer at its connection, which may be kept."""
        if self._lost is not None:
            self._lost.remove_done_callback(self._tell)

    def _tell(self, lost: asyncio.Future[None]) -> None:
        """Tell who reads the body that the connection has been closed before all of it was here."""
        if self.content.exception() is not None:
            return
        if not self.content.is_eof():
            self.content.set_exception(aiohttp.ClientPayloadError("the answer goes on with what is not HTTP"))
        elif _reset_of(lost) and not any(name in self.headers for name in ("content-length", "transfer-encoding")):
            self.content.set_exception(aiohttp.ClientPayloadError("the connection was reset inside the answer"))


class Connections:
    """All connections to servers. An async context: open while it is entered."""

    def __init__(self, settings: Settings) -> None:
        """Prepare; nothing is opened."""
        self._answer_timeout_s = settings.request_timeout_s
        self._connect_timeout_s = settings.connect_timeout_s
        self._tls = settings.tls()
        self._session: aiohttp.ClientSession  # while this is entered

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            # No limit: one would make requests wait for each other. The servers have their own queues.
            connector=_Connector(
                self._connect_timeout_s, limit=0, keepalive_timeout=_IDLE_CONNECTION_S, ssl=self._tls or True
            ),
            timeout=aiohttp.ClientTimeout(sock_read=self._answer_timeout_s),
            response_class=Response,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept"),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def send(self, method: str, url: str, headers: HeaderList, content: bytes | None) -> Response:
        """Send a request; return when the answer's head is here. Close the answer.

        Raises:
            ClosedAtOnce: the server closes new connections at once.
            aiohttp.ClientError: there is no answer, for another reason.
            TimeoutError: the server does not take the connection (``aiohttp.ConnectionTimeoutError``), or is silent.
        """
        as_text = [(name, passed.as_text(value)) for name, value in headers]
        # aiohttp's own limit begins when the request is sent: a server might not read it.
        async with asyncio.timeout(self._answer_timeout_s):
            for left in reversed(range(_ATTEMPTS)):
                body = None if content is None else BytesIO(content)
                try:
                    answer = await self._session.request(method, url, headers=as_text, data=body, allow_redirects=False)
                    break
                except aiohttp.ClientConnectionResetError:
                    if not left:
                        raise
        assert isinstance(answer, Response)
        return answer

    async def is_well(self, url: str, timeout_s: float) -> bool:
        """Return whether a page answers 200 within so many seconds."""
        with suppress(aiohttp.ClientError, TimeoutError):
            async with asyncio.timeout(timeout_s), self._session.get(url, allow_redirects=False) as answer:
                return answer.status == 200
        return False


class _Connector(aiohttp.TCPConnector):
    """Opens connections within a time limit, and hands out none that is old, or that its server has closed."""

    def __init__(self, timeout_s: float, **options: Any) -> None:
        super().__init__(**options)
        self._timeout_s = timeout_s
        self._used = weakref.WeakKeyDictionary[Any, float]()  # protocols, since when, by the loop's clock

    async def connect(
        self, req: aiohttp.ClientRequest, traces: "list[aiohttp.tracing.Trace]", timeout: aiohttp.ClientTimeout
    ) -> "aiohttp.connector.Connection":
        # The event loop may not have seen the end of an idle connection: while it is busy, it sees nothing.
        while _is_closed(connection := await super().connect(req, traces, timeout)) or self._is_old(connection):
            is_new = connection.protocol not in self._used
            connection.close()
            if is_new:
                raise ClosedAtOnce(errno.ECONNRESET, "closed before anything was sent")
        self._used.setdefault(connection.protocol, self._loop.time())
        transport = connection.transport
        assert transport is not None
        # A transport that is closed waits until all is written, which a server that does not read leaves undone.
        connection.add_callback(lambda: transport.abort() if transport.get_write_buffer_size() else None)
        return connection

    def _is_old(self, connection: "aiohttp.connector.Connection") -> bool:
        return self._loop.time() - self._used.get(connection.protocol, self._loop.time()) > _OLDEST_S

    async def _create_connection(
        self, req: aiohttp.ClientRequest, traces: "list[aiohttp.tracing.Trace]", timeout: aiohttp.ClientTimeout
    ) -> "aiohttp.client_proto.ResponseHandler":
        async with _turning_for(self._timeout_s):
            protocol = await super()._create_connection(req, traces, timeout)
        # Made on the first look, which has to come before the end; and an exception that nobody looks at is logged.
        if (lost := protocol.closed) is not None:
            lost.add_done_callback(_reset_of)
        if protocol.transport is not None:
            probe(protocol.transport.get_extra_info("socket"), _UNACKNOWLEDGED)
        return protocol


def probe(peers: socket.socket, *options: tuple[int, int]) -> None:
    """Have the kernel notice that the machine at the other end, of this socket or of those it accepts, has vanished."""
    peers.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (*_PROBES, *options):
        peers.setsockopt(socket.IPPROTO_TCP, option, value)


@asynccontextmanager
async def _turning_for(seconds: float) -> AsyncIterator[None]:
    """Limit what is done inside to so many seconds of an event loop that turns.

    In a burst, the loop is busy for seconds, and sees only then that a server has taken a connection at once.

    Raises:
        TimeoutError: they are over.
    """
    async with asyncio.timeout(None) as limit:
        with _Turns(seconds, lambda: limit.reschedule(asyncio.get_running_loop().time())):
            yield


class _Turns:
    """Counts so many seconds of an event loop that turns, while its context is entered, and then calls a function.

    It is no circle of objects when it is left: one for each request would wait for Python to look for it.
    """

    def __init__(self, seconds: float, action: Callable[[], None] = lambda: None) -> None:
        self._tick_s = seconds / _TICKS
        self._action = action
        self.left = _TICKS  # parts of the time; 0 when it is over

    def __enter__(self) -> Self:
        self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick)  # however late the last one was
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _tick(self) -> None:
        self.left -= 1
        (self.__enter__ if self.left else self._action)()


def _reset_of(lost: asyncio.Future[None]) -> BaseException | None:
    """Return the error that has ended a connection, None if it was closed in order."""
    return None if lost.cancelled() else lost.exception()


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
