"""Two API servers of vllm-ascend, started by ``vllm serve``, behind a router: what a user's client sees."""

import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from tests.support.ascend.paths import recipe_proxy
from tests.support.ascend.servers import ONE_RANK
from tests.support.e2e.client import MODEL_NAME
from tests.support.e2e.deployments import on
from tests.support.e2e.pair import Pair, make_prompt
from tests.support.process import free_port
from tests.support.waiting import until

pytestmark = [
    pytest.mark.ascend_short,
    on(ONE_RANK),
    pytest.mark.parametrize("pair", [("P", "D")], indirect=True, ids="-".join),
]


def command(router: str, pair: Pair, port: int) -> list[str]:
    p, d = pair.prefill.client.base_url, pair.decode.client.base_url
    if router == "recipes":
        hosts = f"--prefiller-hosts 127.0.0.1 --decoder-hosts 127.0.0.1 --host 127.0.0.1 --port {port}"
        ports = ("--prefiller-ports", p.rpartition(":")[2], "--decoder-ports", d.rpartition(":")[2])
        return [sys.executable, str(recipe_proxy()), *hosts.split(), *ports]
    return [sys.executable, "-m", router, "--port", str(port), "--prefill", p, "--decode", d]


@pytest.fixture(params=["examples.minimal_proxy", "pd_proxy", "recipes"])
def router(request: pytest.FixtureRequest, pair: Pair) -> Iterator[str]:
    """The address of a router in front of both servers: one of this project's, or that of vllm-ascend's recipes."""
    port = free_port()
    process = subprocess.Popen(command(request.param, pair, port))
    address = f"http://127.0.0.1:{port}"
    try:
        until(lambda: answers(address), "the router answers")
        yield address
    finally:
        process.terminate()
        process.wait(10)


def answers(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health").status_code < 500
    except httpx.HTTPError:
        return False


def test_a_client_of_the_router_gets_what_one_server_would_say(pair: Pair, router: str) -> None:
    # The large router has asked P for its control channel by the first answer: from then on it sends both legs at once.
    for number in range(2):
        prompt = make_prompt(800, (router, number))
        request = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        with pair.traffic() as traffic:
            response = httpx.post(f"{router}/v1/completions", json={**request, "return_token_ids": True}, timeout=120)
        assert response.status_code == 200, response.text
        (choice,) = response.json()["choices"]
        assert traffic.pulled("pull_tokens") == len(prompt) - 1
        assert traffic.failures() == 0
        assert tuple(choice["token_ids"]) == pair.decode.client.compute(prompt, 16).tokens
