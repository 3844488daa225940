"""One client's request on its way: read, sent to the servers, answered, logged."""

import asyncio
from http import HTTPStatus

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from pd_proxy import headers as passed
from pd_proxy.decode import run_decode
from pd_proxy.error_answers import LegFailed, LegRefused, RequestError
from pd_proxy.http_client import Client, read_body, while_connected
from pd_proxy.journal import CLIENT_LEFT, Journal
from pd_proxy.legs import TwoLegs
from pd_proxy.parameters import Body, decode_body, undivided_reason
from pd_proxy.spans import Tracing
from pd_proxy.upstream import Upstream


class Completions:
    """The ASGI endpoint of one completions path."""

    def __init__(self, upstream: Upstream, journal: Journal, tracing: Tracing, max_body_bytes: int) -> None:
        self._upstream = upstream
        self._journal = journal
        self._tracing = tracing
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request to its end; log it, however it ends."""
        record = self._journal.open(self._upstream.path)
        client = Client(scope, send, record)
        record.trace = self._tracing.request(self._upstream.path, client.headers)
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
            record.cause = f"an error in the proxy itself ({type(error).__name__}): see its log"
            raise
        finally:
            self._journal.close(record)
            record.trace.end(
                {
                    "http.response.status_code": record.status,
                    "pd.request_id": record.identity,
                    "pd.legs": record.legs,
                },
                record.failure,
            )

    async def _receive_and_serve(self, request: Request, client: Client) -> None:
        record = client.record
        try:
            body = await read_body(request, self._max_body_bytes)
        except RequestError as error:
            record.identity = passed.request_id(client.headers, {})
            record.problem = str(error)
            await client.fail(HTTPStatus.BAD_REQUEST, str(error))
            return
        record.identity = passed.request_id(client.headers, body)
        record.streams = body.get("stream") is True
        await while_connected(request.receive, client, self._serve(body, client))

    async def _serve(self, body: Body, client: Client) -> None:
        record = client.record
        try:
            reason = undivided_reason(body, chat=self._upstream.chat)
            if reason is None:
                await TwoLegs(self._upstream, body, client).serve()
            else:
                record.undivided = reason
                await run_decode(self._upstream, client, decode_body(body, None))
        except LegRefused as error:
            record.problem = "the prefill server refused"
            record.cause = f"prefill server {record.prefill_url} refused with status {error.status}"
            await client.send_whole(error.status, error.headers, error.content)
        except LegFailed as error:
            record.problem, record.cause = str(error), error.cause
            await client.fail(error.status, error.told)
