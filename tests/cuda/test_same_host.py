"""D maps P's memory and copies from it (CUDA IPC). Sides differ in block size and layout. Not run on a GPU.

The last test kills P while D has its memory mapped.
"""

import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.support.e2e.cluster import Cluster
from tests.support.e2e.cuda_deployments import (
    CUDA_PULL_TIMEOUT_S,
    CUDA_SAME_HOST,
    IS_CPU,
    SAME_HOST_CACHE_BYTES,
    UNIT,
    fallbacks,
)
from tests.support.e2e.deployments import on
from tests.support.e2e.exact import (
    ANSWER_TOKENS,
    alone,
    assert_pull_at_once_exactly,
    assert_pulls_exactly,
    exact_prompt,
)
from tests.support.e2e.pair import Pair, Traffic, wait_until_at_rest
from tests.support.e2e.trouble import stopped
from tests.support.waiting import until

pytestmark = [
    on(CUDA_SAME_HOST),
    pytest.mark.parametrize("pair", [("P", "D")], indirect=True, ids="-".join),
    pytest.mark.skipif(IS_CPU, reason="the memory of a process on the CPU is not mapped"),
]


def assert_all_over_ipc(traffic: Traffic) -> None:
    assert traffic.pulled("pull_bytes_over_ipc") == traffic.pulled("pull_bytes") > 0


@pytest.mark.parametrize("units", [1, 5, 20, 48])
def test_a_prompt_from_mapped_memory_has_the_bits_that_d_computes_alone(pair: Pair, units: int) -> None:
    assert_all_over_ipc(assert_pulls_exactly(pair, exact_prompt(units, UNIT, ("one", units))))


def test_prompts_at_once_have_the_bits_that_d_computes_alone(pair: Pair) -> None:
    with pair.traffic() as traffic:
        assert_pull_at_once_exactly(
            pair, [exact_prompt(1 + 2 * number, UNIT, ("at once", number)) for number in range(8)]
        )
    assert_all_over_ipc(traffic)


def test_nothing_has_fallen_back_to_a_slower_way(pair: Pair) -> None:
    assert fallbacks(pair.prefill.log_since() + pair.decode.log_since()) == []


def free_gpu_bytes() -> int:
    free, _ = torch.cuda.mem_get_info()
    return int(free)


def test_what_p_had_of_the_gpu_is_free_when_p_is_killed_and_its_next_life_is_mapped_again(
    pair: Pair, cluster: Cluster, figures: list[str]
) -> None:
    """D lives on, and computes the prompt itself."""
    prompt = exact_prompt(40, UNIT, "killed")
    wanted, params = alone(pair.decode, prompt), pair.prefill.client.prefill(prompt)
    before = free_gpu_bytes()
    with ThreadPoolExecutor(1) as clients, stopped(pair.prefill):
        answer = clients.submit(pair.decode_leg, prompt, params, ANSWER_TOKENS)
        time.sleep(1.0)
        assert not answer.done(), "the pull was confirmed before P was killed"
        begin = time.monotonic()
        pair.prefill.signal(signal.SIGKILL)
        until(
            lambda: free_gpu_bytes() >= before + SAME_HOST_CACHE_BYTES,
            lambda: f"P's caches are free: {(free_gpu_bytes() - before) >> 20} MiB are",
            within_s=10.0,
        )
        figures.append(f"what P had of the GPU was free after {time.monotonic() - begin:.1f} s")
        completion = answer.result(CUDA_PULL_TIMEOUT_S + 20.0)
    assert completion.status == 200, completion.body
    assert completion.tokens == wanted.tokens
    wait_until_at_rest(pair.decode)
    cluster.restart(pair.prefill)
    pair.get_acquainted()
    assert_all_over_ipc(assert_pulls_exactly(pair, exact_prompt(5, UNIT, "after P has come back")))
