"""The proxy as a process of its own."""

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest
import uvicorn

import pd_proxy.__main__
from pd_proxy.__main__ import Server, listeners
from tests.support.examples.fake_servers import FakeServer, Received, Wire, opened, stalls
from tests.support.examples.harness import ProxyProcess, RawClient
from tests.support.sources import ROOT
from tests.support.waiting import until

COMMAND = [sys.executable, "-m", "pd_proxy"]


@pytest.fixture
def running(p: FakeServer, d: FakeServer) -> Iterator[ProxyProcess]:
    """A proxy process."""
    with ProxyProcess(["-m", "pd_proxy", "--prefill", p.url + "/", "--decode", d.url]) as process:
        yield process


def test_it_serves_and_a_signal_ends_it_though_a_stream_is_open(running: ProxyProcess, d: FakeServer) -> None:
    url = running.url
    assert httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, trust_env=False).status_code == 200

    async def begins(received: Received, wire: Wire) -> None:
        await wire.head()
        await wire.chunk(b"data: 1\n\n")
        await stalls(received, wire)

    d.script = begins
    with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "a"}, trust_env=False) as response:
        pieces = response.iter_raw()
        assert next(pieces) == b"data: 1\n\n"
        running.end(signal.SIGTERM)
        assert b'{"error":{"message":"the proxy is shutting down",' in next(pieces)
        with pytest.raises(httpx.RemoteProtocolError):
            next(pieces)
    assert d.wait(2).left.wait(30)
    assert "the proxy is shutting down" in running.log
    assert "Traceback" not in running.log


def test_who_has_no_answer_when_a_signal_comes_gets_an_error_of_the_api(running: ProxyProcess, d: FakeServer) -> None:
    d.script = stalls
    body = b'{"max_tokens": 5, "messages": []}'
    head = b"POST /v1/messages HTTP/1.1\r\nHost: proxy\r\nContent-Length: %d\r\n\r\n"
    client = RawClient(running, head % len(body), body)
    d.wait()
    running.end(signal.SIGTERM)
    answer = client.receive_all()
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2]) == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "the proxy is shutting down"},
    }
    assert "status=503" in running.log
    assert "Traceback" not in running.log


def test_a_stream_may_go_on_for_the_shutdown_timeout(p: FakeServer, d: FakeServer) -> None:
    gate = threading.Event()

    async def ends_later(_: Received, wire: Wire) -> None:
        await wire.head()
        await wire.chunk(b"data: 1\n\n")
        await opened(gate)
        await wire.chunk(b"data: 2\n\n")
        await wire.end()

    d.script = ends_later
    arguments = ["--prefill", p.url, "--decode", d.url, "--shutdown-timeout", "60"]
    with (
        ProxyProcess(["-m", "pd_proxy", *arguments]) as process,
        httpx.stream("POST", f"{process.url}/v1/completions", json={"prompt": "a"}, trust_env=False) as response,
    ):
        pieces = response.iter_raw()
        assert next(pieces) == b"data: 1\n\n"
        process.signal(signal.SIGTERM)
        until(lambda: "Shutting down" in process.log)
        gate.set()
        assert list(pieces) == [b"data: 2\n\n"]
        assert process.wait() == -signal.SIGTERM


def test_idle_connections_stay_open_for_longer_than_load_balancers_keep_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[uvicorn.Config] = []

    def run(server: uvicorn.Server, sockets: list[socket.socket]) -> None:
        configs.append(server.config)
        for each in sockets:
            each.close()
        server.started = True

    monkeypatch.setattr(uvicorn.Server, "run", run)
    for of_the_process in ("raise_file_limit", "_look_for_garbage_seldom"):
        monkeypatch.setattr(pd_proxy.__main__, of_the_process, lambda: None)
    pd_proxy.__main__.main(["--prefill", "http://p", "--decode", "http://d", "--port", "0"])
    assert [config.timeout_keep_alive > 600 for config in configs] == [True]


def test_all_addresses_of_ipv6_are_those_of_ipv4_too(p: FakeServer, d: FakeServer) -> None:
    """As with vLLM's own servers."""
    with ProxyProcess(["-m", "pd_proxy", "--prefill", p.url, "--decode", d.url, "--host", "::"]) as process:
        for host in ("127.0.0.1", "[::1]"):
            url = f"http://{host}:{process.address[1]}/healthcheck"
            assert httpx.get(url, trust_env=False).json()["status"] == "ok"


@pytest.mark.parametrize(
    ("addresses", "dual"), [(["::1"], [False]), (["127.0.0.1", "::1"], [False]), (["::"], [True])], ids=str
)
def test_all_addresses_of_a_name_are_listened_on(
    monkeypatch: pytest.MonkeyPatch, addresses: list[str], dual: list[bool]
) -> None:
    families = {True: socket.AF_INET6, False: socket.AF_INET}
    found = [(families[":" in address], socket.SOCK_STREAM, 0, "", (address, 0)) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with ExitStack() as stack:
        listening = [stack.enter_context(each) for each in listeners(Server("a-name", 0), 5)]
        assert [each.getsockname()[0] for each in listening] == addresses
        sixth = [each for each in listening if each.family == socket.AF_INET6]
        assert [not each.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY) for each in sixth] == dual


def test_a_package_that_traces_need_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    monkeypatch.setattr(pd_proxy.__main__, "raise_file_limit", lambda: None)
    words = ["--prefill", "http://p:1", "--decode", "http://d:1", "--otlp-traces-endpoint", "http://collector:4318"]
    with pytest.raises(SystemExit, match=r"tracing needs opentelemetry.*pip install 'pd-connector\[tracing\]'"):
        pd_proxy.__main__.main(words)


def test_a_port_that_is_taken_is_explained(p: FakeServer, d: FakeServer) -> None:
    port = p.url.rpartition(":")[2]
    arguments = ["--prefill", p.url, "--decode", d.url, "--host", "::", "--port", port]
    ended = subprocess.run([*COMMAND, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert f"cannot listen on [::]:{port}: " in ended.stderr
    assert "Traceback" not in ended.stderr
