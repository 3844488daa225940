"""Wakes a thread that waits in a poll. Nothing of the protocol."""

import os
from contextlib import suppress
from threading import Lock


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
