"""What the host tier stores, when, and what becomes of it: one case at a time, with vLLM's own cache manager."""

import logging

import pytest

from pd_connector.orders import LoadOrder, Orders, Report, StoreEnds, StoreOrder
from tests.support.host_tier.cases import (
    EVERYTHING,
    WINDOWED,
    engine_of,
    said,
    steps,
    stores,
    under_way,
    with_memory_of,
)
from tests.support.host_tier.engine import HostTierEngine
from tests.support.host_tier.ranks import End
from tests.support.host_tier.setup import State
from tests.support.releases import since

# Stores


def test_a_block_is_stored_when_the_step_after_it_is_planned() -> None:
    engine = engine_of()
    engine.arrive("first", said(13))
    engine.step(4)
    assert stores(engine) == 0
    engine.step(4)
    assert stores(engine) == 1
    engine.step(3)
    assert stores(engine) == 2


def test_a_block_that_another_request_computes_in_the_same_step_is_not_stored_before_it_is_computed() -> None:
    """vLLM shares blocks as soon as they are planned."""
    engine = engine_of()
    for name in ("first", "second"):
        engine.arrive(name, said(9), outputs=2)
    engine.plan(20)
    assert engine.manager.get_block_ids("first")[0][0] == engine.manager.get_block_ids("second")[0][0]
    assert not engine.steps[0].copies[0]
    engine.update()
    engine.step()
    assert stores(engine) == 1


def test_a_block_is_stored_once_though_two_requests_have_it() -> None:
    engine = engine_of()
    for name in ("first", "second"):
        engine.arrive(name, said(12), outputs=4)
    steps(engine, 8)
    assert stores(engine) == 2


def test_what_is_in_host_memory_is_not_stored_again() -> None:
    engine = with_memory_of(14)
    cached = engine.pool.cached
    engine.serve("second", said(14))
    assert engine.pool.cached == cached
    assert engine.counted()["host_blocks"] == cached


def test_what_a_request_has_computed_last_is_stored_when_it_leaves() -> None:
    engine = engine_of()
    job = engine.arrive("first", said(13))
    engine.step(12)
    assert job.state is State.GONE
    assert engine.tier.wants_step
    engine.settle()
    assert engine.pool.cached == 3


def test_what_an_aborted_request_was_loading_is_not_stored() -> None:
    engine = with_memory_of(14)
    job = engine.arrive("second", said(14))
    engine.step()
    assert under_way(engine, LoadOrder) == 1
    engine.pool.evict_all()
    engine.abort(job)
    engine.settle()
    assert engine.pool.cached == 0
    engine.check_at_rest()


def test_blocks_stay_on_the_device_until_they_are_stored() -> None:
    engine = engine_of(ranks=2)
    engine.serve("nothing of it is full", said(3))
    engine.arrive("first", said(13))
    engine.step(12)
    engine.step()
    assert engine.tier.frees_blocks_soon
    engine.other_requests_come(EVERYTHING)  # would be found to write to blocks that are being stored
    engine.settle()
    assert not engine.tier.frees_blocks_soon
    engine.check_at_rest()


def test_stored_blocks_are_the_last_to_be_reused_on_the_device() -> None:
    engine = engine_of()
    engine.serve("first", said(14))
    held = [block.block_hash is not None for block in engine.manager.block_pool.free_block_queue.get_all_free_blocks()]
    assert held == [False] * 13 + [True] * 3


def test_there_are_never_more_stores_than_slots_and_the_others_come_later() -> None:
    engine = engine_of(slots=2)
    engine.arrive("first", said(25), outputs=8)
    engine.step(20)
    for _ in range(4):
        engine.step()
        assert stores(engine) <= 2
    assert engine.tier._requests["first"].scanned == [2]
    engine.end_copies()
    steps(engine, 2)
    assert engine.tier._requests["first"].scanned == [4]


def test_the_least_recently_used_block_makes_room() -> None:
    engine = engine_of(slots=4)
    engine.serve("a", said(9, seed=1))
    engine.serve("b", said(9, seed=2))
    assert engine.pool.cached == 4
    engine.other_requests_come(EVERYTHING)
    engine.serve("a is used", said(10, seed=1))
    engine.serve("c", said(9, seed=3))
    engine.other_requests_come(EVERYTHING)
    found = [
        engine.tier.missing_tokens(engine.arrive(f"again {seed}", said(10, seed)).request, 0) for seed in (1, 2, 3)
    ]
    assert found == [8, 0, 8]


def test_of_one_prompt_the_end_is_forgotten_first() -> None:
    engine = engine_of(slots=4)
    engine.serve("a", said(17, seed=1))
    engine.serve("b", said(9, seed=2))
    engine.other_requests_come(EVERYTHING)
    assert engine.tier.missing_tokens(engine.arrive("again", said(18, seed=1)).request, 0) == 8


def test_of_a_prompt_computed_in_several_steps_the_end_is_forgotten_first() -> None:
    engine = engine_of(slots=4)
    engine.arrive("a", said(18, seed=1), outputs=2)
    for _ in range(6):
        engine.step(8)
        engine.end_copies()
    engine.settle()
    assert engine.tier._next_store > 1
    engine.serve("b", said(9, seed=2))
    engine.other_requests_come(EVERYTHING)
    assert engine.tier.missing_tokens(engine.arrive("again", said(18, seed=1)).request, 0) == 8


def test_what_a_reset_has_forgotten_is_stored_again_by_those_who_go_on() -> None:
    engine = engine_of()
    engine.arrive("first", said(30), outputs=14)
    steps(engine, 6)
    engine.settle()
    assert engine.pool.cached > 0
    assert engine.reset(preempts=True)
    engine.go_on(40)
    engine.settle()
    engine.other_requests_come(EVERYTHING)
    assert engine.tier.missing_tokens(engine.arrive("again", said(30)).request, 0) == 28


def test_what_was_forgotten_while_a_request_was_preempted_is_stored_again() -> None:
    engine = engine_of()
    job = engine.arrive("first", said(26), outputs=8)
    steps(engine, 5)
    engine.settle()
    assert engine.pool.cached >= 4
    engine.preempt(job)
    engine.pool.evict_all()
    engine.other_requests_come(EVERYTHING)
    engine.go_on(40)
    engine.settle()
    engine.other_requests_come(EVERYTHING)
    assert engine.tier.missing_tokens(engine.arrive("again", said(26)).request, 0) == 24


def test_the_end_of_a_prompt_is_forgotten_first_though_it_is_stored_after_its_request_has_left() -> None:
    engine = engine_of(slots=4)
    engine.arrive("a", said(17, seed=1))
    for _ in range(6):
        engine.step(8)
        engine.end_copies()
    engine.settle()
    assert engine.tier._next_store == 2
    engine.serve("b", said(9, seed=2))
    engine.other_requests_come(EVERYTHING)
    assert engine.tier.missing_tokens(engine.arrive("again", said(18, seed=1)).request, 0) == 8


def test_a_request_that_is_unknown_is_not_stored() -> None:
    engine = engine_of()
    assert engine.tier.step_orders({"unknown": 12}) == Orders()


def test_blocks_are_stored_though_a_window_passes_them_in_the_next_step() -> None:
    engine = engine_of(groups=WINDOWED, device_blocks=33, slots=33)
    engine.arrive("first", said(22))
    engine.step(21)
    engine.step()
    engine.settle()
    held = [block.block_hash for block in engine.pool._pool.blocks if block.block_hash is not None]
    assert len(held) == 5 + 5
    engine.check()


# The ends of stores


def test_a_block_is_found_when_the_last_rank_has_stored_it() -> None:
    engine = engine_of(ranks=3)
    job = engine.arrive("first", said(14))
    while job.state is not State.GONE:
        engine.step(20)
    engine.step()
    again = engine.arrive("second", said(14)).request
    for rank in engine.ranks:
        assert engine.tier.missing_tokens(again, 0) == 0
        rank.finish(rank.under_way[0], End.WELL)
        engine._order([])
        engine.run_all()
    assert engine.tier.missing_tokens(again, 0) == 12


@pytest.mark.parametrize("end", [End.FAILED, End.UNSETTLED])
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_store_that_has_failed_on_one_rank_is_not_found(end: End, bad_rank: int) -> None:
    engine = engine_of(ranks=2)
    engine.arrive("first", said(14))
    engine.step(20)
    engine.step()
    for number, rank in enumerate(engine.ranks):
        rank.finish(rank.under_way[0], end if number == bad_rank else End.WELL)
    engine.settle()
    assert engine.pool.cached == 0
    assert engine.tier._storing == {}
    lost = 3 if end is End.UNSETTLED else 0
    assert engine.pool.free == engine.setup.slots - lost
    assert engine.tier.loans.lost == lost
    engine.other_requests_come(EVERYTHING)
    engine.serve("second", said(14))  # it is stored by this one
    assert engine.pool.cached == 3
    engine.check_at_rest()


def test_a_pool_of_which_every_slot_is_lost_stores_nothing() -> None:
    engine = engine_of(slots=2)
    engine.arrive("first", said(9))
    engine.step(20)
    engine.step()
    engine.end_copies(End.UNSETTLED)
    engine.settle()
    assert engine.pool.free == 0
    engine.serve("second", said(25, seed=5))
    assert engine.pool.cached == 0
    assert not engine.tier.wants_step


def test_a_store_that_ends_twice_is_ignored(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = with_memory_of(14)
    monkeypatch.setattr(logging.getLogger("pd_connector"), "propagate", True)
    before = engine.counted()
    engine.tier.settled(set(), set(), Report({0: StoreEnds(1)}))
    assert engine.counted() == before
    assert "store 0 ended twice" in caplog.text
    engine.check()


def test_the_number_of_stored_blocks_is_told() -> None:
    engine = with_memory_of(14, ranks=2)
    counted = engine.counted()
    assert counted["host_blocks"] == counted["host_blocks_cached"] == 3
    assert counted["host_blocks_capacity"] == 16


# Lazily


def lazy(**options: object) -> HostTierEngine:
    return engine_of(mode="lazy", **options)


def order(engine: HostTierEngine) -> list[int]:
    """Device blocks in the order in which vLLM takes them."""
    return [block.block_id for block in engine.manager.block_pool.free_block_queue.get_all_free_blocks()]


def test_nothing_is_stored_lazily_while_there_is_room() -> None:
    engine = lazy(lookahead=4)
    engine.serve("first", said(14))
    assert engine.pool.cached == 0
    assert not engine.tier.wants_step


def test_what_is_next_to_be_evicted_is_stored_and_is_again_the_next() -> None:
    engine = lazy(lookahead=4)
    engine.serve("first", said(14))
    engine.manager.block_pool.get_new_blocks(11)  # of 16; the last ones are the three blocks, from last to first
    before = order(engine)
    engine.arrive("second", said(6, seed=7), outputs=1)
    engine.step()
    assert stores(engine) == 3
    assert not set(order(engine)) & set(before[-3:])
    engine.end_copies()
    engine.step()
    assert order(engine)[1:4] == before[-3:]  # behind one that is empty
    assert engine.pool.cached == 3
    engine.arrive("third", said(14))
    engine.check()


def test_blocks_in_use_are_not_stored_lazily() -> None:
    engine = lazy(lookahead=16)
    engine.arrive("first", said(22), outputs=6)
    steps(engine, 10)
    assert under_way(engine, StoreOrder) == 0


def test_a_lookahead_shorter_than_the_queue_leaves_the_rest() -> None:
    engine = lazy(lookahead=2, device_blocks=6)
    engine.serve("first", said(14))
    engine.arrive("second", said(6, seed=7), outputs=2)
    engine.step()
    assert stores(engine) == 1  # the other block to be taken next is empty


def test_a_block_that_is_hit_while_it_is_stored_lazily_is_kept() -> None:
    engine = lazy(lookahead=8, device_blocks=8)
    engine.serve("first", said(14))
    engine.arrive("second", said(14, seed=7))
    engine.step(20)
    assert stores(engine) == 3
    job = engine.arrive("third", said(15), outputs=2)
    engine.step()
    assert job.state is State.RUNNING
    engine.settle()
    assert engine.pool.cached == 6  # those of the second request too, which has ended
    assert {engine.manager.block_pool.blocks[block].ref_cnt for block in engine.manager.get_block_ids("third")[0]} == {
        1
    }


@since((0, 30), "all blocks that hold nothing in front of the others")
def test_what_fits_lazily_stays_though_more_could_be_evicted() -> None:
    engine = lazy(lookahead=16, slots=2)
    engine.serve("first", said(22))
    engine.manager.block_pool.get_new_blocks(10)  # of 16; what follows is one that is empty, and the five of the first
    stored = []
    for number in range(4):
        engine.serve(f"other {number}", said(2, seed=7))
        assert not engine.tier.wants_step
        stored.append(engine.tier._next_store)
    assert engine.pool.cached == 2
    assert stored == [1, 1, 1, 1]


def test_of_one_prompt_stored_lazily_the_end_is_forgotten_first() -> None:
    engine = lazy(lookahead=16, slots=6)
    engine.serve("a", said(17, seed=1))
    engine.manager.block_pool.get_new_blocks(11)  # what follows is one that is empty, and the four of a
    engine.arrive("other", said(2, seed=50))
    engine.step()
    assert stores(engine) == 4
    engine.settle()
    host = engine.pool._pool
    host.get_new_blocks(4)  # two hold nothing
    assert engine.tier.missing_tokens(engine.arrive("again", said(18, seed=1)).request, 0) == 8


def test_a_lazy_store_that_fails_is_not_ordered_again_and_again() -> None:
    engine = lazy(lookahead=16)
    engine.serve("first", said(14))
    job = engine.arrive("second", said(30, seed=7), outputs=20)
    while job.state is not State.GONE:
        engine.step()
        engine.end_copies(End.FAILED)
    engine.settle()
    assert engine.tier._next_store == 1
    engine.check_at_rest()


def test_what_a_reset_of_host_memory_has_forgotten_is_stored_lazily_again() -> None:
    engine = lazy(lookahead=16)
    engine.serve("first", said(14))
    engine.serve("second", said(2, seed=7))
    assert engine.pool.cached == 3
    assert engine.tier.reset()
    engine.serve("third", said(2, seed=8))
    assert engine.pool.cached == 3


def test_blocks_that_a_pull_takes_move_on_what_is_next_to_be_evicted() -> None:
    """Such a step computes nothing."""
    engine = lazy(lookahead=3, device_blocks=17)
    engine.serve("first", said(17, seed=1))
    engine.serve("second", said(17, seed=50))
    taken = engine.manager.block_pool.get_new_blocks(8)
    engine.arrive("pulled", said(6, seed=90))
    engine.step(pulls=True)
    assert not engine.running
    assert stores(engine) > 0
    engine.manager.block_pool.free_blocks(taken)


@since((0, 30), "all blocks that hold nothing in front of the others")
def test_blocks_that_a_request_finds_move_on_what_is_next_to_be_evicted() -> None:
    engine = lazy(lookahead=4, device_blocks=17, slots=16)
    for number, tokens in enumerate((9, 9, 13)):
        engine.serve(f"prompt {number}", said(tokens, seed=100 * number))
    engine.manager.block_pool.get_new_blocks(8)  # of 16; what follows is an empty one, and the seven of the prompts
    engine.serve("small", said(2, seed=900))
    assert engine.pool.cached == 4
    engine.arrive("again", said(14, seed=100), outputs=5)  # finds the third and the fourth
    engine.step()
    engine.settle()
    assert engine.pool.cached == 6


def test_what_one_step_takes_beyond_what_was_free_before_is_not_stored_lazily() -> None:
    """A limit that docs/host-memory.md names: it is evicted in the step that would have looked at it."""
    engine = lazy(lookahead=10, device_blocks=21)
    engine.serve("older", said(41, seed=1000))
    engine.serve("first", said(49, seed=1))
    engine.arrive("takes ten at once", said(41, seed=500))
    engine.step(40)
    engine.settle()
    again = engine.arrive("again", said(50, seed=1)).request
    on_device = engine.manager.get_computed_blocks(again)[1]
    assert on_device == 40, "two of twelve blocks are gone"
    assert engine.tier.missing_tokens(again, on_device) == 0


def test_what_was_being_stored_lazily_during_a_reset_is_stored_again() -> None:
    engine = lazy(lookahead=16)
    engine.serve("first", said(14))
    engine.arrive("second", said(2, seed=7))
    engine.step()
    assert engine.tier._jobs
    assert engine.tier.reset()
    engine.settle()
    assert engine.pool.cached == 0
    engine.serve("third", said(2, seed=8))
    assert engine.pool.cached == 3
