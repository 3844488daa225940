"""Data-parallel engines behind one URL of P and one of D: the proxy chooses P's by a header, and vLLM D's."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from tests.support.e2e.apart_deployments import DATA_PARALLEL, FOUR_TO_ONE, ONE_TO_FOUR, balanced_by_node
from tests.support.e2e.client import Client
from tests.support.e2e.cluster import Cluster, Server
from tests.support.e2e.deployments import decode, on
from tests.support.e2e.pair import assert_same_output, make_prompt, wait_until_at_rest
from tests.support.examples.harness import ProxyProcess
from tests.support.process import free_ports
from tests.support.waiting import until

pytestmark = [pytest.mark.routers, pytest.mark.timeout(1500)]

MOST_PAIRS_OF_ENGINES = 4  # each of which proves its first prompt
RANK_HEADER = "X-data-parallel-rank"  # vLLM's


@pytest.fixture
def proxy(request: pytest.FixtureRequest, servers: dict[str, Server]) -> Iterator[Client]:
    """A proxy before both, with more arguments if a test has some."""
    more: tuple[str, ...] = getattr(request, "param", ())
    urls = {name: server.client.base_url for name, server in servers.items()}
    with (
        ProxyProcess(["-m", "pd_proxy", "--prefill", urls["P"], "--decode", urls["D"], *more]) as process,
        closing(Client(process.url)) as client,
    ):
        yield client
    for server in servers.values():
        wait_until_at_rest(server)


@on(DATA_PARALLEL, FOUR_TO_ONE, ONE_TO_FOUR)
def test_every_prompt_is_answered_right_and_pulled_but_those_that_prove_a_pair_of_engines(
    servers: dict[str, Server], proxy: Client
) -> None:
    """Once the proxy knows the engines, both legs go at once, and to the right one: else D would get a second leg."""
    prompts = [make_prompt(200 + number, ("data parallel", number)) for number in range(24)]
    before = {name: server.client.metrics() for name, server in servers.items()}
    with ThreadPoolExecutor(6) as clients:
        answers = list(clients.map(proxy.complete, prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_same_output(answer, servers["P"].client.compute(prompt))
    counted = {name: server.client.metrics().since(before[name]) for name, server in servers.items()}
    assert counted["D"].value("vllm:pd_pulls_total") >= len(prompts) - MOST_PAIRS_OF_ENGINES
    assert counted["D"].value("vllm:pd_pull_failures_total") == 0
    for name, metric in (("P", "vllm:pd_leases_total"), ("D", "vllm:pd_pulls_total")):
        working = {engine for engine in engines_of(servers[name]) if counted[name].value(metric, engine=engine) > 0}
        assert working == engines_of(servers[name]), name
    known = proxy.metrics()
    later = [make_prompt(300 + number, ("data parallel, at once", number)) for number in range(8)]
    for prompt in later:
        assert_same_output(proxy.complete(prompt), servers["P"].client.compute(prompt))
    assert proxy.metrics().since(known).value("pd_proxy_legs_total", legs="together") == len(later)


@on(DATA_PARALLEL)
def test_choices_of_a_request_are_answered_right_on_whichever_engines(
    servers: dict[str, Server], proxy: Client
) -> None:
    for number in range(6):
        prompt = make_prompt(200, ("choices", number))
        choices = proxy.choices(prompt, 3, temperature=0.1, top_k=1)  # vLLM wants sampling: of one token
        assert choices == [servers["P"].client.compute(prompt).tokens] * 3


@on(DATA_PARALLEL)
@pytest.mark.parametrize("side", ["P", "D"])
def test_each_rank_has_host_memory_of_its_own(servers: dict[str, Server], side: str) -> None:
    """What a rank has evicted comes out of its own, and is not in that of the other."""
    url = servers[side].client.base_url
    prompt = make_prompt(600, ("host memory", side))
    with closing(Client(url, {RANK_HEADER: "0"})) as first, closing(Client(url, {RANK_HEADER: "1"})) as second:
        expected = first.complete(prompt)
        for number in range(4):
            first.complete(make_prompt(1200, ("evicts", side, number)), 1)
        before = first.metrics()
        for asked in (second, first):
            assert_same_output(asked.complete(prompt), expected)
        counted = first.metrics().since(before)
    assert counted.value("vllm:pd_host_tokens_total", engine="0") > 500
    assert counted.value("vllm:pd_host_tokens_total", engine="1") == 0


@on(DATA_PARALLEL)
@pytest.mark.parametrize("proxy", [("--request-timeout", "20")], indirect=True, ids=["impatient"])
def test_a_rank_of_p_that_is_killed(servers: dict[str, Server], cluster: Cluster, proxy: Client) -> None:
    """vLLM ends the whole server, some seconds later. What was under way is answered right or in an error, and D holds
    nothing. What the dead rank was asked, vLLM never answers: the proxy gives that up.
    """
    prefill, decode = servers["P"], servers["D"]
    prompts = [make_prompt(400 + number, ("killed rank", number)) for number in range(24)]
    with ThreadPoolExecutor(4) as clients:
        answers = [clients.submit(proxy.complete, prompt) for prompt in prompts]
        until(lambda: sum(each.done() for each in answers) >= 6, within_s=120.0)
        _, killed = prefill.processes("EngineCore")
        os.kill(killed, signal.SIGKILL)
        results = [each.result() for each in answers]
    until(lambda: not prefill.is_running, within_s=120.0)
    wait_until_at_rest(decode)
    statuses = [each.status for each in results]
    assert all(status == 200 or status >= 500 for status in statuses), statuses
    assert statuses.count(200) >= 6
    for prompt, answer in zip(prompts, results, strict=True):
        if answer.status == 200:
            assert_same_output(answer, decode.client.compute(prompt))
    cluster.restart(prefill)
    before = decode.client.metrics()
    until(lambda: proxy.complete(prompts[0]).status == 200)
    for number in range(3 * MOST_PAIRS_OF_ENGINES):
        prompt = make_prompt(200, ("behind the killed rank", number))
        assert_same_output(proxy.complete(prompt), decode.client.compute(prompt))
    assert decode.client.metrics().since(before).value("vllm:pd_pulls_total") > 0


@pytest.mark.slow
def test_engines_that_each_node_balances_for_itself(cluster: Cluster) -> None:
    """Each of two nodes has a URL for its engines. A request names those of its node by numbers from 0 on."""
    (port,) = free_ports(1)
    *nodes, decoding = cluster.start([*balanced_by_node(port), decode(patient=True)])
    prompts = [make_prompt(200 + number, ("nodes", number)) for number in range(24)]
    urls = [argument for node in nodes for argument in ("--prefill", node.client.base_url)]
    with (
        ProxyProcess(["-m", "pd_proxy", *urls, "--decode", decoding.client.base_url]) as process,
        closing(Client(process.url)) as proxy,
    ):
        for prompt in prompts:
            assert_same_output(proxy.complete(prompt), nodes[0].client.compute(prompt))
        assert proxy.metrics().value("pd_proxy_legs_total", legs="together") > 0
    assert decoding.client.metrics().value("vllm:pd_pulls_total") >= len(prompts) - MOST_PAIRS_OF_ENGINES
    for node in nodes:
        leases = {
            engine: node.client.metrics().value("vllm:pd_leases_total", engine=engine) for engine in engines_of(node)
        }
        assert len(leases) == 2
        assert all(leases.values()), leases
    cluster.stop([*nodes, decoding])


def engines_of(server: Server) -> set[str]:
    """The labels of a server's engines."""
    return {
        labels["engine"] for name, labels, _ in server.client.metrics().samples if name == "vllm:num_requests_running"
    }
