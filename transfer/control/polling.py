"""What the control channel's threads poll beside their sockets: a wake-up, and libzmq's monitor events."""

import os
from collections.abc import Iterator
from contextlib import suppress
from threading import Lock

import zmq
from zmq.utils.monitor import parse_monitor_message

from transfer.threads import check_threads


class Wakeup:
    """A file descriptor that is readable from ``set`` to ``clear``; poll it beside the sockets.

    Any thread may call ``set``, which never blocks. ``clear`` and ``fileno`` belong to the polling thread.
    """

    def __init__(self) -> None:
        self._lock = Lock()  # the descriptor must not be closed, and its number reused, while ``set`` writes to it
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Return the descriptor to poll for reading; -1 after ``close``."""
        return self._descriptor

    def set(self) -> None:
        """Wake the current poll, or the next one. Does nothing after ``close``."""
        with self._lock:
            if self._descriptor >= 0:
                os.eventfd_write(self._descriptor, 1)

    def clear(self) -> None:
        """Make the descriptor unreadable until the next ``set``."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._descriptor)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1


def start_threads(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Have libzmq start its two threads now. Later, if the system had none left, it would abort the process.

    Raises:
        RuntimeError: the system has none left.
        zmq.ZMQError: it has no file left.
    """
    check_threads("the control channel", 2)
    context.socket(zmq.PAIR).close(linger=0)


class SocketMonitor:
    """Receives the monitor events of one socket. Belongs to the socket's owner, and is handed over with the socket."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], name: str, events: int
    ) -> None:
        """Start to monitor ``socket`` for ``events``, a mask of ``zmq.EVENT_...``. ``name`` is unique in the context.

        Raises:
            zmq.ZMQError: the operating system provides no socket.
        """
        self._watched = socket
        endpoint = f"inproc://monitor-{name}"
        socket.monitor(endpoint, events)
        try:
            self.socket = context.socket(zmq.PAIR)
        except zmq.ZMQError:
            socket.disable_monitor()
            raise
        # No limit: when the queue of events is full, libzmq's I/O thread blocks, and all connections with it.
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.connect(endpoint)

    def take(self) -> Iterator[tuple[int, int]]:
        """Yield the events since the last call, each with its value: a file descriptor or an error code."""
        with suppress(zmq.Again):
            while True:
                event = parse_monitor_message(self.socket.recv_multipart(zmq.NOBLOCK))
                yield int(event["event"]), int(event["value"])

    def close(self) -> None:
        """Stop monitoring. Call this before the monitored socket is closed."""
        self._watched.disable_monitor()
        self.socket.close(linger=0)
