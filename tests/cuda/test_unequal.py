"""Sides that differ in block size and layout, with host memory on P: pulls, both legs at once, leases that move.

The last test kills P in the middle of a read.
"""

import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.e2e.client import Completion
from tests.support.e2e.cluster import Cluster
from tests.support.e2e.cuda_deployments import (
    CUDA_PULL_TIMEOUT_S,
    CUDA_UNEQUAL,
    DEVICE_TOKENS,
    IS_CPU,
    OWN_STREAM,
    SMALL_BLOCK,
    TOGETHER,
    UNIT,
    fallbacks,
)
from tests.support.e2e.deployments import on
from tests.support.e2e.exact import (
    ANSWER_TOKENS,
    alone,
    assert_held_exactly,
    assert_pull_at_once_exactly,
    assert_pulls_exactly,
    assert_same_bits,
    exact_prompt,
)
from tests.support.e2e.host_memory import evict, metrics_after_a_step
from tests.support.e2e.legs import Router
from tests.support.e2e.pair import Pair, make_prompt, wait_until_at_rest
from tests.support.e2e.trouble import stopped
from tests.support.waiting import until

pytestmark = [on(CUDA_UNEQUAL), pytest.mark.parametrize("pair", [("P", "D")], indirect=True, ids="-".join)]

MOVING, MOVING_UNITS = 18, 5  # prompts that together need more blocks than P's device has


@pytest.mark.parametrize("units", [1, 2, 5, 20, 48])
def test_a_pulled_prompt_has_the_bits_that_d_computes_alone(pair: Pair, units: int) -> None:
    assert_pulls_exactly(pair, exact_prompt(units, UNIT, ("one", units)))


def test_prompts_of_any_length_are_pulled_whole(pair: Pair) -> None:
    """The answer of one that ends within a block is computed from more than one token where D computes alone."""
    for tokens in (2, SMALL_BLOCK - 1, SMALL_BLOCK, UNIT, UNIT + SMALL_BLOCK + 3, 1000):
        pair.assert_pulls_all(make_prompt(tokens, ("any", tokens)))


def test_prompts_at_once_have_the_bits_that_d_computes_alone(pair: Pair) -> None:
    assert_pull_at_once_exactly(pair, [exact_prompt(1 + 2 * number, UNIT, ("at once", number)) for number in range(8)])


@pytest.mark.parametrize("decode_first_s", [0.3, -0.02])
def test_both_legs_at_once_give_the_bits_that_d_computes_alone(pair: Pair, decode_first_s: float) -> None:
    prompt = exact_prompt(40, UNIT, ("legs", decode_first_s))
    wanted, router = alone(pair.decode, prompt), Router(pair)
    with pair.traffic() as traffic:
        legs = router.send(prompt, ANSWER_TOKENS, decode_first_s=decode_first_s)
    assert (traffic.pulled("pulls"), traffic.failures()) == (1, 0)
    assert traffic.source("local_compute") == 1
    assert_same_bits(legs.decode, wanted)


def test_blocks_that_come_back_from_host_memory_have_the_bits_that_were_evicted(pair: Pair) -> None:
    """Until they are evicted, P has answered from what it has computed itself: nothing was loaded."""
    p, prompts = pair.prefill, [exact_prompt(20, UNIT, ("host", number)) for number in range(2)]
    with pair.traffic() as before:
        wanted = [_cold(pair, prompt) for prompt in prompts]
    assert before.loaded("prefill") == 0
    evict(p, "host", DEVICE_TOKENS // SMALL_BLOCK)
    with pair.traffic() as traffic:
        assert_held_exactly(p, prompts, wanted)
    assert traffic.loaded("prefill") >= 20 * UNIT * len(prompts)


def _cold(pair: Pair, prompt: list[int]) -> Completion:
    """P's answer from its device, of which it computes the last token alone, like one whose blocks were loaded."""
    assert pair.prefill.client.complete(prompt, 1).status == 200
    return pair.prefill.client.complete(prompt, ANSWER_TOKENS)


def test_leases_that_have_moved_to_host_memory_are_read_there_with_the_same_bits(pair: Pair) -> None:
    """D has no host memory: what it computes alone came from nowhere else."""
    prompts = [exact_prompt(MOVING_UNITS, UNIT, ("moving", number)) for number in range(MOVING)]
    wanted = [alone(pair.decode, prompt) for prompt in prompts]
    with pair.traffic() as traffic:
        with stopped(pair.decode):
            params = [pair.prefill.client.prefill(prompt) for prompt in prompts]
            leased = DEVICE_TOKENS // SMALL_BLOCK / 10
            until(
                lambda: metrics_after_a_step(pair.prefill).value("vllm:pd_leased_blocks") <= leased,
                "the leases to leave the device",
                within_s=20.0,
            )
        answers = [pair.decode_leg(prompt, each, ANSWER_TOKENS) for prompt, each in zip(prompts, params, strict=True)]
    for answer, each in zip(answers, wanted, strict=True):
        assert_same_bits(answer, each)
    assert (traffic.failures(), traffic.leases("released")) == (0, MOVING)
    assert traffic.pulled("pull_bytes_from_host") > 0


def test_nothing_has_fallen_back_to_a_slower_way(pair: Pair) -> None:
    logs = pair.prefill.log_since(), pair.decode.log_since()
    assert [TOGETHER in log for log in logs] == [True, False]
    assert [OWN_STREAM in log for log in logs] == [not IS_CPU] * 2
    assert [fallbacks(log) for log in logs] == [[], []]


def test_p_that_is_killed_in_the_middle_of_a_read_costs_d_no_wrong_token(
    pair: Pair, cluster: Cluster, figures: list[str]
) -> None:
    """D computes the prompt itself, gives all blocks back, and pulls from P when it is back."""
    prompt = exact_prompt(40, UNIT, "killed")
    wanted, params = alone(pair.decode, prompt), pair.prefill.client.prefill(prompt)
    with ThreadPoolExecutor(1) as clients, stopped(pair.prefill):
        answer = clients.submit(pair.decode_leg, prompt, params, ANSWER_TOKENS)
        time.sleep(1.0)
        assert not answer.done(), "the read was over before P was killed"
        begin = time.monotonic()
        pair.prefill.signal(signal.SIGKILL)
        completion = answer.result(CUDA_PULL_TIMEOUT_S + 20.0)
    figures.append(f"D's answer after P was killed in mid-read: {time.monotonic() - begin:.1f} s")
    assert completion.status == 200, completion.body
    assert completion.tokens == wanted.tokens
    wait_until_at_rest(pair.decode)
    cluster.restart(pair.prefill)
    pair.get_acquainted()
    assert_pulls_exactly(pair, exact_prompt(5, UNIT, "after P has come back"))
