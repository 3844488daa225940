"""Models of which some layers keep states: gated delta net, as in Qwen3.5.

The last prompt token is left to the decode server, as on the CPU.
"""

import pytest

from tests.support.ascend.paths import ascend_release
from tests.support.ascend.reference import transformers_answers
from tests.support.ascend.servers import NPU_GATED_DELTA, NPU_ONE_STATE, NPU_SHORT_STEPS, NPU_STATE_BLOCK
from tests.support.e2e.cluster import Server
from tests.support.e2e.corruption import assert_wrong_numbers_change_the_answer
from tests.support.e2e.deployments import on
from tests.support.e2e.pair import Pair, make_prompt

pytestmark = pytest.mark.skipif(ascend_release() == "0.23", reason="hybrids are refused on vLLM 0.23")

SAME, FEWER, MORE = ("TP1", "other TP1"), ("TP2", "TP1"), ("TP1", "TP2")


def pairs(*names: tuple[str, str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("pair", names, indirect=True, ids="-".join)


@on(NPU_GATED_DELTA)
@pytest.mark.parametrize("server", ["TP1", "TP2"], indirect=True)
def test_one_server_answers_as_transformers_do(server: Server) -> None:
    prompts = [make_prompt(tokens, ("hybrid", tokens)) for tokens in (3, 70, 700)]
    said = [list(server.client.compute(prompt, 12).tokens) for prompt in prompts]
    assert said == transformers_answers(server.model, prompts, 12)


@on(NPU_GATED_DELTA)
class TestStates:
    @pairs(SAME)
    @pytest.mark.parametrize("tokens", [2, NPU_STATE_BLOCK, 3 * NPU_STATE_BLOCK + 2, 1300])
    def test_every_bit_is_the_same(self, pair: Pair, tokens: int) -> None:
        """Of a prompt whose last token D has written itself, in a step of its own."""
        start = make_prompt(tokens - 1, (pair.name, "bits", tokens))
        alone = pair.decode.client.compute(start, 17)
        _, completion = pair.assert_pulls_all([*start, alone.tokens[0]])
        assert (completion.tokens, completion.logprobs) == (alone.tokens[1:], alone.logprobs[1:])

    @pairs(FEWER, MORE)
    @pytest.mark.parametrize("tokens", [2, NPU_STATE_BLOCK + 1, 1300])
    def test_a_pulled_prompt_gives_the_same_output(self, pair: Pair, tokens: int) -> None:
        pair.assert_pulls_right(make_prompt(tokens, (tokens, pair.name)))

    @pairs(SAME, FEWER, MORE)
    def test_concurrent_prompts_give_the_same_outputs(self, pair: Pair) -> None:
        pair.assert_concurrent_pulls_right(3)

    @pairs(SAME, FEWER, MORE)
    def test_the_next_turn_pulls_only_what_is_new(self, pair: Pair) -> None:
        """Both servers find its beginning, up to the last border before it ended."""
        turn = make_prompt(4 * NPU_STATE_BLOCK + 1, (pair.name, "turns"))
        pair.assert_next_turn_pulls_the_rest(turn, 700, NPU_STATE_BLOCK)

    @pairs(FEWER, MORE)
    @pytest.mark.parametrize("part", ["state", "conv_q", "conv_k", "conv_v", "k", "v"])
    def test_wrong_numbers_change_the_output(self, pair: Pair, part: str) -> None:
        """In every part of the cache: none is moved in vain."""
        prompt = make_prompt(3 * NPU_STATE_BLOCK, (pair.name, "spoilt", part))
        assert_wrong_numbers_change_the_answer(pair, prompt, part)


@on(NPU_SHORT_STEPS)
@pairs(("P", "D"))
class TestStepsThatEndInsideBlocks:
    """Of those, vllm-ascend would have states named by the border behind them, and D's first comparison refuse P."""

    def test_a_prompt_that_D_computes_itself_leaves_right_states(self, pair: Pair) -> None:
        prompt = make_prompt(900, (pair.name, "computed"))
        pair.decode.client.complete(prompt[:700], 1)
        with pair.traffic() as traffic:
            said = pair.decode.client.complete(prompt, 12)
        assert traffic.source("local_cache_hit") == 2 * NPU_STATE_BLOCK
        pair.assert_right(said, prompt, pair.prefill.client.compute(prompt, 12))

    def test_the_next_turn_pulls_only_what_is_new(self, pair: Pair) -> None:
        turn = make_prompt(4 * NPU_STATE_BLOCK + 1, (pair.name, "turns"))
        pair.assert_next_turn_pulls_the_rest(turn, 700, NPU_STATE_BLOCK)


@on(NPU_ONE_STATE)
@pairs(("TP2", "other TP2"))
class TestOneStateOfARequest:
    """Without prefix caching, as in vllm-ascend's recipes."""

    @pytest.mark.parametrize("tokens", [2, NPU_STATE_BLOCK + 1, 1300])
    def test_a_pulled_prompt_gives_the_same_output(self, pair: Pair, tokens: int) -> None:
        pair.assert_pulls_right(make_prompt(tokens, (tokens, pair.name)))

    def test_the_next_turn_is_pulled_whole(self, pair: Pair) -> None:
        turn = make_prompt(900, (pair.name, "turns"))
        pair.assert_pulls_right(turn[:700])
        pair.assert_pulls_right(turn)
