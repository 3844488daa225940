"""Tells routers where a prefill engine's control channel is, by HTTP, as vLLM's MooncakeConnector does.

Routers that speak that connector's contract (vllm-router ``--kv-connector mooncake``) ask each prefill server once, and
pass what they learn on to decode servers:

    GET /query    {"0": {"engine_id": "@10.0.0.1:8998", "worker_addr": {"0": {"0": "10.0.0.1:8998"}}}}

The engine id is all that they pass on of it, so it carries the address. What would stand before the @ is left out: an
id changes whenever the engine starts or wakes, which routers would not hear of, and an engine is found without it.

Nothing but addresses is told, to whoever asks.
"""

import asyncio
import logging
import socket
import threading
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from pd_connector.config import ConfigError
from pd_connector.scheduler.scheduler_role import SchedulerRole
from transfer.peers import MAX_PORT, Address, parse_ip, resolve

logger = logging.getLogger(__name__)

#: A router asks once a start. The numbers leave room for many behind one address.
_CONNECTIONS = 128
_CONNECTION_S = 5.0  # of a connection's whole life

_CLOSE_S = 5.0


def control_label(host: str, port: int) -> str:
    """Return the engine id that carries the address of a control channel."""
    return f"@{Address(host, port)}"


class Bootstrap(SchedulerRole):
    """Answers routers on a port of its own, on a thread of its own."""

    def __init__(self, host: str, port: int, ranks: tuple[int, int], bootstrap_port: int) -> None:
        """Bind ``bootstrap_port`` and start answering.

        Args:
            host: of the engine's control channel.
            port: of the same.
            ranks: the engine's tensor-parallel and pipeline-parallel sizes.
            bootstrap_port: on all addresses of the machine, or on the loopback address if ``host`` is one.

        Raises:
            ConfigError: the port cannot be bound.
        """
        label = control_label(host, port)
        workers = {str(tp): {str(pp): label.removeprefix("@") for pp in range(ranks[1])} for tp in range(ranks[0])}
        self._answer: dict[str, Any] = {"0": {"engine_id": label, "worker_addr": workers}}
        self._listener = _listen(host, bootstrap_port)
        self.port = int(self._listener.getsockname()[1])
        self._closing = False
        self._server = uvicorn.Server(
            uvicorn.Config(
                Starlette(routes=[Route("/query", self._query)]),
                http=_Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=1,
            )
        )
        self._thread = threading.Thread(target=self._run, name="pd-bootstrap", daemon=True)
        self._thread.start()
        logger.info("PDConnector: routers may ask where the control channel is by GET /query, port %d", self.port)

    def close(self) -> None:
        """Stop answering and join the thread."""
        self._closing = True
        self._server.should_exit = True
        self._thread.join(_CLOSE_S)
        self._listener.close()

    def check_integrity(self) -> None:
        """Raise AssertionError unless, until ``close``, the thread runs."""
        assert self._closing or self._thread.is_alive(), "the bootstrap thread has died"

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._listener])
        except Exception:
            logger.exception("PDConnector: the HTTP server at bootstrap_port %d has died", self.port)

    async def _query(self, request: Request) -> JSONResponse:
        return JSONResponse(self._answer)


class _Connection(H11Protocol):
    """A connection that ends soon, whether it has asked or not, and that is not taken if there are too many."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Take a connection, for a while."""
        super().connection_made(transport)
        if len(self.connections) > _CONNECTIONS:
            transport.abort()
        else:
            self.loop.call_later(_CONNECTION_S, transport.abort)


def _listen(host: str, port: int) -> socket.socket:
    """Return a listening socket for an engine whose control channel is at ``host``."""
    literal, bound = parse_ip(host), "0.0.0.0"  # noqa: S104  as vLLM's own ports
    try:
        if literal is not None and literal.is_loopback:
            bound = host
        elif ":" in resolve(host):
            bound = "::"
        if port > MAX_PORT:  # its index is added to an engine's port
            raise OSError(f"there are none above {MAX_PORT}")
        family = socket.AF_INET6 if ":" in bound else socket.AF_INET
        return socket.create_server((bound, port), family=family, dualstack_ipv6=bound == "::")
    except OSError as error:
        raise ConfigError(
            f"bootstrap_port = {port}: cannot listen there, at {bound}: {error}. Set it to a free "
            "port; 0 answers no routers"
        ) from error
