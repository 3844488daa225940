"""A store in this process, which fails, hangs and forgets where it is told to."""

import threading
from collections.abc import Sequence

import numpy as np

from layout.geometry import Region
from transfer.store.interface import ObjectStore, Piece, StoreFailed


class SharedObjects:
    """What all connections of such a store share."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.fails = self.keeps_buffer = False
        self.refuses: set[str] = set()  # keys that are not kept
        self.goes_on = threading.Event()  # cleared: calls do not return
        self.goes_on.set()
        self.opened = self.renewed = self.closed = 0
        self.calls: list[tuple[str, int]] = []  # what was called, and with how many keys


class InMemoryStore(ObjectStore):
    """A connection."""

    def __init__(self, shared: SharedObjects, buffer_bytes: int) -> None:
        if shared.fails:
            raise StoreFailed("nobody there")
        shared.opened += 1
        self._shared = shared
        self._memory = np.zeros(buffer_bytes, np.uint8)

    @property
    def buffer(self) -> Region:
        return Region(self._memory.ctypes.data, len(self._memory))

    def exist(self, keys: Sequence[str]) -> list[bool]:
        self._call("exist", keys)
        return [key in self._shared.objects for key in keys]

    def put(self, pieces: Sequence[Piece]) -> list[bool]:
        self._call("put", pieces)
        kept = [piece for piece in pieces if piece.key not in self._shared.refuses]
        for piece in kept:
            sealed = self._memory[piece.offset : piece.offset + piece.size].tobytes()
            self._shared.objects.setdefault(piece.key, sealed)
        return [piece in kept for piece in pieces]

    def get(self, pieces: Sequence[Piece]) -> list[bool]:
        self._call("get", pieces)
        came = []
        for piece in pieces:
            kept = self._shared.objects.get(piece.key)
            came.append(kept is not None and len(kept) == piece.size)
            if kept is not None and came[-1]:
                self._memory[piece.offset : piece.offset + piece.size] = np.frombuffer(kept, np.uint8)
        return came

    def remove(self, keys: Sequence[str]) -> None:
        self._call("remove", keys)
        for key in keys:
            self._shared.objects.pop(key, None)

    def renew_buffer(self) -> None:
        if self._shared.fails:
            raise StoreFailed("still nobody there")
        self._shared.renewed += 1
        self._memory = np.zeros(len(self._memory), np.uint8)

    def close(self) -> bool:
        self._shared.closed += 1
        return True

    def _call(self, what: str, keys: Sequence[object]) -> None:
        self._shared.calls.append((what, len(keys)))
        self._shared.goes_on.wait()
        if self._shared.fails:
            raise StoreFailed("a test", keeps_buffer=self._shared.keeps_buffer)
