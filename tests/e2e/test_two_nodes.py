"""A server whose ranks are on two hosts, as P and as D: every rank is read at, and reads from, its own host."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from tests.support.e2e.apart_deployments import TWO_NODES
from tests.support.e2e.cluster import Cluster
from tests.support.e2e.deployments import on
from tests.support.e2e.hosts import Hosts, why_not
from tests.support.e2e.legs import Router
from tests.support.e2e.pair import Pair, assert_same_output, control_keys, end_lease, make_prompt
from transfer.control.client import ControlClient
from transfer.control.messages import Hello

pytestmark = [
    pytest.mark.hosts,
    on(pytest.param(TWO_NODES, marks=pytest.mark.skipif(bool(why_not()), reason=why_not()))),
    pytest.mark.timeout(900),
]
FIRST, SECOND, OTHER = 1, 2, 3
BOTH_WAYS = [("TP2", "TP1"), ("TP1", "TP2")]
#: docs/reliability.md, by P, and some more where the machine is busy: 10 s without progress where P's control channel
#: answers all the same, 5 s where it does not.
ENDS_WITHIN_S = {"TP2": 16.0, "TP1": 6.5}


@pytest.mark.parametrize("pair", [("TP2", "TP1")], indirect=True, ids="-".join)
def test_each_rank_of_p_names_the_address_of_its_own_host(pair: Pair) -> None:
    params = pair.prefill.client.prefill(make_prompt(40, "addresses"))
    assert params["remote_host"] == Hosts.address(FIRST)
    with closing(ControlClient(keys=control_keys(pair.prefill))) as client:
        hello = Hello(params["remote_engine_id"])
        welcome = client.request(params["remote_host"], params["remote_port"], hello, 10.0).result()
    end_lease(params, control_keys(pair.prefill))
    hosts = [worker.engine_address.rpartition(":")[0] for worker in welcome.workers]
    assert hosts == [Hosts.address(FIRST), Hosts.address(SECOND)]


@pytest.mark.parametrize("pair", BOTH_WAYS, indirect=True, ids="-".join)
def test_pulled_prompts_give_the_outputs_of_one_server(pair: Pair) -> None:
    prompts = [make_prompt(300 + 200 * number, ("two nodes", pair.name, number)) for number in range(4)]
    for prompt in prompts[:2]:
        pair.assert_pulls_right(prompt)
    pair.assert_all_pull_right(prompts[2:])
    one = pair.prefill if pair.prefill.spec.ranks == 1 else pair.decode
    for prompt in prompts:
        assert_same_output(pair.disaggregate(prompt), one.client.compute(prompt))
    Router(pair).assert_right(make_prompt(1000, ("two nodes, at once", pair.name)), decode_first_s=0.3)


@pytest.mark.parametrize("pair", BOTH_WAYS, indirect=True, ids="-".join)
def test_a_rank_that_is_cut_off_ends_its_pulls_in_an_error_in_time(pair: Pair, cluster: Cluster) -> None:
    """The other rank answers as before."""
    prompt = make_prompt(600, ("cut off", pair.name))
    params = pair.prefill.client.prefill(prompt)
    with ThreadPoolExecutor() as threads, cluster.hosts.parted(SECOND, OTHER):
        began = time.monotonic()
        answer = threads.submit(pair.decode_leg, prompt, params).result(60)
        took = time.monotonic() - began
    assert answer.status == 500
    assert took < ENDS_WITHIN_S[f"TP{pair.prefill.spec.ranks}"]
    pair.wait_until_at_rest()
    pair.assert_pulls_right(make_prompt(300, ("behind the cut", pair.name)))
