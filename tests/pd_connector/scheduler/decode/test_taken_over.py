"""An answer goes on at another decode engine, which has its request alone and is told where the rest is found."""

from typing import Any

import pytest

from tests.support.simulation.prefix_engines import BLOCK, FIRST, TURN, a_holder, asker, compute
from tests.support.simulation.state_groups import StateMode
from tests.support.simulation.vllm_schedulers import HOST, ClientRequest, EngineSim, World

WRITTEN = 40


def written(world: World, leaving: EngineSim, **states: Any) -> list[int]:
    """Prompt and answer so far of a stream that a decode engine has given up, in the middle of a block."""
    prefill = EngineSim(world, "kv_producer", 60, **states)
    prefill.ask(ClientRequest("r", FIRST, 4 * WRITTEN, leaving))
    while "r-d" not in leaving.requests or leaving.requests["r-d"][1].num_output_tokens < WRITTEN:
        world.step()
    tokens = list(leaving.requests["r-d"][1].all_token_ids)
    leaving.abort("r-d")
    assert leaving.computed_of["r-d"] < BLOCK + len(tokens) - TURN, "its prompt was pulled"
    return tokens


@pytest.mark.parametrize("states", ["", "align"], ids=["tokens", "states"])
@pytest.mark.parametrize("slots", [0, 200], ids=["device", "host memory"])
@pytest.mark.parametrize("role", ["kv_consumer", "kv_both"])
def test_less_than_a_block_is_computed_of_it(world: World, role: str, slots: int, states: StateMode) -> None:
    leaving = a_holder(world, peers=[], states=states)
    other = asker(world, role=role, states=states, slots=slots, serve_prefixes=True)
    tokens = written(world, leaving, states=states)
    computed, _ = compute(world, other, tokens, 5, prefixes_at=f"{HOST}:{leaving.port}")
    assert computed - 4 == len(tokens) - (len(tokens) - 1) // BLOCK * BLOCK  # one token a step behind the first
    assert other.counts["prefixes: pulled"] == leaving.counts["prefixes_served: found"] == 1
    world.run(1.0)
    assert leaving.leases == leaving.blocks_in_use == other.blocks_in_use == 0


@pytest.mark.parametrize("settings", [{}, {"serve_prefixes": True}])
def test_an_engine_that_asks_nobody_computes_it(world: World, settings: dict[str, Any]) -> None:
    leaving = a_holder(world, peers=[])
    other = EngineSim(world, "kv_consumer", 60, **settings)
    tokens = written(world, leaving)
    computed, _ = compute(world, other, tokens, prefixes_at=f"{HOST}:{leaving.port}")
    assert computed == len(tokens)
    assert not other.computed, "it is no request of an unknown contract"
    assert other.answers["r0-d"] is None


def test_one_that_has_left_meanwhile_costs_the_wait_for_it(world: World) -> None:
    leaving = a_holder(world, peers=[])
    other = asker(world, role="kv_consumer", serve_prefixes=True)
    tokens = written(world, leaving)
    leaving.is_cut = True
    begun = world.clock.now
    computed, _ = compute(world, other, tokens, prefixes_at=f"{HOST}:{leaving.port}")
    assert computed == len(tokens)
    assert world.clock.now - begun < 2.0
