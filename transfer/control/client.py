"""The client end of the control channel, as its callers see it: a request in, a future out.

``client_loop`` does the work on one thread, with the sockets of ``peer_sockets``. Callers interpret the replies.
"""

import logging
import math
import threading
import time
from concurrent.futures import Future
from functools import partial
from itertools import count
from typing import Any, TypeVar

from transfer.control.client_loop import Abandoned, ClientLoop, Inbox, Pending, Watched
from transfer.control.failures import BadRequest
from transfer.control.keys import ControlKeys
from transfer.control.messages import MAX_REQUEST_BYTES, Reply, RequestFor, encode
from transfer.control.peer_sockets import CLOSE_TIMEOUT_S, ClientSettings
from transfer.errors import BadAddress
from transfer.peers import AllowedPeers, peer_address

logger = logging.getLogger(__name__)

_Reply = TypeVar("_Reply", bound=Reply)


class ControlClient:
    """Sends requests to any number of peers, none of which can delay another.

    Threads: ``request`` may be called from any thread, including the scheduler's, because it never waits for a socket.
    A future's callbacks run on the client's thread if it completes there: they must be short and not call ``close``.
    """

    def __init__(
        self,
        settings: ClientSettings | None = None,
        *,
        keys: ControlKeys | None = None,
        allowed: AllowedPeers | None = None,
    ) -> None:
        """Start the thread.

        Args:
            settings: None for the defaults.
            keys: talk only to servers with the same keys; None: only to servers without keys.
            allowed: the hosts that may be contacted; None for every host.
        """
        self._ids = count(1)
        self._inbox = Inbox()
        self._loop = ClientLoop(self._inbox, settings or ClientSettings(), keys, allowed or AllowedPeers())
        self.counters = self._loop.counters
        self._thread = threading.Thread(target=self._loop.run, name="pd-control-client", daemon=True)
        self._thread.start()

    def request(self, host: str, port: int, message: RequestFor[_Reply], timeout_s: float) -> Future[_Reply]:
        """Send a request to ``host``:``port`` until it is answered or ``timeout_s`` seconds have passed.

        The future's result is the reply that the request's type names (``Welcome`` for a ``Hello``), never an
        ``Error``. A future that the caller cancels is forgotten, but the peer may have acted on the request.

        The future fails with:
            BadAddress: host or port cannot be a peer's address.
            PeerUnreachable: no answer came in time, or the host name has no address.
            PeerRefused: the peer answered with an error, or speaks another protocol version. A ``NOT_READY`` is
                retried, and reported only when the time is up.
            BadRequest: the request exceeds ``MAX_REQUEST_BYTES``, or MessagePack cannot hold a field.
            AuthenticationFailed: the secrets differ, or only one side has one. Takes up to 3 s; with a shorter
                ``timeout_s`` it may be PeerUnreachable instead.
            PeerNotAllowed: the host is not one of ``allowed``.
            TooManyPeers: ``max_peers`` peers already have requests pending, or there is no thread for a look-up.
            ClientClosed: the client was closed.

        Raises:
            ValueError: ``timeout_s`` is not positive and finite.
        """
        if not 0 < timeout_s < math.inf:
            raise ValueError(f"timeout_s={timeout_s} of a control request must be positive and finite")
        future: Future[_Reply] = Future()
        message_id = next(self._ids)
        try:
            address = peer_address(host, port)
            frame = _frame(message_id, message)
        except (BadAddress, BadRequest) as error:
            future.set_exception(error)
            return future
        started = time.monotonic()
        asked = Pending(message_id, address, message, frame, future, started, started + timeout_s)
        future.add_done_callback(partial(self._forget_if_cancelled, message_id))
        if not self._inbox.put(asked):
            future.set_exception(asked.closed())
        return future

    def until_lost(self, host: str, port: int) -> Future[None]:
        """Return a future that is done when the connection to ``host``:``port`` ends, for whatever reason.

        At once if there is none, so ask when a request has been answered. A caller that loses interest cancels it.
        """
        watcher: Future[None] = Future()
        try:
            address = peer_address(host, port)
        except BadAddress:
            watcher.set_result(None)
            return watcher
        if not self._inbox.put(Watched(address, watcher)):
            watcher.set_result(None)
        return watcher

    def close(self) -> None:
        """Fail pending requests, join the thread and close every socket. Idempotent."""
        self._inbox.close()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("the control client's thread did not end within %.1f s", CLOSE_TIMEOUT_S)
            return
        self._inbox.wakeup.close()

    def check_integrity(self) -> None:
        """Raise AssertionError if the thread's state is inconsistent. For a callback, or after ``close``."""
        self._loop.check_integrity()

    def _forget_if_cancelled(self, message_id: int, future: Future[Any]) -> None:
        if future.cancelled():
            self._inbox.put(Abandoned(message_id))


def _frame(message_id: int, message: RequestFor[Any]) -> bytes:
    kind = str(message.__struct_config__.tag)
    try:
        frame = encode(message_id, message)
    except (TypeError, ValueError, OverflowError) as error:  # e.g. a lease id with a lone surrogate, as JSON may hold
        raise BadRequest(f"control request {kind!r} cannot be encoded as MessagePack: {error}") from error
    if len(frame) > MAX_REQUEST_BYTES:
        raise BadRequest(
            f"control request {kind!r} has {len(frame)} bytes; at most {MAX_REQUEST_BYTES} are accepted: split it"
        )
    return frame
