"""The proxy as an ASGI application: its routes, and who owns what.

The application owns the connections to the servers (and with them every request under way) from start-up to shutdown.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from pd_proxy import apis
from pd_proxy.apis import Api
from pd_proxy.connection_pool import Connections
from pd_proxy.control import CircuitBreaker, ControlAddresses
from pd_proxy.detour import Detour
from pd_proxy.draining import Draining
from pd_proxy.error_answers import error_response
from pd_proxy.exchange import Generation
from pd_proxy.journal import Journal
from pd_proxy.recent import Recent
from pd_proxy.relay import RELAYED, STORED, Relay, relayed_api
from pd_proxy.servers import Leg, Servers
from pd_proxy.settings import Settings, WithoutPrefill
from pd_proxy.spans import Tracing
from pd_proxy.status import StatusPage
from pd_proxy.upstream import Upstream

#: Longest wait for cancelled requests at shutdown.
_LAST_REQUESTS_S = 2.0
#: Longest wait for a server's health: who asks the proxy for its own may wait a few seconds only.
_HEALTH_S = 2.0


def create_app(settings: Settings) -> Starlette:
    """The proxy for the given servers. Run it with one worker process: the in-flight counts live in it."""
    connections = Connections(settings)
    prefill = Servers(Leg.PREFILL, settings.prefill, connections, settings.skip_s)
    decode = Servers(Leg.DECODE, settings.decode, connections, settings.skip_s)
    recent = Recent() if settings.status_page else None
    journal = Journal(recent)
    control, detour = ControlAddresses(), Detour(settings.prefill_from)
    upstream = Upstream(apis.COMPLETIONS, prefill, decode, control, CircuitBreaker(), detour, settings)
    pages, tracing = _Pages(upstream, journal), Tracing(settings.traces_endpoint)
    draining = None if settings.draining is None else Draining(settings.draining, (prefill, decode))
    status = [] if recent is None else StatusPage((prefill, decode), control, recent).routes

    def generation(api: Api) -> Route:
        return Route(api.path, Generation(replace(upstream, api=api), journal, tracing), methods=["POST"])

    def relayed(path: str, *methods: str) -> Route:
        relay = Relay(replace(upstream, api=relayed_api(path)), journal, tracing)
        return Route(path, relay, methods=methods or ["GET", "POST", "OPTIONS"])

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with connections, draining.watched() if draining is not None else nullcontext():
            yield
            # The ASGI server has ended or cancelled all requests; without this it could end the process before
            # the cancelled ones have closed their connections and are logged.
            with suppress(TimeoutError):
                await asyncio.wait_for(journal.none_open(), _LAST_REQUESTS_S)
        await asyncio.to_thread(tracing.close)

    return Starlette(
        routes=[
            *map(generation, apis.ALL),
            *(relayed(api.path, "OPTIONS") for api in apis.ALL),  # what browsers ask before they send a request
            *map(relayed, (*RELAYED, *settings.relay)),
            *(relayed(path, method) for path, method in STORED.items()),
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

    def __init__(self, upstream: Upstream, journal: Journal) -> None:
        self._legs = upstream.prefill, upstream.decode
        self._settings = upstream.settings
        self._journal = journal

    async def health(self, _: Request) -> Response:
        """200 while a request can be served: at least one healthy server on each leg, unless D may do without P."""
        timeout_s = min(_HEALTH_S, self._settings.connect_timeout_s)
        prefill, decode = await asyncio.gather(*(servers.healthy(timeout_s) for servers in self._legs))
        needs_prefill = self._settings.without_prefill != WithoutPrefill.DECODE
        well = any(decode.values()) and (any(prefill.values()) or not needs_prefill)
        body = {"healthy": well, "prefill": prefill, "decode": decode}
        return JSONResponse(body, status_code=HTTPStatus.OK if well else HTTPStatus.SERVICE_UNAVAILABLE)

    async def healthcheck(self, _: Request) -> Response:
        """200 while the proxy itself runs, in the form of the example proxies of vLLM and vllm-ascend.

        Whether servers answer is for ``health``: a proxy that waits for them must not be restarted for it.
        """
        instances = {f"{servers.leg}_instances": len(servers.members) for servers in self._legs}
        return JSONResponse({"status": "ok"} | instances)

    async def metrics(self, _: Request) -> Response:
        """The proxy's own counters, for Prometheus."""
        in_flight = [(legs.leg, server.url, server.in_flight) for legs in self._legs for server in legs.members]
        return PlainTextResponse(self._journal.exposition(in_flight), media_type="text/plain; version=0.0.4")


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status, detail = HTTPStatus(error.status_code), error.detail
    if status == HTTPStatus.NOT_FOUND:
        detail = "the proxy does not serve this path; started with --relay PATH, it sends it to a decode server"
    response = error_response(status, f"{request.method} {request.scope['path']}: {detail}")
    response.headers.update(error.headers or {})
    return response
