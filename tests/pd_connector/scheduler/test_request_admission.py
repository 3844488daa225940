"""Whoever waits for blocks gets them in the end: vLLM's own schedulers on small pools, with both roles."""

from collections.abc import Iterator

import pytest

from tests.support.simulation.engines import Asked, EngineSim, World


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


def burst(number: int, tokens: int, prefills_on: list[EngineSim], decodes_on: list[EngineSim]) -> list[Asked]:
    """Many different prompts at once, in turns on the engines."""
    all_asked = []
    for index in range(number):
        prompt = [(index * 31 + position) % 500 for position in range(tokens)]
        asked = Asked(f"r{index}", prompt, 5, decodes_on[index % len(decodes_on)])
        prefills_on[index % len(prefills_on)].ask(asked)
        all_asked.append(asked)
    return all_asked


def test_a_burst_on_an_engine_with_both_roles_is_answered_without_losing_a_lease(world: World) -> None:
    engine = EngineSim(world, "kv_both", blocks=64)
    asked = burst(20, 100, [engine], [engine])
    world.run(within_s=60)
    assert {each.ended for each in asked} == {"finished"}
    assert engine.counts == {"pulled": 20}


def test_two_engines_with_both_roles_that_serve_each_other_do_not_lock(world: World) -> None:
    a, b = (EngineSim(world, "kv_both", blocks=64) for _ in range(2))
    asked = burst(40, 100, [a, b], [b, a])
    world.run(within_s=60)
    assert {each.ended for each in asked} == {"finished"}
    assert a.counts + b.counts == {"pulled": 40}
