"""Pulls of leases that have moved to the prefill engine's host memory: every byte, and what may not be used."""

from collections.abc import Iterator

import pytest

from pd_connector.orders import Cause
from tests.support.connector.engines import (
    OURS,
    PREFILL,
    THEIRS,
    Site,
    an_order,
    pull_once,
)
from tests.support.connector.moving import IN_HOST, MovingEngine
from tests.support.layout.oracle import Engine, Model

WINDOWED = Model(kv_heads=4, contents=(6, 10), item_size=2, groups=((0, 2), (1,)), windows=(0, 40))


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.close()


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "layouts", "decode_tokens"),
    [
        (1, 1, ("BHLNC", "LBHNC"), 16),
        (1, 1, ("LBHNC", "BLHNC"), 8),
        (2, 1, ("BLHNC", "BHLNC"), 32),
        (1, 2, ("BHLNC", "BHLNC"), 8),
        (2, 4, ("LBHNC", "BHLNC"), 16),
        (4, 2, ("BHLNC", "LBHNC"), 32),
    ],
)
def test_a_lease_that_has_moved_is_read_in_host_memory(
    site: Site, prefill_tp: int, decode_tp: int, layouts: tuple[str, str], decode_tokens: int
) -> None:
    source = Engine(layout=layouts[0], blocks=12, tp=prefill_tp)
    target = Engine(layout=layouts[1], blocks=24, tp=decode_tp, block_tokens=decode_tokens)
    moving = MovingEngine(site, source)
    remote = moving.prefill.prefill("r", THEIRS)
    assert moving.move(remote, THEIRS, IN_HOST) == "r"
    local = (tuple(range(1, 1 + -(-70 // decode_tokens))),)
    workers = site.decode(target)
    for worker in workers:
        site.session(worker, remote).submit(an_order("r", remote, local))
    for worker in workers:
        end = worker.next_end()
        assert (end.cause, end.tokens) == ("", 69), end.reason
        assert end.host_bytes == end.copied_bytes > 0
        assert worker.holds([(local, 0, 69)], source)
    assert moving.prefill.leases.collect() == ("slots",)


def test_windows_that_have_passed_are_holes_in_host_memory_too(site: Site) -> None:
    moving = MovingEngine(site, PREFILL, WINDOWED)
    theirs, slots, ours = (
        ((5, 6, 3, 9, 2), (0, 0, 4, 7, 8)),
        ((7, 0, 4, 8, 1), (-1, -1, 2, 3, 5)),
        ((1, 2, 8, 3, 11), (0, 0, 4, 5, 6)),
    )
    remote = moving.prefill.prefill("r", theirs)
    moving.move(remote, theirs, slots)
    (worker,) = site.decode(model=WINDOWED)
    site.session(worker, remote).submit(an_order("r", remote, ours))
    assert worker.next_end().cause == ""
    assert worker.holds([(ours, 0, 69)])


def test_a_lease_that_has_not_moved_is_read_on_the_device_and_stays_there(site: Site) -> None:
    moving = MovingEngine(site)
    remote = moving.prefill.prefill("r", THEIRS)
    (worker,) = site.decode()
    site.session(worker, remote).submit(an_order("r", remote, OURS))
    end = worker.next_end()
    assert (end.cause, end.host_bytes) == ("", 0)
    assert worker.holds([(OURS, 0, 69)])


def test_what_was_read_on_the_device_by_one_who_does_not_ask_is_never_confirmed(site: Site) -> None:
    """A decode engine of before that reads while the lease moves."""
    moving = MovingEngine(site)
    remote = moving.prefill.prefill("r", THEIRS)
    (worker,) = site.decode()
    session = site.session(worker, remote)
    service = moving.prefill.service
    service._host_workers = ()  # so it is not told that leases move
    moving.move(remote, THEIRS, IN_HOST)
    session.submit(an_order("r", remote, OURS))
    end = worker.next_end()
    assert end.cause == Cause.LEASE
    assert "has moved to the prefill engine's host memory" in end.reason


def test_a_lease_that_has_ended_is_not_read_at_all(site: Site) -> None:
    moving = MovingEngine(site)
    remote = moving.prefill.prefill("r", THEIRS)
    moving.prefill.leases.cancel([remote.lease_id])
    worker = site.decode()[0]
    end = pull_once(site, remote, worker)
    assert end.cause == Cause.LEASE
    assert "was cancelled" in end.reason
    assert worker.untouched
    assert end.copied_bytes == 0
