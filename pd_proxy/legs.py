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
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus

from starlette.requests import ClientDisconnect

from pd_proxy.apis import Body
from pd_proxy.control import Address, Engine, address_in
from pd_proxy.decode import at_once, run_decode
from pd_proxy.error_answers import FULL, LegFailed, LegRefused, NothingHandedOver, Retry, let_go_of_bodies
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


@dataclass(slots=True, eq=False)
class _Prefill:
    """A prefill leg that runs beside a decode leg, and what is known of it."""

    engine: Engine
    address: Address  # of its control channel, as D is told
    transfer_id: str
    running: asyncio.Task[None] = field(init=False)
    failure: Exception | None = None
    moved: Body | None = None  # an answer from another control address than D was told
    text_ended: bool = False  # with its token, which was to be the client's first
    details: PromptDetails = field(default_factory=PromptDetails)
    has_cancelled: bool = False  # the decode leg

    @property
    def ends_decoding(self) -> bool:
        """Whether the decode leg that runs beside it is no use, if the client has got nothing of it."""
        return self.failure is not None or self.moved is not None or self.text_ended

    async def last_news(self, timeout_s: float | None = _LAST_NEWS_S) -> PromptDetails:
        """Wait a moment for the leg's end, which may come after D's; return the figures of its prompt."""
        if not self.running.done():
            await asyncio.wait([self.running], timeout=timeout_s)
        return self.details


@dataclass(slots=True, eq=False)
class TwoLegs:
    """One client's request and both its legs."""

    upstream: Upstream
    body: Body  # of the client
    client: Client
    written: Written | None = None  # of an answer that may move
    begun: Written | None = None  # of one that may begin with P's token; afterwards, whether it is to move behind that
    failed: str = ""  # the URL of the decode server that has just failed the request
    _first_token: FirstToken | None = field(default=None, init=False)  # of the decode leg that runs

    async def serve(self) -> None:
        """Serve the request to its end.

        A prefill server that cannot be reached is followed by the next one, and one that took the request and failed by
        one more, as long as the client has got nothing: a request that kills prefill servers shall not kill all. Behind
        the last one, a decode server may be the next, with the whole request.

        Raises:
            LegFailed, LegRefused: no prefill server served, or the decode server failed.
            ClientDisconnect: the client left.
        """
        record, untried = self.client.record, self.upstream.prefill.in_order()
        while True:
            server = untried.pop(0)
            failure = await self._serve_with(server)
            if failure is None:
                return
            let_go_of_bodies(failure)
            if failure.retry is not Retry.NO and failure.status != FULL:
                self.upstream.control.forget(server)
            if failure.retry is Retry.NO or (failure.retry is Retry.ONCE and record.prefill_retries):
                raise failure
            if not untried:
                if self.upstream.settings.without_prefill != WithoutPrefill.DECODE:
                    raise failure
                logger.warning("%s: a decode server computes the prompt", failure)
                await self.alone(NO_PREFILL)
                return
            if failure.retry is Retry.ONCE:
                record.prefill_retries += 1
                logger.warning("prefill server %s failed (%s): the request goes to another", server.url, failure)

    async def _serve_with(self, server: Server) -> Failure | None:
        """Serve the request with one prefill server; return how that failed, if it did."""
        may_join = self.upstream.settings.legs == Legs.TOGETHER
        engine = self.upstream.control.choose(server, by_rank=may_join and self.upstream.api.takes_rank)
        next_decode, address = self.upstream.decode.in_order()[0].url, engine.address if may_join else None
        if address is not None and not self.upstream.breaker.go_in_turn(next_decode, str(engine)):
            return await self._together(_Prefill(engine, address, uuid.uuid4().hex))
        self.client.record.legs = Legs.IN_TURN
        try:
            answer = await self._run_prefill(engine)
        except (LegFailed, LegRefused) as failure:
            if not self._text_ended(failure):
                return failure
            await self.alone(_ENDS_AT_ONCE)
        else:
            await self._in_turn(answer, engine)
        return None

    async def _in_turn(self, answer: Body, engine: Engine) -> None:
        """Run the decode leg with what P has answered."""
        self.client.record.legs = Legs.IN_TURN
        told = self.upstream.api.figures.of(answer)

        async def details() -> PromptDetails:
            return told

        body = decode_body(self.upstream.api, self.body, answer["kv_transfer_params"])
        await self._run_decode(body, details, partial(self._judge, engine, None), answer)

    async def alone(self, reason: str, transfer: Body | None = None) -> None:
        """Have a decode server serve the whole request, for this reason. ``transfer``: where it finds the prompt."""
        self.client.record.legs, self.client.record.undivided = "", reason
        await self._run_decode(decode_body(self.upstream.api, self.body, transfer), None)

    async def _together(self, prefill: _Prefill) -> Failure | None:
        self.client.record.legs, decoding = Legs.TOGETHER, asyncio.current_task()
        assert decoding is not None
        prefill.running = asyncio.create_task(self._prefill_beside(prefill, decoding))
        try:
            named = following(prefill.transfer_id, prefill.address.host, prefill.address.port)
            body = decode_body(self.upstream.api, self.body, named)
            await self._run_decode(body, prefill.last_news, partial(self._judge, prefill.engine, prefill))
            if self.client.record.status == HTTPStatus.OK:
                await prefill.last_news()
        except asyncio.CancelledError:
            if not prefill.has_cancelled or decoding.uncancel():
                raise
        except LegFailed:
            if self.client.started or not prefill.ends_decoding:
                raise
        finally:
            prefill.running.cancel()
            await prefill.last_news(None)
        if self.client.started:
            return None
        if not isinstance(prefill.failure, LegFailed | LegRefused | None):
            raise prefill.failure
        if prefill.text_ended:
            await self.alone(_ENDS_AT_ONCE)
        elif prefill.moved is not None:
            await self._in_turn(prefill.moved, prefill.engine)
        return prefill.failure

    async def _prefill_beside(self, prefill: _Prefill, decoding: asyncio.Task[None]) -> None:
        """Run the prefill leg, and end the decode leg where that is no use any more."""
        try:
            answer = await self._run_prefill(prefill.engine, prefill.transfer_id)
            prefill.details = self.upstream.api.figures.of(answer)
            if address_in(answer["kv_transfer_params"]) != prefill.address:
                prefill.moved = answer
            elif self._first_token is not None:
                await self._first_token.send(answer)
        except NothingHandedOver as failure:
            # D needs nothing, has given up, or is told of its end now: what becomes of the request is for D to say.
            prefill.text_ended, prefill.details = self._text_ended(failure), failure.details
            logger.info("%s, for a request that D asks for by name: it may need nothing", failure.cause)
        except (asyncio.CancelledError, ClientDisconnect):  # who watches the client ends the other leg, too
            return  # raised, it would be part of a circle with the request's bodies: see ``let_go_of_bodies``
        except Exception as failure:  # raised where the decode leg runs, if it is none of a server's
            prefill.failure = failure
        if prefill.ends_decoding and not self.client.started:
            prefill.has_cancelled = decoding.cancel()
        elif prefill.failure is not None:
            bug = None if isinstance(prefill.failure, LegFailed | LegRefused) else prefill.failure
            said = "prefill server %s failed (%s) after D had answered"
            logger.warning(said, prefill.engine, prefill.failure, exc_info=bug)
            let_go_of_bodies(prefill.failure)

    def _text_ended(self, failure: Failure) -> bool:
        """Return whether a prefill leg handed nothing over because its token ends the text, as it may."""
        may_end = self.begun is not None or "ignore_eos" not in self.upstream.api.one_token
        return may_end and isinstance(failure, NothingHandedOver) and failure.finish_reason == "stop"

    async def _run_prefill(self, engine: Engine, transfer_id: str | None = None) -> Body:
        used = self.begun is not None
        engine.in_flight += 1
        try:
            return await run_prefill(self.upstream, self.client, engine, self.body, transfer_id, used=used)
        finally:
            engine.in_flight -= 1

    async def _run_decode(
        self,
        body: Body,
        details: Details | None,
        may_answer: Callable[[int], Awaitable[None]] = at_once,
        answer: Body | None = None,
    ) -> None:
        first = self._first_token = None if self.begun is None else FirstToken(self.client, self.begun)
        if first is not None and answer is not None:
            await first.send(answer)
        try:
            await run_decode(
                self.upstream, self.client, body, may_answer=may_answer, first_token=first, details=details,
                written=self.written, failed=self.failed,
            )  # fmt: skip
        except LegFailed as failure:
            if first is not None and failure.retry is Retry.ONCE:
                await first.release()
            if first is None or not await first.is_sent() or first.is_followed:
                raise
            let_go_of_bodies(failure)
            logger.warning("%s, behind a prefill server's token: the request goes on from there", failure)
            self.client.record.problem, self.client.record.broken_off = "", False
            first.begun.details(details)
            first.begun.is_due = True

    async def _judge(self, engine: Engine, beside: _Prefill | None, status: int) -> None:
        """Note what the status of D's answer tells of D, and of the address of P, if that runs ``beside`` D.

        An error waits for news of P, which may be its cause. That D is full tells nothing.
        """
        decode, breaker, control = self.client.record.decode_url, self.upstream.breaker, self.upstream.control
        if status == HTTPStatus.OK and beside is None:
            breaker.served_in_turn(decode, str(engine), engine.address)
        elif status == HTTPStatus.OK:
            breaker.served_at_once(decode, str(engine))
        elif status >= HTTPStatus.INTERNAL_SERVER_ERROR and status != FULL and beside is not None:
            await beside.last_news()
            if beside.moved is None:  # after P's answer, which tells the address anew
                control.fail(engine)
            if not beside.ends_decoding:  # P is not the reason
                breaker.failed_at_once(decode, str(engine), beside.address, self.client.record.identity)
