"""The scheduler that vllm-ascend can put in the place of vLLM's, and that works with the connector."""

import pytest

from tests.support.ascend.servers import BALANCE
from tests.support.e2e.deployments import on
from tests.support.e2e.pair import Pair, make_prompt


@on(BALANCE)
@pytest.mark.parametrize("pair", [("P", "D")], indirect=True, ids="-".join)
class TestBalanceScheduler:
    """One engine has nobody to balance with; the scheduler's own ``schedule`` is in use all the same."""

    def test_a_pulled_prompt_gives_the_same_output(self, pair: Pair) -> None:
        pair.assert_pulls_right(make_prompt(1000, (pair.name, "balance")))

    def test_concurrent_prompts_give_the_same_outputs(self, pair: Pair) -> None:
        pair.assert_concurrent_pulls_right(4)
