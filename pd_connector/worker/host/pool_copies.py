"""Copies between this rank's host slots and a pool that engines share: the worker's part of ``shared_pool.py``.

    put:    slot -> sealed objects in the buffer -> pool
    fetch:  pool -> buffer -> only what is sealed rightly -> slot

The store's calls may take minutes, and bytes of a call that has failed may come later. So each direction has a thread
and a buffer of its own, and an order has a time, after which it is given up: from then on nothing touches its slots,
whatever the thread still does.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from layout.block_objects import ObjectForm, object_forms
from layout.geometry import WorkerGeometry
from pd_connector.config import ConfigError, ConnectorConfig
from pd_connector.orders import Orders, PoolEnds, PoolOrder, Report
from pd_connector.stats import StatsRecorder
from pd_connector.worker.host.pool import HostPool
from pd_connector.worker.worker_role import WorkerRole
from transfer.control.keys import ControlKeys
from transfer.memory import bytes_of
from transfer.peers import parse_address
from transfer.store.interface import ObjectStore, Piece, StoreFailed
from transfer.store.mooncake_store import MooncakeStore, load
from transfer.store.slot_objects import HEADER_BYTES, KEY_BYTES, SlotObjects
from transfer.store.store_thread import StoreThread

logger = logging.getLogger(__name__)

#: Objects in one call at most: the store takes no more of small ones at a time.
_CALL_OBJECTS = 256
#: Memory of each direction, beside that of the slots.
_BUFFER_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class _Object:
    """An object of a block of an order."""

    index: int  # of the block
    objects: SlotObjects
    share: int
    key: str


class _GivenUp(Exception):  # noqa: N818  named after the event
    """The order of a job has been given up. The store may be well."""


class _Job:
    """An order under way. Its thread works on it until it is given up, which the model's thread does."""

    def __init__(self, order: PoolOrder, give_up_at: float) -> None:
        self.order = order
        self.give_up_at = give_up_at
        self.done = 0  # blocks of the order, the first ones, that need no more calls
        self.missing: set[int] = set()  # of these, the indices of those that did not come, or were not kept
        self.moved_bytes = 0
        self.has_begun = False
        self._lock = threading.Lock()
        self._is_over = False

    def touch(self, work: Callable[[], None]) -> None:
        """Do something with the slots.

        Raises:
            _GivenUp: the order has been given up.
        """
        with self._lock:
            if self._is_over:
                raise _GivenUp
            work()

    def begin(self) -> None:
        """Note that the thread works on it.

        Raises:
            _GivenUp: as ``touch``.
        """
        self.touch(lambda: setattr(self, "has_begun", True))

    @property
    def ends(self) -> PoolEnds:
        """How the order has ended if the pool works."""
        return PoolEnds(1, frozenset(self.missing).union(range(self.done, len(self.order))))

    def give_up(self) -> None:
        """Let nothing touch the slots any more. It waits for a copy of one block at most."""
        with self._lock:
            self._is_over = True


def open_pool_copies(
    config: ConnectorConfig, host: HostPool, geometry: WorkerGeometry, keys: ControlKeys | None, stats: StatsRecorder
) -> "PoolCopies":
    """Return what copies between ``host`` and the pool that the settings name. It is connected when it is needed.

    Raises:
        ConfigError: blocks of these caches cannot be kept as objects, or Mooncake's store is not installed.
    """
    assert config.pool is not None, "there is no pool"
    try:
        load()
        forms = object_forms(host.geometry(geometry))
    except (ValueError, StoreFailed) as error:
        raise ConfigError(f"pool = {config.pool!r}: {error}; leave pool out") from error
    largest = max((form.size for of_group in forms for form in of_group), default=0)
    open_store = partial(MooncakeStore, parse_address(config.pool), max(_BUFFER_BYTES, HEADER_BYTES + largest))
    return PoolCopies(forms, bytes(KEY_BYTES) if keys is None else keys.of_objects, open_store, stats)


class PoolCopies(WorkerRole):
    """Owns what is being put into the pool and fetched from there."""

    def __init__(
        self,
        forms: "tuple[tuple[ObjectForm, ...], ...]",
        secret: bytes,
        open_store: Callable[[], ObjectStore],
        stats: StatsRecorder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the threads.

        Args:
            forms: of this rank's blocks in its slots, by cache group.
            secret: seals objects.
            open_store: connects to the pool, with a buffer; called on the threads.
            stats: counts bytes and failures.
            clock: monotonic, in seconds.
        """
        self._objects = [[SlotObjects(form, secret) for form in of_group] for of_group in forms]
        self._stats = stats
        self._clock = clock
        self._fetcher = StoreThread("pd-pool-fetch", open_store, clock)
        self._putter = StoreThread("pd-pool-put", open_store, clock)
        self._fetches: dict[int, tuple[_Job, Future[None]]] = {}
        self._puts: dict[int, tuple[_Job, Future[None]]] = {}

    def execute(self, orders: Orders) -> "tuple[str, ...]":
        """Start the fetches and puts. No request waits for them."""
        for order in orders.fetches:
            self._fetches[order.pool_id] = self._begin(order, self._fetcher, self._fetch)
        for order in orders.puts:
            self._puts[order.pool_id] = self._begin(order, self._putter, self._put)
        return ()

    def take_report(self) -> Report:
        """Return the fetches and puts that have ended since the last call."""
        return Report(fetches=self._take(self._fetches, "fetched"), puts=self._take(self._puts, "put"))

    def abandoned(self) -> Report:
        """Return what has not ended, as failed."""
        for job, _ in (*self._fetches.values(), *self._puts.values()):
            job.give_up()
        lost = Report(
            fetches={pool_id: PoolEnds.nothing(job.order) for pool_id, (job, _) in self._fetches.items()},
            puts={pool_id: PoolEnds.nothing(job.order) for pool_id, (job, _) in self._puts.items()},
        )
        self._fetches, self._puts = {}, {}
        return lost

    def close(self) -> None:
        """Begin nothing more, and touch no slot: host memory may go before ``join``."""
        for job, _ in (*self._fetches.values(), *self._puts.values()):
            job.give_up()
        for thread in (self._fetcher, self._putter):
            thread.close()

    def join(self) -> None:
        """Wait for the threads. A call that does not return is left behind."""
        for thread in (self._fetcher, self._putter):
            thread.join()

    def _begin(
        self, order: PoolOrder, thread: StoreThread, work: Callable[[_Job, ObjectStore], None]
    ) -> "tuple[_Job, Future[None]]":
        job = _Job(order, self._clock() + order.timeout_s)
        return job, thread.submit(partial(work, job), order.timeout_s)

    def _take(self, under_way: "dict[int, tuple[_Job, Future[None]]]", event: str) -> dict[int, PoolEnds]:
        ended = {}
        for pool_id, (job, future) in list(under_way.items()):
            is_late = not future.done() and self._clock() >= job.give_up_at
            if not (future.done() or is_late):
                continue
            del under_way[pool_id]
            job.give_up()
            error = None if is_late else future.exception()
            if error is not None and not isinstance(error, StoreFailed):
                logger.error("PDConnector: blocks could not be %s, which is a bug", event, exc_info=error)
            # Others took long, or so many bytes do: that says nothing against the pool.
            is_stuck = is_late and job.has_begun and not (job.done or job.moved_bytes)
            if is_stuck:
                logger.warning(
                    "PDConnector: %d blocks were not %s in time, so the pool is not used for a while: mooncake_client "
                    "is slow, or hangs", len(job.order.hashes), event,
                )  # fmt: skip
            failed = is_stuck or error is not None
            ended[pool_id] = PoolEnds.nothing(job.order) if failed else job.ends
            self._stats.count("pool_bytes", job.moved_bytes, event)
            if failed:
                self._stats.count("pool_failures", label=event)
        return ended

    def _fetch(self, job: _Job, store: ObjectStore) -> None:
        """Fetch the objects of an order's blocks, and bring the right ones to their slots. On a thread."""
        job.begin()
        buffer = bytes_of(store.buffer)
        for calls in _calls(self._objects_of(job.order, own_turn=False), len(buffer)):
            wanted = [(one, piece) for one, piece in calls if one.index not in job.missing]
            came = store.get([piece for _, piece in wanted])
            wrong = []
            for (one, piece), has_come in zip(wanted, came, strict=True):
                sealed = buffer[piece.offset : piece.offset + piece.size]
                if not has_come:
                    job.missing.add(one.index)
                elif not one.objects.is_sealed(piece.key, sealed):
                    job.missing.add(one.index)
                    wrong.append(piece.key)
                else:
                    slot = int(job.order.slots[one.index])
                    job.touch(partial(one.objects.unpack, sealed, slot, one.share))
                    job.moved_bytes += piece.size
            if wrong:
                logger.warning("PDConnector: %d objects of the pool are not what they should be: removed", len(wrong))
                store.remove(wrong)
            job.done = calls[-1][0].index  # more of this one may come with the next call
            self._fetcher.goes_on()
        job.done = len(job.order)

    def _put(self, job: _Job, store: ObjectStore) -> None:
        """Put the objects of an order's blocks that it is this rank's turn to put. On a thread."""
        job.begin()
        buffer = bytes_of(store.buffer)
        for calls in _calls(self._objects_of(job.order, own_turn=True), len(buffer)):
            for one, piece in calls:
                into, slot = buffer[piece.offset : piece.offset + piece.size], int(job.order.slots[one.index])
                job.touch(partial(one.objects.seal, slot, one.share, one.key, into))
            for (one, piece), is_kept in zip(calls, store.put([piece for _, piece in calls]), strict=True):
                if is_kept:
                    job.moved_bytes += piece.size
                else:
                    job.missing.add(one.index)
            job.done = calls[-1][0].index
            self._putter.goes_on()
        job.done = len(job.order)

    def _objects_of(self, order: PoolOrder, *, own_turn: bool) -> Iterator[_Object]:
        """Yield the objects of an order's blocks; of those that several ranks hold, with ``own_turn``, the rank's."""
        for index, (group, block_hash) in enumerate(zip(order.groups.tolist(), order.hashes, strict=True)):
            for objects in self._objects[group]:
                form = objects.form
                if own_turn and block_hash[0] % form.holders != form.holder:
                    continue
                for share in form.held:
                    yield _Object(index, objects, share, form.key(order.namespace, share, block_hash))


def _calls(objects: Iterable[_Object], room: int) -> Iterator[list[tuple[_Object, Piece]]]:
    """Yield objects with their places in a buffer, as many at a time as one call takes."""
    calls: list[tuple[_Object, Piece]] = []
    used = 0
    for one in objects:
        size = one.objects.sealed_bytes
        if calls and (used + size > room or len(calls) == _CALL_OBJECTS):
            yield calls
            calls, used = [], 0
        calls.append((one, Piece(one.key, used, size)))
        used += size
    if calls:
        yield calls
