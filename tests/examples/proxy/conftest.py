"""A proxy under test and its fake servers, all on real sockets."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Literal

import httpx
import pytest
import uvicorn

from examples.proxy import Settings, create_app
from tests.examples.proxy.fakes import FakeServer, Loop, Script, decodes, prefills


class Proxy:
    """The proxy, served by uvicorn in a thread."""

    def __init__(self, settings: Settings, http: Literal["auto", "h11"]) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._socket.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"
        config = uvicorn.Config(
            create_app(settings),
            http=http,
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, name="proxy")
        self._thread.start()
        until(lambda: self._server.started)
        self.http = httpx.Client(base_url=self.url, timeout=60, trust_env=False)

    def complete(self, **body: Any) -> httpx.Response:
        """A completion of one short prompt."""
        return self.http.post("/v1/completions", json={"model": "tiny", "prompt": "a question"} | body)

    def in_flight(self) -> float:
        """Requests that the proxy counts as under way, over all servers."""
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("pd_proxy_in_flight{"))

    def close(self) -> None:
        self.http.close()
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()


class Setup:
    """Starts fake servers and proxies and stops them all."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._loop = Loop()
        stack.callback(self._loop.close)

    def server(self, script: Script, port: int = 0) -> FakeServer:
        server = FakeServer(script)
        self._loop.run(server.start(port))
        self._stack.callback(lambda: self._loop.run(server.stop()))
        return server

    def proxy(
        self,
        prefill: list[FakeServer | str],
        decode: list[FakeServer | str],
        *,
        http: Literal["auto", "h11"] = "auto",
        **limits: Any,
    ) -> Proxy:
        settings = Settings(prefill=_urls(prefill), decode=_urls(decode), **limits)
        proxy = Proxy(settings, http)
        self._stack.callback(proxy.close)
        return proxy


def _urls(servers: list[FakeServer | str]) -> tuple[str, ...]:
    return tuple(one if isinstance(one, str) else one.url for one in servers)


def until(condition: Callable[[], object], timeout_s: float = 30) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.005)


@pytest.fixture
def setup() -> Iterator[Setup]:
    with ExitStack() as stack:
        yield Setup(stack)


@pytest.fixture
def p(setup: Setup) -> FakeServer:
    """A prefill server."""
    return setup.server(prefills)


@pytest.fixture
def d(setup: Setup) -> FakeServer:
    """A decode server."""
    return setup.server(decodes)


@pytest.fixture
def proxy(setup: Setup, p: FakeServer, d: FakeServer) -> Proxy:
    """A proxy in front of ``p`` and ``d``."""
    return setup.proxy([p], [d])


@pytest.fixture
def access_lines(caplog: pytest.LogCaptureFixture) -> Callable[[int], list[str]]:
    """Waits for so many access lines and returns all there are."""
    caplog.set_level(logging.INFO)

    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "examples.proxy.journal"]

    def wait(count: int) -> list[str]:
        until(lambda: len(lines()) >= count)
        return lines()

    return wait


@pytest.fixture
def closed_port() -> str:
    """The URL of a port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    return f"http://127.0.0.1:{port}"


class RawClient:
    """A client that can leave at any point."""

    def __init__(self, proxy: Proxy, head: bytes, content: bytes = b"") -> None:
        self._socket = socket.create_connection(proxy.address, timeout=10)
        self._socket.sendall(head + content)

    @classmethod
    def completing(cls, proxy: Proxy, content: bytes) -> "RawClient":
        head = b"POST /v1/completions HTTP/1.1\r\nHost: proxy\r\nContent-Length: %d\r\n\r\n" % len(content)
        return cls(proxy, head, content)

    def receive_until(self, wanted: bytes) -> bytes:
        got = b""
        while wanted not in got:
            piece = self._socket.recv(65536)
            assert piece, f"the connection ended before {wanted!r}: {got!r}"
            got += piece
        return got

    def leave(self) -> None:
        self._socket.close()
