"""The scheduler that vllm-ascend can put in the place of vLLM's, and that works with the connector."""

from pathlib import Path

import pytest

from tests.support.ascend.engine_process import output_of_start
from tests.support.ascend.servers import BALANCE
from tests.support.e2e.deployments import on
from tests.support.e2e.models import DEFAULT_MODEL, write_model
from tests.support.e2e.pair import Pair, make_prompt


@on(BALANCE)
@pytest.mark.parametrize("pair", [("P", "D")], indirect=True, ids="-".join)
class TestBalanceScheduler:
    """One engine has nobody to balance with; the scheduler's own ``schedule`` is in use all the same."""

    def test_a_pulled_prompt_gives_the_same_output(self, pair: Pair) -> None:
        pair.assert_pulls_right(make_prompt(1000, (pair.name, "balance")))

    def test_concurrent_prompts_give_the_same_outputs(self, pair: Pair) -> None:
        pair.assert_concurrent_pulls_right(4)


@pytest.mark.parametrize(("switched_on", "name"), [(True, "BalanceScheduler"), (False, "Scheduler")])
def test_the_option_puts_it_in_the_place_of_vllms(tmp_path: Path, switched_on: bool, name: str) -> None:
    model = write_model(tmp_path / "model", DEFAULT_MODEL)
    status, output = output_of_start(model, additional_config={"enable_balance_scheduling": switched_on})
    assert status == 0, output[-4000:]
    assert f"SCHEDULER {name}\n" in output
