"""Two data-parallel engines behind one URL of P, and two behind one of D: vLLM chooses, and no router knows which."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from tests.support.e2e.apart_deployments import DATA_PARALLEL
from tests.support.e2e.client import Client
from tests.support.e2e.cluster import Server
from tests.support.e2e.deployments import on
from tests.support.e2e.pair import assert_same_output, make_prompt, wait_until_at_rest
from tests.support.examples.harness import ProxyProcess

pytestmark = [pytest.mark.routers, on(DATA_PARALLEL)]

PAIRS_OF_ENGINES = 4  # each of which proves its first prompt


@pytest.fixture
def proxy(servers: dict[str, Server]) -> Iterator[Client]:
    urls = {name: server.client.base_url for name, server in servers.items()}
    with (
        ProxyProcess(["-m", "pd_proxy", "--prefill", urls["P"], "--decode", urls["D"]]) as process,
        closing(Client(process.url)) as client,
    ):
        yield client
    for server in servers.values():
        wait_until_at_rest(server)


def test_every_prompt_is_answered_right_and_pulled_but_those_that_prove_a_pair_of_engines(
    servers: dict[str, Server], proxy: Client
) -> None:
    prompts = [make_prompt(200 + number, ("data parallel", number)) for number in range(24)]
    before = servers["D"].client.metrics()
    with ThreadPoolExecutor(6) as clients:
        answers = list(clients.map(proxy.complete, prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_same_output(answer, servers["P"].client.compute(prompt))
    counted = servers["D"].client.metrics().since(before)
    assert counted.value("vllm:pd_pulls_total") >= len(prompts) - PAIRS_OF_ENGINES
    assert counted.value("vllm:pd_pull_failures_total") == 0
    engines = {labels["engine"] for name, labels, value in counted.samples if name == "vllm:pd_pulls_total" and value}
    assert len(engines) == 2, "both engines of D pull"


def test_choices_of_a_request_are_answered_right_on_whichever_engines(
    servers: dict[str, Server], proxy: Client
) -> None:
    for number in range(6):
        prompt = make_prompt(200, ("choices", number))
        choices = proxy.choices(prompt, 3, temperature=0.1, top_k=1)  # vLLM wants sampling: of one token
        assert choices == [servers["P"].client.compute(prompt).tokens] * 3
