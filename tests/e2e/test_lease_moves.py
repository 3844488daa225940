"""Leases that wait for a paused decode server leave a prefill server's device, and are read in its host memory."""

import signal
import time

import pytest

from tests.support.e2e.cluster import Server
from tests.support.e2e.deployments import DEVICE_BLOCKS, MOVING_LEASES, on
from tests.support.e2e.host_memory import metrics_after_a_step
from tests.support.e2e.pair import Pair, make_prompt
from tests.support.waiting import until

pytestmark = [pytest.mark.host_tier, on(MOVING_LEASES)]

PROMPTS, TOKENS = 16, 200


@pytest.mark.parametrize("pair", [("P", "D")], indirect=True)
def test_prompts_for_a_paused_decode_server_leave_the_device_and_are_answered_right(pair: Pair) -> None:
    """Together they need more blocks than the device has, so the prefill server goes on only because they move."""
    prompts = [make_prompt(TOKENS, ("moving", number)) for number in range(PROMPTS)]
    before = pair.prefill.client.metrics()
    pair.decode.signal(signal.SIGSTOP)
    try:
        params = [pair.prefill.client.prefill(prompt) for prompt in prompts]
        done = time.monotonic()
        until(
            lambda: leased_blocks(pair.prefill) <= DEVICE_BLOCKS / 10, "the leases to leave the device", within_s=10.0
        )
        took_s = time.monotonic() - done
    finally:
        pair.decode.signal(signal.SIGCONT)
    assert took_s < 5.0, f"the device was free only {took_s:.1f} s after the last prompt"
    answers = [pair.decode_leg(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    for answer, prompt in zip(answers, prompts, strict=True):
        assert answer.status == 200, answer.body
        pair.assert_right(answer, prompt)
    pair.wait_until_at_rest()
    after = pair.prefill.client.metrics().since(before)
    moved = after.value("vllm:pd_lease_moves_total", event="short") + after.value(
        "vllm:pd_lease_moves_total", event="share"
    )
    assert moved >= PROMPTS - 2
    assert after.value("vllm:pd_leases_total", event="released") == PROMPTS
    assert pair.decode.client.metrics().value("vllm:pd_pull_bytes_from_host_total") > 0


def leased_blocks(server: Server) -> float:
    return metrics_after_a_step(server).value("vllm:pd_leased_blocks")
