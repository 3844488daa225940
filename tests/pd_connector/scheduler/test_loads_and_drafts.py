"""Requests that draft are pulled only where they find room to draft: on pools that they fill."""

import pytest

from tests.support.releases import module_needs
from tests.support.simulation.state_groups import DRAFTS
from tests.support.simulation.vllm_schedulers import ClientRequest, EngineSim, World

module_needs((0, 30), "states of recurrent layers")

STATES = 4  # blocks: of each of two groups, one of the request and one of its draft


def drafting(world: World, role: str, blocks: int, policy: str = "recompute") -> EngineSim:
    """An engine whose requests have ``blocks`` for keys and values, and for states."""
    return EngineSim(world, role, 1 + blocks, policy, states="none", stated=DRAFTS, queue_timeout_s=12.0)


def ask(prefill: EngineSim, decode: EngineSim, *lengths: int) -> list[ClientRequest]:
    asked = [
        ClientRequest(f"r{number}", [number * 100 + token for token in range(tokens)], 4, decode)
        for number, tokens in enumerate(lengths)
    ]
    for each in asked:
        prefill.ask(each)
    return asked


@pytest.mark.parametrize("blocks", range(16, 24))
def test_pulled_prompts_that_fill_all_blocks_do_not_wait_for_each_other_for_ever(world: World, blocks: int) -> None:
    """Nobody runs, and each needs another block for its first step: they hold their blocks until then."""
    prefill, decode = drafting(world, "kv_producer", 60), drafting(world, "kv_consumer", blocks)
    asked = ask(prefill, decode, 96, 96)  # six blocks each, and their states
    world.run(30.0)
    assert [each.ended for each in asked] == ["finished"] * 2
    assert decode.counts["pulled"] == 2


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_prompt_that_leaves_no_room_to_be_pulled_is_computed(world: World, policy: str) -> None:
    """No lease and no failed pull could end its wait: vLLM gives it no blocks for either, and nobody behind it any."""
    prefill, decode = drafting(world, "kv_producer", 60), drafting(world, "kv_consumer", 7 + STATES, policy)
    asked = ask(prefill, decode, 100, 60)
    world.run(30.0)
    assert [each.ended for each in asked] == ["finished"] * 2
    assert decode.computed == {"declined": 1}
    assert decode.counts["pulled"] == 1
    assert prefill.leases == 0


def test_a_prompt_that_leaves_room_for_its_drafts_is_pulled(world: World) -> None:
    prefill, decode = drafting(world, "kv_producer", 60), drafting(world, "kv_consumer", 10 + STATES)
    [asked] = ask(prefill, decode, 100)
    world.run(30.0)
    assert asked.ended == "finished"
    assert decode.counts["pulled"] == 1
