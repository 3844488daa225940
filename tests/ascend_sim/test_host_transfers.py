"""Transfers that begin and end in host memory, on simulated NPUs: leases that move, and prompts that land."""

import pytest

from tests.support.ascend.faults import LOAD
from tests.support.ascend.servers import D_FAULTS, HOST_TRANSFERS
from tests.support.e2e.client import LOGPROB_TOLERANCE
from tests.support.e2e.deployments import on
from tests.support.e2e.pair import Pair, make_prompt

PROMPTS, TOKENS = 4, 1000  # P's device has blocks for two

pytestmark = [on(HOST_TRANSFERS), pytest.mark.parametrize("pair", [("P", "D")], indirect=True, ids="-".join)]


def test_leases_move_from_the_device_and_prompts_land_from_host_memory(pair: Pair) -> None:
    prompts = [make_prompt(TOKENS, (pair.name, "moved", number)) for number in range(PROMPTS)]
    with pair.traffic() as traffic:
        params = [pair.prefill.client.prefill(prompt) for prompt in prompts]
        answers = [pair.decode_leg(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    assert traffic.prefill is not None
    assert traffic.decode is not None
    moved = [traffic.prefill.value("vllm:pd_lease_moves_total", event=why) for why in ("short", "share")]
    assert sum(moved) >= PROMPTS - 2
    assert traffic.decode.value("vllm:pd_landings_total", event="landed") == traffic.leases("released") == PROMPTS
    assert traffic.pulled("pull_bytes_from_host") > 0
    assert traffic.failures() == 0
    for prompt, answer in zip(prompts, answers, strict=True):
        pair.assert_right(answer, prompt)


@pytest.mark.parametrize("without", [(), (LOAD,)], ids=["all waits", "one left out"])
def test_a_request_waits_for_the_load_of_what_has_landed(pair: Pair, without: tuple[str, ...]) -> None:
    prompt = make_prompt(TOKENS, (pair.name, "landed", without))
    with D_FAULTS.on(*without, copy_us=100_000):
        pair.decode.client.complete([1, 2, 3], 2)  # the switch holds from the next step on
        with pair.traffic() as traffic:
            answer = pair.disaggregate(prompt, 2)
    assert traffic.decode is not None
    assert traffic.decode.value("vllm:pd_landings_total", event="landed") == 1
    right = pair.decode.client.compute(prompt, 2)
    is_right = answer.tokens == right.tokens and answer.logprob_difference(right) < LOGPROB_TOLERANCE
    assert is_right is not bool(without)
