"""The servers' key: in the place of what clients send, on every request, and in no log."""

import signal

import httpx
import pytest

from pd_proxy import Settings
from tests.support.examples.fake_servers import FakeServer, answers
from tests.support.examples.harness import ProxyProcess
from tests.support.examples.served_proxy import Proxy, ProxySetup

KEY = "the-servers-own"
REFUSAL = b'{"error": "Unauthorized"}'


@pytest.fixture
def proxy(setup: ProxySetup, p: FakeServer, d: FakeServer) -> Proxy:
    """A proxy with a key."""
    return setup.proxy([p], [d], api_key=KEY)


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer of-the-client"}], ids=["without", "with"])
def test_every_server_gets_the_key_and_no_client_its_way(
    proxy: Proxy, p: FakeServer, d: FakeServer, headers: dict[str, str]
) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert proxy.http.post(path, json={"prompt": "a"}, headers=headers).status_code == 200
    assert proxy.http.get("/v1/models", headers=headers).status_code == 200
    sent = [one.headers["authorization"] for one in (*p.received, *d.received)]
    assert sent == [f"Bearer {KEY}"] * 5


def test_a_key_that_the_servers_do_not_know_is_the_clients_answer(proxy: Proxy, p: FakeServer) -> None:
    p.script = answers(401, REFUSAL, Content_Type="application/json")
    response = proxy.complete()
    assert (response.status_code, response.content) == (401, REFUSAL)


def test_no_log_and_no_error_shows_it(p: FakeServer, closed_port: str) -> None:
    p.script = answers(500, b"broken", Content_Type="text/plain")
    arguments = ["-m", "pd_proxy", "--prefill", p.url, "--decode", closed_port]
    with ProxyProcess(arguments, VLLM_API_KEY=KEY) as process:
        divided = httpx.post(f"{process.url}/v1/completions", json={"prompt": "a"}, trust_env=False)
        undivided = httpx.post(f"{process.url}/v1/completions", json={"prompt": ["a", 7]}, trust_env=False)
        process.end(signal.SIGTERM)
    assert p.received[0].headers["authorization"] == f"Bearer {KEY}"
    assert (divided.status_code, undivided.status_code) == (500, 502)
    assert "the API key goes to the servers in the place of clients' Authorization" in process.log
    assert KEY not in process.log + divided.text + undivided.text + str(divided.headers) + str(undivided.headers)


def test_settings_do_not_show_it() -> None:
    assert KEY not in repr(Settings(prefill=("http://p",), decode=("http://d",), api_key=KEY))
