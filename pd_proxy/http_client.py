"""The client's side of one request: what it asked, what it has been sent so far, and whether it is still there.

A client that leaves is noticed in every stage: the work is cancelled, which closes the connections to the servers, and
vLLM aborts the request.
"""

import asyncio
import re
from collections.abc import Coroutine
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

from pd_proxy import headers as passed
from pd_proxy.apis import Body, parsed
from pd_proxy.error_answers import EVENT_END, FAILED, ErrorShape, RequestError, error_event, error_response
from pd_proxy.journal import Record

#: A client that has sent more than its request is not read from, and so not seen to leave, until the server is asked
#: again whether it is there.
_LOOK_AGAIN_S = 5.0

#: An error behind other events, with an orderly end: so vLLM ends the streams of an engine that has died, among others.
_ERROR = re.compile(EVENT_END + b"(?:%b)" % b"|".join(map(re.escape, FAILED)))


class Client:
    """The client's side of one request: its headers, and the answer that it has been sent so far."""

    def __init__(self, scope: Scope, send: Send, record: Record, errors: ErrorShape = ErrorShape.OPENAI) -> None:
        self.headers = Headers(scope=scope)
        self.record = record
        self.complete = False  # all of the answer's body is sent
        self.has_left = False  # before that
        self._send_message = send
        self._errors = errors
        self.started = False  # something has been sent
        self._missing: int | None = None  # bytes of the body not yet sent, where its length was announced
        self._sends_events = False  # the answer is a stream of events, not encoded
        self._last = EVENT_END  # bytes of the body

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Send status and headers."""
        self.started = True
        self.record.status = status
        named = dict(headers)
        self._missing = int(named[b"content-length"]) if b"content-length" in named else None
        is_stream = named.get(b"content-type", b"").startswith(b"text/event-stream")
        self._sends_events = is_stream and b"content-encoding" not in named
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def send_piece(self, piece: bytes) -> None:
        """Send a part of the body; waits while the client is slow to read."""
        if self._missing is not None:
            self._missing -= len(piece)
            self.complete |= self._missing == 0
        if self._sends_events:
            seen = self._last + piece
            self._last = seen[-32:]  # an error may begin there, and go on in the next piece
            if _ERROR.search(seen) and not self.record.problem:
                self.record.broken_off = True
                self.record.problem = f"decode server {self.record.decode_url} ended its stream with an error"
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def end(self) -> None:
        """The answer is complete."""
        self.complete = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def send_whole(self, status: int, headers: list[tuple[bytes, bytes]], content: bytes) -> None:
        """Send a complete answer."""
        await self.start(status, headers)
        self.complete = True
        await self._send({"type": "http.response.body", "body": content, "more_body": False})

    async def fail(self, status: HTTPStatus, message: str) -> None:
        """Send an error; of an answer that has begun, close the connection without its end.

        The client then sees that the answer is incomplete, which a stream that just ends would hide. A stream's last
        event tells the reason, unless one is left half sent.
        """
        if self.started:
            self.record.broken_off = True
            if self._sends_events and self._last.endswith(EVENT_END):
                await self.send_piece(error_event(status, message, self._errors))
            return  # the ASGI server closes a connection whose answer was left unfinished
        response = error_response(status, message, self._errors)
        headers = passed.to_client(response.raw_headers, self.record.identity)
        await self.send_whole(status, headers, bytes(response.body))

    async def _send(self, message: Message) -> None:
        # Where a server sends faster than a client reads, a cancelled task may find the next piece for ever.
        if self.has_left:
            raise ClientDisconnect
        try:
            await self._send_message(message)
        except OSError as error:  # how ASGI servers say that the client has gone
            raise ClientDisconnect from error


async def read_content(request: Request, max_bytes: int) -> bytes:
    """The client's body as it came.

    Raises:
        RequestError: it is too large.
        ClientDisconnect: the client left before it had sent all.
    """
    content = bytearray()
    async for piece in request.stream():
        content += piece
        if len(content) > max_bytes:
            raise RequestError(f"the request body is larger than {max_bytes} bytes, the limit of this proxy")
    return bytes(content)


def json_object(content: bytes) -> Body:
    """The JSON object that a body is.

    Raises:
        RequestError: it is not JSON, or not an object.
    """
    try:
        body = parsed(content)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the request body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError(f"the request body must be a JSON object, not {type(body).__name__}")
    return body


async def while_connected(receive: Receive, client: Client, work: Coroutine[Any, Any, None]) -> None:
    """Run ``work`` to its end, or cancel it when the client leaves. The request's body must have been read.

    Raises:
        ClientDisconnect: the client left before it had its whole answer; ``work`` has ended.
    """
    working = asyncio.current_task()
    assert working is not None

    async def watch() -> None:
        gone = False
        while not gone:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_AGAIN_S):
                    gone = (await receive())["type"] == "http.disconnect"
        # A client that knows the length may leave with its last byte, before the work has ended.
        if not client.complete:
            client.has_left = True
            working.cancel()

    watching = asyncio.create_task(watch())
    try:
        await work
    except asyncio.CancelledError:
        if not client.has_left or working.uncancel():
            raise
    finally:
        watching.cancel()
    if client.has_left:
        raise ClientDisconnect
