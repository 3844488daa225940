"""What the host tier finds, loads and gives back: one case at a time, with vLLM's own cache manager."""

from dataclasses import replace
from typing import Any
from unittest.mock import create_autospec

import pytest
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from pd_connector.orders import LoadOrder, Orders
from pd_connector.scheduler.host.tier import HostTier, _divided
from pd_connector.vllm.block_pools import HostHit
from tests.support.host_tier import setup
from tests.support.host_tier.cases import (
    EVERYTHING,
    WINDOWED,
    engine_of,
    said,
    steps,
    stores,
    tokens_loading,
    with_memory_of,
)
from tests.support.host_tier.engine import HostTierEngine
from tests.support.host_tier.ranks import End
from tests.support.host_tier.setup import Job, State
from tests.support.releases import since

# Hits


@pytest.mark.parametrize(
    ("tokens", "found"),
    [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (11, 8), (12, 8), (13, 12), (16, 12), (17, 12)],
)
def test_whole_blocks_are_found_and_a_token_is_left_to_compute(tokens: int, found: int) -> None:
    engine = with_memory_of(14)  # three blocks of it are full
    job = engine.arrive("second", said(tokens + 1))
    assert engine.tier.missing_tokens(job.request, 0) == found


def test_only_what_the_device_does_not_hold_is_offered() -> None:
    engine = with_memory_of(18)
    job = engine.arrive("second", said(18))
    assert engine.tier.missing_tokens(job.request, 8) == 8
    engine.step()
    assert tokens_loading(engine, "second") == 16


@pytest.mark.parametrize(("on_device", "found"), [(0, 12), (4, 4), (8, 4), (12, 0)])
def test_a_hit_leaves_no_chunk_whose_begin_is_not_in_it(on_device: int, found: int) -> None:
    """vLLM counts chunks from the first token that is looked up, and takes what lies before the last for seen."""
    engine = with_memory_of(18, groups=((4, 0), (4, -8)), device_blocks=33, slots=33)
    hit = engine.pool.find(engine.arrive("second", said(14)).request, on_device)
    assert (0 if hit is None else hit.tokens) == found
    begin = (on_device + found) // 8 * 8
    assert hit is None or not any(block.is_null for block in hit.groups[1][max(begin - on_device, 0) // 4 :])


def test_another_prompt_is_not_found() -> None:
    engine = with_memory_of(18)
    assert engine.tier.missing_tokens(engine.arrive("second", said(18, seed=1)).request, 0) == 0


def test_a_prompt_that_is_in_host_memory_is_loaded_and_not_computed() -> None:
    engine = with_memory_of(22, ranks=2)
    before = engine.computed_tokens
    engine.serve("second", said(22))
    assert engine.loaded_tokens == 20
    assert engine.computed_tokens - before == 1
    engine.check_at_rest()


def test_the_next_turn_of_a_conversation_finds_what_was_said_in_the_last() -> None:
    engine = engine_of()
    engine.serve("first", said(17), outputs=9)  # 16 tokens are computed, eight of them were put out
    engine.other_requests_come(EVERYTHING)
    assert engine.tier.missing_tokens(engine.arrive("second", said(26)).request, 0) == 16


def test_device_then_host_then_a_prefill_engine() -> None:
    engine = with_memory_of(14)
    engine.serve("a part of it", said(6))
    job = engine.arrive("second", said(26))
    engine.step(pulls=True)
    assert tokens_loading(engine, "second") == 8  # 4 are on the device, 12 to 23 come from elsewhere
    assert job.request.num_computed_tokens == 24
    engine.end_copies()
    while job.state is not State.GONE:
        engine.step()
    engine.settle()
    engine.check_at_rest()


def test_a_block_that_is_missing_in_the_middle_ends_the_hit() -> None:
    engine = with_memory_of(18)
    second = engine.pool._pool.blocks[2]
    engine.pool._pool.evict_blocks({second.block_id})
    assert engine.tier.missing_tokens(engine.arrive("second", said(18)).request, 0) == 4


# Sliding windows


def test_blocks_that_a_window_has_passed_are_not_loaded() -> None:
    engine = with_memory_of(22, groups=WINDOWED, device_blocks=33, slots=33)
    engine.arrive("second", said(22))
    engine.step()
    [copy] = engine.ranks[0].under_way
    assert isinstance(copy.order, LoadOrder)
    assert copy.order.tokens == 20
    assert copy.order.moves.groups.tolist() == [0, 0, 0, 0, 0, 1, 1]  # the window of token 20 begins at token 15
    tables = engine.manager.get_block_ids("second")
    assert copy.order.moves.blocks.tolist() == [*tables[0], *tables[1][3:]]
    assert tables[1][:3] == [0, 0, 0]


def test_blocks_that_leave_the_window_with_what_is_pulled_are_not_loaded() -> None:
    engine = with_memory_of(14, groups=WINDOWED, device_blocks=33, slots=33)
    engine.arrive("second", said(26))
    engine.step(pulls=True)
    loads = [copy.order for copy in engine.ranks[0].under_way if isinstance(copy.order, LoadOrder)]
    assert [load.moves.groups.tolist() for load in loads] == [[0, 0, 0]]
    assert loads[0].tokens == 12


def test_what_host_memory_has_no_block_for_is_not_loaded_though_the_device_keeps_one() -> None:
    """As with drafts of several tokens, for which a window keeps blocks a little longer."""
    null, host, device = KVCacheBlock(0, is_null=True), KVCacheBlock(3), [KVCacheBlock(7), KVCacheBlock(8)]
    assert _divided(HostHit(0, 8, ((null, host),)), [device], [4], 0) == ([(0, 8, 2)], [(0, 0)])


@since((0, 30), "drafts of several tokens beside windows")
def test_what_a_window_keeps_for_drafts_and_nothing_fills_is_found_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM names all blocks of a prefix that another has computed, and looks up fewer of them than a request has."""
    plain = setup._spec

    def with_drafts(tokens: int, window: int) -> Any:
        spec = plain(tokens, window)
        return replace(spec, extra_retained_tokens=2) if window else spec

    monkeypatch.setattr(setup, "_spec", with_drafts)
    engine = with_memory_of(22, groups=((4, 0), (4, 5)), device_blocks=33, slots=33)
    engine.arrive("second", said(22), outputs=4)
    engine.step()
    (copy,) = engine.ranks[0].under_way
    assert isinstance(copy.order, LoadOrder)
    moves = zip(copy.order.moves.groups.tolist(), copy.order.moves.blocks.tolist(), strict=True)
    loaded = {block for group, block in moves if group == 1}
    engine.end_copies()
    for _ in range(2):
        engine.step()
    prefix = engine.manager.get_blocks("second").blocks[1][:4]
    assert {block.block_id for block in prefix if not block.is_null} == loaded
    engine.go_on(10)
    engine.settle()
    engine.check_at_rest()


def test_what_a_window_passes_in_the_next_step_is_found_again() -> None:
    """A prompt is computed in one step, and the blocks before its window are taken from it when the next is planned."""
    engine = with_memory_of(23, groups=WINDOWED, device_blocks=33, slots=33)
    assert engine.tier.missing_tokens(engine.arrive("the same", said(23)).request, 0) == 20
    shared = (*said(12), *said(9, seed=50))
    assert engine.tier.missing_tokens(engine.arrive("begins alike", shared).request, 0) == 12


def test_a_window_that_is_not_whole_is_no_hit() -> None:
    engine = with_memory_of(23, groups=WINDOWED, device_blocks=33, slots=33)
    windowed = [block for block in engine.pool._pool.blocks if block.block_hash and block.block_hash[-1:] == b"\x01"]
    assert len(windowed) == 5
    engine.pool._pool.evict_blocks({windowed[3].block_id})  # tokens 12 to 15
    assert engine.tier.missing_tokens(engine.arrive("second", said(23)).request, 0) == 12


# Loads


def loading(**options: object) -> tuple[HostTierEngine, Job]:
    engine = with_memory_of(14, **options)
    job = engine.arrive("second", said(14))
    engine.step()
    assert job.state is State.LOADING
    return engine, job


def test_slots_that_are_loaded_from_cannot_be_taken() -> None:
    engine, job = loading(slots=3)
    assert engine.pool.free == 0
    engine.arrive("other", said(13, seed=9))
    steps(engine, 6)
    assert stores(engine) == 0
    engine.end_copies()
    steps(engine, 2)
    assert engine.pool.free == 3 - stores(engine)
    assert job.state is State.GONE


def test_slots_stay_until_all_ranks_have_loaded_them() -> None:
    engine, _ = loading(ranks=2)
    engine.ranks[0].finish(engine.ranks[0].under_way[0], End.WELL)
    engine.step()
    assert len(engine.pool.references()) == 3
    engine.ranks[1].finish(engine.ranks[1].under_way[0], End.WELL)
    engine.step()
    assert not engine.pool.references()


def test_a_request_whose_load_has_failed_is_computed() -> None:
    engine, job = loading(ranks=2)
    before = engine.computed_tokens
    engine.ranks[0].finish(engine.ranks[0].under_way[0], End.FAILED)
    engine.end_copies()
    while job.state is not State.GONE:
        engine.step(20)
    assert engine.computed_tokens - before == 13
    engine.settle()
    engine.check_at_rest()


def test_a_request_whose_load_has_failed_is_loaded_once_it_has_run_and_is_preempted() -> None:
    engine, job = loading()
    engine.end_copies(End.FAILED)
    engine.step()
    while job.state is not State.RUNNING:
        engine.step()
    engine.settle()
    engine.run_all()
    engine.preempt(job)
    engine.other_requests_come(EVERYTHING)
    assert engine.tier.missing_tokens(job.request, 0) == 12


def test_what_failed_to_load_is_offered_to_others() -> None:
    engine, _ = loading()
    engine.end_copies(End.FAILED)
    engine.step()
    assert engine.tier.missing_tokens(engine.arrive("third", said(14)).request, 0) == 12


def test_the_load_of_an_aborted_request_goes_on_and_gives_everything_back() -> None:
    engine, job = loading(ranks=2)
    engine.abort(job)
    assert len(engine.pool.references()) == 3
    engine.settle()
    engine.check_at_rest()


def test_an_offer_that_is_not_taken_is_given_back() -> None:
    engine = with_memory_of(14)
    job = engine.arrive("second", said(14))
    engine.admit(job, fate="asked later")
    assert engine.pool.references() == {0: 1, 1: 1, 2: 1}
    engine.admit(job, budget=4, fate="declined")
    assert not engine.pool.references()
    assert engine.tier.step_orders({}) == Orders()


def test_an_offer_is_taken_back_when_vllm_asks_about_another_request() -> None:
    engine = with_memory_of(14)
    engine.tier.missing_tokens(engine.arrive("second", said(14)).request, 0)
    engine.tier.missing_tokens(engine.arrive("third", said(10)).request, 0)
    assert engine.pool.references() == {0: 1, 1: 1}
    engine.tier.check_integrity()


def test_what_was_offered_is_not_searched_again_until_there_is_more(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = with_memory_of(14)
    searched = create_autospec(engine.pool.find, side_effect=engine.pool.find)
    monkeypatch.setattr(engine.pool, "find", searched)
    job = engine.arrive("longer", said(26))
    engine.jobs.remove(job)
    for _ in range(3):
        assert engine.tier.missing_tokens(job.request, 0) == 12
    assert engine.tier.missing_tokens(job.request, 4) == 8  # vLLM has computed a block meanwhile
    assert searched.call_count == 2
    engine.serve("another", said(20))
    assert engine.tier.missing_tokens(job.request, 4) == 12
    for _ in range(3):
        engine.tier.missing_tokens(job.request, 4)
    assert searched.call_count == 4  # the other request's own search is one of them


def test_a_request_that_waits_for_blocks_is_found_and_pinned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM asks about it in every step, and each of the three takes a time that grows with the prompt."""
    engine = with_memory_of(14)
    calls = {name: create_autospec(getattr(engine.pool, name)) for name in ("find", "pin", "unpin")}
    for name, call in calls.items():
        call.side_effect = getattr(engine.pool, name)
        monkeypatch.setattr(engine.pool, name, call)
    taken = engine.manager.block_pool.get_new_blocks(14)
    job = engine.arrive("second", said(14))
    for _ in range(5):
        engine.step()
    assert [call.call_count for call in calls.values()] == [1, 1, 0]
    engine.abort(job)
    assert not engine.pool.references()
    engine.manager.block_pool.free_blocks(taken)
    engine.check_at_rest()


def test_an_offer_stays_while_the_request_waits_for_blocks_and_goes_with_it() -> None:
    engine = with_memory_of(14)
    taken = engine.manager.block_pool.get_new_blocks(14)
    job = engine.arrive("second", said(14))
    for _ in range(3):
        engine.step()
        assert engine.pool.references() == {0: 1, 1: 1, 2: 1}
    engine.abort(job)
    assert not engine.pool.references()
    engine.manager.block_pool.free_blocks(taken)
    engine.check_at_rest()


def test_a_preempted_request_is_loaded_again() -> None:
    engine = engine_of()
    job = engine.arrive("first", said(20), outputs=6)
    steps(engine, 5)
    engine.end_copies()
    engine.step(4)
    engine.preempt(job)
    engine.other_requests_come(EVERYTHING)
    engine.step()
    assert tokens_loading(engine, "first") == 12
    engine.abort(job)
    engine.settle()
    engine.check_at_rest()


def pulled(**options: object) -> tuple[HostTierEngine, Job]:
    """An engine that has pulled a prompt of 14 tokens, three full blocks and a tail, and decodes."""
    engine = engine_of(**options)
    job = engine.arrive("pulled", said(26), outputs=12)
    engine.step(pulls=True)
    engine.end_copies()
    while job.state is not State.RUNNING:
        engine.step()
    return engine, job


def test_a_pulled_prompt_that_is_preempted_is_loaded_again_and_not_pulled() -> None:
    engine, job = pulled()
    assert engine.computed_tokens == 1
    engine.step()
    engine.end_copies()
    engine.step()
    engine.preempt(job)
    engine.other_requests_come(EVERYTHING)
    computed = engine.computed_tokens
    engine.step(pulls=True)
    assert tokens_loading(engine, "pulled") == 12
    engine.go_on(40)
    assert engine.computed_tokens - computed == 26 - 1 - 12, "what fills no block, and what the model says"
    engine.settle()
    engine.check_at_rest()


def test_a_pulled_prompt_that_is_preempted_is_stored_lazily_before_others_get_its_blocks() -> None:
    engine, job = pulled(mode="lazy", device_blocks=9, lookahead=4)
    assert engine.pool.cached == 0
    engine.preempt(job)
    engine.jobs.remove(job)
    for number in range(3):  # before it in vLLM's queue
        engine.serve(f"other{number}", said(18, seed=50 * (number + 1)))
    engine.jobs.append(job)
    engine.step(pulls=True)
    assert tokens_loading(engine, "pulled") == 12
    engine.go_on(40)
    engine.settle()
    engine.check_at_rest()


# Reset


def test_nothing_is_found_after_a_reset() -> None:
    engine = with_memory_of(14)
    assert engine.reset(preempts=False)
    assert engine.tier.missing_tokens(engine.arrive("second", said(14)).request, 0) == 0
    assert engine.pool.free == engine.setup.slots


def test_what_is_being_stored_at_a_reset_is_not_found() -> None:
    engine = engine_of()
    engine.arrive("first", said(14))
    engine.step(20)
    engine.step()
    assert engine.tier.reset()
    engine.settle()
    assert engine.pool.cached == 0
    assert engine.counted()["host_blocks"] == 0
    engine.check_at_rest()


def test_what_was_chosen_before_a_reset_is_not_stored() -> None:
    engine = engine_of()
    engine.arrive("first", said(14))
    engine.step(20)
    assert engine.tier.wants_step
    assert engine.tier.reset()
    assert not engine.tier.wants_step
    engine.check_at_rest()


def test_a_reset_takes_offers_back() -> None:
    engine = with_memory_of(14)
    job = engine.arrive("second", said(14))
    engine.tier.missing_tokens(job.request, 0)
    assert engine.tier.reset()
    assert not engine.pool.references()
    assert engine.tier.allocated(job.request, engine.manager.empty_kv_cache_blocks, 12) == 0


def test_a_reset_says_so_when_a_request_is_loading() -> None:
    engine, job = loading()
    assert not engine.tier.reset()
    assert not engine.reset(preempts=False)
    engine.abort(job)
    engine.settle()
    assert engine.reset(preempts=False)


# The books


def test_lost_books_are_found() -> None:
    engine = with_memory_of(14)
    engine.pool.pin((engine.pool._pool.blocks[1],))
    with pytest.raises(AssertionError, match="slots are in use that nobody uses"):
        engine.tier.check_integrity()


def test_a_tier_wants_no_step_while_it_has_nothing_to_do() -> None:
    engine = engine_of()
    assert isinstance(engine.tier, HostTier)
    assert not engine.tier.wants_step
    assert not engine.tier.frees_blocks_soon
    assert (engine.pool.cached, engine.pool.slots) == (0, 16)
