"""Messages under way, which are delivered, lost, repeated and reordered one by one."""

import itertools
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from tests.support.waiting import ManualClock
from transfer.control.client import ControlClient
from transfer.control.failures import PeerRefused, PeerUnreachable
from transfer.control.messages import (
    Error,
    Release,
    Released,
    Renew,
    Renewed,
    Reply,
    Request,
    decode_reply,
    decode_request,
    encode,
)
from transfer.control.waiting_requests import NotYet, WaitingRequest, WaitingRequests

HOST, PORT = "10.0.0.5", 8998


class Unwaitable(Future[Reply]):
    """An answer that nobody waits for: whoever asks for it before it is here would stop a scheduler (I8)."""

    def result(self, timeout: float | None = None) -> Reply:
        assert self.done(), "I8: the scheduler's thread waits for a peer"
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        assert self.done(), "I8: the scheduler's thread waits for a peer"
        return super().exception(timeout)


@dataclass(frozen=True)
class Asked:
    """A request that was not answered yet."""

    request: Request
    frame: bytes
    future: Unwaitable
    deadline: float


class SimulatedClient(ControlClient):
    """What ``ControlClient`` is to the connector: asks again until it is answered or out of time."""

    def __init__(self, network: "Network") -> None:  # no thread
        self.ended: set[str] = set()  # leases that an answer said have ended
        self.confirmed: set[tuple[str, int]] = set()  # pull id and reader of the releases that were answered as valid
        self.name = str(next(network.ids)).encode()
        self._network = network
        self._pending: dict[int, Asked] = {}

    def request(self, host: str, port: int, message: Any, timeout_s: float) -> Future[Any]:
        assert (host, port) == (HOST, PORT)
        assert timeout_s > 0
        message_id = next(self._network.ids)
        frame = encode(message_id, message)
        asked = Asked(message, frame, Unwaitable(), self._network.clock.now + timeout_s)
        self._pending[message_id] = asked
        self._network.to_prefill.append((self, frame))
        return asked.future

    def close(self) -> None:
        """Nothing to close."""

    def resend(self) -> None:
        self._pending = {each: asked for each, asked in self._pending.items() if not asked.future.cancelled()}
        for asked in self._pending.values():
            self._network.to_prefill.append((self, asked.frame))

    def give_up(self) -> None:
        """Fail what is out of time."""
        now = self._network.clock.now
        for message_id, asked in list(self._pending.items()):
            if asked.deadline <= now:
                del self._pending[message_id]
                if asked.future.cancelled():
                    continue
                kind = str(asked.request.__struct_config__.tag)
                asked.future.set_exception(
                    PeerUnreachable(host=HOST, port=PORT, request_type=kind, tried_s=1.0, attempts=1)
                )

    def take(self, frame: bytes) -> None:
        """An answer has come, the first or a later one."""
        message_id, reply = decode_reply(frame)
        asked = self._pending.pop(message_id, None)
        if asked is None or asked.future.cancelled():
            return
        if isinstance(reply, Error):
            kind = str(asked.request.__struct_config__.tag)
            refused = PeerRefused(host=HOST, port=PORT, request_type=kind, code=reply.code, reason=reply.message)
            asked.future.set_exception(refused)
            return
        if isinstance(asked.request, Renew) and isinstance(reply, Renewed):
            self.ended |= set(asked.request.lease_ids).difference(reply.valid)
        if isinstance(asked.request, Release) and isinstance(reply, Released) and reply.valid:
            self.confirmed.add((asked.request.pull_id, asked.request.reader))
        asked.future.set_result(reply)


class Network:
    """Frames between decode engines and the one address of a prefill engine. ``serve`` answers there, or is dead."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.ids = itertools.count(1)
        self.serve: Callable[[Request], Reply | NotYet] | None = None
        self.waiting = WaitingRequests()  # for news of the engine that serves
        self.is_cut = False  # nothing arrives, though memory can be read
        self.to_prefill: list[tuple[SimulatedClient, bytes]] = []
        self.to_decode: list[tuple[SimulatedClient, bytes]] = []
        self._clients: dict[bytes, SimulatedClient] = {}

    def restart(self, serve: Callable[[Request], Reply | NotYet] | None) -> None:
        """Another prefill engine answers from now on, or nobody."""
        self.serve, self.waiting = serve, WaitingRequests()

    def deliver_request(self, number: int) -> None:
        client, frame = self.to_prefill.pop(number)
        if self.serve is not None and not self.is_cut:
            message_id, request = decode_request(frame)
            self._clients[client.name] = client
            self._answer(client.name, message_id, request)

    def deliver_reply(self, number: int) -> None:
        client, frame = self.to_decode.pop(number)
        client.take(frame)

    def changed(self, *topics: str) -> None:
        """There is news of prompts."""
        self.waiting.changed(*topics)

    def answer_waiting(self) -> None:
        """The server answers what has waited for news that are there now, or for long enough."""
        for waiting in self.waiting.take_changed():
            self._answer(waiting.peer, waiting.message_id, waiting.request, waiting.due_at)
        for waiting in self.waiting.take_late(self.clock.now):
            self._reply(waiting.peer, waiting.message_id, waiting.reply)

    def deliver_all(self) -> None:
        self.answer_waiting()
        while self.to_prefill or self.to_decode:
            if self.to_prefill:
                self.deliver_request(0)
            if self.to_decode:
                self.deliver_reply(0)
            self.answer_waiting()

    def _answer(self, peer: bytes, message_id: int, request: Request, due_at: float | None = None) -> None:
        assert self.serve is not None
        reply = self.serve(request)
        if isinstance(reply, NotYet):
            due_at = self.clock.now + reply.wait_s if due_at is None else due_at
            waiting = WaitingRequest(peer, message_id, request, reply.topic, due_at, reply.reply)
            if reply.wait_s > 0 and self.waiting.add(waiting):
                return
            reply = reply.reply
        self._reply(peer, message_id, reply)

    def _reply(self, peer: bytes, message_id: int, reply: Reply) -> None:
        self.to_decode.append((self._clients[peer], encode(message_id, reply)))
