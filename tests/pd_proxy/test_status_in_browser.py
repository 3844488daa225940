"""The status page in a real browser: what it shows, that it stays live, and that nothing in it is taken for markup."""

import asyncio
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.browser import Browser, needs_chromium
from tests.support.examples.fake_servers import FakeServer, Received, Wire, answers, decodes, opened, prefills_by_name
from tests.support.examples.harness import RawClient, unused_url
from tests.support.examples.served_proxy import Proxy, ProxySetup
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), needs_chromium]

MARKUP = "<img/src=x/onerror=document.title=1>"
#: What the page shows where there is nothing to show.
NONE = "\N{EN DASH}"


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path) as browser:
        yield browser


@pytest.fixture
def proxy(setup: ProxySetup, p: FakeServer, d: FakeServer) -> Proxy:
    p.script = prefills_by_name
    return setup.proxy([p], [d], status_page=True)


def rows(browser: Browser, body: str) -> list[str]:
    """The rows of a table, without the one that says that there are none."""
    found: list[str] = browser.evaluate(
        f"[...document.querySelectorAll('#{body} tr')].map((row) => row.innerText).filter((text) => text !== 'none')"
    )
    return found


def figures(browser: Browser) -> list[str]:
    """The figures on top of the page."""
    found: list[str] = browser.evaluate("[...document.querySelectorAll('#strip .figure')].map((one) => one.innerText)")
    return found


def test_requests_come_and_go_while_the_page_is_open(
    browser: Browser, proxy: Proxy, p: FakeServer, d: FakeServer
) -> None:
    browser.open(f"{proxy.url}/status")
    until(lambda: browser.text("#live") == "live")
    assert [row.split("\t")[:3] for row in rows(browser, "servers")] == [
        ["prefill", p.url, "0"],
        ["decode", d.url, "0"],
    ]
    assert [row.split("\t")[3] for row in rows(browser, "servers")] == ["not asked yet", "not asked yet"]
    assert rows(browser, "ended") == rows(browser, "failures") == []
    assert figures(browser) == [NONE] * 5

    proxy.http.post("/v1/completions", json={"prompt": "a"}, headers={"X-Request-Id": "the-first"})
    until(lambda: len(rows(browser, "ended")) == 1)
    assert "the-first" in rows(browser, "ended")[0]
    assert "ms" in rows(browser, "ended")[0]
    assert float(figures(browser)[0]) > 0
    assert figures(browser)[1:] == [NONE, NONE, NONE, "0"]  # it was no stream
    assert browser.evaluate("document.querySelectorAll('#servers .dot.serves').length") == 2
    assert browser.evaluate("document.querySelectorAll('#ended rect.a').length") == 1
    assert browser.evaluate("document.querySelectorAll('#over-time circle').length") == 1
    until(lambda: "both at once" in rows(browser, "servers")[0])

    gate = threading.Event()

    async def waits(received: Received, wire: Wire) -> None:
        await opened(gate)
        await decodes(received, wire)

    d.script = waits
    client = RawClient.completing(proxy, b'{"prompt": "a"}')
    until(lambda: len(rows(browser, "under-way")) == 1)
    assert "waits for D" in until(lambda: next((row for row in rows(browser, "under-way") if "waits" in row), ""))
    assert "1 under way" in browser.text("#count")
    gate.set()
    until(lambda: len(rows(browser, "ended")) == 2)
    until(lambda: rows(browser, "under-way") == [])
    client.leave()
    assert browser.errors == []


def test_a_failure_is_a_sentence_and_nothing_is_taken_for_markup(browser: Browser, proxy: Proxy, d: FakeServer) -> None:
    d.script = answers(500, b'{"error": {"message": "no"}}')
    proxy.http.post("/v1/completions", json={"prompt": "a"}, headers={"X-Request-Id": MARKUP})
    browser.open(f"{proxy.url}/status")
    (row,) = until(lambda: rows(browser, "failures"))
    assert f"decode server {d.url} answered with status 500" in row
    assert MARKUP in row
    assert browser.evaluate("document.querySelectorAll('img').length") == 0
    assert browser.evaluate("document.title") == "pd-proxy status"
    assert browser.evaluate("document.querySelectorAll('#ended rect.f').length") > 0
    assert figures(browser)[4] == "1"
    assert browser.errors == []


def test_an_id_that_the_proxy_made_is_shortened_and_one_of_a_client_is_not(browser: Browser, proxy: Proxy) -> None:
    made = proxy.complete().headers["X-Request-Id"]
    theirs = "chatcmpl-" + "7" * 30
    proxy.http.post("/v1/completions", json={"prompt": "a"}, headers={"X-Request-Id": theirs})
    browser.open(f"{proxy.url}/status")
    until(lambda: len(rows(browser, "ended")) == 2)
    shown = browser.evaluate(
        "[...document.querySelectorAll('#ended .id span')].map((one) => [one.innerText, one.title])"
    )
    assert shown == [[theirs, theirs], [made[:8], made]]


@pytest.mark.parametrize("width", [1200, 800, 320])
def test_nothing_is_wider_than_the_window(browser: Browser, proxy: Proxy, d: FakeServer, width: int) -> None:
    d.script = answers(500, b"{}")
    proxy.complete(stream=True)
    browser.resize(width, 900)
    browser.open(f"{proxy.url}/status")
    until(lambda: rows(browser, "failures"))
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    wide = "[...document.querySelectorAll('#strip, #strip *')].filter((one) => one.scrollWidth > one.clientWidth + 1)"
    assert browser.evaluate(f"{wide}.map((one) => one.innerText)") == []


def test_a_page_comes_back_to_a_proxy_that_has_restarted(browser: Browser, setup: ProxySetup, d: FakeServer) -> None:
    first = setup.proxy([unused_url()], [d], status_page=True)
    first.complete()
    browser.open(f"{first.url}/status")
    until(lambda: len(rows(browser, "ended")) == 1)
    first.close()
    until(lambda: browser.text("#live") == "connecting")
    second = setup.proxy([unused_url()], [d], status_page=True, port=first.address[1])
    until(lambda: browser.text("#live") == "live")
    until(lambda: rows(browser, "ended") == [])
    second.complete()
    until(lambda: len(rows(browser, "failures")) == 1)


def times_of(received: Received) -> list[float]:
    """The seconds that a prompt of the picture asks for: of P, of the handover, and of the answer."""
    return [int(word) / 1000 for word in received.body["prompt"].split()]


async def prefills_for(received: Received, wire: Wire) -> None:
    if received.path != "/health":
        await asyncio.sleep(times_of(received)[0])
    await prefills_by_name(received, wire)


async def decodes_for(received: Received, wire: Wire) -> None:
    """Stream eight tokens; a prompt without time for them is not served."""
    prefill_s, handover_s, answer_s = times_of(received)
    if not answer_s:
        await asyncio.sleep(prefill_s)
        await wire.json(500, {"error": {"message": "no"}})
        return
    at_once = "transfer_id" in received.body["kv_transfer_params"]
    await asyncio.sleep(handover_s + (prefill_s if at_once else 0))
    await wire.head()
    for _ in range(8):
        await wire.chunk(b'data: {"choices": [{"text": " a"}]}\n\n')
        await asyncio.sleep(answer_s / 8)
    await wire.end()


def test_a_picture_of_the_whole_page(browser: Browser, setup: ProxySetup, tmp_path: Path) -> None:
    """From the servers to where the time of each request went, with a failure and a request under way."""
    p, d = ([setup.server(script) for _ in range(2)] for script in (prefills_for, decodes_for))
    proxy = setup.proxy([*p], [*d], status_page=True)
    browser.open(f"{proxy.url}/status")
    until(lambda: browser.text("#live") == "live")
    prompts = [f"{180 + 70 * (n % 5)} {20 + 7 * (n % 4)} {240 + 90 * (n % 7)}" for n in range(15)]
    prompts[8] = "300 0 0"
    with ThreadPoolExecutor(3) as clients:
        list(clients.map(lambda prompt: proxy.complete(prompt=prompt, stream=True), prompts))
    client = RawClient.completing(proxy, b'{"prompt": "100000 0 1", "stream": true}')
    until(lambda: len(rows(browser, "ended")) == len(prompts) and rows(browser, "under-way"))
    assert len(rows(browser, "failures")) == 1
    file = tmp_path / "status.png"
    browser.screenshot(file)
    client.leave()
    size = struct.unpack(">II", file.read_bytes()[16:24])  # width and height stand there in a PNG
    bottom = browser.evaluate("document.querySelector('#ended').getBoundingClientRect().bottom + scrollY")
    assert size[1] >= bottom
    assert browser.errors == []
