"""What a prefill engine tells routers by HTTP, to whom, and what a stranger can do there."""

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest

from pd_connector.config import ConfigError
from pd_connector.scheduler.prefill import bootstrap
from pd_connector.scheduler.prefill.bootstrap import Bootstrap
from pd_connector.vllm import engine_config
from pd_connector.vllm.engine_config import UnsupportedError
from tests.support.connector.vllm_engine import StartEngine
from tests.support.process import free_port
from tests.support.waiting import until

Serve = Callable[..., Bootstrap]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts servers and ends them; nothing of them is left."""
    before, started = set(threading.enumerate()), []

    def serve(host: str = "127.0.0.1", ranks: tuple[int, int] = (1, 1)) -> Bootstrap:
        started.append(Bootstrap(host, 4711, ranks, 0))
        return started[-1]

    yield serve
    for server in started:
        server.check_integrity()
        server.close()
        server.check_integrity()
    assert set(threading.enumerate()) <= before


def ask(server: Bootstrap, method: str = "GET", path: str = "/query", host: str = "127.0.0.1") -> httpx.Response:
    return httpx.request(method, f"http://{host}:{server.port}{path}", timeout=30, trust_env=False)


@pytest.mark.parametrize(
    ("host", "engine_id"),
    [
        ("127.0.0.1", "@127.0.0.1:4711"),
        ("10.1.2.3", "@10.1.2.3:4711"),
        ("localhost", "@localhost:4711"),
        ("fd00::3", "@[fd00::3]:4711"),
    ],
)
def test_the_engine_id_is_the_control_channels_address(serve: Serve, host: str, engine_id: str) -> None:
    if ":" in host and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    answer = ask(serve(host))
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    told = engine_id.removeprefix("@")
    assert answer.json() == {"0": {"engine_id": engine_id, "worker_addr": {"0": {"0": told}}}}


def test_all_ranks_have_the_same_address(serve: Serve) -> None:
    workers = ask(serve(ranks=(2, 3))).json()["0"]["worker_addr"]
    assert workers == {str(tp): {str(pp): "127.0.0.1:4711" for pp in range(3)} for tp in range(2)}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("POST", "/query", 405), ("POST", "/register", 404), ("GET", "/", 404), ("GET", "/docs", 404)],
)
def test_nothing_else_is_there(serve: Serve, method: str, path: str, status: int) -> None:
    assert ask(serve(), method, path).status_code == status


def test_an_engine_at_the_loopback_address_is_not_told_to_others(serve: Serve) -> None:
    assert serve("127.0.0.1")._listener.getsockname()[0] == "127.0.0.1"
    assert serve("10.1.2.3")._listener.getsockname()[0] == "0.0.0.0"


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no sockets for both families here")
def test_an_engine_whose_name_has_only_an_ipv6_address_is_asked_over_ipv6(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "resolve", lambda _: "fd00::3")
    assert ask(serve("p6.example"), host="[::1]").status_code == 200


def test_a_port_in_use_is_named_with_the_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"bootstrap_port = {port}: cannot listen there.*free port"):
            Bootstrap("127.0.0.1", 4711, (1, 1), port)


def test_a_port_that_an_engines_index_makes_too_large_is_named() -> None:
    with pytest.raises(ConfigError, match=r"bootstrap_port = 65536: cannot listen there.*none above 65535"):
        Bootstrap("127.0.0.1", 4711, (1, 1), 65536)


def test_a_connection_that_says_nothing_is_ended(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "_CONNECTION_S", 0.2)
    server = serve()
    for said in (b"", b"GET /query HTTP/1.1\r\nHost: a\r\nX-Endless: "):
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as idle:
            idle.sendall(said)
            with suppress(ConnectionResetError):
                assert idle.recv(100) == b""
    assert ask(server).status_code == 200


def test_more_connections_than_that_are_not_taken(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "_CONNECTIONS", 4)
    server = serve()
    idle = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(4)]
    until(lambda: len(server._server.server_state.connections) == 4)
    with pytest.raises(httpx.TransportError):
        ask(server)
    for one in idle:
        one.close()
    until(lambda: not server._server.server_state.connections)
    assert ask(server).status_code == 200


def test_it_ends_at_once_though_somebody_is_connected(serve: Serve) -> None:
    server = serve()
    with socket.create_connection(("127.0.0.1", server.port), timeout=30):
        until(lambda: server._server.server_state.connections)
        server.close()
        assert not server._thread.is_alive()


# The engine


def test_a_prefill_engine_tells_where_its_control_channel_is(start: StartEngine) -> None:
    port = free_port()
    p = start("kv_producer", bootstrap_port=port)
    params = p.prefill("r", [3, 1, 6])[1]
    told = httpx.get(f"http://127.0.0.1:{port}/query", trust_env=False).json()["0"]["engine_id"]
    assert told == f"@{params['remote_host']}:{params['remote_port']}"
    p.scheduler.shutdown()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/query", trust_env=False)


@pytest.mark.parametrize(("role", "extra"), [("kv_producer", {}), ("kv_consumer", {"bootstrap_port": 1})])
def test_nobody_is_told_unless_a_prefill_engine_is_to(start: StartEngine, role: str, extra: dict[str, Any]) -> None:
    start(role, **extra)
    assert not [thread for thread in threading.enumerate() if thread.name == "pd-bootstrap"]


def test_a_control_port_that_changes_is_warned_of(
    start: StartEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("pd_connector"), "propagate", True)
    start("kv_producer", bootstrap_port=free_port())
    assert any("set port" in line for line in caplog.messages)


def test_an_engine_that_shares_its_url_does_not_start(start: StartEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_config, "data_parallel_index", lambda config: 1)
    with pytest.raises(UnsupportedError, match="behind one URL"):
        start("kv_producer", bootstrap_port=free_port())
