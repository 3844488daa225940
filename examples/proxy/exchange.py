"""One client's request on its way: read, prefill leg, decode leg, answer.

Who frees P's blocks. D does, when it has read them. Where the client leaves between the legs, or D fails before it
took the request, nobody tells P: its lease on the blocks simply expires. Where D's vLLM takes the request and then
rejects it (a prompt that is too long, say), it hands the ``kv_transfer_params`` to its connector, which may tell P.

A client that leaves is noticed in every stage: the work is cancelled, which closes the connection to the server of
the leg under way, and vLLM aborts the request.
"""

import asyncio
import json
import time
from collections.abc import Coroutine
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, NoReturn

import anyio
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

from examples.proxy import headers as passed
from examples.proxy.errors import LegFailed, LegRefused, RequestError, error_response, is_openai_error
from examples.proxy.journal import CLIENT_LEFT, Journal, Record
from examples.proxy.parameters import Body, decode_body, prefill_body, undivided_reason
from examples.proxy.servers import Answer, Server, Servers


class Completions:
    """The ASGI endpoint of one completions path."""

    def __init__(
        self,
        path: str,
        *,
        chat: bool,
        prefill: Servers,
        decode: Servers,
        journal: Journal,
        max_body_bytes: int,
        api_key: str | None,
    ) -> None:
        self._path = path
        self._chat = chat
        self._prefill = prefill
        self._decode = decode
        self._journal = journal
        self._max_body_bytes = max_body_bytes
        self._api_key = api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request to its end; log it, however it ends."""
        record = self._journal.open(self._path)
        client = Client(scope, send, record)
        try:
            await self._receive_and_serve(Request(scope, receive), client)
        except ClientDisconnect:
            record.status = CLIENT_LEFT
            record.problem = "the client left"
        except asyncio.CancelledError:
            # Not raised again: nothing is above but the ASGI server, which closes the connection.
            record.status = record.status or HTTPStatus.INTERNAL_SERVER_ERROR
            record.broken_off = True
            record.problem = "the proxy is shutting down"
        except Exception as error:
            record.status = HTTPStatus.INTERNAL_SERVER_ERROR
            record.problem = repr(error)
            raise
        finally:
            self._journal.close(record)

    async def _receive_and_serve(self, request: Request, client: "Client") -> None:
        record = client.record
        try:
            body = await read_body(request, self._max_body_bytes)
        except RequestError as error:
            record.identity = passed.request_id(client.headers, {})
            record.problem = str(error)
            await client.fail(HTTPStatus.BAD_REQUEST, str(error))
            return
        record.identity = passed.request_id(client.headers, body)
        await while_connected(request.receive, client, self._serve(body, client))

    async def _serve(self, body: Body, client: "Client") -> None:
        record = client.record
        try:
            transfer = None
            reason = undivided_reason(body, chat=self._chat)
            if reason is None:
                transfer = await self._run_prefill(body, client)
            else:
                record.undivided = reason
            await self._run_decode(decode_body(body, transfer), client)
        except LegRefused as error:
            record.problem = "the prefill server refused"
            await client.send_whole(error.status, error.headers, error.content)
        except LegFailed as error:
            record.problem = str(error)
            await client.fail(error.status, str(error))

    async def _run_prefill(self, body: Body, client: "Client") -> Body:
        """The ``kv_transfer_params`` that a prefill server returned."""
        record = client.record
        started = time.monotonic()
        content = json.dumps(prefill_body(body, chat=self._chat)).encode()
        headers = passed.to_server(client.headers, record.identity, self._api_key, relayed=False)

        def note(server: Server) -> None:
            record.prefill_url = server.url

        async with self._prefill.request("POST", self._path, headers, content, chosen=note) as answer:
            text = await answer.read()
        record.prefill_s = time.monotonic() - started
        if answer.status != HTTPStatus.OK:
            _refuse(answer, text, record.identity)
        return transfer_params(answer.url, text)

    async def _run_decode(self, body: Body, client: "Client") -> None:
        record = client.record
        started = time.monotonic()
        content = json.dumps(body).encode()
        headers = passed.to_server(client.headers, record.identity, self._api_key, relayed=True)

        def note(server: Server) -> None:
            record.decode_url = server.url

        async with (
            self._decode.request("POST", self._path, headers, content, chosen=note) as answer,
            aclosing(answer.pieces()) as pieces,
        ):
            # vLLM sends status 200 before it has computed anything. Held back until the first byte of the
            # body, so that a D that dies before it is an error for the client and not an empty success.
            first = await anext(pieces, b"")
            record.first_byte_s = time.monotonic() - started
            await client.start(answer.status, passed.to_client(answer.raw_headers, record.identity))
            await client.send_piece(first)
            async for piece in pieces:
                await client.send_piece(piece)
        await client.end()


class Client:
    """The client's side of one request: its headers, and the answer that it has been sent so far."""

    def __init__(self, scope: Scope, send: Send, record: Record) -> None:
        self.headers = Headers(scope=scope)
        self.record = record
        self.complete = False  # all of the answer's body is sent
        self._send_message = send
        self._started = False
        self._missing: int | None = None  # bytes of the body not yet sent, where its length was announced

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Send status and headers."""
        self._started = True
        self.record.status = status
        lengths = [int(value) for name, value in headers if name == b"content-length"]
        self._missing = lengths[0] if lengths else None
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def send_piece(self, piece: bytes) -> None:
        """Send a part of the body; waits while the client is slow to read."""
        if self._missing is not None:
            self._missing -= len(piece)
            self.complete = self._missing == 0
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

        The client then sees that the answer is incomplete, which a stream that just ends would hide.
        """
        if self._started:
            self.record.broken_off = True
            return  # the ASGI server closes a connection whose answer was left unfinished
        response = error_response(status, message)
        headers = passed.to_client(response.raw_headers, self.record.identity)
        await self.send_whole(status, headers, bytes(response.body))

    async def _send(self, message: Message) -> None:
        try:
            await self._send_message(message)
        except OSError as error:  # how ASGI servers say that the client has gone
            raise ClientDisconnect from error


async def read_body(request: Request, max_bytes: int) -> Body:
    """The client's JSON object.

    Raises:
        RequestError: it is too large, not JSON, or not an object.
        ClientDisconnect: the client left before it had sent all.
    """
    content = bytearray()
    async for piece in request.stream():
        content += piece
        if len(content) > max_bytes:
            raise RequestError(f"the request body is larger than {max_bytes} bytes, the limit of this proxy")
    try:
        body = json.loads(content, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the request body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError(f"the request body must be a JSON object, not {type(body).__name__}")
    return body


def transfer_params(url: str, text: bytes) -> Body:
    """The ``kv_transfer_params`` of a prefill server's answer.

    Raises:
        LegFailed: the answer is not JSON or holds none.
    """
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LegFailed(HTTPStatus.BAD_GATEWAY, f"prefill server {url} answered with invalid JSON: {error}") from error
    transfer = answer.get("kv_transfer_params") if isinstance(answer, dict) else None
    if not isinstance(transfer, dict) or not transfer:
        raise LegFailed(
            HTTPStatus.BAD_GATEWAY,
            f"prefill server {url} returned no kv_transfer_params (finish reason {_finish_reason(answer)}, expected "
            "'length'). Is it started with --kv-transfer-config and a kv_role of kv_producer or kv_both?",
        )
    return transfer


def _finish_reason(answer: Any) -> str:
    try:
        return repr(answer["choices"][0]["finish_reason"])
    except (KeyError, IndexError, TypeError):
        return "missing"


async def while_connected(receive: Receive, client: Client, work: Coroutine[Any, Any, None]) -> None:
    """Run ``work`` to its end, or cancel it when the client leaves. The request's body must have been read.

    Raises:
        ClientDisconnect: the client left before it had its whole answer; ``work`` has ended.
    """
    failure: Exception | None = None
    left = False

    async def watch() -> None:
        nonlocal left
        while (await receive())["type"] != "http.disconnect":
            pass
        # A client that knows the length may leave with its last byte, before the work has ended.
        if not client.complete:
            left = True
            group.cancel_scope.cancel()

    # Cancelled through a scope and not through the task: the HTTP client closes idle connections of other requests
    # on the way and shields that from a scope's cancellation only.
    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        try:
            await work
        except Exception as error:  # raised below: the group would wrap it
            failure = error
        group.cancel_scope.cancel()
    if left:
        raise ClientDisconnect
    if failure is not None:
        raise failure


def _refuse(answer: Answer, text: bytes, identity: str) -> NoReturn:
    if not is_openai_error(text):
        shown = text[:500].decode("utf-8", "replace")
        known = answer.status >= 400 and answer.status in HTTPStatus.__members__.values()
        status = HTTPStatus(answer.status) if known else HTTPStatus.BAD_GATEWAY
        raise LegFailed(status, f"prefill server {answer.url} answered with status {answer.status}: {shown}")
    raise LegRefused(answer.status, passed.to_client(answer.raw_headers, identity), text)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
