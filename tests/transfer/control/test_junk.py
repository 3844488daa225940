"""Thousands of frames of a stranger's choice: none stops the server, fills memory or log, or delays a real client."""

import contextlib
import itertools
import resource
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import zmq

from tests.support.control.junk import STRANGER, Junk, send_conversations
from tests.support.control.recorder import Recorder
from tests.support.control.samples import REPLIES, REQUESTS, Handler
from tests.support.waiting import until
from transfer.control.client import ControlClient
from transfer.control.keys import ControlKeys
from transfer.control.messages import Reply, Request
from transfer.control.server import ControlServer

HERE = "127.0.0.1"
KEYS = ControlKeys.derive(b"correct horse battery staple")
MOST_UNREAD = 200  # messages that a stranger is ahead of the server by: one that is further ahead may be cut
MAX_GROWTH_BYTES = 128 << 20  # the queues of both ends, sockets of libzmq, and what the allocator keeps

MANY = pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])


class Forgetful(Handler):
    """Answers, counts and remembers nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.times_asked = 0

    def handle(self, request: Request) -> Reply:
        self.times_asked += 1
        return dict(zip(REQUESTS, REPLIES, strict=True)).get(request) or self.usual(request)


class Real:
    """A client that says hello, renews, releases and cancels, over and over, as long as junk comes."""

    def __init__(self, port: int, keys: ControlKeys | None) -> None:
        self.served = 0
        self._port = port
        self._client = ControlClient(keys=keys)

    def ask_during(self, attack: threading.Thread) -> int:
        """Every request is answered, and rightly; the most memory that this process had meanwhile, in bytes."""
        peak = _memory()
        for request, reply in itertools.cycle(zip(REQUESTS, REPLIES, strict=True)):
            assert self._client.request(HERE, self._port, request, 10).result() == reply
            self.served += 1
            peak = max(peak, _memory())
            if not attack.is_alive() and self.served >= 100:
                return peak
        raise AssertionError

    @property
    def sent(self) -> int:
        """Frames, those included that were sent again because an answer took long."""
        return self._client.counters.sent

    def close(self) -> None:
        now = self._client.counters
        assert now.answered == self.served
        assert now.sent <= 1.05 * self.served, "it hardly had to ask again for want of an answer"
        self._client.close()


@contextlib.contextmanager
def serving(handler: Handler, keys: ControlKeys | None) -> Iterator[ControlServer]:
    server = ControlServer(handler, HERE, keys=keys)
    server.start()
    try:
        yield server
    finally:
        server.close()


@pytest.mark.parametrize("messages", [4_000, MANY])
@pytest.mark.parametrize("keys", [None, KEYS], ids=["without a secret", "by one who has the secret"])
def test_bad_messages_are_counted_and_a_real_client_is_served_all_the_while(
    caplog: pytest.LogCaptureFixture, keys: ControlKeys | None, messages: int
) -> None:
    with serving(Forgetful(), keys) as server:
        real, before = Real(server.port, keys), _memory()
        with stranger(server.port, keys) as dealer:

            def counted() -> int:
                return server.counters.requests + server.counters.refusals["malformed"] - real.sent

            attack = threading.Thread(target=send_messages, args=(dealer, Junk(1), messages, counted))
            attack.start()
            peak = real.ask_during(attack)
            until(lambda: counted() == messages, lambda: server.counters)
        now = server.counters
        assert min(now.malformed, now.wrong_version, now.wrong_frames) > messages / 20
        assert now.oversized > 0
        assert now.handler_failures == 0
        real.close()
    assert peak - before < MAX_GROWTH_BYTES
    assert len(caplog.records) <= 5, "one line a cause"


@pytest.mark.thorough
@pytest.mark.parametrize("frames", [4_000, MANY])
@pytest.mark.parametrize("keys", [None, KEYS], ids=["without a secret", "with a secret"])
def test_bad_bytes_end_their_own_connection_at_most(
    caplog: pytest.LogCaptureFixture, keys: ControlKeys | None, frames: int
) -> None:
    handler = Forgetful()
    with serving(handler, keys) as server:
        junk = Junk(2, recorded_conversation(server.port, keys))
        asked_before = handler.times_asked
        real, before = Real(server.port, keys), _memory()
        attack = threading.Thread(target=send_conversations, args=(server.port, junk, frames))
        attack.start()
        peak = real.ask_during(attack)
        until(lambda: server.counters.admission.connections == 1, within_s=10.0)
        if keys is not None:  # of all that was sent, nothing reached anybody
            assert handler.times_asked == asked_before + real.served
            assert server.counters.malformed == server.counters.wrong_frames == 0
            assert server.counters.refusals["authentication"] > frames / 1000
        else:
            assert server.counters.refusals["malformed"] > frames / 6
        assert server.counters.handler_failures == 0
        real.close()
    assert peak - before < MAX_GROWTH_BYTES
    assert len(caplog.records) <= 8, "one line a cause"


@contextlib.contextmanager
def stranger(port: int, keys: ControlKeys | None) -> Iterator[zmq.Socket[bytes]]:
    """A socket of another host."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.RCVHWM, 0)
    if keys is not None:
        keys.secure_client(dealer)
    dealer.connect(f"tcp://{STRANGER}:0;{HERE}:{port}")
    yield dealer
    context.destroy(linger=0)


def send_messages(dealer: zmq.Socket[bytes], junk: Junk, number: int, counted: Callable[[], int]) -> None:
    """Through ZeroMQ; answers are read."""
    for sent in range(number):
        if sent % MOST_UNREAD == 0:
            until(lambda sent=sent: counted() >= sent - MOST_UNREAD)  # type: ignore[misc]
        dealer.send_multipart(junk.message())
        with contextlib.suppress(zmq.Again):
            while True:
                dealer.recv(zmq.NOBLOCK)


def recorded_conversation(port: int, keys: ControlKeys | None) -> Sequence[bytes]:
    """What a client sends that is served, piece by piece."""
    with Recorder(port) as recorder:
        client = ControlClient(keys=keys)
        for request in REQUESTS:
            client.request(HERE, recorder.port, request, 10).result()
        client.close()
    return recorder.sent


def _memory() -> int:
    """Bytes of this process that are in memory now: clients, server and strangers together."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
