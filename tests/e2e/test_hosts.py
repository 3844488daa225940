"""P and D on two hosts, and what becomes of requests while the network between these is not there.

Hosts are network namespaces at a switch; the tests reach both of them all the time, as a router does.
"""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.e2e.cluster import Cluster
from tests.support.e2e.deployments import HOSTS, on
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
RARE = [("reading", True), ("before", False), ("before", True)]
RATE = "20mbit"  # at which a long prompt takes four seconds
INTO_A_READ_S = 1.5
#: 10 s for a message without an answer, or for a read without progress (docs/reliability.md), and some if busy.
ENDS_WITHIN_S = 18.0


def test_each_finds_its_own_address_and_pulled_prompts_give_the_same_outputs(pair: Pair) -> None:
    prompt = make_prompt(1000, "two hosts")
    params = pair.prefill.client.prefill(prompt)
    assert params["remote_host"] == Hosts.address(P)
    pair.assert_right(pair.decode_leg(prompt, params), prompt)
    Router(pair).assert_right(make_prompt(1000, "two hosts, at once"), decode_first_s=0.3)


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


@pytest.mark.parametrize(
    ("when", "refused"),
    [("reading", False), *(pytest.param(*case, marks=pytest.mark.slow) for case in RARE)],
    ids=lambda value: value if isinstance(value, str) else "refused" if value else "dropped",
)
def test_a_long_part_ends_in_an_error_in_time_and_the_next_prompt_is_pulled(
    pair: Pair, cluster: Cluster, when: str, refused: bool
) -> None:
    prompt = make_prompt(LONG, ("long part", when, refused))
    params, hosts = pair.prefill.client.prefill(prompt), cluster.hosts
    with ThreadPoolExecutor() as threads, hosts.slowed(D, RATE):
        answer = threads.submit(pair.decode_leg, prompt, params) if when == "reading" else None
        time.sleep(INTO_A_READ_S)
        with hosts.refusing(D, P) if refused else hosts.parted(P, D):
            answer = answer or threads.submit(pair.decode_leg, prompt, params)
            assert answer.result(ENDS_WITHIN_S).status == 500
    pair.wait_until_at_rest()
    pair.assert_pulls_right(make_prompt(300, ("behind", when, refused)))
