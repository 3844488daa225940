"""What stands in for a P, visited over real HTTP and the real control channel; the real transfer engine is slow."""

import multiprocessing
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pd_connector.config import ConnectorConfig
from pd_connector.doctor import listener as module
from pd_connector.doctor import npu
from pd_connector.doctor.findings import CheckFailed, Examination, Outcome
from pd_connector.doctor.http import HttpServer, base_url
from pd_connector.doctor.listener import Listener, serve_apart
from pd_connector.doctor.peer_check import PeerCheck
from tests.support.engine.in_process import InProcessEngine, InProcessFabric
from transfer.engine.interface import EngineStartError


def settings(**config: object) -> ConnectorConfig:
    return ConnectorConfig.model_validate({"host": "127.0.0.1", "protocol": "tcp"} | config)


@pytest.fixture(autouse=True)
def fabric(monkeypatch: pytest.MonkeyPatch) -> InProcessFabric:
    """Where the transfer engines of this process are."""
    fabric = InProcessFabric()
    monkeypatch.setattr(
        "pd_connector.worker.transfer_engine.open_engine", lambda _, *, is_read: InProcessEngine(fabric)
    )
    return fabric


@pytest.fixture(autouse=True)
def _close_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, an HTTP server looks every half second whether it is to end."""
    serve = ThreadingHTTPServer.serve_forever
    monkeypatch.setattr(ThreadingHTTPServer, "serve_forever", lambda server: serve(server, 0.01))


@pytest.fixture
def listening() -> Iterator[Callable[..., Listener]]:
    """Starts listeners, which hold no lease after the test."""
    started: list[Listener] = []

    def listen(**config: object) -> Listener:
        started.append(Listener(settings(**config), 0))
        return started[-1]

    yield listen
    for listener in started:
        assert listener._leases.active == 0
        listener._service.check_integrity()
        listener.close()


def visited(address: str, **config: object) -> Examination:
    peer_check, report = PeerCheck(HttpServer(base_url(address), None, 20.0), settings(**config), 100), Examination()
    try:
        report.run_chain(peer_check.checks)
    finally:
        peer_check.close()
    return report


def secret(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def test_it_is_visited_like_a_p(listening: Callable[..., Listener]) -> None:
    report = visited(listening().address)
    assert [finding.outcome for finding in report.findings] == [Outcome.OK] * 3, [str(one) for one in report.findings]
    assert "serves 'pd-doctor'" in report.findings[0].text
    assert report.findings[-1].text.startswith("99 tokens, 3.7 MB in 1 descriptors, by 1 workers: ")
    assert report.findings[-1].text.endswith("all checksums equal")


def test_the_right_secret(listening: Callable[..., Listener], tmp_path: Path) -> None:
    file = secret(tmp_path / "right", "0123456789abcdef")
    report = visited(listening(secret_file=file).address, secret_file=file)
    assert report.passed
    assert "authenticated and encrypted" in report.findings[1].text


@pytest.fixture
def ipv6_name(monkeypatch: pytest.MonkeyPatch) -> str:
    """A name of this machine that has an IPv6 address only."""
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    look_up = socket.getaddrinfo

    def found(host: str | None, *rest: Any, **options: Any) -> list[Any]:
        return look_up("::1" if host == "six.example" else host, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", found)
    return "six.example"


def test_a_name_that_has_only_an_ipv6_address(listening: Callable[..., Listener], ipv6_name: str) -> None:
    listener = listening(host=ipv6_name)
    assert listener.address.startswith(f"{ipv6_name}:")
    assert visited(listener.address).passed


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_an_ipv6_address_is_told_in_brackets(listening: Callable[..., Listener]) -> None:
    report = visited(listening(host="::1").address)
    assert report.passed
    assert re.search(r"control channel is at \[::1\]:\d+$", report.findings[0].text)


@pytest.mark.thorough
@pytest.mark.parametrize("ours", ["", "another secret of 16 bytes"])
def test_a_wrong_secret(listening: Callable[..., Listener], tmp_path: Path, ours: str) -> None:
    listener = listening(secret_file=secret(tmp_path / "right", "0123456789abcdef"))
    config: dict[str, Any] = {"secret_file": secret(tmp_path / "wrong", ours)} if ours else {}
    report = visited(listener.address, **config)
    assert report.names(Outcome.FAIL) == ["peer: handshake"]
    assert report.findings[1].text.startswith("denied: ")
    assert "secret" in report.findings[1].text
    listener._leases.cancel_all()  # it could not be told to


def test_it_refuses_what_it_does_not_serve(listening: Callable[..., Listener]) -> None:
    server = HttpServer(base_url(listening().address), None, 20.0)
    leg = {"kv_transfer_params": {"do_remote_decode": True}}
    for body in ({"prompt": [1]}, {"prompt": [], **leg}, {"prompt": ["x"], **leg}, {"prompt": [1] * 4000, **leg}):
        with pytest.raises(CheckFailed, match="status 400"):
            server.ask("/v1/completions", body)


class ProcessInThread:
    """Runs what another process would."""

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...], name: str) -> None:
        self._thread = threading.Thread(target=target, args=args, name=name)
        self.start = self._thread.start

    def join(self, timeout_s: float | None = None) -> None:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive()

    def kill(self) -> None:
        pass


@pytest.fixture
def in_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the second process be a thread, with its end of the pipe for itself."""

    def pipe() -> tuple[Connection, Connection]:
        ours, theirs = multiprocessing.Pipe()
        kept = Connection(os.dup(theirs.fileno()))
        monkeypatch.setattr(ProcessInThread, "end", kept, raising=False)
        return ours, theirs

    def process(target: Callable[..., None], args: tuple[Any, ...], name: str) -> ProcessInThread:
        return ProcessInThread(target, (ProcessInThread.end, *args[1:]), name)  # type: ignore[attr-defined]

    monkeypatch.setattr(module, "get_context", lambda _: SimpleNamespace(Pipe=pipe, Process=process))


@pytest.mark.usefixtures("in_thread")
def test_apart_it_serves_until_it_is_left() -> None:
    with serve_apart(settings(port=1)) as address:
        assert visited(address).passed
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pd-doctor")]


@pytest.mark.usefixtures("in_thread")
def test_apart_its_failure_to_start_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise EngineStartError("no such device")

    monkeypatch.setattr("pd_connector.worker.transfer_engine.open_engine", refuse)
    with pytest.raises(CheckFailed, match=r"^tcp does not start: EngineStartError: no such device$"):  # noqa: SIM117
        with serve_apart(settings()):
            pytest.fail("it cannot start")


@pytest.mark.usefixtures("in_thread")
def test_apart_over_ascend_its_transfer_engine_starts_on_the_first_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    made_current: list[int] = []
    monkeypatch.setattr(npu, "device", lambda: made_current.append(0))
    with serve_apart(settings(protocol="ascend")) as address:
        assert address
    assert made_current == [0]


def crash(parent: Connection, _: ConnectorConfig) -> None:
    parent.close()


@pytest.mark.usefixtures("in_thread")
def test_a_process_that_ends_without_a_word_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_serve", crash)
    with pytest.raises(CheckFailed, match=r"^tcp does not start: its process has ended without a word: the library"):  # noqa: SIM117
        with serve_apart(settings()):
            pytest.fail("it has crashed")


@pytest.mark.usefixtures("in_thread")
def test_a_process_that_says_nothing_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(parent: Connection, _: ConnectorConfig) -> None:
        with pytest.raises(EOFError):
            parent.recv()

    monkeypatch.setattr(module, "_serve", hang)
    monkeypatch.setattr(module, "_START_TIMEOUT_S", 0.1)
    with pytest.raises(CheckFailed, match=r"^tcp does not start: nothing within 0 s$"):  # noqa: SIM117
        with serve_apart(settings()):
            pytest.fail("it hangs")
