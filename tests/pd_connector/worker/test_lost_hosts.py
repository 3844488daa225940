"""A prefill host that does not come back, or in whose place another one comes; and the pulls from others meanwhile."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.support.connector.cuts import Apart, P
from tests.support.connector.engines import OURS, THEIRS, Site, an_order
from tests.support.e2e.hosts import Hosts, why_not
from tests.support.engine.in_process import Fault
from tests.support.waiting import until

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.thorough,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.timeout(120),
]
OTHER = 3
TTL_S = 8.0  # longer than the host is noticed to be lost
#: docs/reliability.md: 5 s, and some more where the machine is busy.
ENDS_WITHIN_S = 6.0
FEWEST_PULLS = 20


@pytest.fixture
def apart(site: Site) -> Iterator[Apart]:
    with closing(Hosts()) as hosts:
        yield Apart(site, hosts)


def test_pulls_from_others_go_on_while_a_host_is_lost_for_good(site: Site, apart: Apart) -> None:
    """None of them waits for it. What it leased ends there, though nobody tells it."""
    gone, other, worker = apart.prefill(ttl_s=TTL_S), apart.prefill(OTHER), apart.decode()
    never = threading.Event()
    remote = gone.prefill("gone", THEIRS)
    session = site.session(worker, other.prefill("first", THEIRS))
    site.fabric.inject(1, Fault(landed=1, fails=False, until=never))
    site.session(worker, remote).submit(an_order("gone", remote, OURS))
    until(lambda: site.fabric.reads == 1)
    with apart.hosts.unplugged(P):
        cut_at = time.monotonic()
        slowest_s, pulls = 0.0, 0
        while True:
            name, began = f"r{pulls}", time.monotonic()
            session.submit(an_order(name, other.prefill(name, THEIRS), OURS))
            if (end := worker.next_end()).request_id == "gone":
                break
            assert end.cause == "", end.reason
            slowest_s, pulls = max(slowest_s, time.monotonic() - began), pulls + 1
        took = time.monotonic() - cut_at
        assert end.cause == "read", end.reason
        assert took < ENDS_WITHIN_S
        assert pulls >= FEWEST_PULLS
        assert slowest_s < took / 2
        assert worker.next_end().cause == ""
        assert worker.holds([(OURS, 0, 69)])
        until(lambda: gone.leases.collect() or not gone.leases.active, within_s=2 * TTL_S)


def test_another_process_is_at_the_address_of_a_host_that_has_vanished(site: Site, apart: Apart) -> None:
    """No packet of the first one says that it is gone. What was being read is not used, the next prompt is pulled."""
    gone, worker = apart.prefill(), apart.decode()
    remote = gone.prefill("gone", THEIRS)
    site.fabric.inject(1, Fault(landed=1, fails=False, until=threading.Event()))
    site.session(worker, remote).submit(an_order("gone", remote, OURS))
    until(lambda: site.fabric.reads == 1)
    with apart.hosts.unplugged(P):
        cut_at = time.monotonic()
        apart.hosts.take_place(OTHER, P)
        second = apart.prefill(OTHER, host=Hosts.address(P), port=gone.port)
        end = worker.next_end()
        assert time.monotonic() - cut_at < ENDS_WITHIN_S
        assert end.cause == "read"
        assert "refused 'renew': unknown_engine" in end.reason
        again = second.prefill("next", THEIRS)
        site.session(worker, again).submit(an_order("next", again, OURS))
        assert worker.next_end().cause == ""
        assert worker.holds([(OURS, 0, 69)])
