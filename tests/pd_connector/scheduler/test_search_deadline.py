"""A prompt that is looked for at peers and in the pool waits for both together no longer than computing it takes."""

from collections.abc import Callable
from typing import Any

import pytest

from pd_connector.scheduler.decode.peer_prefixes import PeerPrefixes
from pd_connector.scheduler.host.shared_pool import SharedPool
from tests.support.simulation.prefix_engines import (
    BLOCK,
    FIRST,
    RATE,
    REST,
    TURN,
    a_holder,
    compute,
    fill_pool,
    hold,
    numbered_prompt,
    searcher,
)
from tests.support.simulation.vllm_schedulers import ClientRequest, EngineSim, World
from transfer.control.messages import Find, Found
from transfer.control.waiting_requests import NotYet
from transfer.store.store_thread import RETRY_S

STEP_S = 0.02
FOREVER_S = 1e9


def answer_late(world: World, holder: EngineSim, late_s: float) -> None:
    """Let an engine answer each question for prefixes so late."""
    asked, handle = dict[str, float](), holder.service.handle

    def handle_late(message: Any) -> Any:
        if isinstance(message, Find) and world.clock.now < asked.setdefault(message.find_id, world.clock.now) + late_s:
            return NotYet("", FOREVER_S, Found(""))
        return handle(message)

    holder.service.handle = handle_late


def look_up_late(world: World, engine: EngineSim, late_s: float) -> None:
    """Let the pool answer each look-up of an engine so late."""
    pool, answer = engine.role_of(SharedPool), world.pool.answer

    def answer_what_is_due() -> None:
        world.pool.is_stuck = any(world.clock.now < each.began_at + late_s for each in pool._looking)
        answer()

    vars(world.pool)["answer"] = answer_what_is_due


def go_on(world: World, engine: EngineSim) -> None:
    """A step, in which the engine learns nothing of how fast it computes."""
    engine.side._rate._per_second = RATE
    world.step(STEP_S)


def delays(world: World, engine: EngineSim, *asked: ClientRequest) -> dict[str, float]:
    """For how long each request waits before it is computed."""
    began, waited = world.clock.now, dict[str, float]()
    for request in asked:
        engine.ask(request)
    while len(waited) < len(asked):
        assert world.clock.now - began < 20.0
        go_on(world, engine)
        for request in asked:
            if engine.computed_of[f"{request.name}-d"]:
                waited.setdefault(request.name, world.clock.now - began)
    world.run(20.0)
    return waited


def settle(world: World, *engines: EngineSim) -> None:
    """What is late ends, and nothing of it is left: no lease, no block, no slot, no time."""
    for engine in engines:
        engine.is_cut, engine.pooled.copy_s = False, 0.1
    world.pool.is_stuck = False
    for pause_s in (0.0, 2 * RETRY_S):
        world.clock.advance(pause_s)
        for _ in range(300):
            world.step()
    for engine in engines:
        assert not engine.service.leases.active
        assert engine.blocks_in_use == engine.slots_in_use == 0
        assert not engine.side._rate._left_s
    for engine in engines:
        pool, peers = engine.role_of(SharedPool), engine.role_of(PeerPrefixes)
        assert pool is None or not (pool._rests() or pool._asking or pool._ahead or pool._looking)
        assert pool is None or not (pool._fetches or pool._waiting)
        assert peers is None or not (peers._asking or peers._pulling or peers._waiting)


def silent(world: World, holder: EngineSim, engine: EngineSim) -> None:
    holder.is_cut = True


def answers_late(world: World, holder: EngineSim, engine: EngineSim) -> None:
    answer_late(world, holder, 0.9)


def slow_to_pull(world: World, holder: EngineSim, engine: EngineSim) -> None:
    answer_late(world, holder, 0.5)
    engine.worker.pull_s = 8.0


def stuck(world: World, holder: EngineSim, engine: EngineSim) -> None:
    world.pool.is_stuck = True


def looks_up_late(world: World, holder: EngineSim, engine: EngineSim) -> None:
    look_up_late(world, engine, 0.9)
    engine.pooled.copy_s = 0.9


def slow_to_fetch(world: World, holder: EngineSim, engine: EngineSim) -> None:
    engine.pooled.copy_s = 8.0


Trouble = Callable[[World, EngineSim, EngineSim], None]
with_slow_peers = pytest.mark.parametrize("peers", [silent, answers_late, slow_to_pull])
with_a_slow_pool = pytest.mark.parametrize("pool", [stuck, looks_up_late, slow_to_fetch])


@with_slow_peers
@with_a_slow_pool
def test_slow_peers_and_a_slow_pool_cost_a_prompt_no_more_than_computing_it(
    world: World, peers: Trouble, pool: Trouble
) -> None:
    holder = a_holder(world)
    fill_pool(world, FIRST)
    if peers is slow_to_pull:
        hold(world, holder, FIRST)
    engine = searcher(world, holder)
    peers(world, holder, engine)
    pool(world, holder, engine)
    waited = delays(world, engine, ClientRequest("r", [*FIRST, 1], 1))
    assert 0.9 < waited["r"] < 1.0 + 4 * STEP_S
    assert engine.computed_of["r-d"] == TURN + 1
    settle(world, holder, engine)


@pytest.mark.parametrize("is_same", [True, False], ids=["behind the same", "behind as many as may"])
def test_nor_if_it_waits_behind_others_before(world: World, is_same: bool) -> None:
    """Those before it are not late, so that it asks itself once they have gone on."""
    holder = a_holder(world)
    engine = searcher(world, holder)
    answer_late(world, holder, 0.7)
    look_up_late(world, engine, 0.95)
    others = [numbered_prompt(1)] if is_same else [numbered_prompt(number) for number in range(1, 17)]
    asked = [ClientRequest(f"other{number}", tokens, 1) for number, tokens in enumerate(others)]
    last = ClientRequest("last", [*numbered_prompt(1)[:-1], 3] if is_same else numbered_prompt(20), 1)
    waited = delays(world, engine, *asked, last)
    computing_s = len(asked) * TURN / 256 * STEP_S  # as vLLM takes them up in turn
    assert 0.9 < waited["last"] < 1.0 + 6 * STEP_S + computing_s
    settle(world, holder, engine)


def test_a_look_up_that_is_answered_at_the_deadline_begins_no_fetch(world: World) -> None:
    fill_pool(world, FIRST)
    engine = searcher(world)
    look_up_late(world, engine, 0.3)
    asked, pool = ClientRequest("r", [*FIRST, 1], 1), engine.role_of(SharedPool)
    engine.ask(asked)
    go_on(world, engine)
    engine.side._rate._left_s = dict.fromkeys(pool._asking, 0.0)
    for _ in range(40):
        go_on(world, engine)
        assert not pool._fetches
    assert asked.ended
    assert engine.counts["pool_prompts: late"] == 1


def test_many_peers_cost_no_more_than_one(world: World) -> None:
    holders = [a_holder(world) for _ in range(4)]
    for number, holder in enumerate(holders):
        hold(world, holder, FIRST)
        answer_late(world, holder, 0.2 + 0.2 * number)
    engine = searcher(world, *holders, pull_s=8.0)
    world.pool.is_stuck = True
    assert 0.9 < delays(world, engine, ClientRequest("r", [*FIRST, 1], 1))["r"] < 1.0 + 4 * STEP_S
    settle(world, *holders, engine)


def test_what_peers_hold_and_what_the_pool_has_more_both_count_within_that_time(world: World) -> None:
    holder = a_holder(world)
    longer = [*FIRST, *numbered_prompt(2)]  # takes two seconds
    hold(world, holder, FIRST)
    fill_pool(world, longer)
    engine = searcher(world, holder, pull_s=0.3)
    answer_late(world, holder, 0.4)
    engine.pooled.copy_s = 0.9
    waited = delays(world, engine, ClientRequest("r", [*longer, 1], 1))
    assert 1.6 < waited["r"] < 2.0
    assert engine.computed_of["r-d"] == 2 * TURN + 1 - 2 * TURN // BLOCK * BLOCK
    engine.side.update_stats()
    assert engine.counts["prefixes: pulled"] == engine.counts["pool_prompts: fetched"] == 1
    settle(world, holder, engine)


def test_after_peers_have_brought_a_part_the_pool_has_no_longer_than_the_rest_takes(world: World) -> None:
    holder = a_holder(world)
    hold(world, holder, FIRST)
    engine = searcher(world, holder)
    world.pool.is_stuck = True
    waited = delays(world, engine, ClientRequest("r", [*FIRST, *numbered_prompt(2)], 1))
    assert engine.counts["prefixes: pulled"] == 1
    assert 1.0 < waited["r"] < 1.4, "not two seconds"
    settle(world, holder, engine)


def test_what_host_memory_holds_is_none_of_what_peers_are_waited_for(world: World) -> None:
    holder = a_holder(world)
    engine = searcher(world, holder)
    compute(world, engine, FIRST)
    for _ in range(10):
        world.step()
    engine.scheduler.kv_cache_manager.block_pool.reset_prefix_cache()
    holder.is_cut = True
    waited = delays(world, engine, ClientRequest("r", [*FIRST, *numbered_prompt(2)], 1))
    assert 0.9 < waited["r"] < 1.2, "not two seconds"
    settle(world, holder, engine)


def test_while_vllm_would_not_take_a_request_up_the_search_has_its_time_left(world: World) -> None:
    """It delays nothing then: the pool is looked at, though the peers have had longer than computing takes."""
    holder = a_holder(world)
    fill_pool(world, FIRST)
    engine = searcher(world, holder)
    holder.is_cut = True
    engine.ask(ClientRequest("r", [*FIRST, 1], 1))
    for _ in range(15):
        go_on(world, engine)
    for number in range(16):  # as many as run at a time
        engine.ask(ClientRequest(f"other{number}", [number], 150))
    while len(engine.requests) > 1:
        go_on(world, engine)
    engine.pooled.copy_s = 0.5
    world.run(20.0)
    assert engine.computed_of["r-d"] == REST
    settle(world, holder, engine)


@pytest.mark.parametrize("stage", ["looked up", "fetched"])
def test_the_pool_is_not_overdue_because_peers_have_left_it_no_time(world: World, stage: str) -> None:
    """Then others would go on without it."""
    holder, prompts = a_holder(world), FIRST
    fill_pool(world, FIRST)
    engine = searcher(world, holder)
    if stage == "looked up":
        hold(world, holder, FIRST)
        prompts = [*FIRST, *numbered_prompt(2)]  # of which peers bring a part before the pool is asked for the rest
        look_up_late(world, engine, 0.6)
    answer_late(world, holder, 0.8)
    engine.worker.pull_s, engine.pooled.copy_s = 0.9, 0.6
    delays(world, engine, ClientRequest("late", [*prompts, 1], 1))
    pool = engine.role_of(SharedPool)
    assert pool._looking if stage == "looked up" else pool._fetches
    while pool._fetches or pool._looking:
        assert not pool._rests()
        go_on(world, engine)
    engine.side.update_stats()
    assert engine.counts["pool_prompts: late"] == 1
    settle(world, holder, engine)


def test_without_time_left_nobody_is_asked(world: World) -> None:
    holder = a_holder(world)
    engine = searcher(world, holder)
    engine.side._rate._left_s["r-d"] = 0.0
    assert delays(world, engine, ClientRequest("r", FIRST, 1))["r"] <= 2 * STEP_S
    engine.side.update_stats()
    assert not engine.counts["prefixes: asked"] + engine.counts["pool_prompts: asked"]


@pytest.mark.parametrize("stage", ["asked", "pulled", "looked up", "fetched", "behind"])
def test_what_is_under_way_when_a_request_leaves_or_its_time_ends_keeps_nothing(world: World, stage: str) -> None:
    holder = a_holder(world)
    fill_pool(world, FIRST)
    if stage in {"pulled", "behind"}:
        hold(world, holder, FIRST)
    engine = searcher(world, holder)
    holder.is_cut = stage == "asked"
    world.pool.is_stuck = stage == "looked up"
    engine.worker.pull_s = engine.pooled.copy_s = 3.0
    peers, pool = engine.role_of(PeerPrefixes), engine.role_of(SharedPool)
    under_way: dict[str, Callable[[], object]] = {
        "asked": lambda: peers._asking,
        "pulled": lambda: peers._waiting,
        "looked up": lambda: pool._asking,
        "fetched": lambda: pool._waiting,
        "behind": lambda: peers._queue.is_waiting("late-d"),
    }
    for name in ("leaves", "late"):
        engine.ask(ClientRequest(name, [*FIRST, 1], 1))
    while not under_way[stage]():
        go_on(world, engine)
    engine.abort("leaves-d")
    began = world.clock.now
    while "late-d" in engine.requests:
        go_on(world, engine)
    assert world.clock.now - began < 1.0 + 4 * STEP_S
    settle(world, holder, engine)
