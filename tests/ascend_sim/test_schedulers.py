"""The schedulers that vllm-ascend can put in the place of vLLM's, and that work with the connector."""

import json
import re
from pathlib import Path

import pytest

from tests.support.ascend import preempted_requests
from tests.support.ascend.engine_process import output_of, output_of_start
from tests.support.ascend.servers import BALANCE, block_bytes
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


@pytest.mark.parametrize("switched_on", [True, False])
def test_the_option_switches_it_on_in_an_engine_with_the_connector(tmp_path: Path, switched_on: bool) -> None:
    model = write_model(tmp_path / "model", DEFAULT_MODEL)
    status, output = output_of_start(model, additional_config={"enable_balance_scheduling": switched_on})
    assert status == 0, output[-4000:]
    [scheduler] = re.findall(r"^SCHEDULER (.*)$", output, re.MULTILINE)
    assert " BalanceScheduler " in scheduler
    assert scheduler.endswith(str(switched_on))


@pytest.mark.parametrize("host_blocks", [0, 64], ids=["device only", "host memory"])
def test_the_recompute_scheduler_lets_preempted_requests_come_back(tmp_path: Path, host_blocks: int) -> None:
    """It ends none of them as "recomputed", and they go on from what host memory has of them."""
    model = write_model(tmp_path / "model", DEFAULT_MODEL)
    host_bytes = host_blocks * block_bytes(DEFAULT_MODEL)
    status, output = output_of(preempted_requests.__name__, str(model), str(host_bytes))
    assert status == 0, output[-4000:]
    found = json.loads(output.rpartition("FOUND ")[2].splitlines()[0])
    assert "RecomputeScheduler" in found["scheduler"]
    assert found["back"] > 0
    assert bool(found["loaded"]) is bool(host_blocks)
    assert found["together"] == found["alone"]
    assert all(end == ["length", None] for _, *end in found["together"])
