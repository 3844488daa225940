"""A worker's part in a pool whose objects another machine holds: the real master, clients and writers as processes."""

import ctypes
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from pd_connector.orders import Orders, PoolEnds, PoolOrder
from pd_connector.stats import StatsRecorder
from pd_connector.worker.host.pool_copies import PoolCopies
from tests.support.layout.oracle import Engine, Model, Table, build
from tests.support.store.mooncake_processes import MooncakeProcesses
from tests.support.store.object_slots import OBJECT_SECRET, HostSlots
from tests.support.waiting import ManualClock, until
from transfer.store import slot_objects
from transfer.store.interface import Piece, StoreFailed
from transfer.store.mooncake_store import MooncakeStore
from transfer.store.store_thread import RETRY_S

pytestmark = pytest.mark.skipif(
    not Path(sys.executable).with_name("mooncake_client").exists(), reason="mooncake_client is not installed"
)

MODEL = Model(4, (2, 2), 2, ((0, 1, 2),), (0,))
TABLE = Table(0, (2, 0, 1))
HASHES = (b"\x01one", b"\x02two", b"\x03three")
ALL = frozenset(range(3))
BUFFER = SIZE = 1 << 20

WRITER = """
import ctypes, sys
from transfer.peers import parse_address
from transfer.store.interface import Piece
from transfer.store.mooncake_store import MooncakeStore
store = MooncakeStore(parse_address(sys.argv[1]), 8 << 20)
ctypes.memset(store.buffer.address, 7, 8 << 20)
print("ready", flush=True)
for number in range(1000):
    store.put([Piece(f"killed/{number}/{part}", part << 20, 1 << 20) for part in range(8)])
"""


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeProcesses]:
    processes = MooncakeProcesses(tmp_path_factory.mktemp("store"), 128 << 20, elsewhere=True)
    yield processes
    processes.close()


class Worker:
    """The only rank of an engine, with three blocks in its slots."""

    def __init__(self, processes: MooncakeProcesses, seed: int) -> None:
        (self.rank,) = build(MODEL, Engine("BLHNC"), seed, 1 << 44)
        self.slots, self.clock, self._orders = HostSlots(self.rank), ManualClock(), 0
        open_store = partial(MooncakeStore, processes.address, BUFFER)
        self.copies = PoolCopies(self.slots.forms, OBJECT_SECRET, open_store, StatsRecorder(), self.clock)
        self.rank.fill([TABLE])

    def order(self, namespace: str) -> PoolOrder:
        self._orders += 1
        slots = np.array([self.slots.slot(0, entry) for entry in range(3)])
        return PoolOrder(self._orders, namespace, np.zeros(3, np.int64), slots, HASHES, 5.0)

    def begin_put(self, namespace: str) -> None:
        self.slots.copy([TABLE], to_host=True)
        self.copies.execute(Orders(puts=(self.order(namespace),)))

    def put(self, namespace: str) -> PoolEnds:
        self.begin_put(namespace)
        return self.end_put()

    def end_put(self) -> PoolEnds:
        return until(self.copies.take_report, within_s=90).puts[self._orders]

    def fetch(self, namespace: str) -> PoolEnds:
        self.copies.execute(Orders(fetches=(self.order(namespace),)))
        return until(self.copies.take_report, within_s=90).fetches[self._orders]

    def works_again(self, namespace: str) -> bool:
        """Put and fetch, as when the pool's time of rest is over."""
        self.clock.advance(RETRY_S)
        return self.put(namespace) == PoolEnds(1) and self.fetch(namespace) == PoolEnds(1)

    def has_all(self) -> bool:
        """Whether the slots hold every byte of the blocks."""
        before = self.rank.memory.copy()
        self.slots.copy([TABLE], to_host=False)
        return bool((self.rank.memory == before).all())


class Workers(list[Worker]):
    """All that a test has started."""

    def start(self, processes: MooncakeProcesses, seed: int = 1) -> Worker:
        self.append(Worker(processes, seed))
        return self[-1]


@pytest.fixture
def workers() -> Iterator[Workers]:
    started = Workers()
    yield started
    for worker in started:
        worker.copies.close()
        worker.copies.join()


class TestWhoShares:
    def test_blocks_come_from_another_machine(self, processes: MooncakeProcesses, workers: Workers) -> None:
        assert workers.start(processes).put("ns/a") == PoolEnds(1)
        reader = workers.start(processes)
        assert reader.fetch("ns/a") == PoolEnds(1)
        assert reader.has_all()

    def test_another_model_finds_nothing_and_is_in_nobodys_way(
        self, processes: MooncakeProcesses, workers: Workers
    ) -> None:
        first, other = workers.start(processes, 1), workers.start(processes, 2)
        assert first.put("ns/model") == PoolEnds(1)
        assert other.fetch("ns/other model") == PoolEnds(1, ALL)
        assert other.put("ns/other model") == PoolEnds(1)
        for worker, namespace in ((first, "ns/model"), (other, "ns/other model")):
            worker.slots.memory[:] = 0
            assert worker.fetch(namespace) == PoolEnds(1)
            assert worker.has_all()

    def test_objects_of_another_version_are_removed_and_put_anew(
        self, processes: MooncakeProcesses, workers: Workers
    ) -> None:
        older, newer = workers.start(processes), workers.start(processes)
        with patch.object(slot_objects, "SEAL", b"pdobj\x00\x00\x01"):
            assert older.put("ns/version") == PoolEnds(1)
        before = newer.slots.memory.copy()
        assert newer.fetch("ns/version") == PoolEnds(1, ALL)
        assert (newer.slots.memory == before).all()
        assert newer.put("ns/version") == PoolEnds(1)
        assert newer.fetch("ns/version") == PoolEnds(1)

    def test_of_two_that_put_a_block_at_once_one_wins_whole(
        self, processes: MooncakeProcesses, workers: Workers
    ) -> None:
        """Each seals by a number of its own: of an object with bytes of both, the seal would be wrong."""
        pair = [workers.start(processes) for _ in range(2)]
        for round_ in range(5):
            for worker in pair:
                worker.begin_put(f"ns/at once/{round_}")
            assert [worker.end_put() for worker in pair] == [PoolEnds(1)] * 2
            for worker in pair:
                worker.slots.memory[:] = 0
                assert worker.fetch(f"ns/at once/{round_}") == PoolEnds(1)
                assert worker.has_all()


class TestTrouble:
    def test_without_a_master_an_engine_begins_and_finds_the_pool_later(
        self, processes: MooncakeProcesses, workers: Workers
    ) -> None:
        processes.master.kill()
        processes.master.wait()
        worker = workers.start(processes)
        assert worker.fetch("ns/no master").failed
        processes.restart_master()
        until(partial(worker.works_again, "ns/no master"), within_s=60)
        assert worker.has_all()

    def test_a_holder_that_was_killed_fails_fetches_until_it_is_forgotten(
        self, processes: MooncakeProcesses, workers: Workers
    ) -> None:
        worker = workers.start(processes)
        until(partial(worker.works_again, "ns/killed holder"), within_s=60)
        before = worker.slots.memory.copy()
        processes.holder.kill()
        processes.holder.wait()
        assert worker.fetch("ns/killed holder").failed
        assert (worker.slots.memory == before).all()

        def is_forgotten() -> bool:
            worker.clock.advance(RETRY_S)
            return worker.fetch("ns/killed holder") == PoolEnds(1, ALL)

        until(is_forgotten, within_s=60)
        processes.restart_holder()
        until(partial(worker.works_again, "ns/killed holder"), within_s=60)

    def test_a_holder_that_was_stopped_writes_to_no_slot_when_it_goes_on(
        self, processes: MooncakeProcesses, workers: Workers
    ) -> None:
        worker = workers.start(processes)
        until(partial(worker.works_again, "ns/stopped holder"), within_s=60)
        worker.slots.memory[:] = 0
        with processes.holder_stopped():
            worker.copies.execute(Orders(fetches=(worker.order("ns/stopped holder"),)))
            until(lambda: worker.copies._fetches[worker._orders][0].has_begun)
            worker.clock.advance(5.0)
            assert worker.copies.take_report().fetches[worker._orders].failed, "nobody waits for it any longer"
        until(partial(worker.works_again, "ns/stopped holder/2"), within_s=90)

    def test_an_engine_that_dies_while_it_puts_leaves_whole_objects_and_free_names(
        self, processes: MooncakeProcesses
    ) -> None:
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(processes.address)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        store = MooncakeStore(processes.address, SIZE)
        assert writer.stdout.readline() == b"ready\n"
        until(lambda: store.exist(["killed/0/0"]) == [True])
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        last = next(number for number in range(1000) if not all(store.exist(names(number))))
        for number in (0, last, last + 1):
            for name in names(number):
                until(partial(is_whole, store, name), within_s=30)
        store.close()


def names(number: int) -> list[str]:
    return [f"killed/{number}/{part}" for part in range(8)]


def is_whole(store: MooncakeStore, name: str) -> bool:
    """Put an object and get it; return whether it has come, whoever has put it."""
    held = np.ctypeslib.as_array((ctypes.c_uint8 * SIZE).from_address(store.buffer.address))
    try:
        held[:] = 8
        store.put([Piece(name, 0, SIZE)])
        held[:] = 0
        if store.get([Piece(name, 0, SIZE)]) != [True]:
            return False
    except StoreFailed:
        return False
    assert set(np.unique(held)) in ({7}, {8})
    return True
