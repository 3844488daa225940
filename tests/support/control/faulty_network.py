"""A bad network: a forwarder between control clients and one server that loses, repeats, delays, alters and reorders.

Every client connection gets its own connection to the server, so replies find their way as they do without it. What
happens to a frame is decided by a ``Rule``, which a test may exchange at any time.
"""

import heapq
import random
import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum
from itertools import count
from types import TracebackType

import zmq

from transfer.control.polling import Wakeup


class Direction(Enum):
    """Which way a frame goes."""

    REQUEST = "request"
    REPLY = "reply"


Delivery = tuple[float, bytes]  # seconds from now, and the frame to deliver then
Rule = Callable[[Direction, bytes], Sequence[Delivery]]


def deliver(direction: Direction, frame: bytes) -> Sequence[Delivery]:
    """The good network."""
    return [(0.0, frame)]


def lose_everything(direction: Direction, frame: bytes) -> Sequence[Delivery]:
    """The cut network: connections stay up and nothing arrives."""
    return []


def lose_first(n: int, direction: Direction) -> Rule:
    """Lose the first ``n`` frames of one direction."""
    left = n

    def rule(way: Direction, frame: bytes) -> Sequence[Delivery]:
        nonlocal left
        if way is direction and left > 0:
            left -= 1
            return []
        return [(0.0, frame)]

    return rule


def chaos(seed: int, *, lose: float, repeat: float, longest_delay_s: float) -> Rule:
    """Lose and repeat with these probabilities, and delay each copy by its own random time, so that frames overtake."""
    dice = random.Random(seed)

    def rule(direction: Direction, frame: bytes) -> Sequence[Delivery]:
        if dice.random() < lose:
            return []
        copies = 2 if dice.random() < repeat else 1
        return [(dice.uniform(0, longest_delay_s), frame) for _ in range(copies)]

    return rule


class FaultyNetwork:
    """Forwards between ``port`` on the loopback interface and a server on it, by ``rule``. A context manager."""

    def __init__(self, server_port: int, rule: Rule = deliver) -> None:
        self.rule = rule
        self._server = f"tcp://127.0.0.1:{server_port}"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self.port = self._front.bind_to_random_port("tcp://127.0.0.1")
        self._backs: dict[bytes, zmq.Socket[bytes]] = {}  # by the client's routing id
        self._late: list[tuple[float, int, bytes, Direction, bytes]] = []  # heap: when, tie break, client, way, frame
        self._ties = count()
        self._poller = zmq.Poller()
        self._wakeup = Wakeup()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="faulty-network")

    def __enter__(self) -> "FaultyNetwork":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._wakeup.set()
        self._thread.join()
        self._wakeup.close()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        self._poller.register(self._front, zmq.POLLIN)
        self._poller.register(self._wakeup.fileno(), zmq.POLLIN)
        while not self._stopping.is_set():
            wait_s = self._late[0][0] - time.monotonic() if self._late else 1.0
            ready = dict(self._poller.poll(max(0, int(wait_s * 1000) + 1)))
            if self._front in ready:
                client, frame = self._front.recv_multipart()
                self._plan(client, Direction.REQUEST, frame)
            for client, back in self._backs.items():
                if back in ready:
                    self._plan(client, Direction.REPLY, back.recv())
            while self._late and self._late[0][0] <= time.monotonic():
                _, _, client, direction, frame = heapq.heappop(self._late)
                self._forward(client, direction, frame)

    def _plan(self, client: bytes, direction: Direction, frame: bytes) -> None:
        now = time.monotonic()
        for delay_s, copy in self.rule(direction, frame):
            heapq.heappush(self._late, (now + delay_s, next(self._ties), client, direction, copy))

    def _forward(self, client: bytes, direction: Direction, frame: bytes) -> None:
        if direction is Direction.REPLY:
            self._front.send_multipart([client, frame])
            return
        if client not in self._backs:
            back = self._context.socket(zmq.DEALER)
            back.connect(self._server)
            self._poller.register(back, zmq.POLLIN)
            self._backs[client] = back
        self._backs[client].send(frame)
