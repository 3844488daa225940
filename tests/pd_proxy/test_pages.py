"""Health, models, and the settings."""

import re
from typing import Any

import pytest

from pd_proxy import Settings
from tests.support.examples.fake_servers import FakeServer, Script, answers, stalls
from tests.support.examples.served_proxy import Proxy, ProxySetup


def test_health_is_good_with_one_server_of_each_leg(
    setup: ProxySetup, p: FakeServer, d: FakeServer, closed_port: str
) -> None:
    sick = setup.server(answers(503, b""))
    response = setup.proxy([sick, p], [closed_port, d]).http.get("/health")
    assert response.status_code == 200
    assert response.json() == {
        "healthy": True,
        "prefill": {sick.url: False, p.url: True},
        "decode": {closed_port: False, d.url: True},
    }


def test_health_does_not_wait_for_a_server_whose_machine_is_off(
    setup: ProxySetup, p: FakeServer, d: FakeServer, full_backlog: str
) -> None:
    response = setup.proxy([full_backlog, p], [d], connect_timeout_s=600).http.get("/health")
    assert response.status_code == 200
    assert response.json()["prefill"] == {full_backlog: False, p.url: True}


@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_health_is_bad_without_a_server_of_either_leg(
    setup: ProxySetup, p: FakeServer, d: FakeServer, leg: str
) -> None:
    (p if leg == "prefill" else d).script = stalls
    response = setup.proxy([p], [d], connect_timeout_s=1).http.get("/health")
    assert response.status_code == 503
    assert response.json()["healthy"] is False
    assert (response.json()["prefill"][p.url], response.json()["decode"][d.url]) == (leg != "prefill", leg != "decode")


@pytest.mark.parametrize("script", [answers(503, b""), stalls])
def test_the_healthcheck_is_that_of_vllms_example_proxies_and_asks_no_server(
    setup: ProxySetup, p: FakeServer, d: FakeServer, closed_port: str, script: Script
) -> None:
    p.script = d.script = script
    response = setup.proxy([p], [closed_port, d]).http.get("/healthcheck")
    assert response.status_code == 200
    assert response.json() == {"status": "ok", "prefill_instances": 1, "decode_instances": 2}
    assert p.received == d.received == []


def test_models_are_those_of_a_decode_server(proxy: Proxy, p: FakeServer, d: FakeServer) -> None:
    response = proxy.http.get("/v1/models", headers={"Authorization": "Bearer key"})
    assert [model["id"] for model in response.json()["data"]] == ["tiny", "an-adapter"]
    assert d.received[0].headers["authorization"] == "Bearer key"
    assert p.received == []


def test_models_without_a_decode_server_are_an_error(setup: ProxySetup, p: FakeServer, closed_port: str) -> None:
    response = setup.proxy([p], [closed_port]).http.get("/v1/models")
    assert response.status_code == 502
    assert response.json()["error"]["message"] == "a decode server cannot be reached"


def test_a_proxy_that_has_served_nothing_exports_the_statuses_of_failures(proxy: Proxy) -> None:
    exported = proxy.http.get("/metrics").text
    for status in (200, 500, 502, 503, 504):
        assert f'pd_proxy_requests_total{{status="{status}"}} 0' in exported


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"prefill": ()}, "no prefill server"),
        ({"decode": ()}, "no decode server"),
        ({"decode": ("http://b", "http://b")}, "named twice"),
        ({"prefill": ("10.0.0.1:8000",)}, "'10.0.0.1:8000' is not a base URL"),
        ({"prefill": ("ftp://a",)}, "not a base URL"),
        ({"prefill": ("http://a/v1",)}, "without /v1"),
        ({"prefill": ("http://a:99999",)}, "not a base URL"),
        ({"prefill": ("http://:80",)}, "not a base URL"),
        ({"legs": "parallel"}, "'parallel' is not a valid Legs"),
        ({"first_token": "P"}, "'P' is not a valid FirstTokenFrom"),
        ({"without_prefill": "D"}, "'D' is not a valid WithoutPrefill"),
        ({"relay": ("tokenizer_info",)}, "the path to relay is 'tokenizer_info'"),
        ({"relay": ("/a/../pause",)}, "the path to relay is '/a/../pause'"),
        ({"relay": ("/metrics",)}, "'/metrics', which the proxy serves itself"),
        ({"relay": ("/{path}",)}, "the path to relay is '/{path}'"),
        ({"connect_timeout_s": 0.0}, "connect_timeout_s is 0.0"),
        ({"request_timeout_s": float("nan")}, "request_timeout_s is nan"),
        ({"api_key": ""}, "the API key is empty"),
        ({"api_key": "two words"}, "the API key is empty or has characters other than"),
        ({"api_key": "key\r\nX-Evil: 1"}, "the API key is empty or has characters other than"),
        ({"api_key": "schlüssel"}, "the API key is empty or has characters other than"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused_by_name(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        Settings(**({"prefill": ("http://a",), "decode": ("http://[::1]:8000",)} | changed))
