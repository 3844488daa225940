"""Host memory at both ends of a pull, for a model with sliding windows: leases move, prompts land in other workers."""

import pytest

from tests.support.e2e.architectures import WINDOW
from tests.support.e2e.cluster import BLOCK_SIZE
from tests.support.e2e.deployments import HOST_WINDOWS, on
from tests.support.e2e.host_memory import metrics_after_a_step
from tests.support.e2e.pair import Pair, make_prompt
from tests.support.waiting import until

pytestmark = [pytest.mark.host_tier, on(HOST_WINDOWS), pytest.mark.parametrize("pair", [("P", "D")], indirect=True)]


#: Of each prompt, more blocks are leased than a tenth of the device's: it moves.
@pytest.mark.parametrize("tokens", [4 * WINDOW + BLOCK_SIZE + 1, 1000])
def test_a_prompt_goes_from_host_memory_to_host_memory(pair: Pair, tokens: int) -> None:
    prompt = make_prompt(tokens, ("windows in host memory", tokens))
    with pair.traffic() as traffic:
        params = pair.prefill.client.prefill(prompt)
        until(
            lambda: metrics_after_a_step(pair.prefill).value("vllm:pd_leased_blocks") == 0,
            "the lease to leave the device",
            within_s=10.0,
        )
        answer = pair.decode_leg(prompt, params)
    assert traffic.prefill is not None
    assert traffic.decode is not None
    assert traffic.prefill.value("vllm:pd_lease_moves_total", event="share") == 1
    assert traffic.decode.value("vllm:pd_landings_total", event="landed") == 1
    assert traffic.source("local_compute") == 1
    assert traffic.failures() == 0
    assert traffic.pulled("pull_bytes_from_host") == traffic.pulled("pull_bytes") > 0
    assert traffic.leases("released") == traffic.leases("granted") == 1
    pair.assert_right(answer, prompt)
