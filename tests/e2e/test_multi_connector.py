"""Beside another connector that has a handshake and statistics, in vLLM's MultiConnector, wherever ours stands."""

import pytest

from tests.support.e2e.cluster import BLOCK_SIZE, Server
from tests.support.e2e.deployments import DEVICE_BLOCKS, MULTI_CONNECTOR, on
from tests.support.e2e.pair import Pair, make_prompt
from tests.support.waiting import until

pytestmark = [pytest.mark.multi_connector, on(MULTI_CONNECTOR)]

either = pytest.mark.parametrize("server", ["first", "last"], indirect=True)


@pytest.mark.parametrize("pair", [("first", "last"), ("last", "first")], indirect=True, ids="-".join)
def test_prompts_are_pulled_both_ways_and_the_outputs_are_right(pair: Pair) -> None:
    pair.assert_pulls_right(make_prompt(200, ("multi", pair.name)))


@either
def test_statistics_of_both_connectors_reach_the_metrics(server: Server) -> None:
    def counted() -> bool:
        server.client.compute([1, 2, 3], max_tokens=2)
        metrics = server.client.metrics()
        return metrics.value("greeting_steps_total") > 0 and metrics.value("vllm:pd_connector_call_seconds_max") > 0

    until(counted, "both connectors' statistics are exported")


@either
def test_host_memory_works_beside_a_child_with_a_handshake(server: Server) -> None:
    prompt = make_prompt(300, "multi host memory")
    first = server.client.complete(prompt)
    for number in range(3):  # evicts the prompt from the device
        server.client.complete(make_prompt(DEVICE_BLOCKS * BLOCK_SIZE // 2, ("multi evicts", number)), 1)
    before = server.client.metrics()
    again = server.client.complete(prompt)
    assert server.client.metrics().since(before).value("vllm:pd_host_tokens_total") == 299 // BLOCK_SIZE * BLOCK_SIZE
    assert again.tokens == first.tokens
