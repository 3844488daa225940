"""With a secret: who holds it is served and is told by whom; all others learn nothing, and why."""

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Iterator

import pytest

from tests.support.control import zmtp
from tests.support.control.recorder import Recorder
from tests.support.control.samples import CANCEL, HELLO, RELEASE, WELCOME, Handler, Start
from tests.support.process import free_port
from tests.support.waiting import until
from transfer.control import peer_sockets
from transfer.control.client import ControlClient
from transfer.control.failures import AuthenticationFailed, PeerUnreachable
from transfer.control.keys import ControlKeys
from transfer.control.limits import ServerLimits
from transfer.control.messages import Cancelled, Released
from transfer.control.peer_sockets import ClientSettings
from transfer.control.server import ControlServer

HERE = "127.0.0.1"
KEYS = ControlKeys.derive(b"correct horse battery staple")
OTHERS = ControlKeys.derive(b"another secret of a kind")

Connect = Callable[[ControlKeys | None], ControlClient]


@pytest.fixture
def connect() -> Iterator[Connect]:
    made: list[ControlClient] = []

    def connect(keys: ControlKeys | None) -> ControlClient:
        made.append(ControlClient(keys=keys))
        return made[-1]

    yield connect
    for client in made:
        client.close()


def ask(client: ControlClient, server: ControlServer) -> object:
    return client.request(HERE, server.port, HELLO, 10).result()


def ask_one_that_hangs_up(client: ControlClient, port: int, timeout_s: float) -> object:
    """Ask what ends every connection to ``port`` as soon as it is made."""
    with socket.create_server((HERE, port)) as listener:
        listener.settimeout(0.1)
        waiting = client.request(HERE, port, HELLO, timeout_s)
        while not waiting.done():
            with contextlib.suppress(TimeoutError):
                listener.accept()[0].close()
    return waiting.result()


def test_the_same_secret_on_both_sides_is_served(start: Start, connect: Connect, handler: Handler) -> None:
    server, client = start(KEYS), connect(KEYS)
    assert ask(client, server) == WELCOME
    assert server.counters.refusals == dict.fromkeys(server.counters.refusals, 0)
    assert handler.asked == [HELLO]


UNEQUAL = [
    pytest.param(KEYS, OTHERS, "the secrets of the two engines differ", id="different"),
    pytest.param(KEYS, None, "that engine has a secret and this one has none", id="only P"),
    pytest.param(None, KEYS, "that one has none", id="only D"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("p", "d", "cause"), UNEQUAL)
def test_unequal_secrets_are_refused_within_seconds_and_the_cause_is_named(
    start: Start, connect: Connect, handler: Handler, p: ControlKeys | None, d: ControlKeys | None, cause: str
) -> None:
    server, client = start(p), connect(d)
    with pytest.raises(
        AuthenticationFailed, match=rf"{HERE}:{server.port}.*{cause}.*secret_file or PD_CONNECTOR_SECRET"
    ):
        client.request(HERE, server.port, HELLO, 60).result(30)  # long before the request's own time is out
    assert handler.asked == []
    until(lambda: server.counters.refusals["authentication"] + server.counters.refusals["handshake"] > 0)
    until(lambda: server.counters.admission.connections == 0)


@pytest.mark.thorough
@pytest.mark.parametrize(("p", "d", "cause"), UNEQUAL)
def test_all_requests_that_wait_for_a_peer_fail_with_its_authentication(
    start: Start, connect: Connect, p: ControlKeys | None, d: ControlKeys | None, cause: str
) -> None:
    server, client = start(p), connect(d)
    futures = [client.request(HERE, server.port, request, 10) for request in (HELLO, RELEASE, CANCEL)]
    for future in futures:
        with pytest.raises(AuthenticationFailed, match=cause):
            future.result()


@pytest.mark.thorough
def test_the_log_of_the_prefill_engine_names_the_peer_once(
    start: Start, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    server, client = start(KEYS), connect(OTHERS)
    with pytest.raises(AuthenticationFailed):
        ask(client, server)
    until(lambda: server.counters.admission.authentication_failures >= 3)  # as often as the client tries
    (record,) = caplog.records
    assert "authentication of a control connection from" in record.message
    assert "its secret differs from this engine's" in record.message


@pytest.mark.thorough
def test_a_peer_that_gets_the_right_secret_is_reached_by_the_next_request(start: Start, connect: Connect) -> None:
    server, client = start(OTHERS), connect(KEYS)
    with pytest.raises(AuthenticationFailed):
        ask(client, server)
    server.close()
    again = ControlServer(Handler(), HERE, server.port, keys=KEYS)
    again.start()
    assert ask(client, again) == WELCOME
    again.close()


def test_a_server_that_is_full_for_a_while_is_not_taken_for_one_with_another_secret(
    handler: Handler, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_sockets, "_SECRET_MISMATCH_S", 20.0)
    server = ControlServer(handler, HERE, keys=KEYS, limits=ServerLimits(max_connections=1))
    server.start()
    with zmtp.connect(server.port, HERE) as only:
        until(lambda: server.counters.admission.connections == 1)
        waiting = connect(KEYS).request(HERE, server.port, HELLO, 10)
        until(lambda: server.counters.admission.connections_refused > 3)
        only.shutdown(socket.SHUT_RDWR)
        assert waiting.result() == WELCOME
    server.close()


def test_a_peer_that_had_the_secret_once_has_it_later_too(
    start: Start, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_sockets, "_SECRET_MISMATCH_S", 0.3)
    server, client = start(KEYS), connect(KEYS)
    assert ask(client, server) == WELCOME
    server.close()
    with pytest.raises(PeerUnreachable):
        ask_one_that_hangs_up(client, server.port, 1.5)


@pytest.mark.parametrize(
    ("keys", "cause"),
    [
        pytest.param(KEYS, "the secrets of the two engines differ or that one has none", id="with a secret"),
        pytest.param(None, "that engine has a secret and this one has none", id="without a secret"),
    ],
)
def test_a_peer_that_has_never_met_us_and_hangs_up_again_and_again_has_another_secret(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, keys: ControlKeys | None, cause: str
) -> None:
    monkeypatch.setattr(peer_sockets, "_SECRET_MISMATCH_S", 0.3)
    with pytest.raises(AuthenticationFailed, match=rf"it ended the handshake \d+ times in [\d.]+ s, .*{cause}"):
        ask_one_that_hangs_up(connect(keys), free_port(), 10)


@pytest.mark.parametrize("keys", [None, KEYS], ids=["without a secret", "with a secret"])
def test_a_frozen_peer_is_unreachable_and_has_ended_nothing(
    keys: ControlKeys | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_sockets, "_SECRET_MISMATCH_S", 0.3)
    client = ControlClient(ClientSettings(connect_timeout_s=0.1), keys=keys)
    with (
        socket.create_server((HERE, 0)) as frozen,
        pytest.raises(PeerUnreachable, match="no connection could be made: check that the engine runs"),
    ):
        client.request(HERE, frozen.getsockname()[1], HELLO, 1.5).result()
    client.close()


def test_a_peer_that_is_not_there_is_unreachable_whatever_the_secret(connect: Connect) -> None:
    with pytest.raises(PeerUnreachable, match="no connection could be made"):
        connect(KEYS).request(HERE, free_port(), HELLO, 0.3).result()


def test_a_listener_that_ends_every_connection_is_unreachable_and_says_what_it_does(connect: Connect) -> None:
    with pytest.raises(PeerUnreachable, match=r"it ended the connection \d+ times before it was established"):
        ask_one_that_hangs_up(connect(None), free_port(), 1.5)


def test_a_server_with_a_secret_does_not_warn_that_it_has_none(caplog: pytest.LogCaptureFixture) -> None:
    server = ControlServer(Handler(), "0.0.0.0", keys=KEYS)
    server.start()
    server.close()
    assert not caplog.records


def test_an_eavesdropper_reads_nothing(start: Start, connect: Connect) -> None:
    for keys, readable in ((None, True), (KEYS, False)):
        with Recorder(start(keys).port) as recorder:
            client = connect(keys)
            assert client.request(HERE, recorder.port, RELEASE, 10).result() == Released(True)
            assert client.request(HERE, recorder.port, HELLO, 10).result() == WELCOME
            client.close()
        assert (RELEASE.lease_id.encode() in b"".join(recorder.sent)) is readable
        assert (b"LlamaForCausalLM" in b"".join(recorder.received)) is readable


def test_a_recorded_conversation_that_is_played_again_is_refused(
    start: Start, connect: Connect, handler: Handler
) -> None:
    server = start(KEYS)
    with Recorder(server.port) as recorder:
        client = connect(KEYS)
        assert client.request(HERE, recorder.port, CANCEL, 10).result() == Cancelled()
        client.close()
    assert handler.asked == [CANCEL]
    assert _failed_handshakes(server) == 0
    for pause_s in (0.0, 0.02):  # all at once, and as if one waited for the other's answers
        with socket.create_connection((HERE, server.port)) as replay:
            replay.settimeout(5)
            for piece in recorder.sent:
                try:
                    replay.sendall(piece)
                except OSError:
                    break
                time.sleep(pause_s)
            while _has_more(replay):
                pass
    until(lambda: _failed_handshakes(server) == 2)
    assert handler.asked == [CANCEL], "what was recorded reached nobody"


def test_a_client_key_of_ones_own_is_not_admitted_though_the_servers_key_is_right(
    start: Start, handler: Handler
) -> None:
    server = start(KEYS)
    client = ControlClient(keys=ControlKeys(KEYS.server, OTHERS.client))
    with pytest.raises(AuthenticationFailed, match="the secrets of the two engines differ"):
        ask(client, server)
    client.close()
    assert handler.asked == []
    until(lambda: server.counters.admission.authentication_failures == 1)


def test_what_listens_there_may_be_no_engine_at_all(connect: Connect) -> None:
    """A mechanism's name that fits, and then something that no CURVE server says."""
    with socket.create_server((HERE, 0)) as listener:
        listener.settimeout(5)
        waiting = connect(KEYS).request(HERE, listener.getsockname()[1], HELLO, 10)
        connection, _ = listener.accept()
        with connection:
            greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
            connection.sendall(greeting + b"\x04" + struct.pack("B", 8) + b"\x07NOTHING")
            with pytest.raises(PeerUnreachable, match="does not speak ZeroMQ's protocol as an engine does"):
                waiting.result()


def _failed_handshakes(server: ControlServer) -> int:
    """Of both kinds: what comes before the server has answered is out of turn, whatever secret it was made with."""
    counters = server.counters.admission
    return counters.authentication_failures + counters.handshake_failures


def _has_more(connection: socket.socket) -> bool:
    """Whether there is more to read before the other side ends the connection."""
    try:
        return bool(connection.recv(65536))
    except ConnectionError:
        return False
