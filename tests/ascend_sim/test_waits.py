"""What the connector waits for on a device, shown by a device that lags: without the wait, wrong bytes come to use.

Kernels are queued on their streams, and run when a stream comes to them. In each case they or copies take long. With
all waits in place answers stay right; with one left out they do not.
"""

from collections.abc import Iterator

import pytest

from tests.support.ascend.faults import FENCE, LOAD, SIDE_STREAM, STORE
from tests.support.ascend.paths import ascend_release
from tests.support.ascend.servers import D_FAULTS, NPU_BLOCK_SIZE, WAITS
from tests.support.e2e.client import LOGPROB_TOLERANCE, Completion
from tests.support.e2e.cluster import Server
from tests.support.e2e.deployments import on
from tests.support.e2e.pair import Pair, make_prompt, wait_until_at_rest

PROMPT_TOKENS = 1000
IN_BLOCKS = (PROMPT_TOKENS - 1) // NPU_BLOCK_SIZE * NPU_BLOCK_SIZE

pytestmark = [on(WAITS), pytest.mark.parametrize("pair", [("P", "D")], indirect=True, ids="-".join)]


@pytest.fixture(autouse=True)
def _nothing_cached(pair: Pair) -> Iterator[None]:
    """Wrong blocks stay out of the caches of later tests: their prompts are others."""
    yield
    wait_until_at_rest(pair.decode)


def evict(server: Server, seed: object) -> None:
    """Have the device drop all that it holds."""
    for number in range(2):
        size = server.client.cache_blocks() * NPU_BLOCK_SIZE // 2
        server.client.complete(make_prompt(size - 1, (server.log.stem, seed, number)), 1)


def is_right(pair: Pair, completion: Completion, prompt: list[int]) -> bool:
    assert completion.status == 200, completion.body
    right = pair.decode.client.compute(prompt, len(completion.tokens))
    return completion.tokens == right.tokens and completion.logprob_difference(right) < LOGPROB_TOLERANCE


@pytest.mark.parametrize("without", [(), (STORE,)], ids=["all waits", "one left out"])
def test_a_store_waits_for_the_forward_pass_that_writes_its_blocks(pair: Pair, without: tuple[str, ...]) -> None:
    prompt = make_prompt(PROMPT_TOKENS, (pair.name, "store", without))
    with D_FAULTS.on(*without, model_kernel_s=0.02):
        # Without logprobs, for which vLLM waits in every step: the second of two steps is given to the device, and the
        # blocks of the first are stored, while the first still runs.
        [tokens] = pair.decode.client.choices(prompt, 1, 2, logprobs=None)
        wait_until_at_rest(pair.decode)
    assert tokens == pair.decode.client.compute(prompt, 2).tokens
    evict(pair.decode, ("store", without))
    with pair.traffic() as traffic:
        again = pair.decode.client.complete(prompt)
    assert traffic.loaded() == IN_BLOCKS
    assert is_right(pair, again, prompt) is not bool(without)


@pytest.mark.parametrize("without", [(), (LOAD,)], ids=["all waits", "one left out"])
def test_a_request_waits_for_the_load_of_its_blocks(pair: Pair, without: tuple[str, ...]) -> None:
    prompt = make_prompt(PROMPT_TOKENS, (pair.name, "load", without))
    pair.decode.client.complete(prompt, 2)
    evict(pair.decode, ("load", without))
    with pair.traffic() as traffic, D_FAULTS.on(*without, copy_us=100_000):
        again = pair.decode.client.complete(prompt, 2)
    assert traffic.loaded() == IN_BLOCKS
    assert is_right(pair, again, prompt) is not bool(without)


@pytest.mark.parametrize("without", [(), (SIDE_STREAM,)], ids=["all waits", "one left out"])
def test_a_pull_waits_until_its_bytes_are_in_place(pair: Pair, without: tuple[str, ...]) -> None:
    prompt = make_prompt(PROMPT_TOKENS, (pair.name, "side stream", without))
    with D_FAULTS.on(*without, side_kernel_s=2.0):
        pair.decode.client.complete([1, 2, 3], 2)  # the switch holds from the next step on
        with pair.traffic() as traffic:
            pulled = pair.disaggregate(prompt, 2)
    assert traffic.pulled("pull_tokens") == PROMPT_TOKENS - 1
    assert is_right(pair, pulled, prompt) is not bool(without)


@pytest.mark.skipif(ascend_release() != "0.23", reason="vLLM 0.30 itself frees no block that the device may write to")
@pytest.mark.parametrize("without", [(), (FENCE,)], ids=["all waits", "one left out"])
def test_a_pull_waits_for_the_forward_pass_of_a_request_that_has_left(pair: Pair, without: tuple[str, ...]) -> None:
    leaving = make_prompt(PROMPT_TOKENS, (pair.name, "leaving", without))
    prompt = make_prompt(12 * NPU_BLOCK_SIZE - 20, (pair.name, "fence", without))
    params = pair.prefill.client.prefill(prompt)
    with D_FAULTS.on(*without, model_kernel_s=0.1):
        # It is computed in two steps. While the first takes long, the second is given to the device already, and the
        # request leaves. Its seven whole blocks are still held by their stores. Of 19 blocks, the pull takes the 11
        # that it had not, and its last one, which the second step writes.
        assert pair.decode.client.abandon(leaving, 6.0, max_tokens=20, logprobs=None)
        pulled = pair.decode_leg(prompt, params, 2)
    assert is_right(pair, pulled, prompt) is not bool(without)
