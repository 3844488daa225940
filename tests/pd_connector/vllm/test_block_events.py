"""Events of lazily stored blocks: routers can index them, and what is remembered for that is bounded."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from tests.support.host_tier.cases import EVERYTHING, WINDOWED, engine_of, said, told_apart
from tests.support.host_tier.engine import HostTierEngine


def lazy(**options: object) -> HostTierEngine:
    return engine_of(mode="lazy", events=True, lookahead=EVERYTHING, **options)


def events_of(engine: HostTierEngine) -> list[BlockStored]:
    """What is told when the idle steps after this have stored all that the device may evict."""
    engine.settle()
    for _ in range(3):
        engine.tier._has_allocated = True  # otherwise nothing is evicted, and nothing stored
        engine.step()
        engine.settle()
    return [event for event in told_apart(engine.tier.take_events()) if isinstance(event, BlockStored)]


def test_a_block_that_is_stored_after_its_request_has_left_is_told_with_tokens_and_parent() -> None:
    engine = lazy()
    job = engine.serve("r", said(14))
    events = {event.block_hashes[0]: event for event in events_of(engine)}
    hashes = [maybe_convert_block_hash(value) for value in job.request.block_hashes[:3]]
    assert events.keys() == set(hashes)
    for number, block_hash in enumerate(hashes):
        event = events[block_hash]
        assert event.token_ids == list(said(14)[4 * number : 4 * number + 4])
        assert event.parent_block_hash == (hashes[number - 1] if number else None)
        assert (event.block_size, event.group_idx, event.kv_cache_spec_kind) == (4, 0, "full_attention")


def test_it_tells_the_same_as_the_event_of_a_block_that_is_stored_at_once() -> None:
    eager, late = engine_of(events=True), lazy()
    for engine in (eager, late):
        engine.serve("r", said(14), outputs=6)
    at_once = {event.block_hashes[0]: event for event in told_apart(eager.tier.take_events())}
    later = {event.block_hashes[0]: event for event in events_of(late)}
    assert later == at_once


@given(numbers=st.lists(st.integers(0, 5), unique=True), salt=st.sampled_from([None, "a salt"]))
def test_in_whatever_order_blocks_are_stored_events_of_several_tell_what_those_of_each_would(
    numbers: list[int], salt: str | None
) -> None:
    engine = engine_of(events=True)
    job = engine.arrive("r", said(26), 1)
    job.request.cache_salt = salt
    told = engine.pool._events.of_request(job.request, 0, 0, 6)
    together = engine.pool._events.stored(told[number] for number in numbers)
    apart = [engine.pool._events.stored([told[number]])[0] for number in numbers]
    assert set(told_apart(together)) == set(apart)
    assert len(list(told_apart(together))) == len(numbers)


@pytest.mark.parametrize("numbers", [range(6), range(5, -1, -1)], ids=["as computed", "as evicted"])
def test_neighbours_are_told_in_one_event(numbers: Sequence[int]) -> None:
    """An event a block would take most of the time of a step in which thousands are stored."""
    engine = engine_of(events=True)
    job = engine.arrive("r", said(26), 1)
    told = engine.pool._events.of_request(job.request, 0, 0, 6)
    (event,) = engine.pool._events.stored(told[number] for number in numbers)
    assert isinstance(event, BlockStored)
    assert event.token_ids == list(said(24))
    others = engine.pool._events.of_request(job.request, 0, 0, 6)
    assert len(engine.pool._events.stored([told[0], told[2], others[3]])) == 3, "what does not follow is apart"


def test_every_group_has_its_own_tokens() -> None:
    engine = lazy(groups=((8, 0), (4, 12)), device_blocks=33, slots=40)
    engine.serve("r", said(18))
    events = events_of(engine)
    assert {event.group_idx for event in events} == {0, 1}
    for group, size in ((0, 8), (1, 4)):
        of_group = sorted((event for event in events if event.group_idx == group), key=lambda event: event.token_ids)
        assert of_group
        for event in of_group:
            assert len(event.token_ids) == size
            first = event.token_ids[0] - said(1)[0]
            assert event.token_ids == list(said(18)[first : first + size])
        for one, following in pairwise(of_group):
            if following.token_ids[0] == one.token_ids[-1] + 1:
                assert following.parent_block_hash == one.block_hashes[0]


def test_evicted_blocks_are_told_in_one_event_for_each_group() -> None:
    engine = engine_of(events=True, groups=WINDOWED, device_blocks=33, slots=6)
    engine.serve("first", said(14))
    stored = {event.group_idx: set(event.block_hashes) for event in engine.tier.take_events()}
    engine.serve("second", said(14, seed=100))
    removed = [event for event in engine.tier.take_events() if isinstance(event, BlockRemoved)]
    assert {event.group_idx: set(event.block_hashes) for event in removed} == stored
    assert len(removed) == len(stored) == 2


def test_a_preempted_requests_blocks_are_told_with_tokens() -> None:
    engine = lazy()
    job = engine.arrive("r", said(14), 4)
    engine.step(20)
    engine.preempt(job)
    candidates = engine.pool.eviction_candidates()
    assert len(candidates) == 2
    told = [candidate.told for candidate in candidates if candidate.told is not None]
    (event,) = engine.pool._events.stored(told)
    assert isinstance(event, BlockStored)
    assert event.token_ids == list(said(8))


def test_what_is_remembered_is_bounded_by_the_device() -> None:
    engine = lazy(device_blocks=9, slots=4)
    events = engine.pool._events
    for number in range(40):
        engine.serve(f"r{number}", said(14, seed=100 * number))
        assert len(events._remembered) <= 2 * 9 + 3
    engine.tier.take_events()
    held = engine.manager.block_pool.cached_block_hash_to_block
    assert all(key in events._remembered for key in held._cache), "what the device holds is remembered"


def test_nothing_is_remembered_without_a_publisher_or_a_need() -> None:
    for options in ({"mode": "lazy", "lookahead": 99}, {"mode": "eager", "events": True}):
        engine = engine_of(**options)
        engine.serve("r", said(14))
        assert engine.pool._events._remembered == {}


def test_a_reset_forgets() -> None:
    engine = lazy()
    engine.serve("r", said(14))
    assert engine.pool._events._remembered
    engine.tier.reset()
    assert engine.pool._events._remembered == {}
