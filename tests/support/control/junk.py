"""What a stranger may send: messages that are none, and bytes that are not even ZeroMQ. Seeded, so that it comes again.

A *message* is what a server gets from ZeroMQ; a *conversation* is what goes over a TCP connection.
"""

import contextlib
import random
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.support.control import zmtp
from tests.support.control.samples import ENGINE, REPLIES, REQUESTS, pack
from transfer.control.messages import MAX_REQUEST_BYTES, PROTOCOL_VERSION, encode

STRANGER = "127.0.0.2"
HANDSHAKE = zmtp.greeting() + zmtp.ready()


@dataclass(frozen=True)
class Conversation:
    """The bytes of one connection, sent in this many pieces; how many frames they hold, however bad."""

    pieces: Sequence[bytes]
    frames: int


class Junk:
    """Draws messages and conversations. ``recorded`` is what a client with the right secret once sent."""

    def __init__(self, seed: int, recorded: Sequence[bytes] = ()) -> None:
        self._dice = random.Random(seed)
        self._recorded = recorded
        self._valid = [encode(number + 1, message) for number, message in enumerate((*REQUESTS, *REPLIES))]
        self._requests = self._valid[: len(REQUESTS)]
        self._oversized = pack([PROTOCOL_VERSION, 5, {"type": "hello", "engine_id": "e" * MAX_REQUEST_BYTES}])

    def message(self) -> list[bytes]:
        """The frames of one message: random, altered, cut, repeated, of another version, too long, framed wrongly."""
        dice = self._dice
        if dice.random() < 0.003:
            return [self._oversized]
        if dice.random() < 0.1:
            return [dice.choice(self._requests)]  # one that was sent before, to the last byte
        if dice.random() < 0.1:
            return [b""] * dice.randint(1, 3) + [dice.choice(self._valid)]
        return [
            dice.choice((self._random, self._altered, self._cut, self._repeated, self._other_version, self._deep))()
        ]

    def conversation(self) -> Conversation:
        """One connection's bytes."""
        dice = self._dice
        handshake = HANDSHAKE
        match dice.randrange(8):
            case 0:
                pieces = [dice.randbytes(dice.randrange(1, 200))]
            case 1:
                pieces = [self._altered(handshake)]
            case 2:
                pieces = [self._cut(handshake + zmtp.frame(self._requests[0]))]
            case 3:
                hello = zmtp.command(b"\x05HELLO" + dice.randbytes(dice.choice([10, 194])))
                pieces = [zmtp.greeting(b"CURVE"), hello, zmtp.command(dice.randbytes(dice.randrange(200)))]
            case 4 if self._recorded:
                pieces = list(self._recorded)
            case 5:
                lie = zmtp.frame(b"x" * dice.randrange(100), length=dice.choice([2**20, 2**31, 2**62, 2**64 - 1]))
                pieces = [handshake, lie]
            case _:
                pieces = [handshake, *self._frames(dice.randint(1, 100))]
        return Conversation(pieces, max(1, len(pieces) - 1))

    def _random(self) -> bytes:
        return self._dice.randbytes(self._dice.randrange(200))

    def _altered(self, whole: bytes | None = None) -> bytes:
        altered = bytearray(whole or self._dice.choice(self._valid))
        for _ in range(self._dice.randint(1, 4)):
            altered[self._dice.randrange(len(altered))] = self._dice.randrange(256)
        return bytes(altered)

    def _cut(self, whole: bytes | None = None) -> bytes:
        whole = whole or self._dice.choice(self._valid)
        return whole[: self._dice.randrange(len(whole))]

    def _repeated(self) -> bytes:
        frame = self._dice.choice(self._valid)
        at = self._dice.randrange(len(frame))
        return frame[:at] + frame[: self._dice.randrange(len(frame))] + frame[at:]

    def _other_version(self) -> bytes:
        version = self._dice.choice([0, PROTOCOL_VERSION + 1, -1, 2**31, 2**64 - 1, "1", None])
        return pack([version, self._dice.randint(1, 2**40), {"type": "hello", "engine_id": ENGINE}])

    def _deep(self) -> bytes:
        return b"\x93\x01\x05" + b"\x91" * self._dice.randint(1, 5000)

    def _frames(self, messages: int) -> Iterator[bytes]:
        """The frames of messages, some with flags of the dice's choice."""
        for _ in range(messages):
            message = self.message()
            for number, body in enumerate(message):
                flags = zmtp.MORE if number + 1 < len(message) else 0
                if self._dice.random() < 0.002:
                    flags = self._dice.randrange(256)
                yield zmtp.frame(body, flags)


def send_conversations(port: int, junk: Junk, number: int) -> None:
    """Over TCP, until ``number`` frames were sent. A connection stays open while others are made.

    Of one that leaves, libzmq drops what nobody has read yet.
    """
    sent = 0
    connections: deque[socket.socket] = deque()
    while sent < number:
        conversation = junk.conversation()
        sent += conversation.frames
        try:
            connections.append(zmtp.connect(port, STRANGER))
        except ConnectionError:  # the server has refused this host in the middle of it
            continue
        with contextlib.suppress(OSError):
            for piece in conversation.pieces:
                connections[-1].sendall(piece)
                if piece == HANDSHAKE:
                    zmtp.await_ready(connections[-1])
        if len(connections) > 50:
            connections.popleft().close()
    for connection in connections:
        connection.settimeout(0.1)
        zmtp.is_ended(connection)
        connection.close()
