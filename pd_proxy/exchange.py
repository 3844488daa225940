"""One client's request on its way: read, sent to the servers, answered, logged."""

import asyncio
import logging
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import replace
from http import HTTPStatus

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from pd_proxy import headers as passed
from pd_proxy.apis import CHAT, COMPLETIONS, KEPT, UNSHARED
from pd_proxy.detour import PromptSize
from pd_proxy.error_answers import LegFailed, LegRefused, RequestError, let_go_of_bodies
from pd_proxy.first_token import may_begin
from pd_proxy.http_client import Client, json_object, read_content, while_connected
from pd_proxy.journal import CLIENT_LEFT, NO_PREFILL, Journal
from pd_proxy.legs import TwoLegs
from pd_proxy.moves import Written, has_no_limit, may_move
from pd_proxy.parameters import undivided_reason
from pd_proxy.settings import FirstTokenFrom, Legs
from pd_proxy.several import Several, can_part
from pd_proxy.spans import Tracing
from pd_proxy.upstream import Upstream

logger = logging.getLogger(__name__)

#: Longest wait for a client to take the reason why it gets no answer, or no more of it, at shutdown.
_LAST_WORD_S = 0.5


class Exchange(ABC):
    """The ASGI endpoint of one path."""

    def __init__(self, upstream: Upstream, journal: Journal, tracing: Tracing) -> None:
        self._upstream, self._journal, self._tracing = upstream, journal, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request to its end; log it, however it ends."""
        api = self._upstream.api
        record = self._journal.open(api.path, generates=bool(api.one_token))
        client = Client(scope, send, record, api.errors)
        record.trace = self._tracing.request(scope["method"], api.path, client.headers)
        try:
            await self._receive_and_serve(Request(scope, receive), client)
        except ClientDisconnect:
            record.status, record.problem = CLIENT_LEFT, "the client left"
        except asyncio.CancelledError:
            # Not raised again: above is the ASGI server, which closes the connection, or who serves several prompts.
            record.problem = "the proxy is shutting down"
            if not client.complete:
                with suppress(ClientDisconnect, TimeoutError):
                    async with asyncio.timeout(_LAST_WORD_S):
                        await client.fail(HTTPStatus.SERVICE_UNAVAILABLE, record.problem)
        except Exception as error:
            record.status, record.problem = HTTPStatus.INTERNAL_SERVER_ERROR, repr(error)
            record.cause = f"an error in the proxy itself ({type(error).__name__}): see its log"
            raise
        finally:
            self._journal.close(record)
            record.trace.end(
                {"http.response.status_code": record.status, "pd.request_id": record.identity, "pd.legs": record.legs},
                record.failure,
            )

    async def _receive_and_serve(self, request: Request, client: Client) -> None:
        record = client.record
        record.identity = passed.request_id(client.headers, {})
        try:
            work = self._serve(request, client, await read_content(request, self._upstream.settings.max_body_bytes))
            await while_connected(request.receive, client, work)
        except (RequestError, RecursionError) as error:
            let_go_of_bodies(error)
            told = str(error) if isinstance(error, RequestError) else "the request body is nested too deeply"
            record.problem = told
            await client.fail(HTTPStatus.BAD_REQUEST, told)
        except LegRefused as error:
            let_go_of_bodies(error)
            record.problem = "the prefill server refused"
            record.cause = f"prefill server {record.prefill_url} refused with status {error.status}"
            await client.send_whole(error.status, error.headers, error.content)
        except LegFailed as error:
            let_go_of_bodies(error)
            record.problem, record.cause = str(error), error.cause
            await client.fail(error.status, error.told)

    @abstractmethod
    async def _serve(self, request: Request, client: Client, content: bytes) -> None:
        """Answer a request with this body.

        Raises:
            RequestError: it cannot be used.
            LegFailed, LegRefused: no server served it.
        """


class Generation(Exchange):
    """The endpoint of one API that generates."""

    def __init__(self, upstream: Upstream, journal: Journal, tracing: Tracing) -> None:
        super().__init__(upstream, journal, tracing)
        settings, is_plain = upstream.settings, upstream.api is not CHAT or upstream.settings.plain_chats
        self._begins = is_plain and settings.first_token == FirstTokenFrom.PREFILL
        self._moves = is_plain and settings.draining is not None and len(settings.decode) > 1
        # In turn: of legs that go at once, P's failure counts only while the client has got nothing.
        self._of_rests = replace(upstream, api=COMPLETIONS, settings=replace(settings, legs=Legs.IN_TURN))

    async def _serve(self, request: Request, client: Client, content: bytes) -> None:
        record, body = client.record, json_object(content)
        del content  # megabytes, perhaps, and an answer takes minutes
        record.identity = passed.request_id(client.headers, body, record.identity)
        record.streams = body.get("stream") is True
        detour, is_cut = self._upstream.detour, self._upstream.control.prompts_are_cut
        reason = undivided_reason(self._upstream.api, body, is_cut=is_cut)
        if can_part(reason, body, is_cut=is_cut):
            await Several(self, request.scope, client, body).serve()
            return
        if reason is None and self._upstream.api.parameters(body).get("n") not in (None, 1):
            headers = self._upstream.headers(client.headers, record.identity, relayed=False)
            reason = None if await self._upstream.decode.shares_prompts(headers) else UNSHARED
        size = PromptSize.of(body) if reason is None and self._upstream.settings.prefill_from else None
        if size is not None:
            record.choice = detour.choice(size, streams=record.streams)
            reason = record.choice.reason if record.choice.alone else None
        api, room = self._upstream.api, None
        moves = self._moves and may_move(api, body)
        # Browsers show a page only what has the headers that let it see that, which are D's to set.
        begins = self._begins and reason is None and "origin" not in client.headers and may_begin(api, body)
        if (moves or begins) and has_no_limit(api, body):
            headers = self._upstream.headers(client.headers, record.identity, relayed=False)
            room = await self._upstream.decode.room(headers)
            moves, begins = moves and room is not None, begins and room is not None
        written = Written(api, body, room) if moves else None
        if reason is None:
            begun = Written(api, body, room) if begins else None
            await TwoLegs(self._upstream, body, client, written, begun).serve()
            if begun is not None and begun.is_due:
                written = begun
                await self._move(client, begun, failed=record.decode_url)
        else:
            record.undivided = reason
            self._check_kept(reason)
            await TwoLegs(self._upstream, body, client, written).alone(reason)
        while written is not None and written.is_due:
            await self._move(client, written)
        if size is not None:
            # A prompt that D has computed for want of a P was late for other reasons.
            first_token_s = record.first_token_s if reason or record.legs else None
            detour.learn(size, record.prompt_tokens, alone=reason is not None, first_token_s=first_token_s)

    async def _move(self, client: Client, written: Written, failed: str = "") -> None:
        """Have another decode server go on with an answer.

        Args:
            client: who has the beginning.
            written: that beginning.
            failed: the URL of the server that failed. Only one more gets the request: it may be what kills them.

        Raises:
            LegFailed: none could.
        """
        record = client.record
        client.record = record.begin_rest()
        try:
            await self._serve_rest(client, written, failed)
        except LegFailed:
            record.moves["failed"] += 1
            raise
        finally:
            client.record = record
        record.moves["continued"] += 1

    async def _serve_rest(self, client: Client, written: Written, failed: str) -> None:
        """Serve the rest of an answer: by a decode server that finds it, else with both legs, else by one alone."""
        try:
            rest = TwoLegs(self._of_rests, written.rest(), client, written, failed=failed)
            await (rest.alone("", {"prefixes_at": written.found_at}) if written.found_at else rest.serve())
        except (LegFailed, LegRefused) as failure:
            let_go_of_bodies(failure)
            tried = client.record.decode_url
            if not written.can_go_on or (failed and tried):
                raise
            logger.warning("%s, for the rest of request %s: once more", failure, client.record.identity)
            await TwoLegs(self._of_rests, written.rest(), client, written, failed=tried or failed).alone(NO_PREFILL)

    def _check_kept(self, reason: str) -> None:
        servers = len(self._upstream.decode.members)
        if reason in KEPT and servers > 1:
            raise RequestError(
                f"the request needs the decode server that keeps responses ({reason}), and this proxy has {servers}; "
                "send the whole conversation as input, without previous_response_id and background"
            )
