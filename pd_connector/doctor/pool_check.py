"""The checks of a pool behind host memory: objects of the doctor's own go there by way of this machine's client."""

import contextlib
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import numpy as np

from pd_connector.doctor.findings import Check, CheckFailed, CheckWarned
from transfer.memory import bytes_of
from transfer.peers import Address
from transfer.store.interface import ObjectStore, Piece, StoreFailed
from transfer.store.mooncake_store import MooncakeStore
from transfer.store.store_thread import StoreThread

_OBJECTS, _OBJECT_BYTES = 16, 1 << 20
_ROUNDS = 3
#: For an answer. A master that is gone shows after about 4 s, a client that is stopped during a call after 30.
_TIMEOUT_S = 10.0

T = TypeVar("T")


class PoolCheck:
    """Checks one pool. Owns its connection, and the objects that it has put there, until ``close``."""

    def __init__(self, client: Address, timeout_s: float = _TIMEOUT_S) -> None:
        """Connect to nothing yet. ``client``: as the setting ``pool`` names it."""
        self._client = client
        self._timeout_s = timeout_s
        self._thread = StoreThread("pd-doctor-pool", partial(MooncakeStore, client, _OBJECTS * _OBJECT_BYTES))
        prefix = f"pd-doctor/{secrets.token_hex(8)}"
        self._pieces = [Piece(f"{prefix}/{n}", n * _OBJECT_BYTES, _OBJECT_BYTES) for n in range(_OBJECTS)]
        self._put: list[Piece] = []

    @property
    def checks(self) -> list[tuple[str, Check]]:
        """All of them, in order."""
        return [("pool", self.connection), ("pool: look-up", self.look_up), ("pool: objects", self.objects)]

    def close(self) -> None:
        """Remove the objects, and end the connection; do not wait for a store that does not answer."""
        if self._put and self._thread.works:
            removed: Future[None] = self._thread.submit(self._remove, self._timeout_s)
            with contextlib.suppress(TimeoutError):  # what is left is evicted like others
                removed.exception(self._timeout_s)
        self._thread.close()
        self._thread.join()

    def connection(self) -> str:
        """Connect to the client, and share memory with it."""
        try:
            _, size = self._answer(lambda store: store.buffer.size)
        except StoreFailed as error:
            raise CheckFailed(str(error)) from error
        return f"mooncake_client at {self._client} shares {size >> 20} MiB with this process"

    def look_up(self) -> str:
        """Ask the master, through the client, for objects that nobody has put."""
        keys = [piece.key for piece in self._pieces]
        try:
            took, found = min(self._answer(lambda store: store.exist(keys)) for _ in range(_ROUNDS))
        except StoreFailed as error:
            raise CheckFailed(
                f"{error}. The client answers, so it is the master that does not: is mooncake_master up, at the "
                "client's --master_server_address?"
            ) from error
        if any(found):
            raise CheckFailed("the pool says that it has objects which nobody has put: is this a Mooncake Store?")
        return f"{len(keys)} keys in {1e3 * took:.2f} ms"

    def objects(self) -> str:
        """Put objects, find them, fetch them and compare every byte."""
        try:
            return self._objects()
        except StoreFailed as error:
            raise CheckFailed(f"{error}: see the logs of mooncake_client and mooncake_master") from error

    def _objects(self) -> str:
        said = secrets.token_bytes(_OBJECTS * _OBJECT_BYTES)
        putting, kept = self._answer(partial(self._put_all, said))
        self._put = [piece for piece, is_kept in zip(self._pieces, kept, strict=True) if is_kept]
        size = f"{_OBJECT_BYTES >> 20} MiB"
        if not self._put:
            raise CheckFailed(
                f"the pool keeps none of {_OBJECTS} objects of {size} (-200): no mooncake_client gives it memory "
                "(--global_segment_size), or all objects there have been looked up or read just now; try again after "
                "the master's --default_kv_lease_ttl, and give it more memory if that recurs"
            )
        fetched = [self._answer(partial(self._get, said)) for _ in range(_ROUNDS)]
        getting = min(took for took, _ in fetched)
        lost, changed = (max(each) for each in zip(*(counts for _, counts in fetched), strict=True))
        is_full = len(self._put) < _OBJECTS
        if changed or (lost and not is_full):
            what = "have other bytes than were put" if changed else "have not come"
            raise CheckFailed(
                f"{changed or lost} of {len(self._put)} objects {what}: other clients of this pool remove or overwrite "
                "objects, or are restarted"
            )
        rate = len(self._put) * _OBJECT_BYTES / 1e9
        text = (
            f"{len(self._put)} of {size} each, put with {rate / putting:.2f} GB/s, fetched with {rate / getting:.2f} "
            "GB/s, every byte equal"
        )
        if is_full:
            evicted = f"; {lost} of these were evicted before they were fetched" if lost else ""
            raise CheckWarned(
                f"{text}{evicted}; {_OBJECTS - len(self._put)} more were not kept (-200): the pool is full, and evicts "
                "while engines put; give it more memory (--global_segment_size) if vllm:pd_pool_blocks_total counts "
                "refused"
            )
        return text

    def _put_all(self, said: bytes, store: ObjectStore) -> list[bool]:
        bytes_of(store.buffer)[:] = np.frombuffer(said, np.uint8)
        return store.put(self._pieces)

    def _get(self, said: bytes, store: ObjectStore) -> tuple[int, int]:
        """Fetch what was put; return how many objects have not come, and how many have other bytes."""
        buffer = bytes_of(store.buffer)
        buffer[:] = 0
        came = store.get(self._put)
        parts = [
            (piece.offset, piece.offset + piece.size)
            for piece, has_come in zip(self._put, came, strict=True)
            if has_come
        ]
        return came.count(False), sum(buffer[start:end].tobytes() != said[start:end] for start, end in parts)

    def _remove(self, store: ObjectStore) -> None:
        store.remove([piece.key for piece in self._put])

    def _answer(self, work: Callable[[ObjectStore], T]) -> tuple[float, T]:
        """Return how many seconds the store took for something, and what it answered.

        Raises:
            CheckFailed: it has not answered in time.
            StoreFailed: it does not work.
        """
        timed: Future[tuple[float, T]] = self._thread.submit(partial(_timed, work), self._timeout_s)
        try:
            return timed.result(self._timeout_s)
        except TimeoutError as error:
            raise CheckFailed(
                f"mooncake_client at {self._client} has not answered within {self._timeout_s:g} s: it is stopped, or "
                "waits for the master or for another machine's client that does not answer; see its log, restart it"
            ) from error


def _timed(work: Callable[[ObjectStore], T], store: ObjectStore) -> tuple[float, T]:
    began = time.perf_counter()
    answer = work(store)
    return time.perf_counter() - began, answer
