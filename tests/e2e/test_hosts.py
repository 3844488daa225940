"""P and D on two hosts, and what becomes of requests while the network between these is not there.

Hosts are network namespaces at a switch; the tests reach both of them all the time, as a router does.
"""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.e2e.apart_deployments import HOSTS
from tests.support.e2e.choice import rarely
from tests.support.e2e.cluster import Cluster
from tests.support.e2e.deployments import on
from tests.support.e2e.hosts import Hosts, why_not
from tests.support.e2e.legs import Router
from tests.support.e2e.pair import Pair, make_prompt

pytestmark = [
    pytest.mark.hosts,
    on(pytest.param(HOSTS, marks=pytest.mark.skipif(bool(why_not()), reason=why_not()))),
    pytest.mark.parametrize("pair", [("P", "D")], indirect=True, ids="-".join),
]
P, D = 1, 2
LONG = 2800
RATE = "20mbit"  # at which a long prompt takes four seconds
INTO_A_READ_S = 1.5
#: docs/reliability.md: 5 s, and some more where the machine is busy.
ENDS_WITHIN_S = 8.0


def test_each_finds_its_own_address_and_pulled_prompts_give_the_same_outputs(pair: Pair) -> None:
    prompt = make_prompt(1000, "two hosts")
    params = pair.prefill.client.prefill(prompt)
    assert params["remote_host"] == Hosts.address(P)
    pair.assert_right(pair.decode_leg(prompt, params), prompt)
    Router(pair).assert_right(make_prompt(1000, "two hosts, at once"), decode_first_s=0.3)


@pytest.mark.slow
def test_a_short_part_in_the_middle_of_a_read_costs_time_only(pair: Pair, cluster: Cluster) -> None:
    prompt = make_prompt(LONG, "short part")
    params = pair.prefill.client.prefill(prompt)
    with ThreadPoolExecutor() as threads, cluster.hosts.slowed(D, RATE):
        answer = threads.submit(pair.decode_leg, prompt, params)
        time.sleep(INTO_A_READ_S)
        with cluster.hosts.parted(P, D):
            time.sleep(2)
            assert not answer.done()
        pair.assert_right(answer.result(60), prompt)


@pytest.mark.parametrize("when", ["reading", rarely("before")])
def test_a_long_part_ends_in_an_error_in_time_and_the_next_prompt_is_pulled(
    pair: Pair, cluster: Cluster, when: str
) -> None:
    prompt = make_prompt(LONG, ("long part", when))
    params = pair.prefill.client.prefill(prompt)
    with ThreadPoolExecutor() as threads, cluster.hosts.slowed(D, RATE):
        answer = threads.submit(pair.decode_leg, prompt, params) if when == "reading" else None
        time.sleep(INTO_A_READ_S)
        with cluster.hosts.parted(P, D):
            answer = answer or threads.submit(pair.decode_leg, prompt, params)
            assert answer.result(ENDS_WITHIN_S).status == 500
    pair.wait_until_at_rest()
    pair.assert_pulls_right(make_prompt(300, ("behind", when)))
