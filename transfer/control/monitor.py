"""What libzmq tells about a socket's connections: events, in their order. What they mean is the caller's business."""

from collections.abc import Iterator
from contextlib import suppress

import zmq
from zmq.utils.monitor import parse_monitor_message


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
