"""Starts HTTP servers as processes of their own, waits until they are ready, and stops them without a trace.

Nothing here knows about models, questions or KV caches. The processes themselves are looked after by ``guard``:
they end with this process even if it is killed.
"""

import os
import random
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

_GUARD = Path(__file__).with_name("guard.py")
_POLL_S = 0.2
_HEALTH_TIMEOUT_S = 2.0
#: Not by the proxy of the environment, if it names one: the servers are on this machine.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_GRACE_S = 5.0

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# The last line of a traceback, or what vLLM logs as an error, without the rest of a traceback:
# "(Worker pid=7) ERROR 11-21 11:02:34 [executor.py:953] ValueError: no weights".
_ERROR = re.compile(
    r"[\w.]+(Error|Exception|Failed|Refused): |(\(\w+ pid=\d+\) )?ERROR .*?\] (?!Traceback|The above|During)\S"
)
# What the interpreter and its extension modules write after the last word of a dying vLLM.
_NOISE = re.compile(
    r"\s*$|nanobind:| - leaked | - \.\.\. skipped|See https://nanobind|.*resource_tracker|  warnings\.warn"
)


class ServerFailed(Exception):  # noqa: N818  it is named after the event, like its message
    """A server ended, or was not ready in time. ``log_tail`` holds the last lines of its log."""

    def __init__(self, reason: str, log_tail: str) -> None:
        super().__init__(reason)
        self.log_tail = log_tail


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports on ``host``, all different, that nothing listens on, and that no connection is given meanwhile.

    Those that the kernel gives to connections lie above these.

    Raises:
        OSError: too few ports are free.
    """
    found: list[int] = []
    with ExitStack() as stack:
        for port in random.sample(_listening_ports(), 1000):
            if len(found) == count:
                return found
            with suppress(OSError):
                stack.enter_context(socket.socket()).bind((host, port))
                found.append(port)
    raise OSError(f"of 1,000 ports of {host} that were tried, only {len(found)} are free; {count} are needed")


def _listening_ports() -> range:
    """The ports of which the kernel gives none to a connection, unless it gives all."""
    try:
        first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:  # not Linux
        first_given = 32_768
    return range(10_000, first_given if first_given > 12_000 else 60_000)


class Server:
    """One server process and its log file. Used from one thread."""

    def __init__(
        self,
        name: str,
        command: list[str],
        *,
        url: str,
        log: Path,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        """Nothing is started yet.

        Args:
            name: for people, e.g. "prefill server".
            command: program and arguments.
            url: where it will listen, without a path. It is ready when ``url``/health answers 200.
            log: file for its standard output and error; written anew at each start.
            environment: added to this process's environment.
            cwd: where it runs; this process's own if None.
        """
        self.name = name
        self.url = url
        self.log = log
        self._command = command
        self._environment = dict(environment or {})
        self._cwd = cwd
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0

    def start(self) -> None:
        """Start the process and return at once."""
        if self._process is not None:
            raise RuntimeError(f"the {self.name} has been started already")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_GUARD), str(_GRACE_S), *self._command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._environment},
                cwd=self._cwd,
                process_group=0,  # a Ctrl-C at the terminal reaches us alone
            )
        self._started_at = time.monotonic()

    @property
    def age_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started_at

    @property
    def process_id(self) -> int:
        """Of the process that looks after the server's; the server's processes are its descendants."""
        if self._process is None:
            raise RuntimeError(f"the {self.name} has not been started")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def ready(self) -> bool:
        """Whether it answers its health check by now.

        Raises:
            ServerFailed: it has ended.
        """
        self.check()
        try:
            with _DIRECT.open(f"{self.url}/health", timeout=_HEALTH_TIMEOUT_S) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def check(self) -> None:
        """Do nothing where the process runs.

        Raises:
            ServerFailed: it has ended.
        """
        if self._process is not None and (status := self._process.poll()) is not None:
            after = f"after {self.age_s:.0f} s" if self.age_s >= 1 else "at once"
            raise ServerFailed(f"the {self.name} ended {after} with exit status {status}", self.log_tail())

    def read_log(self) -> str:
        """What the process has written so far, without colours."""
        return _COLOUR.sub("", self.log.read_text(errors="replace"))

    def log_tail(self, lines: int = 12) -> str:
        """The last ``lines`` lines of the log that say something, after the earlier lines that name an error."""
        said = self._said()
        causes = [line for line in said[:-lines] if _ERROR.match(line)]
        return "\n".join([*causes[-lines:], *(["..."] if causes else []), *said[-lines:]])

    def errors(self, lines: int = 3) -> list[str]:
        """The last ``lines`` lines of the log that name an error."""
        return [line for line in self._said() if _ERROR.match(line)][-lines:]

    def _said(self) -> list[str]:
        return [line for line in self.read_log().splitlines() if not _NOISE.match(line)]

    def request_stop(self) -> None:
        """Ask the process and all its descendants to end, and return at once."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def stop(self) -> None:
        """End the process and all its descendants, and wait until they are gone. Idempotent."""
        self.request_stop()
        if self._process is not None:
            self._process.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Servers:
    """Servers that are started, waited for and stopped together. Leaving the context stops all of them."""

    def __init__(self) -> None:
        self._servers: list[Server] = []

    def start(self, server: Server) -> Server:
        """Start ``server``; it is stopped with the others."""
        self._servers.append(server)
        server.start()
        return server

    def check(self) -> None:
        """Do nothing where all run.

        Raises:
            ServerFailed: one has ended.
        """
        for server in self._servers:
            server.check()

    def wait_ready(
        self,
        servers: Iterable[Server],
        timeout_s: float,
        on_ready: Callable[[Server], None] = lambda _: None,
        on_wait: Callable[[Server], None] = lambda _: None,
    ) -> None:
        """Wait until all of ``servers`` answer their health checks.

        ``on_ready`` is told each that does, ``on_wait`` several times a second each that does not yet.

        Raises:
            ServerFailed: any server of this set ended, or one was not ready within ``timeout_s`` seconds.
        """
        waiting = list(servers)
        while waiting:
            self.check()
            for server in [each for each in waiting if each.ready()]:
                waiting.remove(server)
                on_ready(server)
            for server in waiting:
                on_wait(server)
                if server.age_s > timeout_s:
                    raise ServerFailed(f"the {server.name} was not ready within {timeout_s:.0f} s", server.log_tail())
            if waiting:
                time.sleep(_POLL_S)

    def stop(self) -> None:
        """Stop all, at the same time. Idempotent."""
        for server in self._servers:
            server.request_stop()
        for server in self._servers:
            server.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
