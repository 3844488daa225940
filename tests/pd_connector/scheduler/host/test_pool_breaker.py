"""A pool that stops answering, on vLLM's own schedulers: after the first time-out nobody waits for it."""

import pytest

from pd_connector.orders import Orders
from tests.support.simulation.prefix_engines import FIRST, compute
from tests.support.simulation.vllm_schedulers import ClientRequest, EngineSim, World
from transfer.store.store_thread import RETRY_S

#: When requests come; the first one's time is out after 0.4 s.
ARRIVALS = (0.0, 0.25, 0.35, 0.65, 1.25, 1.85, 2.45, 3.05)


def an_engine(world: World) -> EngineSim:
    engine = EngineSim(world, "kv_producer", 400, slots=600, pooled=True)
    engine.side._rate._per_second = 500.0
    return engine


def prompt(number: int) -> list[int]:
    return [token + 10_000 * number for token in FIRST]


def fill(world: World, prompts: int) -> None:
    """Another engine puts prompts into the pool."""
    writer = an_engine(world)
    for number in range(prompts):
        compute(world, writer, prompt(number))
    for _ in range(60):
        world.step()


def count(engine: EngineSim, event: str) -> int:
    engine.side.update_stats()
    return engine.counts[f"pool_prompts: {event}"]


def follow(world: World, engine: EngineSim) -> tuple[float, dict[int, float]]:
    """Requests come; return when the first has gone on without the pool, and how long each has waited for it."""
    began, first, waited = world.clock.now, 0.0, dict[int, float]()
    while len(waited) < len(ARRIVALS):
        now = world.clock.now - began
        assert now < 10.0
        for number, at in enumerate(ARRIVALS):
            if now >= at and not engine.computed_of[f"r{number}-d"] and f"r{number}-d" not in engine.requests:
                engine.ask(ClientRequest(f"r{number}", [*prompt(number), 1], 1))
        world.step()
        for number, at in enumerate(ARRIVALS):
            if engine.computed_of[f"r{number}-d"] and number not in waited:
                waited[number] = world.clock.now - began - at
        first = first or (world.clock.now - began) * bool(count(engine, "late"))
    return first, waited


@pytest.mark.parametrize("stuck", ["fetches", "look-ups"])
class TestAfterTheFirstTimeOut:
    def test_nobody_waits_longer_than_100_ms(self, world: World, stuck: str) -> None:
        fill(world, len(ARRIVALS))
        engine = an_engine(world)
        engine.pooled.copy_s = 1e9
        world.pool.is_stuck = stuck == "look-ups"
        first, waited = follow(world, engine)
        assert 0.3 < first < 0.6
        assert max(at + waited[number] - max(at, first) for number, at in enumerate(ARRIVALS)) <= 0.1 + 1e-6

    def test_it_is_used_again_as_soon_as_it_goes_on(self, world: World, stuck: str) -> None:
        fill(world, 3)
        engine = an_engine(world)
        engine.pooled.copy_s = 0.8 if stuck == "fetches" else 0.1
        world.pool.is_stuck = stuck == "look-ups"
        for number in range(2):
            engine.ask(ClientRequest(f"r{number}", [*prompt(number), 1], 1))
        world.run(5.0)
        assert count(engine, "late")
        world.pool.is_stuck = False
        engine.pooled.copy_s = 0.1
        for _ in range(20):  # until what was late has ended
            world.step()
        assert compute(world, engine, [*prompt(2), 1])[0] < 50
        assert count(engine, "fetched") == 1

    def test_it_is_used_again_after_a_while_if_it_has_not_gone_on(self, world: World, stuck: str) -> None:
        fill(world, 3)
        engine = an_engine(world)
        engine.pooled.copy_s = 1e9 if stuck == "fetches" else 0.1
        world.pool.is_stuck = stuck == "look-ups"
        compute(world, engine, [*prompt(0), 1])
        for _ in range(160):  # until also a put has failed
            world.step()
        world.pool.is_stuck = False
        engine.pooled.copy_s = 0.1
        world.clock.advance(RETRY_S)
        world.step()
        assert compute(world, engine, [*prompt(2), 1])[0] < 50


def test_a_short_prompt_behind_a_long_one_says_nothing_of_the_pool(world: World) -> None:
    """A rank fetches for one after the other: what is late because of others keeps nobody from the pool."""
    fill(world, 3)
    engine = an_engine(world)
    start = engine.pooled.start
    ends = world.clock.now

    def one_after_the_other(orders: Orders) -> None:
        nonlocal ends
        if orders.fetches:
            ends = max(ends, world.clock.now) + 0.25
            engine.pooled.copy_s = ends - world.clock.now
        start(orders)

    vars(engine.pooled)["start"] = one_after_the_other
    for number in range(2):
        engine.ask(ClientRequest(f"r{number}", [*prompt(number), 1], 1))
        world.step()
    for _ in range(40):
        if count(engine, "late") + count(engine, "fetched") == 2:
            break
        world.step()
    assert (count(engine, "fetched"), count(engine, "late")) == (1, 1)
    assert compute(world, engine, [*prompt(2), 2])[0] < 50
