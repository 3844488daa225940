"""No prefill server serves: the client is told, or a decode server computes the prompt."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.support.examples.fake_servers import (
    FakeServer,
    Received,
    Script,
    Wire,
    answers,
    decodes,
    drops,
    prefills_by_name,
    stalls,
)
from tests.support.examples.served_proxy import Proxy, ProxySetup
from tests.support.waiting import until

#: What D answers, whatever it is asked.
SERVED = {"choices": [{"text": " the answer"}]}
ALONE = 'pd_proxy_not_disaggregated_total{reason="no prefill server"}'
GIVEN_UP = b'{"choices": [{"text": "", "finish_reason": "abort"}], "kv_transfer_params": null}'


def assert_computed_by_d(response: httpx.Response, d: FakeServer) -> None:
    """D has had the client's request as it is, last of all."""
    assert (response.status_code, response.json()) == (200, SERVED)
    assert d.bodies[-1] == {"model": "tiny", "prompt": "a question"}


@pytest.mark.parametrize("without", [{}, {"without_prefill": "fail"}], ids=["default", "fail"])
def test_the_client_is_told_unless_asked_otherwise(
    setup: ProxySetup, d: FakeServer, closed_port: str, without: Any
) -> None:
    proxy = setup.proxy([closed_port], [d], **without)
    response = proxy.complete()
    assert response.status_code == 502
    assert response.json()["error"]["message"] == "a prefill server cannot be reached"
    assert d.received == []
    assert f"{ALONE} 0" in proxy.http.get("/metrics").text


def test_a_decode_server_computes_the_prompt_and_that_is_counted_and_logged(
    setup: ProxySetup, d: FakeServer, closed_port: str, full_backlog: str, access_lines: Callable[[int], list[str]]
) -> None:
    proxy = setup.proxy([closed_port, full_backlog], [d], without_prefill="decode", connect_timeout_s=0.2)
    assert_computed_by_d(proxy.complete(), d)
    line = access_lines(1)[0]
    assert "status=200" in line
    assert "legs=- " in line
    assert "not disaggregated: no prefill server" in line
    assert f"{ALONE} 1" in proxy.http.get("/metrics").text


@pytest.mark.parametrize(
    "script",
    [drops, answers(500, b"no"), answers(503, b'{"error": {}}'), answers(200, GIVEN_UP)],
    ids=["drops", "500", "503", "given up"],
)
def test_so_it_does_where_the_only_one_fails_the_request(
    setup: ProxySetup, p: FakeServer, d: FakeServer, script: Script
) -> None:
    p.script = script
    assert_computed_by_d(setup.proxy([p], [d], without_prefill="decode").complete(), d)


def test_so_it_does_with_both_legs_at_once(setup: ProxySetup, p: FakeServer, d: FakeServer) -> None:
    p.script = prefills_by_name
    proxy = setup.proxy([p], [d], without_prefill="decode")
    assert proxy.complete().status_code == 200
    setup.stop(p)

    async def waits_for_transfers(received: Received, wire: Wire) -> None:
        await (stalls if "kv_transfer_params" in received.body else decodes)(received, wire)

    d.script = waits_for_transfers
    assert_computed_by_d(proxy.complete(), d)
    until(lambda: proxy.in_flight() == 0)


def test_a_request_that_kills_prefill_servers_is_kept_from_decode_servers(setup: ProxySetup, d: FakeServer) -> None:
    proxy = setup.proxy([setup.server(drops), setup.server(drops)], [d], without_prefill="decode")
    assert proxy.complete().status_code == 502
    assert d.received == []


def test_a_prefill_server_that_is_silent_is_a_timeout(setup: ProxySetup, p: FakeServer, d: FakeServer) -> None:
    p.script = stalls
    proxy = setup.proxy([p], [d], without_prefill="decode", request_timeout_s=0.5)
    assert proxy.complete().status_code == 504
    assert d.received == []


@pytest.mark.parametrize("script", [answers(400, b'{"error": {}}'), answers(200, b"{}")], ids=["400", "no params"])
def test_what_is_wrong_with_a_request_or_a_configuration_is_told_all_the_same(
    setup: ProxySetup, p: FakeServer, d: FakeServer, script: Script
) -> None:
    p.script = script
    assert setup.proxy([p], [d], without_prefill="decode").complete().status_code in (400, 502)
    assert d.received == []


@pytest.mark.parametrize(("without", "status"), [("fail", 503), ("decode", 200)])
def test_health_says_whether_a_request_would_be_served(
    setup: ProxySetup, d: FakeServer, closed_port: str, without: str, status: int
) -> None:
    response = setup.proxy([closed_port], [d], without_prefill=without).http.get("/health")
    assert (response.status_code, response.json()["healthy"]) == (status, status == 200)
    assert response.json()["prefill"] == {closed_port: False}


def test_nothing_is_served_without_a_decode_server(setup: ProxySetup, closed_port: str) -> None:
    proxy: Proxy = setup.proxy([closed_port], [closed_port], without_prefill="decode")
    assert proxy.complete().status_code == 502
    assert proxy.http.get("/health").status_code == 503
