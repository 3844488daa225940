"""A pull that fails while host memory comes to hold its prompt, on an engine without room for two such requests."""

from typing import Any

import pytest

from tests.support.simulation.vllm_schedulers import ClientRequest, EngineSim, World

PROMPT = list(range(250))  # 16 blocks


def step_until(world: World, happened: Any) -> None:
    for _ in range(200):
        if happened():
            return
        world.step()
    raise AssertionError("it does not happen")


@pytest.mark.usefixtures("no_log")
def test_its_request_computes_the_prompt_instead_of_waiting_again(world: World) -> None:
    """vLLM takes the blocks that it keeps for the request for those of another one, and would never give it any."""
    prefill = EngineSim(world, "kv_producer", 60)
    decode = EngineSim(world, "kv_consumer", 20, slots=40, host_transfers="auto")
    first, second = (ClientRequest(name, PROMPT, 3, decode) for name in ("first", "second"))
    decode.worker.pull_s = 4.0
    prefill.ask(first)
    step_until(world, lambda: decode.worker.pulls)
    decode.worker.pull_s = 0.1
    prefill.ask(second)
    step_until(world, lambda: decode.counts["landed"])  # there is no room on the device
    prefill.service.leases.cancel_all()
    world.run(20.0)
    assert (first.ended, second.ended) == ("finished", "finished")
    assert decode.computed == {"pull": 1}
