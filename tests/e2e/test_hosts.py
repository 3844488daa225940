"""P and D on two hosts, and what becomes of requests while the network between these is not there.

Hosts are network namespaces at a switch; the tests reach both of them all the time, as a router does.
"""

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest

from tests.support.e2e.apart_deployments import HOSTS
from tests.support.e2e.client import Completion
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
ENDS_WITHIN_S = 6.5
LONGER_S = 200.0
PARTS = [
    ("reading", "both"), ("before", "both"), ("at once", "both"),
    *(("reading", way) for way in ("to P", "from P", "refused")),
]  # fmt: skip


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


@pytest.mark.parametrize(
    ("when", "way"),
    [
        pytest.param(*each, marks=pytest.mark.slow if number else (), id="-".join(each))
        for number, each in enumerate(PARTS)
    ],
)
def test_a_long_part_ends_in_an_error_in_time_and_the_next_prompt_is_pulled(
    pair: Pair, cluster: Cluster, when: str, way: str
) -> None:
    """Before D's leg, or while it reads: a prompt that P has computed, or (at once) one that P computes meanwhile."""
    prompt = make_prompt(LONG, ("long part", when, way))
    router = Router(pair)
    params = {} if when == "at once" else pair.prefill.client.prefill(prompt)

    def send() -> Completion:
        return router.send(prompt).decode if when == "at once" else pair.decode_leg(prompt, params)

    with ThreadPoolExecutor() as threads, cluster.hosts.slowed(D, RATE):
        answer = threads.submit(send) if when != "before" else None
        time.sleep(INTO_A_READ_S)
        with parted(cluster.hosts, way):
            answer = answer or threads.submit(send)
            assert answer.result(ENDS_WITHIN_S).status == 500
    pair.wait_until_at_rest()
    pair.assert_pulls_right(make_prompt(300, ("behind", when, way)))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_part_that_is_longer_than_all_timers(pair: Pair, cluster: Cluster) -> None:
    """Requests end in time at its begin and at its end. Both servers hold nothing meanwhile."""
    began = time.monotonic()
    with ThreadPoolExecutor() as threads, parted(cluster.hosts, "both"):
        for at_s in (0.0, LONGER_S - 3 * ENDS_WITHIN_S):
            time.sleep(max(0.0, began + at_s - time.monotonic()))
            prompt = make_prompt(300, ("longer", at_s))
            answer = threads.submit(pair.decode_leg, prompt, pair.prefill.client.prefill(prompt))
            assert answer.result(ENDS_WITHIN_S).status == 500
            if not at_s:
                pair.wait_until_at_rest()
        time.sleep(max(0.0, began + LONGER_S - time.monotonic()))
    pair.wait_until_at_rest()
    pair.assert_pulls_right(make_prompt(300, "behind the longer"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_network_that_comes_and_goes(pair: Pair, cluster: Cluster) -> None:
    """Requests of four clients go on meanwhile. No answer is wrong, none is late, and nothing is left."""
    is_over = threading.Event()

    def ask(client: int) -> list[tuple[list[int], Completion]]:
        answers = []
        for number in itertools.count():
            prompt = make_prompt(200, ("comes and goes", client, number))
            answers.append((prompt, pair.decode_leg(prompt, pair.prefill.client.prefill(prompt))))
            if is_over.wait(0.5):
                return answers
        raise AssertionError

    with ThreadPoolExecutor() as threads:
        clients = [threads.submit(ask, client) for client in range(4)]
        for _ in range(30):
            with parted(cluster.hosts, "both"):
                time.sleep(1.0)
            time.sleep(1.0)
        is_over.set()
        answers = [each for client in clients for each in client.result(60.0)]
    right = [each for each in answers if each[1].status == 200]
    for prompt, answer in right:
        pair.assert_right(answer, prompt)
    assert {answer.status for _, answer in answers} <= {200, 500}
    assert len(right) > len(answers) / 2
    pair.wait_until_at_rest()
    pair.assert_pulls_right(make_prompt(300, "behind what comes and goes"))


@contextmanager
def parted(hosts: Hosts, way: str) -> Iterator[None]:
    """No packet passes between P and D, or none one way, or (refused) each is answered by ICMP."""
    with ExitStack() as parts:
        if way == "both":
            parts.enter_context(hosts.parted(P, D))
        for source, to in {"to P": [(D, P)], "from P": [(P, D)], "refused": [(D, P), (P, D)]}.get(way, []):
            parts.enter_context(hosts.one_way(source, to, "prohibit" if way == "refused" else "blackhole"))
        yield
