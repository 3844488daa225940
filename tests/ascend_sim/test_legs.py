"""Both legs of a request at once, on simulated NPUs: D pulls what P has computed while P computes the rest.

A long prompt takes P three steps. What is pulled is verified.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.ascend.servers import NPU_BLOCK_SIZE, ONE_RANK, SEVERAL_RANKS
from tests.support.e2e.deployments import on
from tests.support.e2e.legs import Router
from tests.support.e2e.pair import Pair, make_prompt

#: It takes nine blocks: of the 19 that the smaller D has, prompts that are pulled ahead may hold half.
LONG = 1100


@pytest.fixture
def router(pair: Pair) -> Router:
    """A router for the pair of the test."""
    return Router(pair)


class Legs:
    """What holds whatever the tensor parallel sizes of the two sides."""

    @pytest.mark.parametrize("decode_first_s", [0.3, -0.02])
    @pytest.mark.parametrize("tokens", [2, NPU_BLOCK_SIZE + 1, LONG])
    def test_a_prompt_gives_the_same_output_whichever_leg_is_first(
        self, router: Router, tokens: int, decode_first_s: float
    ) -> None:
        prompt = make_prompt(tokens, ("legs", router.pair.name, tokens, decode_first_s))
        traffic = router.assert_right(prompt, decode_first_s=decode_first_s)
        if tokens == LONG and decode_first_s > 0:
            assert traffic.pulled("pulls_ahead") == router.pair.decode_ranks
            assert 0 < traffic.pulled("pull_bytes_ahead") < traffic.pulled("pull_bytes")

    def test_what_d_holds_is_not_pulled(self, router: Router) -> None:
        prompt = make_prompt(1200, ("half of it is known to D", router.pair.name))
        router.pair.disaggregate(prompt[:600])
        router.assert_right(prompt, hit=600 // NPU_BLOCK_SIZE * NPU_BLOCK_SIZE)


@on(ONE_RANK)
@pytest.mark.parametrize("pair", [("P", "D")], indirect=True, ids="-".join)
class TestOneRank(Legs):
    def test_concurrent_prompts_give_the_same_outputs(self, router: Router) -> None:
        prompts = [make_prompt(100 + 250 * number, ("concurrent legs", number)) for number in range(4)]
        with ThreadPoolExecutor(len(prompts)) as clients:
            answers = list(clients.map(router.send, prompts))
        for prompt, legs in zip(prompts, answers, strict=True):
            router.pair.assert_right(legs.decode, prompt)


@on(SEVERAL_RANKS)
@pytest.mark.parametrize("pair", [("TP2", "TP1"), ("TP1", "TP2")], indirect=True, ids="-".join)
class TestSeveralRanks(Legs):
    """Nothing more: heads that are transposed range by range are the subject."""
