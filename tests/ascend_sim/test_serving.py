"""Two API servers of vllm-ascend behind the example router: what a user's client sees."""

import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

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


@pytest.fixture
def router(pair: Pair) -> Iterator[str]:
    """The address of a router in front of both servers."""
    port = free_port()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "examples.minimal_proxy", "--port", str(port)),
            *("--prefill", pair.prefill.client.base_url, "--decode", pair.decode.client.base_url),
        ]
    )
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
    prompt = make_prompt(800, (pair.name, "router"))
    request = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    with pair.traffic() as traffic:
        response = httpx.post(f"{router}/v1/completions", json={**request, "return_token_ids": True}, timeout=120)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    assert traffic.pulled("pull_tokens") == len(prompt) - 1
    assert tuple(choice["token_ids"]) == pair.decode.client.compute(prompt, 16).tokens
