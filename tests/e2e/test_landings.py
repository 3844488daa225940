"""Prompts that are pulled to a decode server's host memory, because its device has no room for them, or always."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.e2e.client import Completion
from tests.support.e2e.cluster import BLOCK_SIZE, Server
from tests.support.e2e.deployments import LANDINGS, on
from tests.support.e2e.pair import Pair, Traffic, assert_same_output, make_prompt

pytestmark = [pytest.mark.host_tier, on(LANDINGS)]

PROMPTS, TOKENS = 16, 900  # the device has room for two


def landings(traffic: Traffic, event: str) -> int:
    assert traffic.decode is not None
    return int(traffic.decode.value("vllm:pd_landings_total", event=event))


@pytest.mark.parametrize("pair", [("P", "D auto")], indirect=True)
def test_a_burst_on_a_device_for_two_prompts_lands_and_is_answered_right(pair: Pair) -> None:
    prompts = [make_prompt(TOKENS + number, ("landing", number)) for number in range(PROMPTS)]
    with pair.traffic() as traffic, ThreadPoolExecutor(PROMPTS) as threads:
        params = [pair.prefill.client.prefill(prompt) for prompt in prompts]
        answers = list(threads.map(pair.decode_leg, prompts, params))
    assert [answer.status for answer in answers] == [200] * PROMPTS
    assert landings(traffic, "landed") >= PROMPTS // 2
    assert landings(traffic, "failed") == landings(traffic, "left") == traffic.failures() == 0
    assert traffic.leases("released") == PROMPTS
    assert traffic.pulled("landed_bytes") > 0
    for answer, prompt in zip(answers, prompts, strict=True):
        pair.assert_right(answer, prompt)


@pytest.mark.parametrize("pair", [("P", "D host")], indirect=True)
@pytest.mark.parametrize("tokens", [2, 33, 65, 900])
def test_every_prompt_lands_to_the_last_token_that_is_pulled(pair: Pair, tokens: int) -> None:
    prompt = make_prompt(tokens, ("every prompt lands", tokens))
    with pair.traffic() as traffic:
        answer = pair.disaggregate(prompt)
    assert landings(traffic, "landed") == 1
    assert traffic.source("local_compute") == 1
    assert (traffic.leases("granted"), traffic.leases("released")) == (1, 1)
    pair.assert_right(answer, prompt)


@pytest.mark.parametrize("server", ["B"], indirect=True)
def test_both_roles_answer_a_burst_of_more_blocks_than_the_device_has(server: Server) -> None:
    """Nothing is computed a second time: leases and prompts that wait for the device's blocks are in host memory."""
    prompts = [make_prompt(200, ("both roles", number)) for number in range(24)]

    def ask(prompt: list[int]) -> Completion:
        params = server.client.prefill(prompt)
        return server.client.complete(prompt, kv_transfer_params=params)

    before = server.client.metrics()
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(ask, prompts))
    assert [answer.status for answer in answers] == [200] * len(prompts)
    counts = server.client.metrics().since(before)
    for event in ("revoked", "expired"):
        assert counts.value("vllm:pd_leases_total", event=event) == 0
    assert counts.value("vllm:pd_pull_failures_total") == counts.value("vllm:pd_landings_total", event="failed") == 0
    # It finds its own blocks, so it never proves itself by one, and computes what is behind the last whole one.
    behind = sum(len(prompt) % BLOCK_SIZE for prompt in prompts)
    assert counts.prompt_tokens("local_compute") <= sum(map(len, prompts)) + behind
    for answer, prompt in zip(answers, prompts, strict=True):
        assert_same_output(answer, server.client.compute(prompt))
