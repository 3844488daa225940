"""Models whose caches are of other kinds, between tensor parallel sizes 1 and 2.

Windows, one latent vector a token, and the same beside the key of an indexer.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.ascend.paths import ascend_release
from tests.support.ascend.servers import NPU_BLOCK_SIZE, NPU_INDEXER, NPU_MLA, NPU_SLIDING_WINDOW
from tests.support.e2e.architectures import SELECTED
from tests.support.e2e.client import Completion
from tests.support.e2e.corruption import assert_wrong_numbers_change_the_answer
from tests.support.e2e.deployments import on
from tests.support.e2e.pair import Pair, make_prompt

both_ways = pytest.mark.parametrize("pair", [("TP2", "TP1"), ("TP1", "TP2")], indirect=True, ids="-".join)

#: What two runs of an MLA model may differ by in a logprob: its prompts are computed in bfloat16.
BFLOAT16_TOLERANCE = 0.05


@on(NPU_SLIDING_WINDOW)
@both_ways
class TestSlidingWindows:
    @pytest.mark.parametrize("tokens", [2, NPU_BLOCK_SIZE + 1, 1000])
    def test_a_pulled_prompt_gives_the_same_output(self, pair: Pair, tokens: int) -> None:
        pair.assert_pulls_right(make_prompt(tokens, (tokens, pair.name)))

    def test_concurrent_prompts_give_the_same_outputs(self, pair: Pair) -> None:
        pair.assert_concurrent_pulls_right(3)


def prompt_and_answer(pair: Pair, tokens: int, seed: object) -> tuple[list[int], Completion]:
    """A prompt that ends with what D answers to the rest of it, and D's answer from there on."""
    start = make_prompt(tokens - 1, (pair.name, tokens, seed))
    answer = pair.decode.client.compute(start, 17)
    return [*start, answer.tokens[0]], Completion(200, "", answer.tokens[1:], answer.logprobs[1:])


def assert_close(completion: Completion, expected: Completion) -> None:
    assert completion.tokens == expected.tokens
    assert completion.logprob_difference(expected) < BFLOAT16_TOLERANCE


@on(NPU_MLA)
@both_ways
class TestLatentVectors:
    """vllm-ascend computes MLA's prompts in bfloat16, and a token that follows alone in the model's own type.

    D computes the last token of a pulled prompt alone. So each prompt ends with a token for which the reference, D's
    own answer to the rest of the prompt, has done the same.
    """

    @pytest.mark.parametrize("tokens", [3, NPU_BLOCK_SIZE + 1, 1000])
    def test_a_pulled_prompt_gives_the_same_output(self, pair: Pair, tokens: int) -> None:
        prompt, expected = prompt_and_answer(pair, tokens, "alone")
        _, completion = pair.assert_pulls_all(prompt)
        assert_close(completion, expected)

    def test_concurrent_prompts_give_the_same_outputs(self, pair: Pair) -> None:
        prompts, expected = zip(*(prompt_and_answer(pair, 40 + 120 * i, "together") for i in range(3)), strict=True)
        with ThreadPoolExecutor(len(prompts)) as clients:
            completions = list(clients.map(pair.disaggregate, prompts))
        for completion, one in zip(completions, expected, strict=True):
            assert_close(completion, one)


@pytest.mark.skipif(ascend_release() == "0.23", reason="vllm-ascend 0.23 calls other operators for it")
@on(NPU_INDEXER)
@both_ways
class TestIndexers:
    """Sparse attention is computed in the model's own type. Longer prompts than what is selected need right keys."""

    @pytest.mark.parametrize("tokens", [2, NPU_BLOCK_SIZE + 1, SELECTED + 500])
    def test_a_pulled_prompt_gives_the_same_output(self, pair: Pair, tokens: int) -> None:
        pair.assert_pulls_right(make_prompt(tokens, (tokens, pair.name)))

    def test_concurrent_prompts_give_the_same_outputs(self, pair: Pair) -> None:
        pair.assert_all_pull_right([make_prompt(tokens, (tokens, pair.name, "all")) for tokens in (40, 300, 2200)])

    @pytest.mark.parametrize("part", ["mla_latent", "mla_rope", "index"])
    def test_wrong_numbers_change_the_output(self, pair: Pair, part: str) -> None:
        """In every part of the cache: none is moved in vain. The last block is whole, and so is all of it wrong."""
        prompt = make_prompt(SELECTED + 5 * NPU_BLOCK_SIZE, (pair.name, "spoilt", part))
        assert_wrong_numbers_change_the_answer(pair, prompt, part)
