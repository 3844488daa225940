"""Pulls to host memory on a worker: real reads into host slots, and from there to the device, byte by byte."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from pd_connector.orders import Orders, RankEnds
from pd_connector.worker.pull_end import PullEnd
from tests.support.connector.engines import DECODE, OURS, PREFILL, THEIRS, Site, an_order
from tests.support.connector.landing import LANDING_SLOTS, HostMemory
from tests.support.connector.moving import IN_HOST, MovingEngine
from tests.support.engine.in_process import Fault
from tests.support.layout.oracle import Engine

HOST_BLOCKS = (7, 1, 8, 2, 5)  # slot s is block s + 1


@pytest.fixture(params=["LBHNC", "BHLNC"])
def hosts(site: Site, request: pytest.FixtureRequest) -> Iterator[list[HostMemory]]:
    with closing(site.add(HostMemory(site.decode(replace(DECODE, layout=request.param))[0]))) as host:
        yield [host]


@pytest.mark.parametrize(
    "remote", [PREFILL, replace(PREFILL, tp=2), Engine(layout="LBNHC", block_tokens=16, blocks=12)]
)
def test_what_lands_and_is_loaded_is_what_a_pull_brings(hosts: list[HostMemory], site: Site, remote: Engine) -> None:
    (host,) = hosts
    prefill = site.prefill(remote)
    order = an_order("r", prefill.prefill("r", THEIRS), (HOST_BLOCKS,))
    assert host.landings.execute(Orders(landings=(order,))) == []
    assert host.end() == RankEnds(1)
    assert host.worker.untouched, "a landing writes to the device"
    counts = (host.stats.take() or {})["counts"]
    assert counts["landed_bytes"] == counts["pull_bytes"] > 0
    slots = [block - 1 for block in HOST_BLOCKS]
    host.load(0, OURS[0], HOST_BLOCKS)
    assert host.worker.holds([(OURS, 0, 69)], remote)
    unused = sorted(set(range(LANDING_SLOTS)) - set(slots))
    assert not host.memory.reshape(LANDING_SLOTS, -1)[unused].any(), "a landing writes outside its slots"


@pytest.mark.parametrize("remote", [PREFILL, replace(PREFILL, tp=2, layout="BHLNC")])
def test_host_memory_is_pulled_to_host_memory(hosts: list[HostMemory], site: Site, remote: Engine) -> None:
    (host,) = hosts
    moving = MovingEngine(site, remote)
    lease = moving.prefill.prefill("r", THEIRS)
    moving.move(lease, THEIRS, IN_HOST)
    host.landings.execute(Orders(landings=(an_order("r", lease, (HOST_BLOCKS,)),)))
    assert host.end() == RankEnds(1)
    counts = (host.stats.take() or {})["counts"]
    assert counts["pull_bytes_from_host"] == counts["landed_bytes"] > 0
    host.load(0, OURS[0], HOST_BLOCKS)
    assert host.worker.holds([(OURS, 0, 69)], remote)


def test_a_landing_that_fails_is_reported_as_failed(hosts: list[HostMemory], site: Site) -> None:
    (host,) = hosts
    prefill = site.prefill()
    site.fabric.inject(1, Fault())
    host.landings.execute(Orders(landings=(an_order("r", prefill.prefill("r", THEIRS), (HOST_BLOCKS,)),)))
    assert host.end() == RankEnds(1, failed=True)


def test_landings_that_have_not_ended_when_the_engine_sleeps_have_failed(hosts: list[HostMemory], site: Site) -> None:
    (host,) = hosts
    prefill = site.prefill()
    host.landings.execute(Orders(landings=(an_order("r", prefill.prefill("r", THEIRS), (HOST_BLOCKS,)),)))
    host.close()
    assert host.landings.abandoned().landings == {"r": RankEnds(1, failed=True)}
    assert not host.landings.abandoned()


def test_a_landing_of_which_the_prefill_engine_lacks_a_state_says_so(hosts: list[HostMemory]) -> None:
    landings = hosts[0].landings
    for end in (PullEnd("r", lacking_states=frozenset({(1, 4)})), PullEnd("s")):
        landings._outstanding[end.request_id] = False
        landings._ended.put(end)
    ends = landings.take_report().landings
    lacking = frozenset({(1, 4)})
    assert ends == {"r": RankEnds(1, lacking_states=lacking), "s": RankEnds(1)}
    assert ends["s"] + ends["r"] + ends["s"] == RankEnds(3, lacking_states=lacking)
