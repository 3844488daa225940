"""Peers and the pool are asked for a prompt at the same time, and what that costs: each step without work is time.

More of those who wait in ``test_passed_over`` and ``test_search_deadline``.
"""

from unittest.mock import patch

import pytest

from pd_connector.scheduler.decode.peer_prefixes import PeerPrefixes
from pd_connector.scheduler.host.shared_pool import SharedPool
from tests.support.simulation.prefix_engines import (
    BLOCK,
    FIRST,
    REST,
    TURN,
    RestingCore,
    a_holder,
    compute,
    fill_pool,
    hold,
    numbered_prompt,
    searcher,
    watch_orders,
)
from tests.support.simulation.vllm_schedulers import ClientRequest, EngineSim, World

LONGER = [*FIRST, *numbered_prompt(2)]


everybody = pytest.mark.parametrize(("peers", "pooled"), [(True, False), (False, True), (True, True)])


def empty_steps(world: World, engine: EngineSim, tokens: list[int]) -> int:
    """How many steps an engine makes without work before it computes a prompt."""
    engine.ask(ClientRequest("r", tokens, 1))
    for steps in range(400):
        world.step(0.005)
        if engine.computed_of["r-d"]:
            return steps
    raise AssertionError("the prompt is not computed")


def pool_of(engine: EngineSim) -> SharedPool:
    role: SharedPool = engine.role_of(SharedPool)
    return role


@everybody
def test_a_prompt_that_nobody_holds_costs_one_step_whoever_is_asked(world: World, *, peers: bool, pooled: bool) -> None:
    engine = searcher(world, *([a_holder(world)] if peers else []), pooled=pooled)
    assert empty_steps(world, engine, FIRST) == 1
    engine.side.update_stats()
    assert engine.counts["prefixes: nothing"] == peers
    assert engine.counts["pool_prompts: nothing"] == pooled


@everybody
def test_an_engine_without_other_requests_has_the_answers_in_the_first_step(
    world: World, *, peers: bool, pooled: bool
) -> None:
    engine = searcher(world, *([a_holder(world)] if peers else []), pooled=pooled)
    core = RestingCore(world, engine)
    assert empty_steps(world, engine, FIRST) == 0
    assert core.rests == [0.005]


def test_it_pulls_in_the_first_step_and_fetches_in_the_first_after_that(world: World) -> None:
    holder = a_holder(world)
    hold(world, holder, FIRST)
    fill_pool(world, LONGER)
    engine = searcher(world, holder)
    RestingCore(world, engine, holder)
    pool, orders = pool_of(engine), watch_orders(engine)
    engine.ask(ClientRequest("r", [*LONGER, 1], 1))
    world.step(0.005)
    assert len(orders) == 1
    while engine.worker.prefixes:
        assert not pool._fetches
        world.step(0.005)
    world.step(0.005)
    assert pool._fetches
    world.run(20.0, 0.005)
    assert engine.computed_of["r-d"] == 2 * TURN + 1 - 2 * TURN // BLOCK * BLOCK


def test_it_waits_once_for_answers_that_are_late(world: World) -> None:
    engine = searcher(world, a_holder(world))
    core = RestingCore(world, engine)
    core.is_late = world.engines[1].is_cut = world.pool.is_stuck = True
    engine.ask(ClientRequest("r", FIRST, 1))
    for _ in range(10):
        world.step(0.005)
    assert len(core.rests) == 1
    world.engines[1].is_cut = world.pool.is_stuck = False
    world.run(20.0, 0.005)
    assert len(core.rests) == 1


@pytest.mark.parametrize("other", ["runs", "waits"])
def test_an_engine_with_other_requests_does_not_wait(world: World, other: str) -> None:
    holder = a_holder(world)
    engine = searcher(world, holder)
    core = RestingCore(world, engine)
    core.is_late = holder.is_cut = other == "waits"
    engine.ask(ClientRequest("other", numbered_prompt(1) if other == "waits" else [1000], 50))
    world.step(0.005)
    core.rests.clear()
    engine.ask(ClientRequest("r", FIRST, 1))
    world.step(0.005)
    assert "r-d" in engine.role_of(PeerPrefixes)._asking
    assert core.rests == []
    holder.is_cut = False
    world.run(20.0)


def test_it_does_not_wait_while_workers_are_to_report_something(world: World) -> None:
    """Peers may wait for that."""
    engine = searcher(world, a_holder(world))
    core = RestingCore(world, engine)
    with patch.object(SharedPool, "wants_step", True):
        assert empty_steps(world, engine, FIRST) == 1
    assert core.rests == []


def test_few_look_ahead_at_a_time(world: World) -> None:
    """The pool has one thread for them: behind more, one is soon overdue, and all would go on without the pool."""
    holder = a_holder(world)
    engine = searcher(world, holder)
    holder.is_cut = world.pool.is_stuck = True
    for number in range(8):
        engine.ask(ClientRequest(f"r{number}", numbered_prompt(number), 1))
    for _ in range(4):
        world.step(0.005)
    assert len(pool_of(engine)._ahead) == 4
    holder.is_cut = world.pool.is_stuck = False
    world.run(20.0, 0.005)


def test_what_peers_hold_is_not_fetched_from_the_pool(world: World) -> None:
    holder = a_holder(world)
    hold(world, holder, FIRST)
    fill_pool(world, FIRST)
    engine = searcher(world, holder)
    assert compute(world, engine, [*FIRST, 1])[0] == REST
    engine.side.update_stats()
    assert engine.counts["prefixes: pulled"] == 1
    assert engine.counts["pool_prompts: asked"] == engine.counts["pool_blocks: fetched"] == 0


def test_who_has_all_from_peers_does_not_wait_for_the_pool(world: World) -> None:
    holder = a_holder(world)
    hold(world, holder, FIRST)
    engine = searcher(world, holder, pull_s=0.1)
    world.pool.is_stuck = True
    assert empty_steps(world, engine, [*FIRST, 1]) < 40, "200, if it waited as long as computing takes"
    assert engine.computed_of["r-d"] == REST


def test_behind_what_peers_have_brought_the_pool_is_asked_again(world: World) -> None:
    """It may have lost the beginning alone."""
    holder = a_holder(world)
    hold(world, holder, FIRST)
    fill_pool(world, FIRST)
    beginning = set(world.pool.objects)
    fill_pool(world, LONGER)
    for key in beginning:
        del world.pool.objects[key]
    engine = searcher(world, holder)
    assert compute(world, engine, [*LONGER, 1])[0] == 2 * TURN + 1 - 2 * TURN // BLOCK * BLOCK


def test_each_prompt_is_looked_up_once_however_many_ask_at_once(world: World) -> None:
    """More than may ask the pool at a time, and it is slower than the peers."""
    engine = searcher(world, a_holder(world))
    world.pool.is_stuck = True
    for number in range(8):
        engine.ask(ClientRequest(f"r{number}", numbered_prompt(number), 1))
    with patch.object(world.pool, "submit", side_effect=world.pool.submit) as submit:
        for _ in range(4):
            world.step(0.005)
        assert len(pool_of(engine)._asking) == 4
        world.pool.is_stuck = False
        world.run(20.0, 0.005)
    assert submit.call_count == 8


def test_nor_is_it_looked_up_in_each_step_while_peers_are_asked(world: World) -> None:
    """Beside other connectors, requests that wait are looked at in each."""

    class MultiConnector:
        def start(self, holder: EngineSim) -> EngineSim:
            return searcher(world, holder)

    holder = a_holder(world)
    engine = MultiConnector().start(holder)
    holder.is_cut = True
    engine.ask(ClientRequest("r", FIRST, 1))
    with patch.object(world.pool, "submit", side_effect=world.pool.submit) as submit:
        for _ in range(4):
            world.step(0.005)
    assert submit.call_count == 1
    world.run(20.0)


def test_what_was_looked_up_before_a_reset_is_not_fetched(world: World) -> None:
    holder = a_holder(world)
    fill_pool(world, FIRST)
    engine = searcher(world, holder)
    holder.is_cut = True
    engine.ask(ClientRequest("r", [*FIRST, 1], 1))
    world.step(0.005)
    assert pool_of(engine)._ahead["r-d"].answer.result() > 0
    engine.scheduler.reset_prefix_cache(reset_connector=True)
    holder.is_cut = False
    world.run(20.0, 0.005)
    engine.side.update_stats()
    assert engine.computed_of["r-d"] == TURN + 1
    assert engine.counts["pool_blocks: gone"] == 0


def test_of_a_request_that_leaves_no_question_is_left(world: World) -> None:
    holder = a_holder(world)
    engine = searcher(world, holder)
    holder.is_cut = True
    engine.ask(ClientRequest("r", FIRST, 1))
    world.step(0.005)
    assert pool_of(engine)._ahead
    engine.abort("r-d")
    assert not pool_of(engine)._ahead
    world.run(20.0)
