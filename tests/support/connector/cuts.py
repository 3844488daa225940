"""A network between a prefill engine and a decode worker that is cut, one way or both, when a test says so.

Each has its control channel on a host of its own; leases and bytes are real. In-process reads stand still by a fault.
"""

import threading
import time
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

from tests.support.connector.engines import DecodeWorker, PrefillEngine, Site
from tests.support.connector.moving import MovingEngine
from tests.support.e2e.hosts import Hosts
from transfer.control.client import ControlClient

P, D = 1, 2
APART_TTL_S = 15.0
#: What arrives no more; "refused" is both ways, by ICMP.
WAYS = ("both", "to P", "from P", "refused")


class Cut:
    """Cuts the network of a host once, for some seconds."""

    def __init__(self, hosts: Hosts, seconds: float, way: str = "both") -> None:
        self._hosts, self._seconds, self._way = hosts, seconds, way
        self._undo = ExitStack()
        self._lock = threading.Lock()
        self.began = 0.0
        self.over = threading.Event()

    def begin(self) -> None:
        with self._lock:
            if not self.began:
                self._lose()
                self.began = time.monotonic()
                self._timer = threading.Timer(self._seconds, self.end)
                self._timer.start()

    def end(self) -> None:
        self._undo.close()
        self.over.set()

    def close(self) -> None:
        if self.began:
            self._timer.join()

    def _lose(self) -> None:
        if self._way == "both":
            self._undo.enter_context(self._hosts.unplugged(P))
            return
        how = "prohibit" if self._way == "refused" else "blackhole"
        ways = {"to P": [(D, P)], "from P": [(P, D)], "refused": [(D, P), (P, D)]}
        for source, to in ways[self._way]:
            self._undo.enter_context(self._hosts.one_way(source, to, how))


class CuttingClient(ControlClient):
    """A client that has the network cut before it sends a message of one kind."""

    def __init__(self, cut: Cut, before: object) -> None:
        super().__init__()
        self._cut, self._before = cut, before

    def request(self, host: str, port: int, message: Any, timeout_s: float) -> "Future[Any]":
        if type(message) is self._before:
            self._cut.begin()
        return super().request(host, port, message, timeout_s)


class Apart:
    """Makes the engines of a site on hosts of their own."""

    def __init__(self, site: Site, hosts: Hosts) -> None:
        self.site, self.hosts = site, hosts
        for number in (P, D):
            hosts.namespace(number)

    def prefill(self, number: int = P, **options: Any) -> PrefillEngine:
        given: dict[str, Any] = {"host": Hosts.address(number), "ttl_s": APART_TTL_S} | options
        with self.hosts.entered(number):
            return self.site.prefill(**given)

    def moving(self) -> MovingEngine:
        """A prefill engine with host memory."""
        with self.hosts.entered(P):
            return MovingEngine(self.site, host=Hosts.address(P), ttl_s=APART_TTL_S)

    def decode(self, cut: Cut | None = None, before: object = None) -> DecodeWorker:
        """A worker with the times of real ones, whose messages of a kind begin a cut if one is given."""
        (worker,) = self.site.decode()
        worker.client.close()
        with self.hosts.entered(D):
            worker.client = ControlClient() if cut is None else CuttingClient(cut, before)
        worker.pull_timeout_s, worker.handshake_timeout_s = 60.0, 10.0
        return worker
