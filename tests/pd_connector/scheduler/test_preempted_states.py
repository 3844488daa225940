"""Prompts with states at borders that one of two engines preempts, by vLLM's own schedulers on small pools.

After every step, the simulated workers check each state that a request goes on from, and each that can be found.
"""

from collections import Counter
from contextlib import closing
from typing import Any

import pytest

from tests.support.releases import INSTALLED, module_needs
from tests.support.simulation.vllm_schedulers import ClientRequest, EngineSim, World

if INSTALLED < (0, 30):
    module_needs((0, 30), "states of recurrent layers")

PROMPT, OUTPUTS = 100, 100
FIRST: Any = {"states": "align", "scheduling": "priority"}


def run(world: World, engine: EngineSim, asked: list[ClientRequest]) -> Counter[str]:
    """Run to the end; return how often the engine has preempted each request."""
    preemptions: Counter[str] = Counter()
    while any(not each.ended for each in asked) or any(each.side.wants_step() for each in world.engines.values()):
        world.step()
        preemptions |= Counter({name: request.num_preemptions for name, (_, request) in engine.requests.items()})
    assert {each.ended for each in asked} == {"finished"}
    for each in world.engines.values():
        assert each.blocks_in_use == 0
    return preemptions


@pytest.mark.parametrize("pull_s", [0.1, 1.0])
def test_prompts_that_the_decode_engine_preempts_go_on_from_a_border(world: World, pull_s: float) -> None:
    """``pull_s``: until the states at borders have come behind prompts, of which some are preempted by then."""
    prefill = EngineSim(world, "kv_producer", 200, states="align")
    decode = EngineSim(world, "kv_consumer", 60, states="align", pull_s=pull_s)
    asked = [ClientRequest(f"r{number}", [number] * PROMPT, OUTPUTS, decode) for number in range(6)]
    for each in asked:
        prefill.ask(each)
    preemptions = run(world, decode, asked)
    assert prefill.leases == 0
    assert decode.counts["pulled"] == len(asked), "what is preempted is not pulled again"
    assert preemptions.total() > 0
    again = decode.computed_tokens - len(asked) * OUTPUTS
    assert again < preemptions.total() * PROMPT


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("later", [0, 1])
def test_prompts_that_the_prefill_engine_preempts_are_started_over(later: int, at_once: bool) -> None:
    """For a request that comes first, ``later`` steps after the prompt has begun. What was not computed is not found.

    By what there is room for, in some of these pools.
    """
    preempted = 0
    for blocks in range(48, 55):
        with closing(World()) as world:
            preempted += preempts(world, EngineSim(world, "kv_producer", blocks, **FIRST), later, at_once=at_once)
    assert preempted > 0


def preempts(world: World, prefill: EngineSim, later: int, *, at_once: bool) -> bool:
    """Whether a prompt is preempted there, which is pulled whole in any case, and found by a longer one."""
    decode, prompt = EngineSim(world, "kv_consumer", 200, states="align"), list(range(4 * PROMPT))
    if at_once:
        decode.ask_by_name(ClientRequest("r", prompt, 3), prefill)
    prefill.ask(ClientRequest("r", prompt, 3, decode, 1, "r" if at_once else ""))
    for _ in range(later):
        world.step()
    _, request = prefill.requests["r-p"]
    prefill.ask(ClientRequest("first", list(range(1000, 1300)), 30))
    world.run(100.0)
    assert decode.counts["pulled"] == 1
    assert decode.computed_tokens == 3
    assert decode.blocks_in_use == prefill.blocks_in_use == prefill.leases == 0
    prefill.ask(ClientRequest("longer", [*prompt, *range(20)], 1))
    world.run(100.0)
    return bool(request.num_preemptions)


def test_states_of_a_step_that_preempts_their_request_are_not_found(world: World) -> None:
    """vLLM names them when it schedules that step, which then computes a request that comes first instead."""
    engine = EngineSim(world, "kv_producer", 10, **FIRST)
    engine.ask(ClientRequest("last", list(range(30)), 10, priority=2))
    world.step()
    _, request = engine.requests["last-d"]
    engine.ask(ClientRequest("first", list(range(1000, 1032)), 10))
    world.run(100.0)
    assert request.num_preemptions > 0
