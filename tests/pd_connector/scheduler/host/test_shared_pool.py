"""Prompts that are found in a pool, on vLLM's own schedulers: who waits for it, what is found, and what it may cost."""

from unittest.mock import patch

import pytest

from pd_connector.scheduler.host.shared_pool import SharedPool
from tests.support.simulation.prefix_engines import BLOCK, FIRST, TURN, compute, take_all_blocks
from tests.support.simulation.vllm_schedulers import ClientRequest, EngineSim, World
from transfer.store.store_thread import RETRY_S

FULL = TURN // BLOCK * BLOCK
EVENTS = ("fetched", "nothing", "late")


def an_engine(world: World, slots: int = 100, blocks: int = 60, **settings: object) -> EngineSim:
    return EngineSim(world, "kv_producer", blocks, slots=slots, pooled=True, **settings)  # type: ignore[arg-type]


def fill(world: World) -> EngineSim:
    """An engine computes a prompt, all of which comes to the pool."""
    writer = an_engine(world)
    compute(world, writer, FIRST)
    for _ in range(40):
        world.step()
    assert counted(writer, "pool_blocks: put") == TURN // BLOCK == len(world.pool.objects)
    return writer


def counted(engine: EngineSim, what: str) -> int:
    engine.side.update_stats()
    return engine.counts[what]


def fail_while_putting(world: World, engine: EngineSim) -> int:
    """Let the pool fail during a put; return how many blocks wait to be put once more."""
    compute(world, engine, FIRST)
    while not pool_of(engine)._puts:
        world.step()
    world.pool.fails = True
    while pool_of(engine)._puts:
        world.step()
    return len(pool_of(engine)._to_put._once_more)


def slow_down(engine: EngineSim) -> None:
    """Let the engine think that it computes slowly, so that more is worth waiting for."""
    engine.side._rate._per_second = 500.0


def pool_works(engine: EngineSim) -> bool:
    gauges: dict[str, float] = {}
    with patch.object(engine.side._stats, "gauge", gauges.__setitem__):
        pool_of(engine).update_stats(engine.side._stats)
    return bool(gauges["pool_works"])


def pool_of(engine: EngineSim) -> SharedPool:
    role: SharedPool = engine.role_of(SharedPool)
    return role


class TestFinding:
    def test_another_engine_computes_only_what_the_pool_lacks(self, world: World) -> None:
        fill(world)
        reader = an_engine(world)
        computed, _ = compute(world, reader, [*FIRST, *range(5000, 5100)])
        assert computed == TURN + 100 - FULL
        assert counted(reader, "pool_prompts: fetched") == 1
        assert counted(reader, "pool_blocks: fetched") == TURN // BLOCK

    def test_an_engine_finds_what_it_has_lost_itself(self, world: World) -> None:
        writer = fill(world)
        take_all_blocks(world, writer)
        for part in range(4):
            compute(world, writer, [3000 + part] * 400)
        slow_down(writer)
        computed, _ = compute(world, writer, [*FIRST, 1])
        assert computed == TURN + 1 - FULL

    def test_what_host_memory_holds_is_not_fetched(self, world: World) -> None:
        fill(world)
        reader = an_engine(world)
        compute(world, reader, FIRST[:48])
        for _ in range(20):
            world.step()
        take_all_blocks(world, reader)
        slow_down(reader)
        compute(world, reader, [*FIRST, 1])
        assert counted(reader, "pool_blocks: fetched") == (FULL - 48) // BLOCK

    def test_the_last_token_is_computed(self, world: World) -> None:
        fill(world)
        reader = an_engine(world)
        computed, _ = compute(world, reader, FIRST[:FULL])
        assert computed == BLOCK

    def test_short_prompts_and_decode_legs_are_not_looked_up(self, world: World) -> None:
        writer = fill(world)
        world.pool.looked_up.clear()
        reader = EngineSim(world, "kv_consumer", 60, slots=100, pooled=True)
        compute(world, reader, FIRST[:100])
        request = ClientRequest("legs", [*FIRST, 1], 1, reader)
        writer.ask(request)
        world.run(20.0)
        assert request.ended == "finished"
        assert not world.pool.looked_up
        assert counted(reader, "pool_prompts: asked") == 0

    def test_the_longest_prefix_is_looked_for_from_its_end_in_small_calls(self, world: World) -> None:
        fill(world)
        reader = an_engine(world)
        compute(world, reader, FIRST)
        assert len(world.pool.looked_up) <= 32

    def test_what_is_gone_shortens_the_prefix(self, world: World) -> None:
        fill(world)
        world.pool.lose(every=5)  # the first put is the last block
        reader = an_engine(world)
        computed, _ = compute(world, reader, [*FIRST, 1])
        assert 0 < counted(reader, "pool_blocks: gone") < TURN // BLOCK
        assert TURN + 1 - FULL < computed < TURN + 1

    def test_an_end_that_the_pool_has_lost_is_put_again(self, world: World) -> None:
        writer = fill(world)
        lost = list(world.pool.objects)[:6]  # put first, as the pool evicts it first
        for key in lost:
            del world.pool.objects[key]
        take_all_blocks(world, writer)
        for part in range(4):
            compute(world, writer, [3000 + part] * 400)
        for _ in range(40):
            world.step()
        slow_down(writer)
        computed, _ = compute(world, writer, [*FIRST, 1])
        for _ in range(60):
            world.step()
        assert computed == TURN + 1 - FULL + 6 * BLOCK
        assert world.pool.objects.keys() >= set(lost)

    def test_what_comes_late_is_not_counted_as_saved(self, world: World) -> None:
        fill(world)
        reader = an_engine(world)
        reader.pooled.copy_s = 1.0
        with patch.object(pool_of(reader), "update_stats"):
            assert compute(world, reader, [*FIRST, 1])[0] == TURN + 1
            for _ in range(40):
                world.step()
        assert pool_of(reader).counts["pool_blocks", "fetched"] == TURN // BLOCK
        assert not pool_of(reader).counts["pool_tokens", ""]

    def test_a_prefix_that_has_lost_its_beginning_is_not_fetched(self, world: World) -> None:
        fill(world)
        del world.pool.objects[list(world.pool.objects)[-1]]  # what was put last
        reader = an_engine(world)
        assert compute(world, reader, FIRST)[0] == TURN
        assert counted(reader, "pool_prompts: nothing") == 1
        assert counted(reader, "pool_blocks: gone") == 0

    def test_an_answer_that_came_in_time_counts_however_late_vllm_asks_for_it(self, world: World) -> None:
        fill(world)
        reader = an_engine(world)
        reader.ask(ClientRequest("r", [*FIRST, 1], 1))
        reader.step()
        world.pool.answer()
        world.clock.advance(5.0)  # others fill the steps
        world.run(20.0)
        assert reader.computed_of["r-d"] == TURN + 1 - FULL

    def test_what_comes_before_in_host_memory_stays_there_meanwhile(self, world: World) -> None:
        fill(world)
        reader = an_engine(world)
        compute(world, reader, FIRST[:96])
        for _ in range(20):
            world.step()
        assert reader.scheduler.reset_prefix_cache()
        slow_down(reader)
        reader.ask(ClientRequest("r", [*FIRST, 1], 1))
        while not pool_of(reader)._fetches:
            world.step()
        assert reader.slots_in_use == FULL // BLOCK
        world.run(20.0)
        assert reader.computed_of["r-d"] == TURN + 1 - FULL

    def test_requests_beyond_those_that_may_wait_wait_no_longer_than_computing_takes(self, world: World) -> None:
        world.pool.is_stuck = True
        reader = an_engine(world, blocks=200)
        began = world.clock.now
        for number in range(8):
            reader.ask(ClientRequest(f"r{number}", range_from(10_000 * (1 + number)), 1))
        world.run(20.0)
        assert world.clock.now - began < 3.0

    def test_requests_that_vllm_leaves_aside_do_not_keep_others_from_looking_up(self, world: World) -> None:
        reader = an_engine(world, blocks=200)
        pool = pool_of(reader)
        for number in range(5):
            reader.ask(ClientRequest(f"r{number}", range_from(10_000 * (1 + number)), 1))
        requests = [reader.requests[f"r{number}-d"][1] for number in range(5)]
        assert all(pool.must_wait(request, 0) for request in requests)
        assert len(pool._asking) == 4
        world.pool.answer()
        world.clock.advance(1.5)  # and vLLM has asked for none of them
        assert pool.must_wait(requests[4], 0)
        assert len(pool._asking) == 5
        world.run(20.0)

    def test_a_short_request_does_not_wait_for_a_long_one_that_begins_alike(self, world: World) -> None:
        world.pool.is_stuck = True
        reader = an_engine(world, blocks=200)
        reader.side._rate._per_second = 100.0
        short = ClientRequest("short", FIRST[:60], 1)
        reader.ask(ClientRequest("long", [*FIRST, *range(5000, 5250)], 1))
        reader.ask(short)
        for _ in range(20):  # a second
            world.step()
        assert (short.ended, reader.computed_of) == ("finished", {"short-d": 60})
        assert counted(reader, "pool_prompts: late") == 1

    def test_two_requests_for_the_same_fetch_it_once(self, world: World) -> None:
        fill(world)
        reader = an_engine(world)
        requests = [ClientRequest(f"same{number}", [*FIRST, number], 1) for number in range(3)]
        for request in requests:
            reader.ask(request)
        world.run(20.0)
        assert [request.ended for request in requests] == ["finished"] * 3
        assert counted(reader, "pool_prompts: asked") == 1
        assert all(reader.computed_of[f"same{number}-d"] == TURN + 1 - FULL for number in range(3))

    def test_states_come_with_their_borders(self, world: World) -> None:
        writer = an_engine(world, blocks=120, states="align")
        compute(world, writer, FIRST)
        for _ in range(40):
            world.step()
        reader = an_engine(world, blocks=120, states="align")
        computed, _ = compute(world, reader, [*FIRST, *range(5000, 5100)])
        assert computed < TURN


class TestPutting:
    def test_a_put_has_no_more_bytes_than_come_in_its_time(self, world: World) -> None:
        with patch("pd_connector.scheduler.host.shared_pool._PUT_BYTES", 1):  # less than a block's
            writer = an_engine(world)
        compute(world, writer, FIRST)
        sizes = []
        for _ in range(80):
            world.step()
            sizes += [len(put.keys) for put in pool_of(writer)._puts.values()]
        assert set(sizes) == {1}
        assert counted(writer, "pool_blocks: put") == TURN // BLOCK

    def test_what_was_fetched_is_not_put_again(self, world: World) -> None:
        fill(world)
        reader = an_engine(world)
        compute(world, reader, FIRST)
        for _ in range(40):
            world.step()
        assert counted(reader, "pool_blocks: put") == 0

    def test_the_end_of_a_prompt_is_put_first(self, world: World) -> None:
        fill(world)
        keys, before = list(world.pool.objects), len(world.pool.looked_up)
        reader = an_engine(world)
        compute(world, reader, [*FIRST, 1])
        assert keys[0] == world.pool.looked_up[before + 1], "the last block is the first that was put"

    def test_slots_are_given_back(self, world: World) -> None:
        assert fill(world).slots_in_use == 0

    def test_an_idle_engine_puts_what_is_left(self, world: World) -> None:
        writer = an_engine(world, slots=400, blocks=400)
        for number in range(8):
            compute(world, writer, [7000 + number] * 400)
        for _ in range(100):
            world.step()
        assert counted(writer, "pool_blocks: put") == 8 * 25
        assert not writer.side.wants_step()

    def test_what_a_full_pool_has_refused_is_put_once_more(self, world: World) -> None:
        world.pool.refuses = 7
        writer = fill(world)
        assert counted(writer, "pool_blocks: refused") == 0
        compute(world, writer, [*FIRST, 1])
        for _ in range(40):
            world.step()
        assert counted(writer, "pool_blocks: put") == TURN // BLOCK, "what is there is not put again"

    def test_what_is_refused_twice_is_left_out(self, world: World) -> None:
        world.pool.refuses = 10_000
        writer = an_engine(world)
        compute(world, writer, FIRST)
        for _ in range(40):
            world.step()
        assert counted(writer, "pool_blocks: refused") == TURN // BLOCK
        assert world.pool.refuses == 10_000 - 2 * (TURN // BLOCK)
        assert not writer.side.wants_step()

    def test_what_was_under_way_when_the_pool_failed_is_put_when_it_works_again(self, world: World) -> None:
        writer = an_engine(world)
        waiting = fail_while_putting(world, writer)
        world.pool.fails = False
        world.clock.advance(RETRY_S)
        for _ in range(40):
            world.step()
        assert waiting
        assert counted(writer, "pool_blocks: put") == TURN // BLOCK == len(world.pool.objects)

    def test_what_waits_for_its_second_try_waits_once_also_if_it_is_computed_anew(self, world: World) -> None:
        writer = an_engine(world)
        waiting = fail_while_putting(world, writer)
        for number in range(12):  # until neither the device nor host memory has it
            compute(world, writer, [7000 + number] * 400)
        assert compute(world, writer, FIRST)[0] == TURN
        world.step()
        queue = pool_of(writer)._to_put
        again = [key for key in queue._waiting if key in queue._once_more]
        assert len(again) == waiting

    def test_what_a_reset_drops_before_its_second_try_counts_as_refused(self, world: World) -> None:
        writer = an_engine(world)
        waiting = fail_while_putting(world, writer)
        assert waiting
        assert writer.scheduler.reset_prefix_cache(reset_connector=True)
        assert counted(writer, "pool_blocks: refused") == waiting

    @pytest.mark.parametrize("refused", [0, 64])
    def test_a_put_that_a_reset_overtakes_is_none_of_what_is_put_from_then_on(self, world: World, refused: int) -> None:
        short = FIRST[:100]  # is not looked up
        world.pool.refuses = refused
        writer = an_engine(world)
        compute(world, writer, short)
        while not pool_of(writer)._puts:
            world.step()
        assert writer.scheduler.reset_prefix_cache(reset_connector=True)
        while pool_of(writer)._puts:
            world.step()
        assert not writer.side.wants_step()
        before, world.pool.refuses = len(world.pool.objects), 0
        compute(world, writer, [*short, 1])
        for _ in range(40):
            world.step()
        assert len(world.pool.objects) == before + 100 // BLOCK


class TestTrouble:
    def test_a_pool_that_fails_costs_nothing_but_the_look_up(self, world: World) -> None:
        fill(world)
        world.pool.fails = True
        reader = an_engine(world)
        assert compute(world, reader, FIRST)[0] == TURN
        world.pool.fails = False
        assert compute(world, reader, [*FIRST, 1])[0] < TURN, "its device has it"
        assert counted(reader, "pool_prompts: asked") == 1, "it is left alone for a while"
        world.clock.advance(RETRY_S)
        assert compute(world, reader, range_from(9000))[0] == TURN
        assert counted(reader, "pool_prompts: asked") == 2

    def test_a_pool_that_has_failed_counts_as_broken_until_something_succeeds(self, world: World) -> None:
        reader = an_engine(world, slots=400, blocks=400)
        assert pool_works(reader)
        world.pool.fails = True
        compute(world, reader, FIRST)
        world.clock.advance(2 * RETRY_S)
        assert not pool_works(reader), "nobody has asked it since"
        world.pool.fails = False
        compute(world, reader, range_from(9000))
        assert pool_works(reader)

    def test_a_fetch_that_brings_nothing_and_one_that_is_late_do_not_count_as_fetched(self, world: World) -> None:
        fill(world)
        readers = [an_engine(world) for _ in range(2)]
        readers[1].pooled.copy_s = 1.5
        for reader in readers:
            reader.ask(ClientRequest("r", list(FIRST), 1))
        while not all(pool_of(reader)._fetches for reader in readers):
            world.step()
        kept, world.pool.objects = world.pool.objects, {}
        while pool_of(readers[0])._fetches:
            world.step()
        world.pool.objects = kept
        world.run(5.0)
        while pool_of(readers[1])._fetches:
            world.step()
        counts = [{event: counted(reader, f"pool_prompts: {event}") for event in EVENTS} for reader in readers]
        assert counts == [{"fetched": 0, "nothing": 1, "late": 0}, {"fetched": 0, "nothing": 0, "late": 1}]

    def test_a_pool_that_does_not_answer_costs_no_more_time_than_computing(self, world: World) -> None:
        fill(world)
        world.pool.is_stuck = True
        reader = an_engine(world)
        began = world.clock.now
        assert compute(world, reader, FIRST)[0] == TURN
        assert world.clock.now - began < 1.5
        began = world.clock.now
        compute(world, reader, range_from(9000))
        assert world.clock.now - began < 0.3, "it is not asked again"

    def test_a_pool_that_does_not_answer_is_waited_for_by_what_host_memory_lacks(self, world: World) -> None:
        reader = an_engine(world)
        compute(world, reader, range_from(9000))
        for _ in range(10):
            world.step()
        reader.scheduler.kv_cache_manager.block_pool.reset_prefix_cache()
        world.pool.is_stuck = True
        reader.side._rate._per_second = 200.0  # what is held takes a second, and what is new half of one
        began = world.clock.now
        compute(world, reader, [*range_from(9000), *range(100)])
        assert 0.3 < world.clock.now - began < 0.8

    def test_a_fetch_that_fails_gives_its_slots_back(self, world: World) -> None:
        fill(world)
        reader = an_engine(world)
        request = ClientRequest("r", list(FIRST), 1)
        reader.ask(request)
        while not pool_of(reader)._fetches:
            world.step()
        world.pool.fails = True
        world.run(20.0)
        assert request.ended == "finished"
        assert reader.computed_of["r-d"] == TURN
        for _ in range(100):
            world.step()
        assert reader.slots_in_use == 0

    def test_a_request_that_leaves_meanwhile_leaves_the_prefix_to_others(self, world: World) -> None:
        fill(world)
        reader = an_engine(world)
        reader.ask(ClientRequest("gone", list(FIRST), 1))
        while not pool_of(reader)._fetches:
            world.step()
        reader.abort("gone-d")
        for _ in range(20):
            world.step()
        assert compute(world, reader, [*FIRST, 1])[0] == TURN + 1 - FULL
        assert counted(reader, "pool_prompts: asked") == 1

    def test_without_free_slots_the_prompt_is_computed(self, world: World) -> None:
        fill(world)
        reader = an_engine(world, slots=8)
        assert compute(world, reader, FIRST)[0] == TURN
        assert counted(reader, "pool_prompts: full") == 1

    def test_nothing_from_before_a_reset_is_found(self, world: World) -> None:
        writer = fill(world)
        assert writer.scheduler.reset_prefix_cache(reset_connector=True)
        assert compute(world, writer, [*FIRST, 1])[0] == TURN + 1
        for _ in range(40):
            world.step()
        assert len(world.pool.objects) == 2 * (TURN // BLOCK), "what it puts from now on has other names"
        other = an_engine(world)
        assert compute(world, other, [*FIRST, 2])[0] == TURN + 1 - FULL, "others find what they found before"

    def test_what_is_fetched_during_a_reset_is_not_found(self, world: World) -> None:
        fill(world)
        reader = an_engine(world)
        reader.ask(ClientRequest("r", list(FIRST), 1))
        while not pool_of(reader)._fetches:
            world.step()
        reader.scheduler.reset_prefix_cache(reset_connector=True)
        world.run(20.0)
        assert reader.computed_of["r-d"] == TURN


def range_from(first: int) -> list[int]:
    return list(range(first, first + TURN))
