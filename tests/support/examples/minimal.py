"""The example's router as a process between two fake servers."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from examples import minimal_proxy
from tests.support.examples.fake_servers import FakeServer, decodes, prefills
from tests.support.examples.harness import FakeServers, ProxyProcess
from tests.support.sources import ROOT

BODY: dict[str, Any] = {"model": "tiny", "prompt": "a question"}


class MinimalProxy(ProxyProcess):
    """The router's process and a client of it."""

    def __init__(self, prefill: str, decode: str, *options: str, **variables: str) -> None:
        arguments = [minimal_proxy.__file__, "--prefill", prefill, "--decode", decode, *options]
        super().__init__(arguments, (sys.executable,), ROOT, **variables)
        self.http = httpx.Client(base_url=self.url, timeout=60, trust_env=False)

    def kill(self) -> None:
        self.http.close()
        super().kill()

    def complete(self, **body: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json=BODY | body)


@dataclass(frozen=True)
class Bed:
    """A router in front of one P and one D."""

    p: FakeServer
    d: FakeServer
    proxy: MinimalProxy

    @contextmanager
    def used(self) -> Iterator["Bed"]:
        """For one test: both servers are well and have had no request, and the router shows no fault of its own."""
        self.p.script, self.d.script = prefills, decodes
        self.p.received.clear()
        self.d.received.clear()
        yield self
        assert "Traceback" not in self.proxy.log
        assert "never retrieved" not in self.proxy.log


@contextmanager
def started_bed(*options: str) -> Iterator[Bed]:
    """The router with these options, and its servers."""
    with ExitStack() as stack:
        servers = FakeServers(stack)
        p, d = servers.start(prefills), servers.start(decodes)
        yield Bed(p, d, stack.enter_context(MinimalProxy(p.url + "/", d.url, *options)))
