"""Models whose caches are of other kinds, between tensor parallel sizes 1 and 2: windows, and one latent vector."""

import pytest

from tests.support.ascend.servers import NPU_BLOCK_SIZE, NPU_MLA, NPU_SLIDING_WINDOW
from tests.support.e2e.deployments import on
from tests.support.e2e.pair import Pair, make_prompt

both_ways = pytest.mark.parametrize("pair", [("TP2", "TP1"), ("TP1", "TP2")], indirect=True, ids="-".join)


@on(NPU_SLIDING_WINDOW, NPU_MLA)
@both_ways
@pytest.mark.parametrize("tokens", [2, NPU_BLOCK_SIZE + 1, 1000])
def test_a_pulled_prompt_gives_the_same_output(pair: Pair, tokens: int) -> None:
    pair.assert_pulls_right(make_prompt(tokens, (tokens, pair.name)))


@on(NPU_SLIDING_WINDOW, NPU_MLA)
@both_ways
def test_concurrent_prompts_give_the_same_outputs(pair: Pair) -> None:
    pair.assert_concurrent_pulls_right(3)
