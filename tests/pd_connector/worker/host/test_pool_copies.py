"""A worker's part in a pool: bytes that go there and back, and stores that fail, hang and hold something else."""

import logging
import threading
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest

from pd_connector.orders import Orders, PoolEnds, PoolOrder, Report
from pd_connector.stats import StatsRecorder
from pd_connector.worker.host.pool_copies import PoolCopies
from tests.support.layout.oracle import Engine, Model, Rank, Table, build
from tests.support.store.in_memory import InMemoryStore, SharedObjects
from tests.support.store.object_slots import OBJECT_SECRET, HostSlots
from tests.support.waiting import ManualClock, until

MODEL = Model(4, (2, 2), 2, ((0, 1, 2),), (0,))
TABLE = Table(0, (2, 0, 1))
HASHES = (b"\x01one", b"\x02two", b"\x03three")
TIMEOUT_S = 5.0


class Worker:
    """A rank with slots and copies. Small buffers: each order takes several calls."""

    def __init__(self, rank: Rank, shared: SharedObjects, clock: ManualClock, objects: int = 3) -> None:
        self.rank, self.slots, self.stats = rank, HostSlots(rank), StatsRecorder()
        size = self.slots.objects[0][0].sealed_bytes
        self.copies = PoolCopies(
            self.slots.forms, OBJECT_SECRET, partial(InMemoryStore, shared, objects * size), self.stats, clock
        )

    def order(self, pool_id: int = 1) -> PoolOrder:
        slots = np.array([self.slots.slot(0, entry) for entry in range(3)])
        return PoolOrder(pool_id, "ns", np.zeros(3, np.int64), slots, HASHES, TIMEOUT_S)

    def begin(self, **orders: tuple[PoolOrder, ...]) -> None:
        assert not self.copies.execute(Orders(**orders))  # type: ignore[arg-type]

    def report(self) -> Report:
        return until(self.copies.take_report)

    def put(self) -> PoolEnds:
        self.rank.fill([TABLE])
        self.slots.copy([TABLE], to_host=True)
        self.begin(puts=(self.order(),))
        return self.report().puts[1]

    def fetch(self) -> PoolEnds:
        self.begin(fetches=(self.order(),))
        return self.report().fetches[1]

    def check(self) -> None:
        """The device has every byte of the table, and no other has changed."""
        expected = self.rank.memory.copy()
        self.slots.copy([TABLE], to_host=False)
        tokens = range(3 * self.rank.engine.block_tokens)
        for held in self.rank.planes:
            expected[self.rank.positions(held, TABLE, tokens)] = self.rank.wanted_values(held, tokens)
        assert (self.rank.memory == expected).all()

    def counted(self, name: str) -> int:
        return int((self.stats.take() or {"counts": {}})["counts"].get(name, 0))


class StopsAfter(threading.Event):
    """Lets a number of calls go on, each of which takes a while."""

    def __init__(self, calls: int, clock: ManualClock, seconds: float) -> None:
        super().__init__()
        self._left, self._clock, self._seconds = calls, clock, seconds

    def wait(self, timeout: float | None = None) -> bool:
        self._left -= 1
        if self._left < 0:
            return super().wait(timeout)
        self._clock.advance(self._seconds)
        return True


@pytest.fixture
def shared() -> SharedObjects:
    return SharedObjects()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


class Workers(list[Worker]):
    """All that a test has started."""

    def start(self, engine: Engine, shared: SharedObjects, clock: ManualClock, seed: int = 1) -> list[Worker]:
        started = [Worker(rank, shared, clock) for rank in build(MODEL, engine, seed, 1 << 44)]
        self.extend(started)
        return started


@pytest.fixture
def workers(shared: SharedObjects) -> Iterator[Workers]:
    started = Workers()
    yield started
    shared.goes_on.set()
    for worker in started:
        worker.copies.close()
        worker.copies.join()


@pytest.mark.parametrize(("writers", "readers"), [(1, 1), (2, 1), (1, 4), (8, 2)])
def test_blocks_go_from_the_ranks_of_one_engine_to_those_of_another(
    workers: Workers, shared: SharedObjects, clock: ManualClock, writers: int, readers: int
) -> None:
    for worker in workers.start(Engine("BLHNC", tp=writers), shared, clock):
        assert worker.put() == PoolEnds(1)
    assert len(shared.objects) == 3 * 4, "an object for each block and head"
    for worker in workers.start(Engine("LBHNC", tp=readers), shared, clock, seed=2):
        assert worker.fetch() == PoolEnds(1)
        worker.check()
    assert max(number for _, number in shared.calls) == 3


def test_replicas_put_each_object_once(workers: Workers, shared: SharedObjects, clock: ManualClock) -> None:
    for worker in workers.start(Engine(tp=8), shared, clock):
        worker.put()
    assert sum(number for what, number in shared.calls if what == "put") == 3 * 4


class TestWhatIsNotThere:
    def test_only_blocks_with_all_their_objects_come(
        self, workers: Workers, shared: SharedObjects, clock: ManualClock
    ) -> None:
        (worker,) = workers.start(Engine(), shared, clock)
        worker.put()
        gone = next(key for key in shared.objects if key.endswith(f"/3/{HASHES[1].hex()}"))
        del shared.objects[gone]
        assert worker.fetch() == PoolEnds(1, frozenset({1}))

    @pytest.mark.parametrize("block", range(3))
    def test_what_a_stranger_has_put_is_removed_and_does_not_count(
        self, workers: Workers, shared: SharedObjects, clock: ManualClock, block: int
    ) -> None:
        (worker,) = workers.start(Engine(), shared, clock)
        worker.put()
        before = worker.slots.memory.copy()
        key = next(key for key in shared.objects if key.endswith(HASHES[block].hex()))
        torn = bytearray(shared.objects[key])
        torn[-1] ^= 1
        shared.objects[key] = bytes(torn)
        assert worker.fetch() == PoolEnds(1, frozenset({block}))
        assert key not in shared.objects
        assert (worker.slots.memory == before).all(), "it has not come to a slot"
        assert worker.put() == PoolEnds(1)
        assert worker.fetch() == PoolEnds(1)

    def test_what_is_not_kept_is_told(self, workers: Workers, shared: SharedObjects, clock: ManualClock) -> None:
        (worker,) = workers.start(Engine(), shared, clock)
        shared.refuses = {worker.slots.objects[0][0].form.key("ns", 2, HASHES[2])}
        assert worker.put() == PoolEnds(1, frozenset({2}))


class TestTrouble:
    @pytest.fixture
    def worker(self, workers: Workers, shared: SharedObjects, clock: ManualClock) -> Worker:
        (worker,) = workers.start(Engine(), shared, clock)
        worker.put()
        return worker

    def test_a_store_that_fails_is_told_once_and_costs_nothing_then(
        self, worker: Worker, shared: SharedObjects
    ) -> None:
        shared.fails = True
        assert worker.fetch().failed
        calls = len(shared.calls)
        worker.begin(fetches=(worker.order(2),))
        report = worker.copies.take_report()
        assert report.fetches[2] == PoolEnds(1, frozenset({0, 1, 2}), failed=True), "at once"
        assert len(shared.calls) == calls
        assert worker.counted("pool_failures:fetched") == 2

    def test_after_its_time_an_order_is_given_up_and_touches_no_slot(
        self, worker: Worker, shared: SharedObjects, clock: ManualClock
    ) -> None:
        shared.goes_on.clear()
        worker.slots.memory[:] = 0
        calls = len(shared.calls)
        worker.begin(fetches=(worker.order(),))
        until(lambda: len(shared.calls) > calls)
        assert not worker.copies.take_report()
        clock.advance(TIMEOUT_S)
        assert worker.copies.take_report().fetches[1].failed
        shared.goes_on.set()  # the bytes come now
        until(lambda: worker.copies._fetcher._late_at is None)
        assert not worker.slots.memory.any()

    def test_what_waited_for_another_for_too_long_does_not_speak_against_the_pool(
        self, worker: Worker, shared: SharedObjects, clock: ManualClock, caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        monkeypatch.setattr(logging.getLogger("pd_connector"), "propagate", True)
        shared.goes_on.clear()
        calls = len(shared.calls)
        worker.begin(fetches=(worker.order(2), worker.order(3)))
        until(lambda: len(shared.calls) > calls)
        clock.advance(TIMEOUT_S)
        ended = worker.copies.take_report().fetches
        assert ended[2].failed
        assert ended[3] == PoolEnds(1, frozenset({0, 1, 2}))
        assert caplog.text.count("3 blocks were not fetched in time") == 1, "nobody else says what is counted"
        shared.goes_on.set()
        until(lambda: worker.copies._fetcher._late_at is None)
        assert worker.fetch() == PoolEnds(1), "the store is well"

    @pytest.mark.parametrize("event", ["fetched", "put"])
    def test_so_many_bytes_that_they_take_long_do_not_speak_against_the_pool(
        self, worker: Worker, shared: SharedObjects, clock: ManualClock, event: str
    ) -> None:
        """What has come counts, and the next order is begun."""
        if event == "put":
            shared.objects.clear()
        shared.goes_on = StopsAfter(2, clock, 0.4 * TIMEOUT_S)
        calls = len(shared.calls)
        worker.begin(**{"fetches" if event == "fetched" else "puts": (worker.order(2),)})
        until(lambda: len(shared.calls) == calls + 3)
        clock.advance(0.2 * TIMEOUT_S)
        report = worker.copies.take_report()
        (ends,) = (*report.fetches.values(), *report.puts.values())
        assert ends == PoolEnds(1, frozenset({1, 2}))
        assert worker.counted(f"pool_failures:{event}") == 0
        worker.begin(fetches=(worker.order(3),))
        shared.goes_on.set()
        assert not worker.report().fetches[3].failed

    def test_once_it_is_closed_no_slot_is_touched(self, worker: Worker, shared: SharedObjects) -> None:
        """Host memory is given back before the threads are waited for."""
        shared.goes_on.clear()
        worker.slots.memory[:] = 0
        calls = len(shared.calls)
        worker.begin(fetches=(worker.order(2),))
        until(lambda: len(shared.calls) > calls)
        worker.copies.close()
        shared.goes_on.set()
        worker.copies.join()
        assert not worker.slots.memory.any()

    def test_a_put_reads_no_slot_after_its_time(
        self, worker: Worker, shared: SharedObjects, clock: ManualClock
    ) -> None:
        shared.objects.clear()
        shared.goes_on.clear()
        calls = len(shared.calls)
        worker.begin(puts=(worker.order(),))
        until(lambda: len(shared.calls) > calls)
        clock.advance(TIMEOUT_S)
        assert worker.copies.take_report().puts[1].failed
        worker.slots.memory[:] = 0  # somebody else's now
        shared.goes_on.set()
        until(lambda: worker.copies._putter._late_at is None)
        worker.rank.memory[:] = 7
        for key, sealed in shared.objects.items():
            objects = worker.slots.objects[0][0]
            assert objects.is_sealed(key, np.frombuffer(sealed, np.uint8))
            assert any(sealed[32:]), "bytes of before, or none"

    def test_a_put_that_hangs_does_not_hold_up_fetches(
        self, worker: Worker, shared: SharedObjects, workers: Workers
    ) -> None:
        hang = shared.goes_on
        shared.goes_on.clear()
        calls = len(shared.calls)
        worker.begin(puts=(worker.order(2),))
        until(lambda: len(shared.calls) > calls)
        shared.goes_on = type(hang)()
        shared.goes_on.set()
        assert worker.fetch() == PoolEnds(1)
        hang.set()
        assert worker.report().puts[2] == PoolEnds(1)

    def test_what_is_under_way_when_the_engine_sleeps_is_told_as_failed(
        self, worker: Worker, shared: SharedObjects, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("transfer.store.store_thread._JOIN_S", 0.1)
        shared.goes_on.clear()
        worker.begin(fetches=(worker.order(2),), puts=(worker.order(3),))
        worker.copies.close()
        worker.copies.join()
        lost = worker.copies.abandoned()
        assert lost.fetches[2].failed
        assert lost.puts[3].failed
        assert not worker.copies.take_report()
