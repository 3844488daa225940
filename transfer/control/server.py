"""The server end of the control channel: one ROUTER socket, and one thread that calls a handler.

Decodes frames into requests and encodes replies into frames; nothing that a peer sends can stop it. The handler decides
what a request means (leases, geometry), ``admission`` who may be connected.
"""

import errno
import logging
import threading
import time
from typing import Protocol

import msgspec
import zmq

from transfer.control.admission import Admission, AdmissionCounters
from transfer.control.connections import FRAMES_READ, receive
from transfer.control.failures import ControlStartError
from transfer.control.keys import ControlKeys
from transfer.control.limits import ServerLimits, ThrottledWarnings
from transfer.control.messages import (
    MAX_FRAME_BYTES,
    MAX_REQUEST_BYTES,
    Error,
    ErrorCode,
    MalformedMessage,
    Reply,
    Request,
    Welcome,
    decode_request,
    encode,
    encode_body,
    enveloped,
    message_id_of,
)
from transfer.control.polling import Wakeup, start_threads
from transfer.control.waiting_requests import NotYet, WaitingRequest, WaitingRequests
from transfer.errors import BadAddress
from transfer.peers import Address, listen_address, parse_ip, resolve

logger = logging.getLogger(__name__)

# Frames up to twice the limit are read, so that they can be counted and answered. For larger ones libzmq closes the
# connection without reading them.
_READ_BYTES = 2 * MAX_REQUEST_BYTES
_MESSAGES_PER_TURN = 256  # between two checks of whether to stop
_PAUSE_AFTER_FAULT_S = 0.05
_BACKLOG = 1024  # connections that arrive at once, as after a restart
_HANDSHAKE_S = 5.0  # closes a connection that has not finished its handshake by then
_UNREAD_REPLIES_S = 15.0  # closes a connection whose peer has read no bytes for this long
_HEARTBEAT_S = 15.0  # how often silent peers are probed, so that vanished ones are dropped
_LINGER_S = 0.2  # how long the last replies have to leave
_LOG_INTERVAL_S = 60.0  # at most one warning per cause in this time

_BIND_HINTS = {
    errno.EADDRINUSE: "another process holds the port: choose a different one, or 0 to let the OS choose",
    errno.EADDRNOTAVAIL: "the host is not an address of this machine: use one that is",
    errno.EACCES: "this user may not bind the port: choose one above 1023, or 0 to let the OS choose",
}


class ControlHandler(Protocol):
    """Implements the requests."""

    def handle(self, request: Request) -> Reply | NotYet:
        """Answer ``request``. Called on the server's thread, which serves nobody else in the meantime.

        A request may arrive more than once: a repetition must have no effect and get the same answer. An exception is
        logged and answered with ``ErrorCode.INTERNAL``.
        """
        ...


class ServerCounters(msgspec.Struct):
    """Messages since the start, by outcome. Changed by the server's thread, read by any.

    Every message counts in exactly one of the first five fields.
    """

    requests: int = 0  # well-formed and passed to the handler, including repetitions
    malformed: int = 0  # not a request of this protocol, or above one of the maximums in ``limits``
    oversized: int = 0  # above MAX_REQUEST_BYTES, if it was read at all
    wrong_version: int = 0
    wrong_frames: int = 0  # not exactly one frame
    handler_failures: int = 0  # requests whose handler raised, or whose reply could not be encoded
    replies_dropped: int = 0  # the peer has left, or does not read its replies
    admission: AdmissionCounters = msgspec.field(default_factory=AdmissionCounters)

    @property
    def refusals(self) -> dict[str, int]:
        """What was not served, by cause. The causes are the labels of a metric."""
        return {
            "authentication": self.admission.authentication_failures,
            "handshake": self.admission.handshake_failures,
            "connections": self.admission.connections_refused + self.admission.connections_cut,
            "malformed": self.malformed + self.oversized + self.wrong_version + self.wrong_frames,
        }


class ControlServer:
    """Serves ``handler`` at ``host``:``port`` from ``start`` to ``close``.

    Threads: ``start`` and ``close`` belong to the owner; everything else may be read from any thread.
    """

    def __init__(
        self,
        handler: ControlHandler,
        host: str,
        port: int = 0,
        *,
        keys: ControlKeys | None = None,
        limits: ServerLimits | None = None,
        queued_replies: int = 1000,
        close_timeout_s: float = 5.0,
    ) -> None:
        """Store the settings. Nothing is bound before ``start``.

        Args:
            handler: implements the requests.
            host: the address or name to bind.
            port: the port to bind; 0 lets the OS choose.
            keys: serve only clients with the same keys; None: serve whoever can connect.
            limits: None for the defaults.
            queued_replies: how many replies a peer may leave unread before more are dropped (it asks again).
            close_timeout_s: how long ``close`` waits for a handler that has not returned.
        """
        self._handler = handler
        self._keys = keys
        self._limits = limits or ServerLimits()
        self._admission: Admission | None = None
        self._host = host
        self._port = port
        self._queued_replies = queued_replies
        self._close_timeout_s = close_timeout_s
        self._warnings = ThrottledWarnings(logger, _LOG_INTERVAL_S)
        self._waiting = WaitingRequests()
        self._welcome: tuple[Welcome, msgspec.Raw] | None = None  # the last one, encoded
        self.counters = ServerCounters()
        self._address: Address | None = None
        self._stopping = threading.Event()
        self._wakeup: Wakeup | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Bind the socket and start the thread. A server can start only once.

        Raises:
            ControlStartError: host and port cannot be bound, the system has no thread left, or the server was started
                or closed before.
        """
        if self._thread is not None or self._stopping.is_set():
            raise ControlStartError("this control server was started or closed before: make a new one")
        address = _resolved_address(self._host, self._port)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            start_threads(context)
            socket, admission = self._bind(context, address)
        except BaseException as error:
            context.destroy(linger=0)
            if isinstance(error, RuntimeError):  # of ``start_threads``
                raise ControlStartError(str(error)) from error
            raise
        self._address = Address(address.host, admission.port)
        self._admission = admission
        self._wakeup = Wakeup()
        if self._keys is None:
            _warn_if_exposed(self._address)
        self._thread = threading.Thread(
            target=self._run, args=(context, socket, admission, self._wakeup), name="pd-control-server", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving, join the thread and close the socket. Idempotent."""
        self._stopping.set()
        if self._thread is None or self._wakeup is None:
            return
        self._wakeup.set()
        self._thread.join(self._close_timeout_s)
        if self._thread.is_alive():
            logger.error(
                "the control server's handler did not return within %.1f s; its thread is left running",
                self._close_timeout_s,
            )
            return
        self._wakeup.close()

    def changed(self, *topics: str) -> None:
        """Ask the handler again about the requests that wait for one of ``topics``. Safe from any thread."""
        if self._waiting.changed(*topics) and self._wakeup is not None:
            self._wakeup.set()

    @property
    def port(self) -> int:
        """The port that was bound."""
        if self._address is None:
            raise RuntimeError("the control server has no port before start()")
        return self._address.port

    def check_integrity(self) -> None:
        """Raise AssertionError if the thread's state is inconsistent. Call before ``start`` or after ``close``."""
        self._waiting.check_integrity()
        if self._admission is not None:
            self._admission.check_integrity()

    def _bind(self, context: zmq.Context[zmq.Socket[bytes]], address: Address) -> tuple[zmq.Socket[bytes], Admission]:
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.MAXMSGSIZE, _READ_BYTES)
        # No limit: libzmq aborts the process if a connection ends that it has stopped reading, and a ping is among what
        # it has read (zeromq/libzmq#4364). ``admission`` cuts who sends more than is read.
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.SNDHWM, self._queued_replies)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # makes a reply that cannot be queued an error, which is counted
        socket.setsockopt(zmq.HEARTBEAT_IVL, int(_HEARTBEAT_S * 1000))
        socket.setsockopt(zmq.BACKLOG, _BACKLOG)
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(_HANDSHAKE_S * 1000))
        socket.setsockopt(zmq.TCP_MAXRT, int(_UNREAD_REPLIES_S * 1000))
        socket.setsockopt(zmq.IPV6, ":" in address.host)
        admission = Admission(context, socket, self._keys, self._limits, self.counters.admission, self._warnings)
        try:
            socket.bind(address.endpoint)
        except zmq.ZMQError as error:
            hint = _BIND_HINTS.get(error.errno or 0, "check host and port")
            raise ControlStartError(f"cannot bind the control channel to {address}: {error}: {hint}") from error
        admission.port = int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        return socket, admission

    def _run(
        self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], admission: Admission, wakeup: Wakeup
    ) -> None:
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(wakeup.fileno(), zmq.POLLIN)
        admission.register(poller)
        try:
            while not self._stopping.is_set():
                timeouts = [each for each in (admission.timeout_ms, self._waiting.timeout_ms) if each is not None]
                poller.poll(min(timeouts, default=None))
                wakeup.clear()
                self._turn(socket, admission)
        finally:
            admission.unwatch()
            socket.close(linger=int(_LINGER_S * 1000))
            admission.close()
            context.term()

    def _turn(self, socket: zmq.Socket[bytes], admission: Admission) -> None:
        try:
            admission.serve()
            self._serve_queued(socket, admission)
            admission.cut_floods()
            self._serve_waiting(socket)
        except Exception as error:  # a bug of this code: a peer that triggers it must not end everybody's leases
            self._warnings.warn("turn", "the control server failed and continues", error=error)
            self._stopping.wait(_PAUSE_AFTER_FAULT_S)

    def _serve_queued(self, socket: zmq.Socket[bytes], admission: Admission) -> None:
        for _ in range(_MESSAGES_PER_TURN):
            try:
                peer, *frames = receive(socket)
            except zmq.Again:
                return
            admission.message_received(frames)
            if frames[-1].more:
                self._drop_endless(socket, admission, frames[-1])
                continue
            answer = self._answer(peer.bytes, frames, _sender(frames[0]))
            if answer is None:
                continue
            if not admission.takes_reply(frames[0]):  # it will ask again
                self.counters.replies_dropped += 1
                self._warnings.warn("unread", f"{_sender(frames[0])} does not read its replies: one was dropped")
            elif self._send(socket, peer.bytes, answer):
                admission.reply_sent(frames[0], len(answer))

    def _serve_waiting(self, socket: zmq.Socket[bytes]) -> None:
        """Answer the requests that have waited for what is there now, or for long enough."""
        for waiting in self._waiting.take_changed():
            answer = self._ask_handler(waiting.peer, waiting.message_id, waiting.request, waiting)
            if answer is not None:
                self._send(socket, waiting.peer, answer)
        for waiting in self._waiting.take_late(time.monotonic()):
            self._send(socket, waiting.peer, encode(waiting.message_id, waiting.reply))

    def _drop_endless(self, socket: zmq.Socket[bytes], admission: Admission, frame: zmq.Frame) -> None:
        """Cut the connection that sent an endless message, and read the remaining frames, which block all others."""
        self.counters.wrong_frames += 1
        admission.cut_sender(frame, f"it sent a message of {FRAMES_READ} or more frames; a message is one frame")
        while frame.more:
            frame = socket.recv(zmq.NOBLOCK, copy=False)

    def _send(self, socket: zmq.Socket[bytes], peer: bytes, answer: bytes) -> bool:
        """Send an answer; return False if that is not possible now."""
        try:
            socket.send_multipart([peer, answer], zmq.NOBLOCK)
        except zmq.ZMQError:  # it has left (EHOSTUNREACH) or its queue is full (EAGAIN); it will ask again
            self.counters.replies_dropped += 1
            return False
        return True

    def _answer(self, peer: bytes, frames: list[zmq.Frame], sender: str) -> bytes | None:
        """Return the frame to send back; None if there is none yet, or the message id of the request is unknown."""
        if len(frames) != 1:
            reason = f"{len(frames)} frames; a message is one frame: use a DEALER socket and no empty delimiter"
            return self._refuse("wrong_frames", sender, message_id_of(frames[-1].bytes), ErrorCode.MALFORMED, reason)
        frame = frames[0].bytes
        try:
            message_id, request = decode_request(frame)
        except MalformedMessage as error:
            cause = "wrong_version" if error.code is ErrorCode.VERSION else "malformed"
            if len(frame) > MAX_REQUEST_BYTES:
                cause = "oversized"
            return self._refuse(cause, sender, error.message_id, error.code, str(error))
        self.counters.requests += 1
        return self._ask_handler(peer, message_id, request)

    def _refuse(self, cause: str, sender: str, message_id: int, code: ErrorCode, reason: str) -> bytes | None:
        """Count the refusal in the counter named ``cause``, and return the error to send if there is a message id."""
        setattr(self.counters, cause, getattr(self.counters, cause) + 1)
        self._warnings.warn(cause, f"refused a control message from {sender}: {reason!r}")
        return encode(message_id, Error(code, reason)) if message_id else None

    def _encoded(self, message_id: int, reply: Reply) -> bytes:
        """Return an answer as a frame. A welcome may take milliseconds, and all decode engines may come at once."""
        if not isinstance(reply, Welcome):
            return encode(message_id, reply)
        if self._welcome is None or self._welcome[0] != reply:
            self._welcome = reply, encode_body(reply)
        return enveloped(message_id, self._welcome[1])

    def _ask_handler(
        self, peer: bytes, message_id: int, request: Request, before: WaitingRequest | None = None
    ) -> bytes | None:
        """Return the handler's answer as a frame; None if it has none yet, as it had not ``before``."""
        kind = str(request.__struct_config__.tag)
        try:
            reply = self._handler.handle(request)
            if isinstance(reply, NotYet):
                due_at = before.due_at if before is not None else time.monotonic() + reply.wait_s
                waiting = WaitingRequest(peer, message_id, request, reply.topic, due_at, reply.reply)
                if reply.wait_s > 0 and self._waiting.add(waiting):
                    return None
                reply = reply.reply
            answer = self._encoded(message_id, reply)
            if len(answer) > MAX_FRAME_BYTES:
                raise ValueError(f"the reply has {len(answer)} bytes; a frame holds at most {MAX_FRAME_BYTES}")
        except Exception as error:  # whatever it is, the other peers must still be served
            self.counters.handler_failures += 1
            self._warnings.warn(f"handler:{kind}", f"handling a control request {kind!r} failed", error=error)
            reason = f"the engine failed to handle {kind!r} ({type(error).__name__}); its log says why"
            return encode(message_id, Error(ErrorCode.INTERNAL, reason))
        return answer


def _resolved_address(host: str, port: int) -> Address:
    try:
        address = listen_address(host, port)
        return Address(resolve(address.host), address.port)
    except BadAddress as error:
        raise ControlStartError(f"cannot bind the control channel: {error}") from error
    except OSError as error:
        raise ControlStartError(
            f"cannot bind the control channel to {address}: the host name has no address ({error}): use an IP "
            "address of this machine"
        ) from error


def _warn_if_exposed(address: Address) -> None:
    ip = parse_ip(address.host)
    if ip is None or not ip.is_loopback:
        logger.warning(
            "the control channel at %s is not authenticated: whoever can reach it can read memory layouts and end "
            "leases. Give all engines the same secret (secret_file or PD_CONNECTOR_SECRET). Isolate the network in any "
            "case, because the transfer engine has no authentication: let only prefill and decode hosts connect "
            "(firewall, network policy or VLAN)",
            address,
        )


def _sender(frame: zmq.Frame) -> str:
    try:
        return str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return "an unknown address"
