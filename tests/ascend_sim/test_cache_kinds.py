"""Models whose caches are of other kinds, between tensor parallel sizes 1 and 2.

Windows, one latent vector a token, the same beside the key of an indexer, as numbers and quantised, and keys and values
beside such a key, as numbers and in fp8; one of them also from pipeline stages, and where ranks share a request's
tokens.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.ascend.paths import ascend_release
from tests.support.ascend.servers import (
    NPU_BLOCK_FP8,
    NPU_BLOCK_INDEXER,
    NPU_BLOCK_SIZE,
    NPU_FP8,
    NPU_INDEXER,
    NPU_MLA,
    NPU_QUANTISED,
    NPU_SHARED_TOKENS,
    NPU_SLIDING_WINDOW,
    NPU_STAGES,
    NPU_STAGES_OF_TWO_RANKS,
    STEP_TOKENS,
)
from tests.support.e2e.architectures import SELECTED, SELECTED_BLOCKS
from tests.support.e2e.choice import on_pairs, pairs
from tests.support.e2e.client import Completion
from tests.support.e2e.cluster import Server
from tests.support.e2e.corruption import assert_wrong_numbers_change_the_answer
from tests.support.e2e.deployments import on
from tests.support.e2e.legs import Router
from tests.support.e2e.pair import Pair, assert_same_output, make_prompt

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


def assert_close(completion: Completion, expected: Completion) -> None:
    assert completion.tokens == expected.tokens
    assert completion.logprob_difference(expected) < BFLOAT16_TOLERANCE


def assert_wrong_numbers_count(
    pair: Pair, tokens: int, part: str, stage: int | None = None, tp_rank: int | None = None
) -> None:
    """Spoil a part of what P holds of a prompt, on all ranks or some; D's answer must be another one."""
    prompt, right = pair.prompt_and_answer(tokens, ("spoilt", part, stage, tp_rank))
    assert_wrong_numbers_change_the_answer(pair, prompt, part, right=right, stage=stage, tp_rank=tp_rank)


@on(NPU_MLA)
@both_ways
class TestLatentVectors:
    """vllm-ascend computes MLA's prompts in bfloat16, and a token that follows alone in the model's own type.

    D computes the last token of a pulled prompt alone. So each prompt ends with a token for which the reference, D's
    own answer to the rest of the prompt, has done the same.
    """

    @pytest.mark.parametrize("tokens", [3, NPU_BLOCK_SIZE + 1, 1000])
    def test_a_pulled_prompt_gives_the_same_output(self, pair: Pair, tokens: int) -> None:
        prompt, expected = pair.prompt_and_answer(tokens, "alone")
        _, completion = pair.assert_pulls_all(prompt)
        assert_close(completion, expected)

    def test_concurrent_prompts_give_the_same_outputs(self, pair: Pair) -> None:
        prompts, expected = zip(*(pair.prompt_and_answer(40 + 120 * i, "together") for i in range(3)), strict=True)
        with ThreadPoolExecutor(len(prompts)) as clients:
            completions = list(clients.map(pair.disaggregate, prompts))
        for completion, one in zip(completions, expected, strict=True):
            assert_close(completion, one)


@pytest.mark.skipif(ascend_release() == "0.23", reason="vllm-ascend 0.23 calls other operators for it")
@on(NPU_INDEXER)
@pytest.mark.parametrize("pair", [("TP2", "TP1"), ("TP1", "TP2"), ("TP2", "other TP2")], indirect=True, ids="-".join)
class TestIndexers:
    """Sparse attention is computed in the model's own type. Longer prompts than what is selected need right keys."""

    @pytest.mark.parametrize("tokens", [2, NPU_BLOCK_SIZE + 1, SELECTED + 500])
    def test_a_pulled_prompt_gives_the_same_output(self, pair: Pair, tokens: int) -> None:
        pair.assert_pulls_right(make_prompt(tokens, (tokens, pair.name)))

    def test_concurrent_prompts_give_the_same_outputs(self, pair: Pair) -> None:
        pair.assert_all_pull_right([make_prompt(tokens, (tokens, pair.name, "all")) for tokens in (40, 300, 2200)])

    def test_the_next_turn_pulls_only_what_is_new(self, pair: Pair) -> None:
        """P finds its beginning, too."""
        turn = make_prompt(SELECTED + 300, (pair.name, "turns"))
        pair.assert_next_turn_pulls_the_rest(turn, SELECTED + 70, NPU_BLOCK_SIZE)

    def test_both_legs_at_once(self, pair: Pair) -> None:
        Router(pair).assert_right(make_prompt(SELECTED + 200, (pair.name, "legs")), decode_first_s=0.3)

    @pytest.mark.parametrize("part", ["mla_latent", "mla_rope", "index"])
    def test_wrong_numbers_change_the_output(self, pair: Pair, part: str) -> None:
        """In every part of the cache: none is moved in vain. The last block is whole, and so is all of it wrong."""
        prompt = make_prompt(SELECTED + 5 * NPU_BLOCK_SIZE, (pair.name, "spoilt", part))
        assert_wrong_numbers_change_the_answer(pair, prompt, part)


@pytest.mark.skipif(ascend_release() == "0.23", reason="vllm-ascend 0.23 calls other operators for it")
class TestQuantisedIndexers:
    """The caches of GLM-5 with w8a8c8: packed rows in int8, and an indexer's keys with scales. Weights are bfloat16.

    In fp8 on devices that know it, which have operators of their own for both.

    P writes the indexer's keys by runs of slots, D one by one. Each reference has computed the last token of the prompt
    alone, as above: the numbers have the same bits then.
    """

    of_one_stage = pairs(NPU_QUANTISED, [("P TP1", "D"), ("P TP2", "D"), ("P TP2", "D TP2")])
    in_fp8 = pairs(NPU_FP8, [("P", "D")])
    of_stages = pairs(NPU_STAGES, [("P PP2", "D")]) + pairs(NPU_STAGES_OF_TWO_RANKS, [("P TP2 PP2", "D")])
    of_shared_tokens = pairs(NPU_SHARED_TOKENS, [("P DCP2", "D")])
    on_all = on_pairs(of_one_stage, in_fp8, of_stages, of_shared_tokens)

    @on_all
    @pytest.mark.parametrize("tokens", [3, NPU_BLOCK_SIZE + 1, SELECTED + 200])
    def test_a_pulled_prompt_gives_the_same_output(self, pair: Pair, tokens: int) -> None:
        prompt, expected = pair.prompt_and_answer(tokens, "alone")
        _, completion = pair.assert_pulls_all(prompt)
        assert_same_output(completion, expected)

    @on_all
    def test_a_second_turn_pulls_the_rest(self, pair: Pair) -> None:
        """P finds its beginning, too."""
        prompt, expected = pair.prompt_and_answer(3 * NPU_BLOCK_SIZE + 40, "turns")
        before = pair.prefill.client.metrics()
        pair.assert_pulls_behind(prompt[: 2 * NPU_BLOCK_SIZE + 9], prompt, expected)
        counted = pair.prefill.client.metrics().since(before)
        assert counted.prompt_tokens("local_cache_hit") == 2 * NPU_BLOCK_SIZE

    @on_all
    def test_both_legs_at_once(self, pair: Pair) -> None:
        prompt, expected = pair.prompt_and_answer(700, "legs")
        Router(pair).assert_right(prompt, decode_first_s=0.3, expected=expected)

    @on_pairs(of_one_stage, in_fp8)
    @pytest.mark.parametrize("part", ["mla_latent", "mla_rope", "mla_scale", "index", "part1"])
    def test_wrong_numbers_change_the_output(self, pair: Pair, part: str) -> None:
        """In every part of the cache, "part1" the scales of the indexer's keys: a byte in each row of a block."""
        tokens = 5 * NPU_BLOCK_SIZE + (SELECTED if part in ("index", "part1") else 0)
        assert_wrong_numbers_count(pair, tokens, part)

    @on_pairs(of_stages)
    @pytest.mark.parametrize("stage", [0, 1])
    def test_wrong_numbers_in_the_last_layer_of_a_stage_change_the_output(self, pair: Pair, stage: int) -> None:
        assert_wrong_numbers_count(pair, 5 * NPU_BLOCK_SIZE, "mla_latent", stage=stage)

    @on_pairs(of_shared_tokens)
    @pytest.mark.parametrize("tp_rank", [0, 1])
    def test_wrong_numbers_of_a_rank_that_shares_tokens_change_the_output(self, pair: Pair, tp_rank: int) -> None:
        """In the last block, in which both ranks have as many tokens."""
        assert_wrong_numbers_count(pair, 6 * NPU_BLOCK_SIZE, "mla_latent", tp_rank=tp_rank)


@pytest.mark.skipif(ascend_release() == "0.23", reason="vllm-ascend 0.23 calls other operators for it")
@on(NPU_SHARED_TOKENS)
@pytest.mark.parametrize("pair", [("P DCP2", "D DCP2")], indirect=True, ids="-".join)
class TestSharedTokensOnBothSides:
    """The same caches where D's ranks share tokens, too.

    D computes a pulled prompt's last token as a part of the prompt, for which its ranks gather what they hold; in what
    follows, each attends to its own tokens, and the output is joined. So each prompt ends with a token that a step of
    the reference computes alone.
    """

    @pytest.mark.parametrize("tokens", [STEP_TOKENS + 1, 5 * STEP_TOKENS + 1])
    def test_a_pulled_prompt_gives_the_same_output(self, pair: Pair, tokens: int) -> None:
        pair.assert_pulls_right(make_prompt(tokens, (tokens, pair.name)))

    def test_a_second_turn_pulls_the_rest(self, pair: Pair) -> None:
        pair.assert_pulls_the_rest(make_prompt(2 * STEP_TOKENS + 1, (pair.name, "turns")), 2 * NPU_BLOCK_SIZE + 9)

    def test_the_output_is_that_of_one_server_but_for_rounding(self, pair: Pair, servers: dict[str, Server]) -> None:
        """Up to a tie: what each rank has seen is rounded to bfloat16 before it is joined.

        Longer prompts, of whose tokens the indexer selects, differ by more.
        """
        tokens = 2 * NPU_BLOCK_SIZE + 30
        prompt = make_prompt(tokens, (pair.name, tokens, "one server"))
        expected = servers["D"].client.compute(prompt)
        assert pair.disaggregate(prompt).logprob_difference(expected) < 2 * BFLOAT16_TOLERANCE


@pytest.mark.skipif(ascend_release() == "0.23", reason="vllm-ascend 0.23 has no MiniMax-M3")
class TestBlockIndexers:
    """Of longer prompts, a query attends to its own block and to the best of the others; in the first layer, to all.

    In fp8, its caches are without scales, but for the first layer's, which are in bfloat16. Each reference has computed
    the last token of the prompt alone, as above.
    """

    of_one_stage = pairs(NPU_BLOCK_INDEXER, [("TP2", "TP1"), ("TP1", "TP2")])
    of_stages = pairs(NPU_BLOCK_INDEXER, [("PP2", "TP1")])
    in_float32 = of_one_stage + of_stages
    in_fp8 = pairs(NPU_BLOCK_FP8, [("P", "D")])
    on_all = on_pairs(in_float32, in_fp8)

    @on_all
    @pytest.mark.parametrize("tokens", [2, NPU_BLOCK_SIZE + 1, 10 * NPU_BLOCK_SIZE + 20])
    def test_a_pulled_prompt_gives_the_same_output(self, pair: Pair, tokens: int) -> None:
        prompt, expected = pair.prompt_and_answer(tokens, "alone")
        _, completion = pair.assert_pulls_all(prompt)
        assert_same_output(completion, expected)

    @on_pairs(in_float32)
    def test_concurrent_prompts_give_the_same_outputs(self, pair: Pair) -> None:
        pair.assert_all_pull_right([make_prompt(tokens, (tokens, pair.name, "all")) for tokens in (40, 300, 900)])

    @on_all
    def test_the_next_turn_pulls_only_what_is_new(self, pair: Pair) -> None:
        prompt, expected = pair.prompt_and_answer(1200, "turns")
        pair.assert_pulls_behind(prompt[:700], prompt, expected)

    @on_all
    @pytest.mark.parametrize(("part", "more"), [("k", 60), ("v", 60), ("index", 0)])
    def test_wrong_numbers_change_the_output(self, pair: Pair, part: str, more: int) -> None:
        """In every part of a cache of which blocks are selected: of the last layer, with stages of the first one.

        A token's own block is always seen; the last whole one, if its keys say so.
        """
        assert_wrong_numbers_count(pair, 2 * SELECTED_BLOCKS * NPU_BLOCK_SIZE + more, part, stage=0)

    @on_pairs(of_stages)
    @pytest.mark.parametrize(("part", "more"), [("k", 60), ("index", 0)])
    def test_wrong_numbers_in_the_last_stage_change_the_output(self, pair: Pair, part: str, more: int) -> None:
        assert_wrong_numbers_count(pair, 2 * SELECTED_BLOCKS * NPU_BLOCK_SIZE + more, part, stage=1)

    @on_pairs(in_fp8)
    @pytest.mark.parametrize("part", ["k", "v"])
    def test_wrong_numbers_in_the_first_layer_change_the_output(self, pair: Pair, part: str) -> None:
        prompt, right = pair.prompt_and_answer(5 * NPU_BLOCK_SIZE, ("spoilt", "first layer", part))
        assert_wrong_numbers_change_the_answer(pair, prompt, part, ".layers.0.self_attn.attn", right)
