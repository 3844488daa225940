"""A request's two legs: in turn, or both at once.

In turn: P computes the prompt, and D gets the ``kv_transfer_params`` of its answer. This works with every connector,
and while nothing is known of P.

Both at once: the proxy gives the transfer a name. D gets its leg in the same moment as P, with the name and the address
of P's control channel, and reads what P has computed while P goes on. P's answer then has nothing new for D. It is
still awaited: an error of P is the client's answer at once, and if it names another control address, D has asked the
wrong one, so its leg is sent again with what P's answer says.

Who frees P's blocks. D does, when it has read them. Where the client leaves between the legs, or D fails before it
took the request, nobody tells P: its lease on the blocks simply expires. Where D's vLLM takes the request and then
rejects it (a prompt that is too long, say), it hands the ``kv_transfer_params`` to its connector, which may tell P.
Of two legs that are under way, each ends the other: closing the connection makes vLLM abort the request.
"""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from http import HTTPStatus

import anyio
from starlette.requests import ClientDisconnect

from pd_proxy.apis import Body
from pd_proxy.control import Address
from pd_proxy.decode import at_once, run_decode
from pd_proxy.error_answers import LegFailed, LegRefused, NothingHandedOver, Retry, let_go_of_bodies
from pd_proxy.first_token import FirstToken
from pd_proxy.http_client import Client
from pd_proxy.journal import NO_PREFILL
from pd_proxy.moves import Written
from pd_proxy.parameters import decode_body, following
from pd_proxy.prefill import run_prefill
from pd_proxy.servers import Server
from pd_proxy.settings import Legs, WithoutPrefill
from pd_proxy.upstream import Upstream
from pd_proxy.usage import Details, PromptDetails

logger = logging.getLogger(__name__)

#: How long an error of D waits for news of P, which may be its cause, and P's answer for its end after D's.
_LAST_NEWS_S = 1.0

#: Why a decode server has served a request alone, as does ``NO_PREFILL``.
_ENDS_AT_ONCE = "the text ends with its first token"

Failure = LegFailed | LegRefused


class _Prefill:
    """What is known of a prefill leg that runs beside a decode leg."""

    def __init__(self) -> None:
        self.done = asyncio.Event()
        self.failure: Failure | None = None
        self.moved: Body | None = None  # an answer from another control address than D was told
        self.text_ended = False  # with its token, which was to be the client's first
        self.details = PromptDetails()
        self.problem: ClientDisconnect | None = None

    @property
    def ends_decoding(self) -> bool:
        """Whether the decode leg that runs beside it is no use, if the client has got nothing of it."""
        return self.failure is not None or self.moved is not None or self.text_ended


class TwoLegs:
    """One client's request and both its legs."""

    def __init__(
        self,
        upstream: Upstream,
        body: Body,
        client: Client,
        written: Written | None = None,
        begun: Written | None = None,
        failed: str = "",
    ) -> None:
        """Prepare; nothing is sent.

        Args:
            upstream: the servers.
            body: of the client.
            client: who asks.
            written: of an answer that may move.
            begun: of an answer that may begin with P's token; afterwards, it says whether it is to move behind that.
            failed: the URL of the decode server that has just failed the request.
        """
        self._upstream = upstream
        self._body = body
        self._client = client
        self._record = client.record
        self._written = written
        self._first_token = None if begun is None else FirstToken(client, begun)
        self._failed = failed

    async def serve(self) -> None:
        """Serve the request to its end.

        A prefill server that cannot be reached is followed by the next one, and one that took the request and failed by
        one more, as long as the client has got nothing: a request that kills prefill servers shall not kill all. Behind
        the last one, a decode server may be the next, with the whole request.

        Raises:
            LegFailed, LegRefused: no prefill server served, or the decode server failed.
            ClientDisconnect: the client left.
        """
        once = True
        untried = self._upstream.prefill.in_order()
        while True:
            server = untried.pop(0)
            failure = await self._serve_with(server)
            if failure is None:
                return
            let_go_of_bodies(failure)
            if failure.retry is not Retry.NO:
                self._upstream.control.forget(server.url)
            if failure.retry is Retry.NO or (failure.retry is Retry.ONCE and not once):
                raise failure
            if not untried:
                if self._upstream.without_prefill != WithoutPrefill.DECODE:
                    raise failure
                logger.warning("%s: a decode server computes the prompt", failure)
                await self._alone(NO_PREFILL)
                return
            if failure.retry is Retry.ONCE:
                once = False
                self._record.prefill_retries += 1
                logger.warning("prefill server %s failed (%s): the request goes to another", server.url, failure)

    async def _serve_with(self, server: Server) -> Failure | None:
        """Serve the request with one prefill server; return how that failed, if it did."""
        address = self._upstream.control.of(server.url) if self._upstream.legs == Legs.TOGETHER else None
        next_decode = self._upstream.decode.in_order()[0].url
        if address is not None and not self._upstream.breaker.go_in_turn(next_decode, server.url):
            return await self._together(server, address)
        self._record.legs = Legs.IN_TURN
        try:
            answer = await self._run_prefill(server)
        except (LegFailed, LegRefused) as failure:
            if not self._text_ended(failure):
                return failure
            await self._alone(_ENDS_AT_ONCE)
        else:
            await self._in_turn(answer, server)
        return None

    async def _in_turn(self, answer: Body, server: Server) -> None:
        """Run the decode leg with what P has answered."""
        self._record.legs = Legs.IN_TURN
        if self._first_token is not None:
            self._first_token.hold(answer)
        told = self._upstream.api.figures.of(answer)

        async def details() -> PromptDetails:
            return told

        body = decode_body(self._upstream.api, self._body, answer["kv_transfer_params"])
        await self._run_decode(body, details, self._noting_in_turn(server))

    async def _alone(self, reason: str) -> None:
        """Have a decode server compute the prompt, because no prefill server has handed it over."""
        self._record.legs, self._record.undivided = "", reason
        await self._run_decode(decode_body(self._upstream.api, self._body, None), None)

    async def _together(self, server: Server, address: Address) -> Failure | None:
        self._record.legs = Legs.TOGETHER
        transfer_id = uuid.uuid4().hex
        prefill, decoding = _Prefill(), anyio.CancelScope()
        problem: Exception | None = None
        async with anyio.create_task_group() as group:
            group.start_soon(self._prefill_beside, server, address, transfer_id, prefill, decoding)
            try:
                with decoding:
                    named = following(transfer_id, address.host, address.port)
                    body = decode_body(self._upstream.api, self._body, named)
                    await self._run_decode(body, _details_of(prefill), self._after_news_of(prefill, server, address))
                    if self._record.status == HTTPStatus.OK:
                        await _last_news(prefill)
            except Exception as error:  # raised below: the group would wrap it
                problem = error
            group.cancel_scope.cancel()
        if prefill.problem is not None:
            raise prefill.problem
        if problem is not None and (self._client.started or not prefill.ends_decoding):
            raise problem
        if not self._client.started:
            if prefill.text_ended:
                await self._alone(_ENDS_AT_ONCE)
            elif prefill.moved is not None:
                await self._in_turn(prefill.moved, server)
            else:
                return prefill.failure
        return None

    async def _prefill_beside(
        self, server: Server, address: Address, transfer_id: str, prefill: _Prefill, decoding: anyio.CancelScope
    ) -> None:
        """Run the prefill leg, and end the decode leg where that is no use any more. Only its group cancels it."""
        try:
            answer = await self._run_prefill(server, transfer_id)
            prefill.details = self._upstream.api.figures.of(answer)
            if self._upstream.control.of(server.url) != address:
                prefill.moved = answer
            elif self._first_token is not None:
                await self._first_token.send(answer)
        except NothingHandedOver as failure:
            # D has given the transfer up, or is told of its end now: what becomes of the request is for D to say.
            prefill.text_ended, prefill.details = self._text_ended(failure), failure.details
            logger.info("%s, for a request that D asks for by name", failure)
        except (LegFailed, LegRefused) as failure:
            prefill.failure = failure
        except ClientDisconnect as problem:
            prefill.problem = problem
        except asyncio.CancelledError:
            return  # raised, it would be part of a circle with the request's bodies: see ``let_go_of_bodies``
        prefill.done.set()
        if prefill.problem is not None or (prefill.ends_decoding and not self._client.started):
            decoding.cancel()
        elif prefill.failure is not None:
            logger.warning("prefill server %s failed (%s) after D had answered", server.url, prefill.failure)
            let_go_of_bodies(prefill.failure)

    def _text_ended(self, failure: Failure) -> bool:
        """Return whether a prefill leg handed nothing over because its token ends the text, as it may."""
        may_end = self._first_token is not None or self._upstream.api.may_end_at_once
        return may_end and isinstance(failure, NothingHandedOver) and failure.text_ended

    async def _run_prefill(self, server: Server, transfer_id: str | None = None) -> Body:
        used = self._first_token is not None
        return await run_prefill(self._upstream, self._client, server, self._body, transfer_id, used=used)

    async def _run_decode(
        self, body: Body, details: Details | None, may_answer: Callable[[int], Awaitable[None]] = at_once
    ) -> None:
        first = self._first_token
        try:
            await run_decode(
                self._upstream, self._client, body, may_answer=may_answer, first_token=first, details=details,
                written=self._written, failed=self._failed,
            )  # fmt: skip
        except LegFailed as failure:
            if first is not None and failure.retry is Retry.ONCE:
                await first.release()
            if first is None or not await first.is_sent() or first.is_followed:
                raise
            let_go_of_bodies(failure)
            logger.warning("%s, behind a prefill server's token: the request goes on from there", failure)
            self._record.problem, self._record.broken_off = "", False
            first.begun.details(details)
            first.begun.is_due = True

    def _after_news_of(self, prefill: _Prefill, server: Server, address: Address) -> Callable[[int], Awaitable[None]]:
        breaker = self._upstream.breaker

        async def wait(status: int) -> None:
            if status == HTTPStatus.OK:
                breaker.served_at_once(self._record.decode_url, server.url)
            if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                await _last_news(prefill)
                if prefill.moved is None:  # after P's answer, which tells the address anew
                    self._upstream.control.forget(server.url)  # it may be what D could not use
                if not prefill.ends_decoding:  # P is not the reason
                    breaker.failed_at_once(self._record.decode_url, server.url, address, self._record.identity)

        return wait

    def _noting_in_turn(self, server: Server) -> Callable[[int], Awaitable[None]]:
        async def note(status: int) -> None:
            if status == HTTPStatus.OK:
                address = self._upstream.control.of(server.url)
                self._upstream.breaker.served_in_turn(self._record.decode_url, server.url, address)

        return note


def _details_of(prefill: _Prefill) -> Details:
    async def details() -> PromptDetails:
        await _last_news(prefill)  # D may end before P's answer is here
        return prefill.details

    return details


async def _last_news(prefill: _Prefill) -> None:
    with anyio.move_on_after(_LAST_NEWS_S):
        await prefill.done.wait()
