"""Host blocks that are lent: all or none, not evicted, given back once, and lost where a copy may still write."""

from typing import Any

import pytest

from pd_connector.scheduler.host_loans import HostLoans
from pd_connector.vllm.block_pools import DeviceBlocks, HeldBlocks, HostBlockPool, slot_of
from tests.support.host_tier.setup import Setup, make_manager, make_pool, make_request

TOKENS, SLOTS = 10, 5  # two full blocks, and a tail
SETUP = Setup(groups=((4, 0),), device_blocks=16, slots=SLOTS)


@pytest.fixture
def parts() -> tuple[HostBlockPool, HostLoans, HeldBlocks]:
    """A pool, its loans, and the device blocks of a prompt."""
    manager = make_manager(SETUP)
    pool, device = make_pool(SETUP, manager), DeviceBlocks()
    device.bind(manager)
    request: Any = make_request(SETUP, "r", list(range(TOKENS)))
    assert manager.allocate_slots(request, TOKENS) is not None
    return pool, HostLoans(pool), device.hold("r")


def test_too_few_free_blocks_lend_none(parts: tuple[HostBlockPool, HostLoans, HeldBlocks]) -> None:
    pool, loans, _ = parts
    held = loans.lend((), 3)
    assert held is not None
    before = pool.references()
    assert loans.lend(held, SLOTS - 2) is None
    assert pool.references() == before == loans.references(), "nothing is lent, and nothing is kept pinned"
    taken = loans.lend(held, SLOTS - 3)
    assert taken is not None
    assert not {*map(slot_of, held)} & {*map(slot_of, taken)}
    assert loans.references() == pool.references()


def test_copies_are_found_once_they_are_published_and_lent_again_then(
    parts: tuple[HostBlockPool, HostLoans, HeldBlocks],
) -> None:
    pool, loans, blocks = parts
    first = loans.lend_for_copies(blocks)
    assert first is not None
    assert (first.new, pool.cached) == ((0, 1, 2), 0)
    loans.publish(blocks, first)
    assert pool.cached == 2, "the tail is for nobody else"
    second = loans.lend_for_copies(blocks)
    assert second is not None
    assert (second.new, second.hosts[:2]) == ((2,), first.hosts[:2])
    assert sorted(loans.references().values()) == [1, 1, 2, 2]
    loans.take_back(first.hosts)
    assert loans.are_lent([second.hosts])
    loans.take_back(second.hosts)
    assert pool.references() == loans.references() == {}
    assert pool.cached == 2, "what was lent stays until its slots are needed"
    assert not loans.are_lent([second.hosts])


def test_blocks_to_which_a_copy_may_still_write_are_never_lent_again(
    parts: tuple[HostBlockPool, HostLoans, HeldBlocks],
) -> None:
    pool, loans, blocks = parts
    loan = loans.lend_for_copies(blocks)
    assert loan is not None
    loans.take_back(loan.hosts, lost=(1,))
    assert pool.references() == loans.references() == {slot_of(loan.hosts[1]): 1}
    assert loans.lend((), SLOTS) is None
    rest = loans.lend((), SLOTS - 1)
    assert rest is not None
    assert slot_of(loan.hosts[1]) not in map(slot_of, rest)
