"""The caches of GLM-5.3-Flash: states of KDA, latent vectors, keys of pools of tokens, and rings of the rest.

In bfloat16, the only type that KDA is computed in. So each reference has computed the last token of a prompt alone, as
the decode server does with a pulled one.
"""

import pytest

from tests.support.ascend.paths import ascend_release
from tests.support.ascend.servers import NPU_POOLED_INDEXER, NPU_STATE_BLOCK
from tests.support.e2e.corruption import assert_wrong_numbers_change_the_answer
from tests.support.e2e.deployments import on
from tests.support.e2e.glm5_next import POOL, SELECTED_IN_POOLS
from tests.support.e2e.legs import Router
from tests.support.e2e.pair import Pair, assert_same_output

pytestmark = pytest.mark.skipif(ascend_release() == "0.23", reason="vllm-ascend 0.23 has no GLM-5.3")

#: Tokens of an answer: a step of this model takes long.
ANSWER = 6
SAME, FEWER, MORE = ("TP1", "other TP1"), ("TP2", "TP1"), ("TP1", "TP2")


def pairs(*names: tuple[str, str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("pair", names, indirect=True, ids="-".join)


@on(NPU_POOLED_INDEXER)
class TestPooledIndexers:
    @pairs(SAME, FEWER, MORE)
    @pytest.mark.parametrize("tokens", [3, NPU_STATE_BLOCK, 3 * NPU_STATE_BLOCK + 2, 5 * NPU_STATE_BLOCK + POOL + 1])
    def test_a_pulled_prompt_gives_the_same_output(self, pair: Pair, tokens: int) -> None:
        """With any number of tokens in its ring, and more pools than are selected."""
        prompt, expected = pair.prompt_and_answer(tokens, "alone", ANSWER)
        _, completion = pair.assert_pulls_all(prompt, ANSWER)
        assert_same_output(completion, expected)

    @pairs(SAME, FEWER, MORE)
    def test_the_next_turn_pulls_only_what_is_new(self, pair: Pair) -> None:
        """Both servers find its beginning, up to the last border before it ended."""
        prompt, expected = pair.prompt_and_answer(4 * NPU_STATE_BLOCK + 2, "turns", ANSWER)
        pair.assert_pulls_behind(prompt[:700], prompt, expected, ANSWER)

    @pairs(FEWER, MORE)
    def test_both_legs_at_once(self, pair: Pair) -> None:
        prompt, expected = pair.prompt_and_answer(900, "legs")
        Router(pair).assert_right(prompt, decode_first_s=0.3, expected=expected)

    @pairs(FEWER)
    @pytest.mark.parametrize(
        ("layer", "part"),
        [
            ("self_attn.attn", "part0"),
            ("indexer.k_cache", "part0"),
            ("indexer.tail_cache", "state"),
            *(("self_attn", part) for part in ("state", "conv_q", "conv_k", "conv_v")),
        ],
    )
    def test_wrong_numbers_change_the_output(self, pair: Pair, layer: str, part: str) -> None:
        """In every part of the cache: none is moved in vain. The last block is whole, and so is all of it wrong."""
        tokens = SELECTED_IN_POOLS + 3 * NPU_STATE_BLOCK
        prompt, right = pair.prompt_and_answer(tokens, ("spoilt", layer, part))
        assert_wrong_numbers_change_the_answer(pair, prompt, part, layer, right)
