"""Requests that leave, and a prefill server that dies: nothing is held, nothing wrong is said, and it goes on."""

import pytest

from tests.support.ascend.servers import ONE_RANK, RECOMPUTE
from tests.support.e2e.cluster import Cluster
from tests.support.e2e.deployments import on
from tests.support.e2e.pair import Pair, assert_failed_pull, make_prompt

pytestmark = pytest.mark.parametrize("pair", [("P", "D")], indirect=True, ids="-".join)


@pytest.mark.ascend_short
@on(ONE_RANK)
def test_requests_that_leave_at_any_moment_of_the_pull_hold_nothing(pair: Pair) -> None:
    for number, after_s in enumerate((0.01, 0.05, 0.2)):
        prompt = make_prompt(900, (pair.name, "leaving", number))
        params = pair.prefill.client.prefill(prompt)
        pair.decode.client.abandon(prompt, after_s, max_tokens=200, kv_transfer_params=params)
    pair.wait_until_at_rest()
    prompt = make_prompt(900, (pair.name, "after leaving"))
    pair.assert_right(pair.disaggregate(prompt), prompt)


@pytest.mark.ascend_short
@on(ONE_RANK)
def test_a_request_that_leaves_during_prefill_holds_nothing(pair: Pair) -> None:
    prompt = make_prompt(1800, (pair.name, "leaving early"))
    assert pair.prefill.client.abandon(prompt, 0.1, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    pair.wait_until_at_rest()


@on(ONE_RANK, RECOMPUTE)
def test_a_pull_of_a_lease_that_is_not_there_ends_as_the_policy_says_and_the_next_one_works(pair: Pair) -> None:
    prompt = make_prompt(600, (pair.name, "unknown lease"))
    params = pair.prefill.client.prefill(prompt)
    assert_failed_pull(pair, prompt, {**params, "lease_id": "nothing"}, "lease", ("nothing",))
    pair.assert_right(pair.decode_leg(prompt, params, cache_salt="the right lease"), prompt)


@on(ONE_RANK)
def test_a_prefill_server_that_dies_fails_the_request_and_works_again_when_it_is_back(
    pair: Pair, cluster: Cluster
) -> None:
    prompt = make_prompt(900, (pair.name, "died"))
    params = pair.prefill.client.prefill(prompt)
    pair.prefill.kill()
    completion = pair.decode_leg(prompt, params)
    assert completion.status == 500, f"{completion.status} {completion.body}"
    assert pair.decode.client.is_healthy()
    cluster.restart(pair.prefill)
    pair.assert_right(pair.disaggregate(prompt), prompt)
