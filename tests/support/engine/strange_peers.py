"""Peers of Mooncake that are not what they seem: one that never gives its metadata, and one on another's data port."""

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

#: The kinds of messages on Mooncake's own control port: a length of 8 bytes, the kind, and JSON.
METADATA, PROBE = 1, 3


class SilentPeer:
    """Answers probes, and never the request for its metadata, with which reading begins."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.asked = threading.Event()  # for its metadata
        self._held: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                kind = _receive(connection)
                if kind == PROBE:
                    answer = b"{}\n"
                    connection.sendall(struct.pack("<QB", len(answer) + 1, PROBE) + answer)
                    connection.close()
                else:
                    self._held.append(connection)
                    self.asked.set()

    def close(self) -> None:
        """Idempotent."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        for connection in self._held:
            connection.close()


def _receive(connection: socket.socket) -> int:
    (length,) = struct.unpack("<Q", connection.recv(8, socket.MSG_WAITALL))
    return connection.recv(length, socket.MSG_WAITALL)[0]


@contextmanager
def forwarded(port: int, to: int) -> Iterator[None]:
    """Let what listens at ``to`` be reached at ``port`` too, which is free."""
    listener = socket.create_server(("127.0.0.1", port))
    threads: list[threading.Thread] = []
    ends: list[socket.socket] = []

    def pump(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def serve() -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", to))
                ends.extend((near, far))
                for pair in ((near, far), (far, near)):
                    threads.append(threading.Thread(target=pump, args=pair))
                    threads[-1].start()

    serving = threading.Thread(target=serve)
    serving.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        serving.join()
        listener.close()
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        for end in ends:
            end.close()
