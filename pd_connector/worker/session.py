"""All pulls of a worker from one prefill engine, one after another on a thread of their own.

No peer delays another. Every pull ends exactly once, unless the session is closed.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable

from pd_connector.orders import Cause, PullOrder
from pd_connector.worker.checksums import Interrupted
from pd_connector.worker.peer import Peer, PeerAddress, PullContext, connect_peer
from pd_connector.worker.pull import AnyEnd, Pull
from pd_connector.worker.pull_end import PullFailed

logger = logging.getLogger(__name__)


class PeerSession:
    """Runs the pulls from one prefill engine in the order in which they are submitted.

    ``submit``, ``close`` and ``join`` belong to one thread; the pulls run on the session's own.
    """

    def __init__(self, context: PullContext, report: Callable[[AnyEnd], None], address: PeerAddress) -> None:
        """Start the thread. ``report`` is called with the end of each pull, on any thread."""
        self.last_used = time.monotonic()
        self._context = context
        self._report = report
        self._address = address
        self._peer: Peer | None = None
        self._pulls: queue.SimpleQueue[Pull | None] = queue.SimpleQueue()
        self._unsettled = 0  # pulls that wait or are being read; guarded by _lock
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"pd-pull-{address.engine_id[:8]}", daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        """Whether no pull waits or is being read."""
        with self._lock:
            return self._unsettled == 0

    def submit(self, order: PullOrder) -> None:
        """Queue a pull. It ends within the pull timeout, and the time for P's answer, or as an ``UnsettledPull``."""
        with self._lock:
            self._unsettled += 1
        self.last_used = time.monotonic()
        self._pulls.put(Pull(self._context, order, self._report, self._closing))

    def close(self) -> None:
        """Stop after the current read, without waiting. Queued pulls are dropped and not reported."""
        self._closing.set()
        self._pulls.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread after ``close``; return whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def check_integrity(self) -> None:
        """Raise AssertionError unless the number of pulls is possible and, until ``close``, the thread runs."""
        with self._lock:
            assert self._unsettled >= 0, "more pulls have ended than were submitted"
            assert self._closing.is_set() or self._thread.is_alive(), "the session's thread has died"

    def _run(self) -> None:
        while (pull := self._pulls.get()) is not None and not self._closing.is_set():
            self._run_to_its_end(pull)
            self._count_ended()
        self._disconnect()

    def _run_to_its_end(self, pull: Pull) -> None:
        try:
            self._run_pull(pull)
        except BaseException as error:  # whatever it is, the request must not wait for ever
            logger.exception("PDConnector: the clean-up of the pull of request %s has failed", pull.order.request_id)
            pull.lose(error)

    def _run_pull(self, pull: Pull) -> None:
        try:
            pull.run(self._connect)
        except PullFailed as error:
            pull.fail(error)
            if error.cause.is_peer_wide:
                self._fail_queued(error)
        except Exception as error:
            if isinstance(error, Interrupted) and self._closing.is_set():
                return  # outstanding pulls are not reported
            # A peer's geometry is data from another machine. Whatever it breaks here, the request must end.
            logger.exception("PDConnector: unexpected failure of the pull of request %s", pull.order.request_id)
            self._disconnect()
            pull.fail(PullFailed(Cause.INTERNAL, f"{type(error).__name__}: {error}"))

    def _connect(self, deadline: float) -> Peer:
        """Return the prefill engine, after a handshake unless there was one.

        Raises:
            PullFailed: as ``connect_peer``.
        """
        if self._peer is None:
            self._peer = connect_peer(self._context, self._address, deadline)
        return self._peer

    def _disconnect(self) -> None:
        """Close all links. The next pull starts with a handshake."""
        if self._peer is not None:
            self._peer.close()
            self._peer = None

    def _fail_queued(self, error: PullFailed) -> None:
        """Fail all queued pulls with ``error``, instead of letting each wait for it."""
        while not self._pulls.empty():
            pull = self._pulls.get_nowait()
            if pull is None:
                self._pulls.put(None)
                return
            try:
                pull.fail(error)
            except Exception as failure:
                pull.lose(failure)
            self._count_ended()

    def _count_ended(self) -> None:
        with self._lock:
            self._unsettled -= 1
