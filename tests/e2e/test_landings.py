"""Prompts that are pulled to a decode server's host memory, because its device has no room for them, or always."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.e2e.deployments import LANDINGS, on
from tests.support.e2e.pair import Pair, Traffic, make_prompt

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
