"""A TCP forwarder between a decode server and a port of a prefill server, which loses what a test wants."""

import random
import selectors
import socket
import threading

_CHUNK = 64 * 1024


class Forwarder:
    """Listens on a port of its own and passes bytes on in both directions, but for the chunks that it loses.

    A control message is small and is sent at once, so that a lost chunk is a lost message; where it is not, the
    receiver sees a broken stream and connects again. ``close`` joins the thread.
    """

    def __init__(self, host: str, port: int, seed: int = 0, *, listens_at: str = "127.0.0.1") -> None:
        self.lost = 0  # chunks
        self.passed = 0  # chunks
        self._target = (host, port)
        self._random = random.Random(seed)
        self._losing = 0.0
        self._listener = socket.create_server((listens_at, 0))
        self._selector = selectors.DefaultSelector()
        self._peers: dict[socket.socket, socket.socket] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forwarder")
        self._thread.start()

    @property
    def port(self) -> int:
        """Where to connect to."""
        return int(self._listener.getsockname()[1])

    def lose(self, share: float) -> None:
        """From now on lose this share of all chunks, at random: 0 passes everything on, 1 nothing."""
        self._losing = share

    def close(self) -> None:
        """End all connections and the thread."""
        self._stop.set()
        self._thread.join()
        for one in (self._listener, *self._peers):
            one.close()
        self._selector.close()

    def _run(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ)
        while not self._stop.is_set():
            for key, _ in self._selector.select(0.05):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._pass_on(key.fileobj)

    def _accept(self) -> None:
        one, _ = self._listener.accept()
        try:
            other = socket.create_connection(self._target, timeout=5.0)
        except OSError:
            one.close()
            return
        self._peers |= {one: other, other: one}
        for end in (one, other):
            self._selector.register(end, selectors.EVENT_READ)

    def _pass_on(self, one: socket.socket) -> None:
        other = self._peers.get(one)
        if other is None:  # closed in this round
            return
        try:
            data = one.recv(_CHUNK)
            if data and self._random.random() < self._losing:
                self.lost += 1
                return
            if data:
                other.sendall(data)
                self.passed += 1
                return
        except OSError:
            pass
        for end in (one, other):
            self._selector.unregister(end)
            del self._peers[end]
            end.close()
