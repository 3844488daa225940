"""The proxy as an ASGI application: its routes, and who owns what.

The application owns the connections to the servers (and with them every request under way) from start-up to shutdown.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from pd_proxy import headers as passed
from pd_proxy.connection_pool import Connections
from pd_proxy.control import CircuitBreaker, ControlAddresses
from pd_proxy.error_answers import LegFailed, error_response
from pd_proxy.exchange import Completions
from pd_proxy.journal import Journal
from pd_proxy.recent import Recent
from pd_proxy.servers import Leg, Servers
from pd_proxy.settings import Settings, WithoutPrefill
from pd_proxy.spans import Tracing
from pd_proxy.status import StatusPage
from pd_proxy.upstream import Upstream

#: Longest wait for cancelled requests at shutdown.
_LAST_REQUESTS_S = 2.0


def create_app(settings: Settings) -> Starlette:
    """The proxy for the given servers. Run it with one worker process: the in-flight counts live in it."""
    connections = Connections(settings)
    prefill = Servers(Leg.PREFILL, settings.prefill, connections, settings.skip_s)
    decode = Servers(Leg.DECODE, settings.decode, connections, settings.skip_s)
    recent = Recent() if settings.status_page else None
    journal = Journal(recent)
    pages = _Pages(prefill, decode, journal, settings)
    control, breaker = ControlAddresses(), CircuitBreaker()
    tracing = Tracing(settings.traces_endpoint)
    status = [] if recent is None else StatusPage((prefill, decode), control, recent).routes

    def completions(path: str, *, chat: bool) -> Route:
        upstream = Upstream(
            path,
            chat,
            prefill,
            decode,
            control,
            breaker,
            legs=settings.legs,
            first_token=settings.first_token,
            without_prefill=settings.without_prefill,
            api_key=settings.api_key,
        )
        return Route(path, Completions(upstream, journal, tracing, settings.max_body_bytes), methods=["POST"])

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with connections:
            yield
            # The ASGI server has ended or cancelled all requests; without this it could end the process before
            # the cancelled ones have closed their connections and are logged.
            with suppress(TimeoutError):
                await asyncio.wait_for(journal.none_open(), _LAST_REQUESTS_S)
        await asyncio.to_thread(tracing.close)

    return Starlette(
        routes=[
            completions("/v1/completions", chat=False),
            completions("/v1/chat/completions", chat=True),
            Route("/v1/models", pages.models),
            Route("/health", pages.health),
            Route("/healthcheck", pages.healthcheck),
            Route("/metrics", pages.metrics),
            *status,
        ],
        exception_handlers={HTTPException: _http_error},
        lifespan=lifespan,
    )


class _Pages:
    """The small routes."""

    def __init__(self, prefill: Servers, decode: Servers, journal: Journal, settings: Settings) -> None:
        self._prefill = prefill
        self._decode = decode
        self._journal = journal
        self._health_timeout_s = settings.connect_timeout_s
        self._api_key = settings.api_key
        self._without_prefill = settings.without_prefill

    async def health(self, _: Request) -> Response:
        """200 while a request can be served: at least one healthy server on each leg, unless D may do without P."""
        legs = await asyncio.gather(
            self._prefill.healthy(self._health_timeout_s), self._decode.healthy(self._health_timeout_s)
        )
        well = any(legs[1].values()) and (self._without_prefill == WithoutPrefill.DECODE or any(legs[0].values()))
        body = {"healthy": well, "prefill": legs[0], "decode": legs[1]}
        return JSONResponse(body, status_code=HTTPStatus.OK if well else HTTPStatus.SERVICE_UNAVAILABLE)

    async def healthcheck(self, _: Request) -> Response:
        """200 while the proxy itself runs, in the form of the example proxies of vLLM and vllm-ascend.

        Whether servers answer is for ``health``: a proxy that waits for them must not be restarted for it.
        """
        instances = {"prefill_instances": len(self._prefill.members), "decode_instances": len(self._decode.members)}
        return JSONResponse({"status": "ok"} | instances)

    async def models(self, request: Request) -> Response:
        """The model list of a decode server."""
        identity = passed.request_id(request.headers, {})
        headers = passed.to_server(request.headers, identity, self._api_key, relayed=True)
        try:
            async with self._decode.request("GET", "/v1/models", headers) as answer:
                content = await answer.read()
        except LegFailed as error:
            return error_response(error.status, error.told)
        response = Response(content, status_code=answer.status)
        response.raw_headers = passed.to_client(answer.raw_headers, identity)
        return response

    async def metrics(self, _: Request) -> Response:
        """The proxy's own counters, for Prometheus."""
        in_flight = [
            (str(servers.leg), server.url, server.in_flight)
            for servers in (self._prefill, self._decode)
            for server in servers.members
        ]
        return PlainTextResponse(self._journal.exposition(in_flight), media_type="text/plain; version=0.0.4")


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    response = error_response(status, f"{request.method} {request.url.path}: {error.detail}")
    response.headers.update(error.headers or {})
    return response
