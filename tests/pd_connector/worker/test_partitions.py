"""A network that is cut while a pull is under way, both ways or one way, for a short and for a long time.

The cut comes when a chosen message is about to leave, or in the middle of a read, which stands still meanwhile.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from pd_connector.orders import LeaseEnd, Orders, RankEnds
from pd_connector.scheduler.decode.renewals import Renewals
from pd_connector.worker.lease_checksums import CacheChecksums
from pd_connector.worker.verification import Verifier
from tests.support.connector.chunked_prompts import ChunkedPrompt
from tests.support.connector.cuts import APART_TTL_S, WAYS, Apart, Cut, P
from tests.support.connector.engines import OURS, THEIRS, DecodeWorker, PrefillEngine, Site, an_order
from tests.support.connector.landing import HostMemory
from tests.support.connector.moving import IN_HOST
from tests.support.e2e.hosts import Hosts, why_not
from tests.support.engine.in_process import Fault
from tests.support.waiting import until
from transfer.control.messages import Cancel, Checksums, Follow, Hello, Locate, Release, Renew
from transfer.control.server import ControlServer

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.thorough,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.timeout(120),
]
SHORT_S, LONG_S = 2.0, 20.0
#: docs/reliability.md: 5 s, and some more where the machine is busy.
ENDS_WITHIN_S = 6.0
LONG = pytest.param(LONG_S, marks=pytest.mark.slow)
DURATIONS = [SHORT_S, LONG]
WAYS_RARELY = [WAYS[0], *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS[1:])]
#: The cause of a pull that a long cut ends, by what it comes before.
LONG_ENDS: dict[object, str] = {
    Hello: "unreachable",
    Locate: "unreachable",
    "read": "read",
    Checksums: "unreachable",
    Release: "unconfirmed",
    Follow: "unreachable",
}
HOST_BLOCKS = (7, 1, 8, 2, 5)

CutFor = Callable[..., Cut]


@pytest.fixture
def apart(site: Site) -> Iterator[Apart]:
    with closing(Hosts()) as hosts:
        yield Apart(site, hosts)


@pytest.fixture
def cut_for(apart: Apart) -> Iterator[CutFor]:
    with ExitStack() as cuts:
        yield lambda seconds, way="both": cuts.enter_context(closing(Cut(apart.hosts, seconds, way)))


def begin(site: Site, cut: Cut, point: object, start: Callable[[], object]) -> None:
    """Start a pull that is cut in its first read, or by its worker's client."""
    if point != "read":
        start()
        return
    site.fabric.inject(1, Fault(landed=1, fails=False, until=cut.over))
    start()
    until(lambda: site.fabric.reads == 1)
    cut.begin()


def check(cut: Cut, seconds: float, worker: DecodeWorker, prefill: PrefillEngine, point: object) -> None:
    """The pull ends right where it is short, in an error in time where it is long. P's lease ends in both cases."""
    end = worker.next_end(LONG_S + 30.0)
    took = time.monotonic() - cut.began
    assert end.cause == ("" if seconds == SHORT_S else LONG_ENDS[point]), end.reason
    if end.cause:
        assert took < ENDS_WITHIN_S, end.reason
    else:
        assert worker.holds([(OURS, 0, 69)])
    ends_its_leases(cut, prefill)


def ends_its_leases(cut: Cut, prefill: PrefillEngine) -> None:
    assert cut.over.wait(LONG_S + 5.0)
    until(lambda: prefill.leases.collect() or not prefill.leases.active, within_s=2 * APART_TTL_S)


@pytest.mark.parametrize("way", WAYS_RARELY)
@pytest.mark.parametrize("seconds", DURATIONS)
@pytest.mark.parametrize("point", [Hello, "read", Release])
def test_a_pull(site: Site, apart: Apart, cut_for: CutFor, point: object, seconds: float, way: str) -> None:
    cut, prefill = cut_for(seconds, way), apart.prefill()
    worker = apart.decode(cut, point)
    remote = prefill.prefill("r", THEIRS)
    session = site.session(worker, remote)
    begin(site, cut, point, lambda: session.submit(an_order("r", remote, OURS)))
    check(cut, seconds, worker, prefill, point)
    again = prefill.prefill("next", THEIRS)
    session.submit(an_order("next", again, OURS))
    assert worker.next_end().cause == ""
    assert worker.holds([(OURS, 0, 69)])


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [SHORT_S, LONG_S])
def test_checksums(site: Site, apart: Apart, cut_for: CutFor, seconds: float) -> None:
    cut, prefill = cut_for(seconds), apart.prefill(verify=True)
    worker = apart.decode(cut, Checksums)
    remote = prefill.prefill("r", THEIRS)
    prefill.hash_leased()
    verifier = Verifier(CacheChecksums(worker.rank.geometry), worker.client)
    site.session(worker, remote, verifier=verifier).submit(an_order("r", remote, OURS))
    check(cut, seconds, worker, prefill, Checksums)


@pytest.mark.parametrize(
    ("point", "seconds"),
    [(Locate, SHORT_S), *(pytest.param(each, LONG_S, marks=pytest.mark.slow) for each in (Locate, "read", Release))],
)
def test_a_lease_that_has_moved(site: Site, apart: Apart, cut_for: CutFor, point: object, seconds: float) -> None:
    """It is read in P's host memory. In a short cut, it moves while D asks where it is."""
    cut, moving = cut_for(seconds), apart.moving()
    worker = apart.decode(cut, point)
    remote = moving.prefill.prefill("r", THEIRS)
    if seconds == LONG_S:
        moving.move(remote, THEIRS, IN_HOST)
    begin(site, cut, point, lambda: site.session(worker, remote).submit(an_order("r", remote, OURS)))
    if seconds == SHORT_S:
        until(lambda: cut.began > 0.0)
        moving.move(remote, THEIRS, IN_HOST)
    check(cut, seconds, worker, moving.prefill, point)


@pytest.mark.parametrize(
    ("point", "seconds"),
    [("read", SHORT_S), *(pytest.param(each, LONG_S, marks=pytest.mark.slow) for each in (Locate, "read", Release))],
)
def test_a_landing(site: Site, apart: Apart, cut_for: CutFor, point: object, seconds: float) -> None:
    cut, moving = cut_for(seconds), apart.moving()
    worker = apart.decode(cut, point)
    host = site.add(HostMemory(worker))
    remote = moving.prefill.prefill("r", THEIRS)
    moving.move(remote, THEIRS, IN_HOST)
    order = an_order("r", remote, (HOST_BLOCKS,))
    begin(site, cut, point, lambda: host.landings.execute(Orders(landings=(order,))))
    end, took = host.end(), time.monotonic() - cut.began
    assert end == RankEnds(1, failed=seconds == LONG_S)
    if end.failed:
        assert took < ENDS_WITHIN_S
    else:
        host.load(0, OURS[0], HOST_BLOCKS)
        assert worker.holds([(OURS, 0, 69)])
    ends_its_leases(cut, moving.prefill)


@pytest.mark.parametrize("when", [pytest.param("asking", marks=pytest.mark.slow), "waiting"])
@pytest.mark.parametrize("seconds", DURATIONS)
def test_a_prompt_that_is_followed(site: Site, apart: Apart, cut_for: CutFor, seconds: float, when: str) -> None:
    """The cut comes before D asks, or while the question waits at P for an answer."""
    cut, prefill = cut_for(seconds), apart.prefill()
    worker, prompt = apart.decode(cut, Follow if when == "asking" else None), ChunkedPrompt(prefill, THEIRS)
    with apart.hosts.entered(P):
        server = ControlServer(prompt, Hosts.address(P))
        server.start()
    site.add(server)
    where: dict[str, Any] = {"remote_host": Hosts.address(P), "remote_port": server.port}
    prompt.compute(32)
    site.session(worker, prompt.remote(**where)).submit(prompt.order("r", OURS, **where))
    if when == "waiting":
        until(lambda: prompt.asked)
        cut.begin()
    until(lambda: cut.began > 0.0)
    prompt.compute(48)
    prompt.complete()
    check(cut, seconds, worker, prefill, Follow)


@pytest.mark.parametrize("seconds", DURATIONS)
def test_a_cancel(apart: Apart, cut_for: CutFor, seconds: float) -> None:
    """It arrives when the network is back, or the lease expires."""
    cut, prefill = cut_for(seconds), apart.prefill()
    worker = apart.decode(cut, Cancel)
    remote = prefill.prefill("r", THEIRS)
    with closing(Renewals(worker.client, 5.0, 120.0)) as renewals:
        renewals.cancel(remote)
        assert cut.began
        until(lambda: prefill.leases.collect() == ("r",), within_s=2 * APART_TTL_S)
    ended = prefill.leases.take_counts().keys() & set(LeaseEnd)
    assert ended == {LeaseEnd.CANCELLED if seconds == SHORT_S else LeaseEnd.EXPIRED}


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [SHORT_S, LONG_S])
def test_a_renewal(site: Site, apart: Apart, cut_for: CutFor, seconds: float) -> None:
    """A lease that was not renewed in time has ended, and what is pulled under it is not used."""
    cut, prefill = cut_for(seconds), apart.prefill()
    worker = apart.decode(cut, Renew)
    remote = prefill.prefill("r", THEIRS)
    with closing(Renewals(worker.client, 5.0, 120.0)) as renewals:
        renewals.start()
        renewals.keep("r", remote)
        assert cut.over.wait(LONG_S + 15.0)
        time.sleep(APART_TTL_S)
        session = site.session(worker, remote)
        session.submit(an_order("r", remote, OURS))
        end = worker.next_end()
    assert end.cause == ("" if seconds == SHORT_S else "lease"), end.reason
    until(lambda: prefill.leases.collect() or not prefill.leases.active)
