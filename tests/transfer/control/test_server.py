"""Starting, stopping and failing handlers."""

import logging
import socket
import threading
import time

import msgspec
import pytest

from tests.support.control.samples import CANCEL, HELLO, RELEASE, WELCOME, Handler
from transfer.control import messages
from transfer.control.client import ControlClient
from transfer.control.failures import ControlStartError, PeerRefused
from transfer.control.messages import MAX_FRAME_BYTES, Cancelled, Error, ErrorCode, Released, Reply, Request
from transfer.control.server import ControlServer


def test_port_0_lets_the_os_choose(server: ControlServer) -> None:
    assert server.port > 0


def test_the_handler_is_called_on_the_servers_thread(
    server: ControlServer, client: ControlClient, handler: Handler
) -> None:
    assert client.request("127.0.0.1", server.port, HELLO, 5).result() == WELCOME
    assert handler.thread is not None
    assert handler.thread.name == "pd-control-server"


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_ipv6(host: str, handler: Handler, client: ControlClient) -> None:
    server = ControlServer(handler, host)
    server.start()
    assert client.request(host, server.port, HELLO, 5).result() == WELCOME
    server.close()


def test_a_host_name_is_bound_at_its_address(handler: Handler, client: ControlClient) -> None:
    server = ControlServer(handler, "localhost")
    server.start()
    assert client.request("127.0.0.1", server.port, HELLO, 5).result() == WELCOME
    server.close()


def test_a_port_in_use_is_refused_at_once_with_the_way_out(server: ControlServer, handler: Handler) -> None:
    second = ControlServer(handler, "127.0.0.1", server.port)
    with pytest.raises(ControlStartError, match=rf"127\.0\.0\.1:{server.port}.*in use.*0 to let the OS choose"):
        second.start()
    second.close()


def test_a_port_in_use_by_another_program_is_refused(handler: Handler) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(ControlStartError, match="another process"):
        ControlServer(handler, "127.0.0.1", other.getsockname()[1]).start()


@pytest.mark.parametrize(
    ("host", "port", "words"),
    [
        ("192.0.2.1", 0, r"192\.0\.2\.1.*not an address of this machine"),
        ("no-such-host.invalid", 0, r"no-such-host\.invalid.*use an IP address"),
        ("", 0, "''"),
        ("127.0.0.1", 70000, "70000"),
    ],
)
def test_what_cannot_be_bound_is_named(handler: Handler, host: str, port: int, words: str) -> None:
    with pytest.raises(ControlStartError, match=words):
        ControlServer(handler, host, port).start()


def test_a_server_starts_once(server: ControlServer) -> None:
    with pytest.raises(ControlStartError, match="make a new one"):
        server.start()
    server.close()
    with pytest.raises(ControlStartError, match="make a new one"):
        server.start()


def test_there_is_no_port_before_the_start(handler: Handler) -> None:
    with pytest.raises(RuntimeError, match=r"before start\(\)"):
        _ = ControlServer(handler, "127.0.0.1").port


def test_only_a_host_beyond_loopback_is_warned_about(handler: Handler, caplog: pytest.LogCaptureFixture) -> None:
    local = ControlServer(handler, "127.0.0.1")
    local.start()
    local.close()
    assert not caplog.records
    everywhere = ControlServer(handler, "0.0.0.0")
    everywhere.start()
    everywhere.close()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "not authenticated" in record.message
    assert "Isolate the network" in record.message


def test_close_is_idempotent_and_quick(handler: Handler) -> None:
    server = ControlServer(handler, "127.0.0.1")
    server.close()  # never started
    server = ControlServer(handler, "127.0.0.1", close_timeout_s=60)
    server.start()
    started = time.monotonic()
    server.close()
    server.close()
    assert time.monotonic() - started < 10


def test_a_handler_that_never_returns_does_not_hold_up_close(
    handler: Handler, client: ControlClient, caplog: pytest.LogCaptureFixture
) -> None:
    busy, finish = threading.Event(), threading.Event()

    def answer(request: Request) -> Reply:
        busy.set()
        finish.wait(10)
        return Cancelled()

    handler.answer = answer
    server = ControlServer(handler, "127.0.0.1", close_timeout_s=0.05)
    server.start()
    client.request("127.0.0.1", server.port, CANCEL, 5)
    assert busy.wait(5)
    server.close()
    assert "handler did not return" in caplog.text
    finish.set()
    assert handler.thread is not None
    handler.thread.join(5)
    server.close()


def test_a_failing_handler_is_logged_answered_and_asked_again(
    server: ControlServer, client: ControlClient, handler: Handler, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(request: Request) -> Reply:
        raise KeyError("lost lease")

    handler.answer = fail
    for _ in range(3):
        with pytest.raises(PeerRefused, match=r"internal.*'release'.*KeyError") as caught:
            client.request("127.0.0.1", server.port, RELEASE, 5).result()
        assert caught.value.code == ErrorCode.INTERNAL
    assert server.counters.handler_failures == 3
    (record,) = caplog.records  # not one a request
    assert "'release'" in record.message
    assert record.exc_info is not None
    handler.answer = handler.usual
    assert client.request("127.0.0.1", server.port, RELEASE, 5).result() == Released(True)


@pytest.mark.parametrize(
    "reply",
    [Error(ErrorCode.UNKNOWN_ENGINE, "x" * MAX_FRAME_BYTES), Error(ErrorCode.UNKNOWN_ENGINE, "\ud800")],
    ids=["too large", "not UTF-8"],
)
def test_a_reply_that_cannot_be_sent_is_an_internal_error(
    server: ControlServer, client: ControlClient, handler: Handler, reply: Reply
) -> None:
    handler.answer = lambda request: reply
    with pytest.raises(PeerRefused) as caught:
        client.request("127.0.0.1", server.port, HELLO, 5).result()
    assert caught.value.code == ErrorCode.INTERNAL


def test_a_restarted_server_is_reached_again_on_the_same_port(handler: Handler, impatient: ControlClient) -> None:
    first = ControlServer(handler, "127.0.0.1")
    first.start()
    assert impatient.request("127.0.0.1", first.port, HELLO, 5).result() == WELCOME
    first.close()
    waiting = impatient.request("127.0.0.1", first.port, RELEASE, 10)
    second = ControlServer(handler, "127.0.0.1", first.port)
    second.start()
    assert waiting.result() == Released(True)
    assert impatient.request("127.0.0.1", first.port, HELLO, 5).result() == WELCOME
    second.close()


def test_a_welcome_is_encoded_once_as_long_as_it_says_the_same(
    server: ControlServer, handler: Handler, client: ControlClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may take milliseconds, and all decode engines may come at once."""
    encoded: list[Reply] = []

    def encode_body(reply: Reply) -> msgspec.Raw:
        encoded.append(reply)
        return messages.encode_body(reply)

    monkeypatch.setattr("transfer.control.server.encode_body", encode_body)
    other = msgspec.structs.replace(WELCOME, engine_id="another")
    answers = [WELCOME, WELCOME, other, other, WELCOME]
    left = [msgspec.structs.replace(answer) for answer in answers]
    handler.answer = lambda _: left.pop(0)
    assert [client.request("127.0.0.1", server.port, HELLO, 5).result() for _ in answers] == answers
    assert encoded == [WELCOME, other, WELCOME]
