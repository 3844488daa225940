"""Models with states where requests are preempted, clients leave and servers die."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.e2e.cluster import Cluster
from tests.support.e2e.deployments import on
from tests.support.e2e.host_memory import wait_until_nothing_is_lent
from tests.support.e2e.hybrid_deployments import GRANITE_BORDERS_SHORT_OF_BLOCKS, GRANITE_SHORT_OF_BLOCKS
from tests.support.e2e.legs import Router
from tests.support.e2e.pair import Pair, assert_same_output, make_prompt
from tests.support.e2e.trouble import stopped
from tests.support.waiting import until

pytestmark = pytest.mark.cache_kinds


@on(GRANITE_SHORT_OF_BLOCKS, *GRANITE_BORDERS_SHORT_OF_BLOCKS)
@pytest.mark.parametrize("pair", [("P", "D")], indirect=True, ids="-".join)
@pytest.mark.timeout(900)  # which counts the start of the servers, too
class TestTrouble:
    def test_prompts_that_the_decode_server_preempts(self, pair: Pair) -> None:
        """It has no states of theirs any more but at borders, and computes again what comes behind these."""
        prompts = [make_prompt(300, (pair.name, "preempted on D", number)) for number in range(8)]
        client, before = pair.decode.client, pair.decode.client.metrics()
        with ThreadPoolExecutor(len(prompts)) as clients:
            together = list(clients.map(lambda prompt: pair.disaggregate(prompt, 250), prompts))
        counted = client.metrics().since(before)
        assert counted.value("vllm:num_preemptions_total") > 0
        with ThreadPoolExecutor(4) as clients:  # for as many, the device has room
            alone = list(clients.map(lambda prompt: client.compute(prompt, 250), prompts))
        for completion, reference in zip(together, alone, strict=True):
            assert_same_output(completion, reference)

    def test_prompts_that_the_prefill_server_preempts(self, pair: Pair) -> None:
        """A request that it answers itself grows until there is no room beside it."""
        client, router = pair.prefill.client, Router(pair)
        before, right = router.transfers(), 0
        with ThreadPoolExecutor(3) as clients:
            own = clients.submit(client.complete, make_prompt(700, (pair.name, "P's own")), 1100)
            until(lambda: client.metrics().value("vllm:num_requests_running") == 1)
            while not own.done():
                prompts = [make_prompt(2500, (pair.name, "preempted on P", right + number)) for number in range(2)]
                for prompt, legs in zip(prompts, clients.map(router.send, prompts), strict=True):
                    pair.assert_right(legs.decode, prompt)
                    right += 1
        assert own.result().status == 200
        assert router.transfers().get("restarted", 0.0) > before.get("restarted", 0.0)

    def test_a_client_that_leaves_during_the_pull_leaves_nothing_behind(self, pair: Pair) -> None:
        pair.get_acquainted()
        prompt = make_prompt(1000, (pair.name, "left"))
        params = pair.prefill.client.prefill(prompt)
        with stopped(pair.prefill):
            assert pair.decode.client.abandon(prompt, 2.0, kv_transfer_params=params)
        pair.wait_until_at_rest()
        pair.assert_pulls_right(make_prompt(1000, (pair.name, "after that")))

    @pytest.mark.parametrize("at_once", [False, True], ids=["in turn", "at once"])
    def test_clients_that_leave_at_any_moment_leave_nothing_behind(self, pair: Pair, at_once: bool) -> None:
        prompts = [make_prompt(1000, (pair.name, "left", at_once, number)) for number in range(17)]
        if at_once:
            Router(pair).assert_nothing_is_left(prompts[1:])
        else:
            pair.assert_nothing_is_left(prompts[0])
        pair.assert_right(pair.disaggregate(prompts[0]), prompts[0])
        wait_until_nothing_is_lent(pair.decode)

    def test_a_prefill_server_that_dies(self, pair: Pair, cluster: Cluster) -> None:
        pair.get_acquainted()
        prompt = make_prompt(1000, (pair.name, "dies"))
        params = pair.prefill.client.prefill(prompt)
        pair.prefill.kill()
        completion = pair.decode_leg(prompt, params)
        assert completion.status == 500, completion.body
        cluster.restart(pair.prefill)
        pair.get_acquainted()
        pair.assert_pulls_right(prompt)
