"""What tests of HTTP proxies need around the fake servers: their owner, a client that can leave, a proxy process."""

import asyncio
import json
import os
import re
import resource
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Protocol, Self

from tests.support.examples.fake_servers import FakeServer, Loop, PrefillLegs, Script
from tests.support.process import free_port
from tests.support.sources import ROOT
from tests.support.waiting import until


def unused_url() -> str:
    """The URL of a port that nobody listens on."""
    return f"http://127.0.0.1:{free_port()}"


@contextmanager
def full_backlog() -> Iterator[str]:
    """The URL of a server that takes no connection: its queue of waiting ones is full."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(3):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


class FakeServers:
    """Starts fake servers and stops them all when ``stack`` is closed."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._loop = Loop()
        self._legs = PrefillLegs()
        stack.callback(self._loop.close)

    def start(self, script: Script, port: int = 0, tls: ssl.SSLContext | None = None) -> FakeServer:
        server = FakeServer(script, self._legs)
        self._loop.run(server.start(port, tls))
        self._stack.callback(self.stop, server)
        return server

    def stop(self, server: FakeServer) -> None:
        """Stop a server. Idempotent."""
        self._loop.run(server.stop())


def probed_after(connection: socket.socket) -> int:
    """After how many seconds without a word of the other machine the kernel closes a connection."""
    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    idle_s, interval_s, count = (connection.getsockopt(socket.IPPROTO_TCP, option) for option in options)
    return idle_s + interval_s * count


class Listening(Protocol):
    """Whatever takes connections."""

    @property
    def address(self) -> tuple[str, int]: ...


class RawClient:
    """A client that can leave at any point."""

    def __init__(self, proxy: Listening, head: bytes, content: bytes = b"") -> None:
        self._socket = socket.create_connection(proxy.address, timeout=10)
        self._socket.sendall(head + content)

    @classmethod
    def completing(cls, proxy: Listening, content: bytes) -> "RawClient":
        head = b"POST /v1/completions HTTP/1.1\r\nHost: proxy\r\nContent-Length: %d\r\n\r\n" % len(content)
        return cls(proxy, head, content)

    def send(self, content: bytes) -> None:
        self._socket.sendall(content)

    def receive_until(self, wanted: bytes) -> bytes:
        got = b""
        while wanted not in got:
            piece = self._socket.recv(65536)
            assert piece, f"the connection ended before {wanted!r}: {got!r}"
            got += piece
        return got

    def receive_all(self) -> bytes:
        with self._socket:
            return b"".join(iter(lambda: self._socket.recv(65536), b""))

    def leave(self) -> None:
        self._socket.close()


def ask_at_once(port: int, prompts: Sequence[object]) -> list[bytes]:
    """The whole answers, head and body, to clients that ask for completions in the same moment."""

    async def ask(prompt: object) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = json.dumps({"prompt": prompt}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: proxy\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % len(body) + body)
        try:
            return await reader.read()
        finally:
            writer.close()

    async def everybody() -> list[bytes]:
        return await asyncio.gather(*map(ask, prompts))

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # the servers' sockets are this process's, too
    try:
        return asyncio.run(everybody())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class ProxyProcess:
    """A proxy run as its users run it: a process of its own, here on a free port. Leaving the context ends it."""

    def __init__(
        self, arguments: Sequence[str], command: Sequence[str] = (sys.executable,), cwd: Path = ROOT, **variables: str
    ) -> None:
        self._lines: list[str] = []
        self._process = subprocess.Popen(
            [*command, *arguments, "--port", "0"],
            cwd=cwd,
            env=os.environ | variables,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stderr is not None
        self._reader = threading.Thread(target=self._read, args=(self._process.stderr,), name="log of a proxy")
        self._reader.start()
        try:
            until(lambda: self._listening() or self._process.poll() is not None)
            found = self._listening()
            assert found, f"the proxy ended before it listened: {self.log}"
        except BaseException:
            self.kill()
            raise
        self.url = found[1]
        self.address = (found[2], int(found[3]))

    @property
    def log(self) -> str:
        """What it has written so far; all of it once it has ended."""
        return "".join(self._lines)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def signal(self, number: int) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def end(self, number: int) -> int:
        """Send a signal; the exit status."""
        self.signal(number)
        return self.wait()

    def wait(self) -> int:
        """The exit status."""
        status = self._process.wait(60)
        self._reader.join()
        return status

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """End it in any case. Idempotent."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stderr is not None
        self._process.stderr.close()

    def _read(self, stderr: IO[str]) -> None:
        self._lines.extend(iter(stderr.readline, ""))

    def _listening(self) -> re.Match[str] | None:
        return re.search(r"(?:running|listening) on (http://\[?([\d.:]+?)\]?:(\d+))", self.log)
