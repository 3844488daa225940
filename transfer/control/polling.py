"""What the control channel's threads poll beside their sockets: a wake-up, and what libzmq tells about connections."""

import os
from collections.abc import Iterator
from contextlib import suppress
from threading import Lock

import zmq
from zmq.utils.monitor import parse_monitor_message


class Wakeup:
    """A file descriptor that is readable from ``set`` to ``clear``; poll it beside the sockets.

    ``set`` may be called from any thread and never blocks. ``clear`` and ``fileno`` belong to the thread that polls.
    """

    def __init__(self) -> None:
        self._lock = Lock()  # a descriptor must not be closed, and its number given away, under a writer
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)

    def fileno(self) -> int:
        """What to poll for reading; -1 after ``close``."""
        return self._reader

    def set(self) -> None:
        """Wake the poll, or the next one. No effect after ``close``."""
        with self._lock:
            if self._writer < 0:
                return
            with suppress(BlockingIOError):  # the pipe is full: it is readable already
                os.write(self._writer, b"\0")

    def clear(self) -> None:
        """Make the descriptor unreadable until the next ``set``."""
        with suppress(BlockingIOError):
            while os.read(self._reader, 65536):
                pass

    def close(self) -> None:
        """Close both ends. Idempotent."""
        with self._lock:
            if self._writer >= 0:
                os.close(self._reader)
                os.close(self._writer)
                self._reader = self._writer = -1


class SocketMonitor:
    """The events of one socket; made and closed on, or handed over with, the thread that owns the socket."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], name: str, events: int
    ) -> None:
        """``name`` is unique in the context; ``events`` is a mask of ``zmq.EVENT_...``.

        Raises:
            zmq.ZMQError: the operating system gives no socket.
        """
        self._watched = socket
        endpoint = f"inproc://monitor-{name}"
        socket.monitor(endpoint, events)
        try:
            self.socket = context.socket(zmq.PAIR)
        except zmq.ZMQError:
            socket.disable_monitor()
            raise
        # libzmq's I/O thread waits, with every connection, where events find no room.
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.connect(endpoint)

    def take(self) -> Iterator[tuple[int, int]]:
        """The events since the last call: which, and its value (a descriptor or an error code)."""
        with suppress(zmq.Again):
            while True:
                event = parse_monitor_message(self.socket.recv_multipart(zmq.NOBLOCK))
                yield int(event["event"]), int(event["value"])

    def close(self) -> None:
        """Watch no more; before the watched socket is closed."""
        self._watched.disable_monitor()
        self.socket.close(linger=0)
