"""Forms of caches between tensor parallel sizes 1 and 2: DeepSeek-V4's and V4.1's compressed ones, windows and states.

Weights are bfloat16, and nothing is drafted. Each reference has computed the last token of the prompt alone, as D does
of a prompt that it pulls, so the numbers have the same bits. Requests come one by one: together, they round otherwise.
"""

import pytest

from tests.support.ascend.paths import ascend_release
from tests.support.ascend.servers import NPU_COMPRESSED, NPU_RINGS, STEP_TOKENS
from tests.support.e2e.client import LOGPROB_TOLERANCE
from tests.support.e2e.compressed_model import SELECTED_ROWS
from tests.support.e2e.corruption import spoil_numbers
from tests.support.e2e.deployments import on
from tests.support.e2e.pair import Pair, assert_same_output

pytestmark = pytest.mark.skipif(ascend_release() == "0.23", reason="vllm-ascend 0.23 calls other operators for it")

#: Tokens of an answer: a step of these models takes long.
ANSWER = 6
#: Of a compressor's ring in V4.1.
RING_ROWS = 32
#: Tokens for which the indexer has more rows than it selects, in three windows.
LONG = 4 * SELECTED_ROWS + 3 * 128


def pairs(*prefill: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("pair", [(name, "D") for name in prefill], indirect=True, ids="-".join)


class CompressedCaches:
    """What holds of both models."""

    @pairs("P TP1", "P TP2")
    @pytest.mark.parametrize("tokens", [3, 129, 512, LONG + 1, 1155])
    def test_a_pulled_prompt_gives_the_same_output(self, pair: Pair, tokens: int) -> None:
        prompt, expected = pair.prompt_and_answer(tokens, "alone", ANSWER)
        _, completion = pair.assert_pulls_all(prompt, ANSWER)
        assert_same_output(completion, expected)

    @pairs("P TP2")
    def test_another_prompt_gives_another_output(self, pair: Pair) -> None:
        """In the first token, for which only compressed rows still stand."""
        prompt, expected = pair.prompt_and_answer(LONG, "another", ANSWER)
        other = [(prompt[0] + 1) % 512, *prompt[1:]]
        assert pair.decode.client.compute(other, ANSWER).logprob_difference(expected) > 5 * LOGPROB_TOLERANCE

    def assert_wrong_numbers_change_the_output(self, pair: Pair, tokens: int, layers: str, part: str) -> None:
        """In the first of these layers: a byte in each row of its last block."""
        prompt, right = pair.prompt_and_answer(tokens, ("spoilt", layers, part))
        params = pair.prefill.client.prefill(prompt)
        spoil_numbers(pair.prefill, params, part, layers)
        wrong = pair.decode_leg(prompt, params)
        assert wrong.status == 200, wrong.body
        assert wrong.logprob_difference(right) > 5 * LOGPROB_TOLERANCE


@on(NPU_COMPRESSED)
class TestCompressedCaches(CompressedCaches):
    """V4's."""

    @pairs("P TP1", "P TP2")
    def test_a_next_turn_is_pulled_whole(self, pair: Pair) -> None:
        """All caches together end a block after 16384 tokens, and nothing is found of what is shorter."""
        prompt, expected = pair.prompt_and_answer(900, "turns", ANSWER)
        pair.disaggregate(prompt[:700], ANSWER)
        _, completion = pair.assert_pulls_all(prompt, ANSWER)
        assert_same_output(completion, expected)

    @pairs("P TP2")
    @pytest.mark.parametrize(
        ("layers", "part"),
        [
            ("swa_cache", "part0"),
            ("3.self_attn.attn", "part0"),
            ("2.self_attn.attn", "part0"),
            ("indexer.k_cache", "part0"),
            ("indexer.k_cache", "part1"),
            ("2.self_attn.compressor.state_cache", "part0"),
            ("3.self_attn.compressor.state_cache", "part0"),
            ("indexer.compressor.state_cache", "part0"),
        ],
    )
    def test_wrong_numbers_change_the_output(self, pair: Pair, layers: str, part: str) -> None:
        """In every cache. D completes rows with what it decodes, of ratio 128 one."""
        self.assert_wrong_numbers_change_the_output(pair, LONG - 8, layers, part)


@on(NPU_RINGS)
class TestRings(CompressedCaches):
    """V4.1's."""

    @pairs("P TP1", "P TP2")
    def test_the_next_turn_pulls_only_what_is_new(self, pair: Pair) -> None:
        """Both servers find whole blocks: none of their rows needs a ring.

        They end where the reference has ended a step: behind others of its own blocks, D alone answers otherwise, too.
        """
        prompt, expected = pair.prompt_and_answer(900, "turns", ANSWER)
        pair.assert_pulls_behind(prompt[: STEP_TOKENS + 88], prompt, expected, ANSWER)

    @pairs("P TP2")
    @pytest.mark.parametrize(
        ("layers", "part"),
        [
            ("swa_cache", "part0"),
            *((f"{layer}.self_attn.long_kv_cache", "part0") for layer in (1, 3)),
            *((f"{layer}.self_attn.indexer.k_cache", f"part{part}") for layer in (1, 3) for part in (0, 1)),
            ("compressor.state_cache", "state"),
        ],
    )
    def test_wrong_numbers_change_the_output(self, pair: Pair, layers: str, part: str) -> None:
        """In every cache. D joins the token that it computes with the one in the first row of the ring."""
        self.assert_wrong_numbers_change_the_output(pair, 19 * RING_ROWS + 2, layers, part)
