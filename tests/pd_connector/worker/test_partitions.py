"""A network that is cut both ways while a pull is under way, for a short and for a long time.

P's control channel is on a host of its own, leases and bytes are real. The cut comes when a chosen message is about to
leave, or in the middle of a read, which stands still meanwhile.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing
from typing import Any

import pytest

from pd_connector.scheduler.decode.renewals import Renewals
from tests.support.connector.chunked_prompts import ChunkedPrompt
from tests.support.connector.engines import OURS, THEIRS, DecodeWorker, PrefillEngine, Site, an_order
from tests.support.e2e.hosts import Hosts, why_not
from tests.support.engine.in_process import Fault
from tests.support.waiting import until
from transfer.control.client import ControlClient
from transfer.control.messages import Follow, Hello, Release, Renew
from transfer.control.server import ControlServer

pytestmark = [pytest.mark.thorough, pytest.mark.skipif(bool(why_not()), reason=why_not()), pytest.mark.timeout(120)]
P = 1
TTL_S = 15.0
SHORT_S, LONG_S = 2.0, 20.0
#: docs/reliability.md: 5 s, and some more where the machine is busy.
ENDS_WITHIN_S = 8.0
DURATIONS = [SHORT_S, pytest.param(LONG_S, marks=pytest.mark.slow)]
LONG_ENDS: dict[object, str] = {Hello: "unreachable", "read": "read", Release: "unconfirmed", Follow: "unreachable"}


class Cut:
    """Cuts the network of a host once, for some seconds."""

    def __init__(self, hosts: Hosts, seconds: float) -> None:
        self._hosts, self._seconds = hosts, seconds
        self._undo = ExitStack()
        self._lock = threading.Lock()
        self.began = 0.0
        self.over = threading.Event()

    def begin(self) -> None:
        with self._lock:
            if not self.began:
                self._undo.enter_context(self._hosts.unplugged(P))
                self.began = time.monotonic()
                self._timer = threading.Timer(self._seconds, self.end)
                self._timer.start()

    def end(self) -> None:
        self._undo.close()
        self.over.set()

    def close(self) -> None:
        if self.began:
            self._timer.join()


class CuttingClient(ControlClient):
    """A client that has the network cut before it sends a message of one kind."""

    def __init__(self, cut: Cut, before: object) -> None:
        super().__init__()
        self._cut, self._before = cut, before

    def request(self, host: str, port: int, message: Any, timeout_s: float) -> "Future[Any]":
        if type(message) is self._before:
            self._cut.begin()
        return super().request(host, port, message, timeout_s)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with closing(Hosts()) as hosts:
        hosts.namespace(P)
        yield hosts


@pytest.fixture
def cut_for(hosts: Hosts) -> Iterator[Callable[[float], Cut]]:
    with ExitStack() as cuts:
        yield lambda seconds: cuts.enter_context(closing(Cut(hosts, seconds)))


def far_prefill(site: Site, hosts: Hosts) -> PrefillEngine:
    with hosts.entered(P):
        return site.prefill(host=Hosts.address(P), ttl_s=TTL_S)


def cutting(site: Site, cut: Cut, before: object) -> DecodeWorker:
    (worker,) = site.decode()
    worker.client.close()
    worker.client = CuttingClient(cut, before)
    worker.pull_timeout_s, worker.handshake_timeout_s = 60.0, 10.0
    return worker


def check(cut: Cut, seconds: float, worker: DecodeWorker, prefill: PrefillEngine, point: object) -> None:
    """The pull ends right where it is short, in an error in time where it is long. P's lease ends in both cases."""
    end = worker.next_end(LONG_S + 30.0)
    took = time.monotonic() - cut.began
    assert end.cause == ("" if seconds == SHORT_S else LONG_ENDS[point]), end.reason
    if end.cause:
        assert took < ENDS_WITHIN_S, end.reason
    else:
        assert worker.holds([(OURS, 0, 69)])
    assert cut.over.wait(LONG_S + 5.0)
    until(lambda: prefill.leases.collect() or not prefill.leases.active, within_s=2 * TTL_S)


@pytest.mark.parametrize("seconds", DURATIONS)
@pytest.mark.parametrize("point", [Hello, "read", Release])
def test_a_pull(site: Site, hosts: Hosts, cut_for: Callable[[float], Cut], point: object, seconds: float) -> None:
    cut, prefill = cut_for(seconds), far_prefill(site, hosts)
    worker = cutting(site, cut, point)
    if point == "read":
        site.fabric.inject(1, Fault(landed=1, fails=False, until=cut.over))
    remote = prefill.prefill("r", THEIRS)
    session = site.session(worker, remote)
    session.submit(an_order("r", remote, OURS))
    if point == "read":
        until(lambda: site.fabric.reads == 1)
        cut.begin()
    check(cut, seconds, worker, prefill, point)
    again = prefill.prefill("next", THEIRS)
    session.submit(an_order("next", again, OURS))
    assert worker.next_end().cause == ""
    assert worker.holds([(OURS, 0, 69)])


@pytest.mark.parametrize("seconds", DURATIONS)
def test_a_prompt_that_is_followed(site: Site, hosts: Hosts, cut_for: Callable[[float], Cut], seconds: float) -> None:
    cut, prefill = cut_for(seconds), far_prefill(site, hosts)
    worker, prompt = cutting(site, cut, Follow), ChunkedPrompt(prefill, THEIRS)
    with hosts.entered(P):
        server = ControlServer(prompt, Hosts.address(P))
        server.start()
    site.add(server)
    where: dict[str, Any] = {"remote_host": Hosts.address(P), "remote_port": server.port}
    prompt.compute(32)
    site.session(worker, prompt.remote(**where)).submit(prompt.order("r", OURS, **where))
    until(lambda: cut.began > 0.0)
    prompt.compute(48)
    prompt.complete()
    check(cut, seconds, worker, prefill, Follow)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [SHORT_S, LONG_S])
def test_a_renewal(site: Site, hosts: Hosts, cut_for: Callable[[float], Cut], seconds: float) -> None:
    """A lease that was not renewed in time has ended, and what is pulled under it is not used."""
    cut, prefill = cut_for(seconds), far_prefill(site, hosts)
    worker = cutting(site, cut, Renew)
    remote = prefill.prefill("r", THEIRS)
    with closing(Renewals(worker.client, 5.0, 120.0)) as renewals:
        renewals.start()
        renewals.keep("r", remote)
        assert cut.over.wait(LONG_S + 15.0)
        time.sleep(TTL_S)
        session = site.session(worker, remote)
        session.submit(an_order("r", remote, OURS))
        end = worker.next_end()
    assert end.cause == ("" if seconds == SHORT_S else "lease"), end.reason
    until(lambda: prefill.leases.collect() or not prefill.leases.active)
