"""An eavesdropper: forwards TCP connections to a server and keeps what clients send."""

import socket
import threading
from types import TracebackType


class Recorder:
    """Listens on ``port`` of the loopback interface. A context manager."""

    def __init__(self, server_port: int) -> None:
        self.sent: list[bytes] = []  # by clients, piece by piece as it came
        self.received: list[bytes] = []
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._accept)]

    def __enter__(self) -> "Recorder":
        self._threads[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in self._sockets:
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        for thread in self._threads:
            thread.join(5)
        for each in self._sockets:
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._server_port))
            self._sockets += client, server
            for source, target, heard in ((client, server, self.sent), (server, client, self.received)):
                self._threads.append(threading.Thread(target=_forward, args=(source, target, heard)))
                self._threads[-1].start()


def _forward(source: socket.socket, target: socket.socket, heard: list[bytes]) -> None:
    try:
        while piece := source.recv(65536):
            heard.append(piece)
            target.sendall(piece)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        return
