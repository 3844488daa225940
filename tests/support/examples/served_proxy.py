"""The proxy under test, in front of fake servers, all on real sockets."""

import asyncio
import socket
import ssl
import threading
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import httpx
import uvicorn
import uvicorn.server

from pd_proxy import Settings, create_app
from pd_proxy.__main__ import Server, listeners, uvicorn_config
from tests.support.examples.fake_servers import FakeServer, Script
from tests.support.examples.harness import FakeServers, probed_after
from tests.support.waiting import until


async def _sleep_shortly(_seconds: float) -> None:
    await asyncio.sleep(0.005)


class _QuickServer(uvicorn.Server):
    """Looks often whether it is to end, and whether it has: most tests would wait longer for that than for answers."""

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            await _sleep_shortly(0.1)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        with patch.object(uvicorn.server, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": _sleep_shortly})):
            await super().shutdown(sockets)


class Proxy:
    """The proxy, served by uvicorn in a thread."""

    def __init__(self, settings: Settings, port: int = 0) -> None:
        (self._socket,) = listeners(Server(port=port), 2048)
        self.address: tuple[str, int] = self._socket.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"
        self._server = _QuickServer(uvicorn_config(create_app(settings), Server(shutdown_timeout_s=1)))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, name="proxy")
        self._thread.start()
        until(lambda: self._server.started)
        self.http = httpx.Client(base_url=self.url, timeout=60, trust_env=False)

    def complete(self, **body: Any) -> httpx.Response:
        """A completion of one short prompt."""
        return self.http.post("/v1/completions", json={"model": "tiny", "prompt": "a question"} | body)

    def clients_probed_after(self) -> list[int]:
        """Of each client's connection, after how many seconds without a word of its machine it is closed."""
        transports = [each.transport for each in self._server.server_state.connections]
        return [probed_after(each.get_extra_info("socket")) for each in transports]

    def in_flight(self) -> float:
        """Requests that the proxy counts as under way, over all servers."""
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("pd_proxy_in_flight{"))

    def close(self) -> None:
        """End it. Idempotent."""
        self.http.close()
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()


class ProxySetup:
    """Starts fake servers and proxies and stops them all."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._servers = FakeServers(stack)

    def server(self, script: Script, port: int = 0, tls: ssl.SSLContext | None = None) -> FakeServer:
        return self._servers.start(script, port, tls)

    def stop(self, server: FakeServer) -> None:
        self._servers.stop(server)

    def proxy(
        self,
        prefill: list[FakeServer | str],
        decode: list[FakeServer | str],
        *,
        port: int = 0,
        **options: Any,
    ) -> Proxy:
        settings = Settings(prefill=_urls(prefill), decode=_urls(decode), **options)
        proxy = Proxy(settings, port)
        self._stack.callback(proxy.close)
        return proxy


def _urls(servers: list[FakeServer | str]) -> tuple[str, ...]:
    return tuple(one if isinstance(one, str) else one.url for one in servers)
