"""The proxy's status page in front of real servers, in a real browser."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.browser import Browser, needs_chromium
from tests.support.e2e.client import MODEL_NAME
from tests.support.e2e.cluster import Server
from tests.support.e2e.deployments import ROUTED, on
from tests.support.e2e.pair import make_prompt
from tests.support.examples.harness import ProxyProcess
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.routers, pytest.mark.timeout(400), needs_chromium]

#: Where the picture of the page is written, if that is set: the one in the proxy's README is made so.
PICTURE = "PD_CONNECTOR_SCREENSHOT"
#: Of prompts, in tokens: several in chunks, between short ones.
LENGTHS = (900, 200, 2800, 60, 1500, 300, 2200, 120, 700, 2800, 40, 1100, 500, 1900, 250)
LONG_ANSWER = 600


def ask(proxy: ProxyProcess, tokens: int, answer_tokens: int) -> None:
    """Have a prompt that nobody has seen answered as a stream."""
    body = {
        "model": MODEL_NAME, "prompt": make_prompt(tokens, ("status page", tokens, answer_tokens, os.urandom(8))),
        "max_tokens": answer_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
    }  # fmt: skip
    answer = httpx.post(f"{proxy.url}/v1/completions", json=body, timeout=120, trust_env=False)
    assert answer.status_code == 200, answer.text


@on(ROUTED)
def test_the_page_shows_where_the_time_of_real_requests_went(servers: dict[str, Server], tmp_path: Path) -> None:
    legs = [word for name in ("P", "P other") for word in ("--prefill", servers[name].client.base_url)]
    legs += ["--decode", servers["D"].client.base_url, "--status-page"]
    with (
        ProxyProcess(["-m", "pd_proxy", *legs]) as proxy,
        Browser(tmp_path) as browser,
        ThreadPoolExecutor(3) as clients,
    ):

        def count(rows: str) -> int:
            return int(browser.evaluate(f"document.querySelectorAll('{rows}').length"))

        browser.open(f"{proxy.url}/status")
        until(lambda: browser.text("#live") == "live")
        list(clients.map(lambda each: ask(proxy, each[1], 16 + each[0] * 7 % 60), enumerate(LENGTHS)))
        under_way = clients.submit(ask, proxy, 400, LONG_ANSWER)
        until(lambda: "answers" in browser.text("#under-way"))
        until(lambda: count("#ended tr") == len(LENGTHS))
        file = Path(os.environ.get(PICTURE) or tmp_path / "status.png")
        browser.screenshot(file)
        assert browser.text("#count").startswith(f"1 under way, {len(LENGTHS)} ended")
        assert count("#servers .dot.serves") == 3
        assert "together" in browser.text("#ended")
        assert browser.text("#strip").splitlines()[-1].endswith("requests")
        assert browser.errors == []
        under_way.result()
    assert file.read_bytes().startswith(b"\x89PNG")
