"""Host blocks in vLLM's own pool: what is found, taken, published, told."""

from dataclasses import replace
from typing import Any

import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.request import Request

from pd_connector.vllm.block_pools import HostBlockPool, Store, slot_of
from pd_connector.vllm.device_blocks import DeviceBlocks
from tests.support.host_tier.cases import EVERYTHING, engine_of, said, told_apart, with_memory_of
from tests.support.host_tier.setup import CONFIG, Setup, make_manager, make_pool, make_request
from tests.support.releases import INSTALLED

HYBRID = ((4, 0), (4, 6))


class Bench:
    """A device's cache manager, its pool of host blocks, and requests computed on the device at once."""

    def __init__(self, **options: Any) -> None:
        self.setup = Setup(**{"device_blocks": 17, "slots": 8, **options})
        self.manager: KVCacheManager = make_manager(self.setup)
        self.pool: HostBlockPool = make_pool(self.setup, self.manager)

    def computed(self, name: str, tokens: tuple[int, ...]) -> Request:
        request = make_request(self.setup, name, tokens)
        blocks, hit, *_ = self.manager.get_computed_blocks(request)
        assert self.manager.allocate_slots(
            request, len(tokens) - hit, num_new_computed_tokens=hit, new_computed_blocks=blocks
        )
        request.num_computed_tokens = len(tokens)
        return request

    def stored(self, request: Request, group: int = 0) -> tuple[Store, ...]:
        """All full blocks of a request, published."""
        stores = self.begun(request, group)
        self.pool.publish(stores)
        self.pool.finish_stores(stores)
        return stores

    def begun(self, request: Request, group: int = 0) -> tuple[Store, ...]:
        full = self.pool.num_full_blocks(request, group, 0)
        return self.pool.start_stores([one for one in self.pool.candidates(request, group, 0, full) if one is not None])

    def free_order(self) -> list[int]:
        return [block.block_id for block in self.manager.block_pool.free_block_queue.get_all_free_blocks()]


# The pool


def test_all_slots_can_be_taken_and_are_numbered_from_zero() -> None:
    bench = Bench(slots=4)
    assert [bench.pool.has_spare(number, 0.25) for number in (3, 4)] == [True, False]
    stores = bench.begun(bench.computed("r", said(16)))
    assert [slot_of(store.host) for store in stores] == [0, 1, 2, 3]
    assert (bench.pool.free, bench.pool.slots) == (0, 4)
    assert bench.pool.references() == {0: 1, 1: 1, 2: 1, 3: 1}


def test_more_than_there_is_cannot_be_taken() -> None:
    bench = Bench(slots=2)
    with pytest.raises(ValueError, match="3 host slots are to be taken, and 2 are free"):
        bench.begun(bench.computed("r", said(12)))


def test_what_is_taken_was_least_recently_used_and_is_found_no_more() -> None:
    bench = Bench(slots=4)
    old, new = (bench.computed(name, said(13, seed)) for name, seed in (("old", 1), ("new", 2)))
    bench.stored(old)
    taken = bench.pool.take(2)
    assert [slot_of(block) for block in taken] == [3, 2]
    assert bench.pool.references() == {3: 1, 2: 1}
    hit = bench.pool.find(old, 0)
    assert hit is not None
    assert hit.tokens == 8
    bench.pool.check_integrity()
    bench.pool.unpin(taken)
    bench.stored(new)
    if INSTALLED >= (0, 30):  # which takes empty blocks before others
        assert bench.pool.find(old, 0) is not None
        assert bench.pool.cached == 4
    bench.pool.check_integrity()


def test_a_block_is_found_only_when_it_is_published() -> None:
    bench = Bench()
    request = bench.computed("r", said(13))
    stores = bench.begun(request)
    assert bench.pool.find(request, 0) is None
    bench.pool.publish(stores)
    hit = bench.pool.find(request, 0)
    assert hit is not None
    assert (hit.first_token, hit.tokens) == (0, 12)
    assert [slot_of(block) for block in hit.blocks] == [0, 1, 2]


def test_a_pinned_hit_is_not_evicted() -> None:
    bench = Bench(slots=3)
    request = bench.computed("r", said(13))
    bench.stored(request)
    hit = bench.pool.find(request, 0)
    assert hit is not None
    bench.pool.pin(hit.blocks)
    assert bench.pool.free == 0
    bench.pool.unpin(hit.blocks)
    assert bench.pool.free == 3
    assert bench.pool.cached == 3


def test_a_request_that_must_not_read_the_cache_finds_nothing() -> None:
    bench = Bench()
    request = bench.computed("r", said(13))
    bench.stored(request)
    request.skip_reading_prefix_cache = True
    assert bench.pool.find(request, 0) is None


@pytest.mark.parametrize(("first", "found"), [(0, 12), (4, 8), (8, 4), (12, None)])
def test_a_hit_begins_where_the_device_ends(first: int, found: int | None) -> None:
    bench = Bench()
    request = bench.computed("r", said(14))
    bench.stored(request)
    hit = bench.pool.find(request, first)
    assert (hit.tokens if hit else None) == found
    if hit:
        assert hit.first_token == first
        assert [slot_of(block) for block in hit.blocks] == list(range(first // 4, 3))


def test_forgetting_all_forgets_blocks_in_use_too_and_keeps_them_in_use() -> None:
    bench = Bench()
    request = bench.computed("r", said(13))
    bench.stored(request)
    hit = bench.pool.find(request, 0)
    assert hit is not None
    bench.pool.pin(hit.blocks)
    bench.pool.evict_all()
    assert bench.pool.cached == 0
    assert bench.pool.find(request, 0) is None
    assert len(bench.pool.references()) == 3
    bench.pool.unpin(hit.blocks)
    assert not bench.pool.references()


def test_a_hit_of_two_groups_has_null_blocks_where_the_window_has_passed() -> None:
    bench = Bench(groups=HYBRID, device_blocks=33, slots=16)
    request = bench.computed("r", said(21))
    for group in (0, 1):
        bench.stored(request, group)
    hit = bench.pool.find(request, 0)
    assert hit is not None
    assert hit.tokens == 20
    assert [block.is_null for block in hit.groups[0]] == [False] * 5
    assert [block.is_null for block in hit.groups[1]] == [True, True, True, False, False]
    assert len(hit.blocks) == 7


def test_both_groups_must_have_it() -> None:
    bench = Bench(groups=HYBRID, device_blocks=33, slots=16)
    request = bench.computed("r", said(21))
    bench.stored(request, 0)
    assert bench.pool.find(request, 0) is None


# What may be stored


def test_only_blocks_that_are_computed_to_their_end_are_full() -> None:
    bench = Bench()
    request = bench.computed("r", said(14))
    full = []
    for computed, scheduled in [(0, 0), (3, 0), (4, 0), (0, 7), (3, 1), (12, 2), (14, 0)]:
        request.num_computed_tokens = computed
        full.append(bench.pool.num_full_blocks(request, 0, scheduled))
    assert full == [0, 0, 1, 1, 1, 3, 3]


def test_what_the_model_is_yet_to_say_does_not_count() -> None:
    bench = Bench()
    request = bench.computed("r", said(15))
    request.num_computed_tokens, request.num_output_placeholders = 16, 1
    assert bench.pool.num_full_blocks(request, 0, 0) == 3
    assert bench.pool.num_full_blocks(request, 0, 1) == 3
    request.num_computed_tokens, request.num_output_placeholders = 15, 0
    assert bench.pool.num_full_blocks(request, 0, 1) == 3


def test_blocks_of_two_sizes_are_full_at_boundaries_of_both() -> None:
    bench = Bench(groups=((8, 0), (4, 6)))
    request = bench.computed("r", said(15))
    assert [bench.pool.num_full_blocks(request, group, 0) for group in (0, 1)] == [1, 2]


def test_what_is_null_unhashed_or_there_already_is_no_candidate() -> None:
    bench = Bench(groups=HYBRID, device_blocks=33, slots=16)
    request = bench.computed("r", said(23))
    bench.manager.remove_skipped_blocks("r", 23)
    candidates = list(bench.pool.candidates(request, 1, 0, 6))
    assert [candidate is None for candidate in candidates] == [True] * 4 + [False, True]
    bench.stored(request, 0)
    assert list(bench.pool.candidates(request, 0, 0, 5)) == [None] * 5


def test_a_request_without_blocks_has_no_candidates() -> None:
    bench = Bench()
    assert list(bench.pool.candidates(make_request(bench.setup, "r", said(9)), 0, 0, 2)) == []


def test_next_to_be_evicted_is_what_vllm_takes_next() -> None:
    bench = Bench(device_blocks=8, mode="lazy", lookahead=7)
    request = bench.computed("r", said(14))
    table = bench.manager.get_block_ids("r")[0]
    assert bench.pool.eviction_candidates() == []  # what is in use is not evicted
    bench.manager.free(request)
    found = [candidate.block.block_id for candidate in bench.pool.eviction_candidates()]
    assert found == [table[2], table[1], table[0]]
    assert found == [block for block in bench.free_order() if block in table[:3]]


def test_as_many_more_are_named_as_a_request_has_found_among_those_named_before() -> None:
    bench = Bench(device_blocks=8, mode="lazy", lookahead=3, slots=16)
    first, second = bench.computed("first", said(12)), bench.computed("second", said(16, seed=9))
    for request in (first, second):
        bench.manager.free(request)
    assert len(bench.pool.eviction_candidates()) == 3
    again = bench.computed("again", said(13))
    bench.pool.on_allocated(bench.manager.get_blocks("again"))
    assert again.num_computed_tokens == 13
    assert len(bench.pool.eviction_candidates()) == 3


def test_what_is_next_to_be_evicted_and_in_host_memory_already_counts_as_used() -> None:
    bench = Bench(device_blocks=8, slots=7, mode="lazy", lookahead=7)
    request = bench.computed("r", said(14))
    stores = bench.stored(request)
    bench.stored(bench.computed("others", said(9, seed=7)))
    bench.manager.free(request)
    assert bench.pool.eviction_candidates() == []
    bench.pool._pool.get_new_blocks(4)
    assert all(bench.pool.holds(store.candidate.key) for store in stores)


def test_of_what_is_next_to_be_evicted_and_here_already_the_end_is_forgotten_first() -> None:
    bench = Bench(device_blocks=8, slots=7, mode="lazy", lookahead=7)
    request = bench.computed("r", said(14))
    bench.stored(request)
    bench.manager.free(request)
    assert bench.pool.eviction_candidates() == []
    bench.pool._pool.get_new_blocks(5)  # four hold nothing
    hit = bench.pool.find(request, 0)
    assert hit is not None
    assert hit.tokens == 8


def test_no_more_than_fits_into_host_memory_is_next_to_be_evicted() -> None:
    bench = Bench(device_blocks=8, slots=6, mode="lazy", lookahead=99)
    bench.manager.free(bench.computed("r", said(21)))
    bench.pool._pool.get_new_blocks(4)
    first = bench.pool.eviction_candidates()
    assert len(first) == 2
    stores = bench.pool.start_stores(first)
    assert bench.pool.eviction_candidates() == []
    bench.pool.publish(stores)
    bench.pool.finish_stores(stores)
    second = bench.pool.eviction_candidates()
    assert len(second) == 2
    assert not {one.key for one in first} & {one.key for one in second}


def test_blocks_in_use_on_the_device_are_not_the_first_to_be_forgotten() -> None:
    bench = Bench(slots=4)
    first = bench.computed("first", said(9))
    stores = bench.stored(first)
    bench.stored(bench.computed("second", said(9, seed=7)))
    assert list(bench.pool.candidates(first, 0, 0, 2)) == [None, None]
    bench.begun(bench.computed("third", said(9, seed=8)))
    assert all(bench.pool.holds(store.candidate.key) for store in stores)


def test_of_a_prompt_stored_by_and_by_the_end_is_forgotten_first() -> None:
    bench = Bench(slots=4)
    request = bench.computed("r", said(17))
    for first in (0, 2):
        stores = bench.pool.start_stores([one for one in bench.pool.candidates(request, 0, first, first + 2) if one])
        bench.pool.publish(stores)
        bench.pool.finish_stores(stores)
    bench.pool.touch(bench.pool.block_keys(request))
    bench.begun(bench.computed("other", said(9, seed=7)))
    hit = bench.pool.find(request, 0)
    assert hit is not None
    assert hit.tokens == 8


# References to the device


def test_blocks_being_stored_are_not_reused_on_the_device() -> None:
    bench = Bench()
    request = bench.computed("r", said(13))
    stores = bench.begun(request)
    bench.manager.free(request)
    stored = {store.candidate.block.block_id for store in stores}
    assert not stored & set(bench.free_order())
    bench.pool.finish_stores(stores)
    assert stored < set(bench.free_order())


@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_stored_blocks_are_the_next_to_be_reused_after_the_empty_ones_or_the_last(mode: str) -> None:
    bench = Bench(mode=mode, slots=16, lookahead=99)
    first, second = bench.computed("first", said(14)), bench.computed("second", said(9, seed=7))
    tables = [bench.manager.get_block_ids(name)[0] for name in ("first", "second")]
    stores = bench.begun(first)
    for request in (first, second):
        bench.manager.free(request)
    empty = len(bench.free_order()) - 2
    bench.pool.publish(stores)
    bench.pool.finish_stores(stores)
    of_first = tables[0][2::-1]  # the end of a prompt is reused first
    of_second = tables[1][1::-1]
    expected = [*of_first[::-1], *of_second] if mode == "lazy" else [*of_second, *of_first]
    assert bench.free_order()[empty:] == expected


def test_what_was_stored_before_is_still_reused_before() -> None:
    bench = Bench(mode="lazy", lookahead=99, slots=16)
    begun = []
    for request in [bench.computed(name, said(14, seed=len(name))) for name in ("first", "second")]:
        bench.manager.free(request)
        begun.append(bench.pool.start_stores(bench.pool.eviction_candidates()))
    for stores in begun:
        bench.pool.publish(stores)
        bench.pool.finish_stores(stores)
    expected = [store.candidate.block.block_id for stores in begun for store in stores]
    assert len(expected) == 6
    assert bench.free_order()[-6:] == expected


@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_a_block_that_others_use_is_not_freed_with_its_store(mode: str) -> None:
    bench = Bench(mode=mode)
    bench.pool.finish_stores(bench.begun(bench.computed("r", said(13))))
    table = bench.manager.get_block_ids("r")[0]
    assert [bench.manager.block_pool.blocks[block].ref_cnt for block in table] == [1] * 4
    assert not set(bench.free_order()) & set(table)


def test_slots_that_may_still_be_written_are_kept() -> None:
    bench = Bench(slots=3)
    stores = bench.begun(bench.computed("r", said(13)))
    bench.pool.finish_stores(stores, keep_slots=True)
    assert bench.pool.free == 0
    assert bench.pool.references() == {0: 1, 1: 1, 2: 1}


def test_a_requests_blocks_are_given_by_group() -> None:
    bench = Bench(groups=HYBRID, device_blocks=33)
    bench.computed("r", said(9))
    blocks = bench.manager.get_blocks("r").blocks
    assert tuple([block.block_id for block in group] for group in blocks) == bench.manager.get_block_ids("r")


# Events


def test_a_stored_event_tells_routers_all_that_they_need() -> None:
    bench = Bench(events=True)
    tokens = said(13)
    request = bench.computed("r", tokens)
    bench.stored(request)
    (event,) = bench.pool.take_events()  # of neighbours, as vLLM tells those of the device
    events = list(told_apart([event]))
    hashes = [maybe_convert_block_hash(value) for value in request.block_hashes]
    assert all(isinstance(event, BlockStored) for event in events)
    for number, event in enumerate(events):
        assert event.block_hashes == [hashes[number]]
        assert event.parent_block_hash == (hashes[number - 1] if number else None)
        assert list(event.token_ids) == list(tokens[4 * number : 4 * number + 4])
        assert (event.block_size, event.medium, event.group_idx) == (4, "CPU", 0)
        assert event.kv_cache_spec_kind == "full_attention"
    assert len(events) == 3
    assert bench.pool.take_events() == []


def test_the_event_of_a_coarser_block_has_the_hash_of_its_end() -> None:
    bench = Bench(groups=((8, 0), (4, 6)), events=True, device_blocks=33)
    request = bench.computed("r", said(17))
    bench.stored(request, 0)
    first, second = told_apart(bench.pool.take_events())
    hashes = [maybe_convert_block_hash(value) for value in request.block_hashes]
    assert (first.block_hashes, second.block_hashes) == ([hashes[1]], [hashes[3]])
    assert second.parent_block_hash == hashes[1]
    assert list(second.token_ids) == list(said(16)[8:])


def test_the_event_of_a_windowed_group_tells_its_window() -> None:
    bench = Bench(groups=HYBRID, events=True, device_blocks=33)
    bench.stored(bench.computed("r", said(9)), 1)
    event = bench.pool.take_events()[0]
    assert (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) == ("sliding_window", 6)
    assert event.group_idx == 1


def test_no_event_before_the_block_is_found() -> None:
    bench = Bench(events=True)
    stores = bench.begun(bench.computed("r", said(9)))
    assert bench.pool.take_events() == []
    bench.pool.publish(stores)
    assert len(list(told_apart(bench.pool.take_events()))) == 2


def test_an_evicted_block_is_told_as_removed() -> None:
    bench = Bench(slots=2, events=True)
    first = bench.computed("first", said(9))
    bench.stored(first)
    bench.pool.take_events()
    bench.stored(bench.computed("second", said(9, seed=9)))
    removed, stored = bench.pool.take_events()
    assert isinstance(removed, BlockRemoved)
    assert (removed.medium, removed.group_idx) == ("CPU", 0)
    assert set(removed.block_hashes) == {maybe_convert_block_hash(value) for value in first.block_hashes}
    assert isinstance(stored, BlockStored)


def test_forgotten_blocks_are_told_as_removed() -> None:
    bench = Bench(events=True)
    bench.stored(bench.computed("r", said(13)))
    bench.pool.take_events()
    bench.pool.evict_all()
    events = bench.pool.take_events()
    assert [type(event) for event in events] == [BlockRemoved] * 3
    assert {event.medium for event in events} == {"CPU"}


def test_a_block_whose_request_has_left_is_told_with_what_is_known() -> None:
    bench = Bench(events=True, mode="lazy", lookahead=99, slots=16)
    request = bench.computed("r", said(9))
    bench.manager.free(request)
    stores = bench.pool.start_stores(bench.pool.eviction_candidates())
    bench.pool.publish(stores)
    events = bench.pool.take_events()
    assert {event.block_hashes[0] for event in told_apart(events)} == {
        maybe_convert_block_hash(value) for value in request.block_hashes
    }
    assert {(event.medium, event.block_size, event.group_idx) for event in events} == {("CPU", 4, 0)}


def test_without_a_publisher_there_are_no_events() -> None:
    bench = Bench()
    bench.stored(bench.computed("r", said(13)))
    bench.pool.evict_all()
    assert bench.pool.take_events() == []


def test_events_follow_a_block_through_the_tier() -> None:
    engine = engine_of(events=True, slots=3)
    engine.serve("first", said(14))
    stored = engine.tier.take_events()
    assert [type(event) for event in told_apart(stored)] == [BlockStored] * 3
    engine.other_requests_come(EVERYTHING)
    engine.serve("loaded", said(14))
    assert engine.tier.take_events() == []
    assert engine.tier.reset()
    assert [type(event) for event in engine.tier.take_events()] == [BlockRemoved] * 3


def test_the_pools_configuration_is_taken_from_the_device() -> None:
    engine = with_memory_of(9, groups=HYBRID, device_blocks=33, slots=5)
    assert engine.pool.groups == (0, 1)
    assert engine.pool.block_tokens == (4, 4)
    assert engine.pool.slots == 5
    assert isinstance(engine.pool._coordinator, type(engine.manager.coordinator))
    assert HostBlockPool(CONFIG, engine.manager, 1).free == 1


@pytest.mark.skipif(INSTALLED < (0, 30), reason="context parallelism is served from 0.30 on")
def test_slots_have_the_tokens_of_a_block_that_ranks_share() -> None:
    setup = Setup(groups=((4, 0),))
    manager = make_manager(setup, token_ranks=2)
    pool = make_pool(setup, manager)
    blocks = DeviceBlocks()
    blocks.bind(manager)
    assert pool.block_tokens == blocks.block_tokens == (8,)
    request = make_request(replace(setup, groups=((8, 0),)), "r", range(20))
    held = manager.allocate_slots(request, 20)
    assert held is not None
    assert [len(group) for group in held.blocks] == [3]
