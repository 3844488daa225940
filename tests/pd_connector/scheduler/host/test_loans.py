"""Host blocks that are lent: none of them is evicted, and each comes back once."""

import pytest
from vllm.v1.core.kv_cache_manager import KVCacheManager

from pd_connector.scheduler.host.loans import HostLoans
from pd_connector.vllm.block_pools import HostBlockPool
from pd_connector.vllm.device_blocks import HeldBlocks
from tests.support.host_tier.setup import STATES, Setup, make_manager, make_pool, make_request
from tests.support.releases import INSTALLED

SETUP = Setup(groups=((4, 0),), device_blocks=8, slots=4)
Parts = tuple[KVCacheManager, HostBlockPool, HostLoans]


@pytest.fixture
def parts() -> Parts:
    manager = make_manager(SETUP)
    pool = make_pool(SETUP, manager)
    return manager, pool, HostLoans(pool)


def on_device(manager: KVCacheManager, tokens: int = 8, name: str = "r", first: int = 0) -> HeldBlocks:
    """The blocks of a prompt that has been computed, of the tokens from ``first`` on; full ones can be found."""
    request = make_request(SETUP, name, range(first, first + tokens))
    assert manager.allocate_slots(request, tokens) is not None
    return tuple(manager.get_blocks(name).blocks[0])


def test_copies_that_are_published_can_be_found_and_stay_while_they_are_lent(parts: Parts) -> None:
    manager, pool, loans = parts
    blocks = on_device(manager)
    loan = loans.lend_for_copies(blocks)
    assert loan is not None
    assert loan.new == (0, 1)
    loans.publish(blocks, loan)
    assert pool.cached == 2
    again = loans.lend_for_copies(blocks)
    assert again is not None
    assert (again.hosts, again.new) == (loan.hosts, ())
    assert loans.are_lent([loan.hosts, again.hosts])
    assert loans.lend((), 3) is None, "lent blocks would be evicted"
    loans.take_back(loan.hosts)
    loans.take_back(again.hosts)
    assert not loans.are_lent([loan.hosts])
    assert loans.lend((), 4) is not None
    assert pool.cached == 0


def test_what_is_lent_for_its_contents_is_not_evicted_for_the_free_ones_beside_it(parts: Parts) -> None:
    manager, pool, loans = parts
    blocks = on_device(manager)
    loan = loans.lend_for_copies(blocks)
    assert loan is not None
    loans.publish(blocks, loan)
    loans.take_back(loan.hosts)
    assert loans.lend(loan.hosts, 3) is None
    taken = loans.lend(loan.hosts, 2)
    assert taken is not None
    assert not {block.block_id for block in taken} & {block.block_id for block in loan.hosts}
    assert pool.cached == 2


@pytest.mark.skipif(INSTALLED < (0, 30), reason="vLLM names full blocks only")
@pytest.mark.parametrize(
    ("groups", "token_ranks", "drafts"), [(((8, 0), (4, 8)), 1, True), (((4, 0), (4, STATES)), 2, False)]
)
def test_a_last_block_that_is_named_by_a_part_of_its_tokens_stands_for_no_other(
    groups: tuple[tuple[int, int], ...], token_ranks: int, drafts: bool
) -> None:
    """Two prompts that differ behind the last hash: each has its last tokens in a slot of its own."""
    setup = Setup(mode="lazy", groups=groups, device_blocks=32, slots=32, lookahead=32)
    manager = make_manager(setup, token_ranks, drafts=drafts, hash_tokens=4)
    pool = make_pool(setup, manager)
    loans = HostLoans(pool)
    slots = []
    for name, end in (("a", 900), ("b", 800)):
        request = make_request(setup, name, [*range(20), end])
        known, tokens, *_ = manager.get_computed_blocks(request)
        assert manager.allocate_slots(request, request.num_tokens - tokens, tokens, known) is not None
        blocks = tuple(manager.get_blocks(name).blocks[0])
        assert blocks[-1].block_hash is not None, "vLLM has named a block of 5 tokens"
        loan = loans.lend_for_copies(blocks)
        assert loan is not None
        assert len(blocks) - 1 in loan.new, "the last tokens are to be copied"
        loans.publish(blocks, loan)
        slots.append(loan.hosts[-1].block_id)
        manager.free(request)
    assert slots[0] != slots[1]
    assert pool.cached == len(blocks) - 1
    stored = {candidate.block.block_id for candidate in pool.eviction_candidates()}
    assert blocks[-1].block_id not in stored, "it is found by nobody"


def test_slots_to_which_a_failed_copy_may_still_write_are_never_used_again(parts: Parts) -> None:
    _, pool, loans = parts
    taken = loans.lend((), 4)
    assert taken is not None
    loans.take_back(taken, lost=[1, 3])
    assert pool.free == 2
    assert loans.references() == pool.references() == {taken[1].block_id - 1: 1, taken[3].block_id - 1: 1}
