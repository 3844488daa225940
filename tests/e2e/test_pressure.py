"""More requests than blocks, and caches that are reset while leases live."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.e2e.choice import on_servers
from tests.support.e2e.client import Completion
from tests.support.e2e.cluster import Server
from tests.support.e2e.deployments import HOST_TIER, MIXED
from tests.support.e2e.pair import make_prompt

pytestmark = pytest.mark.pressure

BURST = 24


@on_servers((MIXED, "TP1"), (HOST_TIER, "W"))
def test_a_burst_on_a_server_of_both_roles_is_answered_without_losing_a_lease(server: Server) -> None:
    """Its leases would fill the device, and their readers wait behind prompts that find no block."""

    def ask(number: int) -> Completion:
        prompt = make_prompt(300, ("burst", number))
        params = server.client.prefill(prompt)
        return server.client.complete(prompt, kv_transfer_params=params)

    before = server.client.metrics()
    with ThreadPoolExecutor(BURST) as threads:
        answers = list(threads.map(ask, range(BURST)))
    assert [answer.status for answer in answers] == [200] * BURST
    after = server.client.metrics()
    for event in ("revoked", "expired"):
        name = "vllm:pd_leases_total"
        assert after.value(name, event=event) == before.value(name, event=event), f"a lease was {event}"
    assert after.value("vllm:pd_leased_blocks") == after.value("vllm:pd_leases_active") == 0


@on_servers((MIXED, "TP2"), (HOST_TIER, "P"), (HOST_TIER, "W"))
def test_a_reset_ends_the_leases_that_are_alive(server: Server) -> None:
    prompt = make_prompt(300, ("reset", server.log.stem))
    before = server.client.metrics().value("vllm:pd_leases_total", event="cancelled")
    server.client.prefill(prompt)
    assert server.client.reset_prefix_cache()
    server.client.complete(prompt, 1)  # the books come with a step
    assert server.client.metrics().value("vllm:pd_leases_total", event="cancelled") == before + 1
