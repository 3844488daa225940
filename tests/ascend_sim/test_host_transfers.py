"""Transfers that begin and end in host memory, on simulated NPUs: leases that move, and prompts that land."""

import pytest

from tests.support.ascend.faults import LOAD
from tests.support.ascend.servers import D_FAULTS, HOST_TRANSFERS
from tests.support.e2e.client import LOGPROB_TOLERANCE
from tests.support.e2e.deployments import on
from tests.support.e2e.pair import Pair, make_prompt

TOKENS = 1000

pytestmark = [on(HOST_TRANSFERS), pytest.mark.parametrize("pair", [("P", "D")], indirect=True, ids="-".join)]


@pytest.mark.parametrize("without", [(), (LOAD,)], ids=["all waits", "one left out"])
def test_a_request_waits_for_the_load_of_what_has_landed(pair: Pair, without: tuple[str, ...]) -> None:
    prompt = make_prompt(TOKENS, (pair.name, "landed", without))
    with D_FAULTS.on(*without, copy_us=100_000):
        pair.decode.client.complete([1, 2, 3], 2)  # the switch holds from the next step on
        with pair.traffic() as traffic:
            answer = pair.disaggregate(prompt, 2)
    assert traffic.decode is not None
    assert traffic.decode.value("vllm:pd_landings_total", event="landed") == 1
    right = pair.decode.client.compute(prompt, 2)
    is_right = answer.tokens == right.tokens and answer.logprob_difference(right) < LOGPROB_TOLERANCE
    assert is_right is not bool(without)
