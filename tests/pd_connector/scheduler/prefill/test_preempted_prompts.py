"""Prompts that a decode engine preempts, whose blocks others get: they come back from host memory.

Through vLLM's own scheduler, which preempts because its pool is small. Every token that the model attends to is checked
by the simulated workers.
"""

import pytest

from pd_connector.config import HostTransfers
from pd_connector.scheduler.host.tier import StoreMode
from tests.support.simulation.vllm_schedulers import ClientRequest, EngineSim, World

PROMPT, OUTPUTS, REQUESTS, BLOCK_TOKENS = 100, 100, 5, 16


def served_by_few_blocks(world: World, **host_memory: object) -> tuple[EngineSim, int]:
    """A decode engine that has served requests of 7 blocks, which grew to 13; and how often it preempted one."""
    prefill = EngineSim(world, "kv_producer", blocks=100)
    decode = EngineSim(world, "kv_consumer", blocks=25, **host_memory)  # type: ignore[arg-type]  # of any setting
    asked = [ClientRequest(f"r{number}", [number] * PROMPT, OUTPUTS, decode) for number in range(REQUESTS)]
    for each in asked:
        prefill.ask(each)
    preemptions: dict[str, int] = {}
    while any(not each.ended for each in asked):
        world.step()
        preemptions |= {name: request.num_preemptions for name, (_, request) in decode.requests.items()}
    assert {each.ended for each in asked} == {"finished"}
    assert decode.counts["pulled"] == REQUESTS, "what is preempted is not pulled again"
    assert decode.computed == {}
    return decode, sum(preemptions.values())


@pytest.mark.parametrize(("store", "lost"), [("eager", 1), ("lazy", 2)])
@pytest.mark.parametrize("transfers", ["off", "always"])
def test_only_what_fills_no_block_is_computed_again(
    world: World, transfers: HostTransfers, store: StoreMode, lost: int
) -> None:
    """Of lazy stores, what the step that preempts takes at once is lost too. ``lost``: blocks of each, at most."""
    decode, preemptions = served_by_few_blocks(world, slots=100, host_transfers=transfers, cpu_store=store)
    assert decode.counts["landed"] == (REQUESTS if transfers == "always" else 0)
    assert preemptions > 0
    assert decode.computed_tokens - REQUESTS * OUTPUTS < lost * BLOCK_TOKENS * preemptions


def test_without_host_memory_what_others_have_taken_is_computed_again(world: World) -> None:
    decode, preemptions = served_by_few_blocks(world)
    assert decode.computed_tokens - REQUESTS * OUTPUTS > 4 * BLOCK_TOKENS * preemptions
