"""A pool that engines of ``vllm_schedulers`` share: objects that hold stamps, and the workers' part in it.

What is put is read when the put begins, and must still be in its slot when it ends. What is fetched is in its slot when
the fetch ends, and nothing is until then.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from layout.block_objects import object_forms
from layout.geometry import ModelIdentity, WorkerGeometry
from pd_connector.orders import Orders, PoolEnds, PoolOrder, Report
from tests.support.simulation.scheduler_pulls import FAILED, BlockStamps
from tests.support.waiting import ManualClock
from transfer.store.interface import ObjectStore, Piece, StoreFailed
from transfer.store.store_thread import StoreThread

POOLED_MODEL = ModelIdentity("A", "config", "weights", 1, 1, 1, "float32", "auto")


class SimulatedPool(ObjectStore, StoreThread):
    """The objects, and the thread that looks them up, which answers when it is told to."""

    def __init__(self, clock: ManualClock) -> None:  # no thread
        self.objects: dict[str, list[int]] = {}
        self.fails = self.is_stuck = False
        self.refuses = 0  # blocks, before it has room again
        self.looked_up: list[str] = []
        self.clock = clock
        self._asked: list[tuple[Callable[[ObjectStore], Any], Future[Any]]] = []

    def submit(self, work: Callable[[ObjectStore], Any], timeout_s: float) -> "Future[Any]":
        future: Future[Any] = Future()
        self._asked.append((work, future))
        return future

    def answer(self) -> None:
        """Answer what was asked, unless the pool is stuck."""
        asked, self._asked = (self._asked, []) if not self.is_stuck else ([], self._asked)
        for work, future in asked:
            try:
                future.set_result(work(self))
            except StoreFailed as error:
                future.set_exception(error)

    def exist(self, keys: Sequence[str]) -> list[bool]:
        if self.fails:
            raise StoreFailed("a test")
        self.looked_up += keys
        return [key in self.objects for key in keys]

    def lose(self, every: int) -> None:
        """Lose one object of so many."""
        for key in list(self.objects)[::every]:
            del self.objects[key]

    buffer: Any = None

    def put(self, pieces: Sequence[Piece]) -> list[bool]:
        raise NotImplementedError("workers are simulated")

    get = put

    def remove(self, keys: Sequence[str]) -> None:
        raise NotImplementedError("workers are simulated")

    def renew_buffer(self) -> None:
        """Workers are simulated."""

    def close(self) -> Any:
        """Nothing to close."""
        return True

    join = close


@dataclass(frozen=True)
class _UnderWay:
    order: PoolOrder
    is_put: bool
    found: tuple[tuple[int, ...], ...]  # by block, what its slot held when the order began
    ends_at: float
    in_time: bool


class PooledWorker:
    """What ``PoolCopies`` is to a worker."""

    copy_s = 0.1

    def __init__(self, pool: SimulatedPool, geometry: WorkerGeometry, host: BlockStamps) -> None:
        self._pool = pool
        self._host = host
        self._forms = object_forms(geometry)
        self._rows = [1 if group.states else group.block_tokens for group in geometry.groups]
        self._under_way: list[_UnderWay] = []

    def start(self, orders: Orders) -> None:
        """Begin what is ordered."""
        now = self._pool.clock.now
        for is_put, of_kind in ((True, orders.puts), (False, orders.fetches)):
            for order in of_kind:
                in_time = self.copy_s <= order.timeout_s and not self._pool.is_stuck
                found = tuple(self._slot(order, index) for index in range(len(order)))
                ends_at = now + (self.copy_s if in_time else order.timeout_s)
                self._under_way.append(_UnderWay(order, is_put, found, ends_at, in_time))
                for index in range(0 if is_put else len(order)):
                    self._write(order, index, [FAILED] * self._rows[int(order.groups[index])])

    def take_report(self) -> Report:
        """End what is due."""
        now = self._pool.clock.now
        due = [each for each in self._under_way if each.ends_at <= now]
        self._under_way = [each for each in self._under_way if each.ends_at > now]
        puts = {each.order.pool_id: self._end_put(each) for each in due if each.is_put}
        return Report(fetches={each.order.pool_id: self._end_fetch(each) for each in due if not each.is_put}, puts=puts)

    def _end_put(self, put: _UnderWay) -> PoolEnds:
        for index, held in enumerate(put.found):
            assert self._slot(put.order, index) == held, "I5: a slot is written while it is put"
        if self._pool.fails or not put.in_time:
            return PoolEnds.nothing(put.order)
        missing = set()
        for index, held in enumerate(put.found):
            if self._pool.refuses:
                self._pool.refuses -= 1
                missing.add(index)
                continue
            kept = self._pool.objects.setdefault(self._key(put.order, index), list(held))
            assert kept == list(held), "two blocks of one name differ"
        return PoolEnds(1, frozenset(missing))

    def _end_fetch(self, fetch: _UnderWay) -> PoolEnds:
        if self._pool.fails or not fetch.in_time:
            return PoolEnds.nothing(fetch.order)
        missing = set()
        for index in range(len(fetch.order)):
            assert set(self._slot(fetch.order, index)) == {FAILED}, "I5: a slot is written while it is fetched to"
            kept = self._pool.objects.get(self._key(fetch.order, index))
            if kept is None:
                missing.add(index)
            else:
                self._write(fetch.order, index, kept)
        return PoolEnds(1, frozenset(missing))

    def _key(self, order: PoolOrder, index: int) -> str:
        form = self._forms[int(order.groups[index])][0]
        return form.key(order.namespace, form.first_share, order.hashes[index])

    def _slot(self, order: PoolOrder, index: int) -> tuple[int, ...]:
        slot, rows = int(order.slots[index]), self._rows[int(order.groups[index])]
        return tuple(self._host.get((slot, row), FAILED) for row in range(rows))

    def _write(self, order: PoolOrder, index: int, stamps: Sequence[int]) -> None:
        slot = int(order.slots[index])
        self._host.update({(slot, row): stamp for row, stamp in enumerate(stamps)})
