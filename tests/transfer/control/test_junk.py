"""Thousands of frames of a stranger's choice: none stops the server, fills its log, or delays a real client."""

import random
import socket
import threading

import pytest
import zmq

from tests.transfer.control.support import HELLO, REPLIES, REQUESTS, WELCOME, Handler, wait_until
from transfer.control.client import ControlClient
from transfer.control.messages import encode
from transfer.control.server import ControlServer

FRAMES = 4000


def junk(seed: int) -> list[list[bytes]]:
    """Multipart messages: random bytes, and valid frames with bytes flipped, cut, repeated, or framed wrongly."""
    dice = random.Random(seed)
    valid = [encode(dice.randint(1, 2**40), message) for message in (*REQUESTS, *REPLIES)]
    messages = []
    for _ in range(FRAMES):
        frame = bytearray(dice.choice(valid))
        match dice.randrange(5):
            case 0:
                frame = bytearray(dice.randbytes(dice.randrange(200)))
            case 1:
                for _ in range(dice.randint(1, 4)):
                    frame[dice.randrange(len(frame))] = dice.randrange(256)
            case 2:
                del frame[dice.randrange(len(frame)) :]
            case 3:
                at = dice.randrange(len(frame))
                frame[at:at] = frame[: dice.randrange(len(frame))]
            case 4:
                messages.append([b""] * dice.randint(1, 3) + [bytes(frame)])
                continue
        messages.append([bytes(frame)])
    return messages


@pytest.mark.parametrize("seed", range(2))
def test_a_real_client_is_served_through_a_flood_of_junk(
    server: ControlServer, client: ControlClient, handler: Handler, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(server.endpoint)
    messages = junk(seed)

    def flood() -> None:
        for message in messages:
            stranger.send_multipart(message)

    flooding = threading.Thread(target=flood)
    flooding.start()
    served = 0
    while flooding.is_alive() or served < 50:
        assert client.request("127.0.0.1", server.port, HELLO, 5).result() == WELCOME
        served += 1
    flooding.join()

    def counted() -> int:
        now = server.counters
        return now.requests + now.malformed + now.oversized + now.wrong_version + now.wrong_frames

    wait_until(lambda: counted() == FRAMES + served)
    context.destroy(linger=0)
    assert min(server.counters.malformed, server.counters.wrong_version, server.counters.wrong_frames) > 0
    assert server.counters.handler_failures == 0
    assert len(caplog.records) <= 4  # one a cause


def test_bytes_that_are_not_even_zeromq_do_no_harm(server: ControlServer, client: ControlClient) -> None:
    dice = random.Random(7)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
    for beginning in (b"", greeting, b"GET / HTTP/1.1\r\n\r\n"):
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", server.port)) as connection:
                connection.sendall(beginning + dice.randbytes(100))
    assert client.request("127.0.0.1", server.port, HELLO, 5).result() == WELCOME
    assert server.counters.requests == 1
