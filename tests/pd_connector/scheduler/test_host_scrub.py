"""What is zeroed in host memory, and when: with vLLM's own pool, by hand and in portions.

``test_host_machine`` has it in any order of events.

Covers: pd_connector.vllm.forgotten_slots.
"""

import pytest

from pd_connector.orders import Report
from pd_connector.scheduler.host_scrub import HostScrub, portion_slots
from pd_connector.stats import StatsRecorder
from pd_connector.vllm.block_pools import HostBlockPool, slot_of
from pd_connector.vllm.forgotten_slots import ForgottenSlots
from tests.support.host_tier.cases import engine_of, said, with_memory_of
from tests.support.host_tier.engine import HostTierEngine
from tests.support.host_tier.ranks import End
from tests.support.host_tier.setup import Setup, make_manager, make_pool

SETUP = Setup(slots=8, scrubs=True)


def a_pool(setup: Setup = SETUP) -> HostBlockPool:
    return make_pool(setup, make_manager(setup))


def ordered(scrub: HostScrub) -> list[list[int]]:
    scrub.check_integrity()
    return [order.slots.tolist() for order in scrub.step_orders({}).scrubs]


def zeroed(engine: HostTierEngine) -> list[int]:
    (rank,) = engine.ranks
    return [slot for slot, held in enumerate(rank.host) if not any(held)]


# What is forgotten


def test_slots_that_are_given_back_with_contents_that_nobody_can_find_are_zeroed() -> None:
    pool = a_pool()
    taken = pool.take(3)
    scrub = HostScrub(pool.forgotten, 1, 8)
    assert ordered(scrub) == []
    pool.pin(taken[:1])
    pool.unpin(taken)
    assert ordered(scrub) == [[slot_of(block) for block in taken[1:]]], "the first one is still in use"


def test_without_the_setting_nothing_is_remembered() -> None:
    pool = a_pool(Setup(slots=8))
    taken = pool.take(3)
    pool.forgotten.zero_first(taken)
    pool.unpin(taken)
    assert len(pool.forgotten) == 0


def test_what_is_taken_again_before_it_is_zeroed_is_left_to_what_takes_it() -> None:
    pool = a_pool()
    pool.unpin(pool.take(8))
    again = pool.take(3)
    [slots] = ordered(HostScrub(pool.forgotten, 1, 8))
    assert sorted(slots) == sorted(set(range(8)) - {slot_of(block) for block in again})


def test_contents_that_can_be_found_stay_and_a_reset_has_them_zeroed() -> None:
    engine = with_memory_of(16, scrubs=True)
    empty = zeroed(engine)
    assert len(empty) == 16 - 3, "three full blocks are stored, and nothing else was ever written"
    engine.reset(preempts=True)
    engine.settle()
    assert len(zeroed(engine)) == 16
    assert engine.pool.cached == 0
    engine.check_at_rest()


def test_what_a_request_loads_is_zeroed_when_it_has_been_loaded() -> None:
    engine = with_memory_of(16, scrubs=True)
    engine.arrive("again", said(16))
    engine.step()
    engine.step()
    engine.reset(preempts=False)
    for _ in range(3):
        engine.step()
        engine.check()
    assert len(zeroed(engine)) == 13, "slots are zeroed under a load"
    engine.end_copies()
    engine.settle()
    engine.go_on(20)
    engine.settle()
    engine.check_at_rest()


def test_a_store_that_fails_leaves_nothing() -> None:
    engine = engine_of(scrubs=True)
    engine.arrive("failing", said(16))
    for _ in range(6):
        engine.step(20)
    engine.end_copies(End.FAILED)
    engine.settle()
    engine.check()
    assert len(zeroed(engine)) == 16 - engine.pool.cached


# When


@pytest.mark.parametrize(
    ("slot_bytes", "slots"), [(0, 256), (1 << 12, 256), (1 << 20, 256), (2 << 20, 128), (100 << 20, 2), (1 << 30, 1)]
)
def test_a_portion_has_no_more_slots_than_a_step_hands_over_in_no_time(slot_bytes: int, slots: int) -> None:
    assert portion_slots(slot_bytes) == slots


def test_one_portion_is_under_way_at_a_time_until_every_rank_has_reported_it() -> None:
    pool = a_pool()
    pool.unpin(pool.take(8))
    scrub = HostScrub(pool.forgotten, 2, 3)
    assert [len(slots) for slots in ordered(scrub)] == [3]
    assert ordered(scrub) == []
    scrub.settled(set(), set(), Report(scrubs={0: 1}))
    assert ordered(scrub) == []
    scrub.settled(set(), set(), Report(scrubs={0: 1}))
    assert [len(slots) for slots in ordered(scrub)] == [3]
    scrub.settled(set(), set(), Report(scrubs={1: 2}))
    assert [len(slots) for slots in ordered(scrub)] == [2]
    assert scrub.wants_step, "nobody would learn of the end"
    scrub.settled(set(), set(), Report(scrubs={2: 2}))
    assert not scrub.wants_step
    stats = StatsRecorder()
    scrub.update_stats(stats)
    assert stats.take()["counts"]["host_blocks_scrubbed"] == 8


def test_what_is_forgotten_wants_a_step() -> None:
    pool = a_pool()
    scrub = HostScrub(pool.forgotten, 1, 3)
    assert not scrub.wants_step
    pool.unpin(pool.take(1))
    assert scrub.wants_step


def test_what_must_be_zero_before_it_is_written_to_waits_for_no_portion() -> None:
    pool = a_pool()
    pool.unpin(pool.take(6))
    scrub = HostScrub(pool.forgotten, 1, 2)
    ordered(scrub)
    taken = pool.take(1)
    pool.forgotten.zero_first(taken)
    assert scrub.wants_step
    assert ordered(scrub) == [[slot_of(taken[0])]]
    scrub.settled(set(), set(), Report(scrubs={1: 1}))
    assert ordered(scrub) == [], "the end of what was urgent is not the end of the portion"
    scrub.settled(set(), set(), Report(scrubs={0: 1}))
    assert len(ordered(scrub)) == 1


def test_a_book_that_nobody_reads_stays_empty() -> None:
    book = ForgottenSlots(kept=False)
    book.given_back(a_pool().take(2))
    assert len(book) == 0
    assert book.take(5) == ()
    assert book.take_urgent() == ()
