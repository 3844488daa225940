"""The copies of one rank between its caches and its slots: real memory, real copiers, and copiers that fail."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from layout.copies import Copies
from layout.geometry import Region
from layout.host_blocks import HostLayout, host_layout
from pd_connector.orders import BlockMoves, LoadOrder, StoreEnds, StoreOrder
from pd_connector.worker.host.device_copies import CopyEnd, HostCopies, UnsettledLoadError, _InFlight, _poll
from tests.support.connector.engines import placed
from tests.support.devices.fake_cuda import FakeEvent
from tests.support.layout.oracle import Engine, Extra, Model, build
from tests.support.layout.round_trips import Device
from tests.support.memory import Bytes
from tests.support.waiting import WAIT_S, holds_for, until
from transfer.copies.batch.backends import Backend, open_copier
from transfer.copies.batch.base import CopyFailed, DeviceEvent, Direction, Handle
from transfer.copies.batch.copier import BatchCopier
from transfer.copies.batch.host import HostBackend

SLOTS = 6
GUARD = 64
GQA = Model(2, (4, 4), 2, ((0, 1),), (0,))
FORMS = {
    "layers apart": (GQA, Engine(layers_apart=True, form="apart")),
    "all layers of a block together": (GQA, Engine("BLHNC")),
    "kernel blocks": (GQA, Engine("LBNHC", kernel_blocks=2)),
    "two cache groups of other sizes": (
        Model(2, (4, 4), 2, ((0, 2, 3), (1,)), (0, 8), (Extra("k_scale", 1, 4),)),
        Engine(group_factors=(1, 2)),
    ),
}

Triple = tuple[int, int, int]  # cache group, block, slot


@dataclass
class Faulty(HostBackend):
    """Copies when it may, or fails, or hands the end of a copy to a device."""

    may_start: threading.Event = field(default_factory=threading.Event)
    failure: Exception | None = None
    end: FakeEvent | None = None
    started: int = 0

    def start(self, copies: Copies, after: DeviceEvent | None) -> DeviceEvent | None:  # type: ignore[override]
        self.started += 1
        assert self.may_start.wait(WAIT_S)
        if self.failure is not None:
            raise self.failure
        super().start(copies, after)
        return self.end


class Worker:
    """One rank's caches, its host memory between two guards, and the copies between them."""

    def __init__(
        self,
        form: tuple[Model, Engine] = (GQA, Engine()),
        stores: BatchCopier | None = None,
        loads: BatchCopier | None = None,
        mark: Callable[[], DeviceEvent | None] = lambda: None,
    ) -> None:
        rank = placed(build(*form, seed=5, base=1 << 40))[0]
        self.device = Device(rank.geometry, rank.memory.ctypes.data, rank.memory)
        self.layout: HostLayout = host_layout(self.device.geometry)
        self.memory = np.full(SLOTS * self.layout.slot_bytes + 2 * GUARD, 7, np.uint8)
        region = Region(self.memory.ctypes.data + GUARD, SLOTS * self.layout.slot_bytes)
        stores = stores or open_copier(Backend.HOST, Direction.DEVICE_TO_HOST)
        loads = loads or open_copier(Backend.HOST, Direction.HOST_TO_DEVICE)
        self.copies = HostCopies(self.layout, region, stores, loads, mark)
        self.close = self.copies.close

    def store(self, store_id: int, *triples: Triple) -> None:
        self.copies.store(StoreOrder(store_id, BlockMoves.of(triples)))

    def load(self, request_id: str, *triples: Triple) -> None:
        self.copies.load(LoadOrder(request_id, BlockMoves.of(triples), 16 * len(triples)))

    def stored(self, store_id: int) -> tuple[CopyEnd, StoreEnds]:
        """The end of a store, awaited; nothing else may end meanwhile."""
        ends: dict[int, tuple[CopyEnd, StoreEnds]] = {}
        until(lambda: bool(ends.update(self.copies.take_stores()) or ends))
        assert ends.keys() == {store_id}
        return ends[store_id]

    def loaded(self, request_id: str) -> CopyEnd:
        ends: dict[str, CopyEnd] = {}
        until(lambda: bool(ends.update(self.copies.take_loads()) or ends))
        assert ends.keys() == {request_id}
        return ends[request_id]

    def bytes_of(self, group: int, block: int) -> list[Bytes]:
        """The elements of a block, plane by plane."""
        return [self.device.memory[positions] for positions in self.device.elements(group, block)]

    def size_of(self, group: int) -> int:
        return len(self.device.block_bytes(group, 0))


def faulty(**options: object) -> tuple[Faulty, BatchCopier]:
    """A copier that starts at once, unless told otherwise."""
    backend = Faulty(**options)  # type: ignore[arg-type]  # of any field
    backend.may_start.set()
    return backend, BatchCopier(backend, "copier under test")


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


# Bytes


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), form=st.sampled_from(sorted(FORMS)))
def test_blocks_come_back_into_any_other_block_and_nothing_else_changes(data: st.DataObject, form: str) -> None:
    with closing(Worker(FORMS[form])) as worker:
        groups = range(len(worker.layout.groups))
        pairs = [(group, block) for group in groups for block in range(1, worker.layout.groups[group].blocks)]
        stored = data.draw(st.lists(st.sampled_from(pairs), unique=True, max_size=SLOTS))
        slots = data.draw(st.permutations(range(SLOTS)))[: len(stored)]
        to = [data.draw(st.permutations([pair for pair in pairs if pair[0] == group])) for group in groups]
        targets = [to[group].pop()[1] for group, _ in stored]
        before = [worker.bytes_of(*pair) for pair in stored]
        worker.store(1, *((*pair, slot) for pair, slot in zip(stored, slots, strict=True)))
        moved = sum(worker.size_of(group) for group, _ in stored)
        end, ends = worker.stored(1)
        assert (end.blocks, end.copied_bytes, end.failure, ends) == (len(stored), moved, "", StoreEnds(1))
        worker.device.memory[:] ^= 0xFF
        expected = worker.device.memory.copy()
        worker.load("r", *((pair[0], block, slot) for pair, block, slot in zip(stored, targets, slots, strict=True)))
        end = worker.loaded("r")
        assert (end.blocks, end.copied_bytes, end.failure) == (len(stored), moved, "")
        for (group, _), block, contents in zip(stored, targets, before, strict=True):
            for positions, values in zip(worker.device.elements(group, block), contents, strict=True):
                expected[positions] = values
        assert (worker.device.memory == expected).all()
        used = np.ones(len(worker.memory), bool)
        for slot in slots:
            used[GUARD + slot * worker.layout.slot_bytes : GUARD + (slot + 1) * worker.layout.slot_bytes] = False
        assert (worker.memory[used] == 7).all()


def test_an_order_of_no_blocks_ends_well() -> None:
    """Of a hit of which the request needs no block any more."""
    with closing(Worker()) as worker:
        worker.load("r")
        assert replace(worker.loaded("r"), seconds=0.0) == CopyEnd(0, 0, 0.0)


def test_several_orders_at_once_are_told_apart() -> None:
    with closing(Worker()) as worker:
        for number in range(3):
            worker.store(number, (0, number + 1, number))
        stored: dict[int, object] = {}
        until(lambda: bool(stored.update(worker.copies.take_stores()) or len(stored) == 3))
        before = [worker.bytes_of(0, number + 1)[0] for number in range(3)]
        for number in range(3):
            worker.load(f"r{number}", (0, number + 5, number))
        loaded: dict[str, object] = {}
        until(lambda: bool(loaded.update(worker.copies.take_loads()) or len(loaded) == 3))
        for number in range(3):
            assert (worker.bytes_of(0, number + 5)[0] == before[number]).all()


# Polling


def test_an_order_is_submitted_once_and_reported_once_however_often_it_is_asked_for() -> None:
    backend, copier = faulty()
    backend.may_start.clear()
    with closing(Worker(stores=copier)) as worker:
        worker.store(4, (0, 1, 0))
        assert [worker.copies.take_stores() for _ in range(50)] == [{}] * 50
        backend.may_start.set()
        worker.stored(4)
        assert [worker.copies.take_stores() for _ in range(50)] == [{}] * 50
        assert backend.started == 1


def test_a_load_is_submitted_once_and_reported_once_however_often_it_is_asked_for() -> None:
    backend, copier = faulty()
    backend.may_start.clear()
    with closing(Worker(loads=copier)) as worker:
        worker.load("r", (0, 1, 0))
        assert [worker.copies.take_loads() for _ in range(50)] == [{}] * 50
        backend.may_start.set()
        worker.loaded("r")
        assert [worker.copies.take_loads() for _ in range(50)] == [{}] * 50
        assert backend.started == 1


def test_loads_do_not_queue_behind_stores() -> None:
    backend, copier = faulty()
    backend.may_start.clear()
    with closing(Worker(stores=copier)) as worker:
        worker.store(1, (0, 1, 0))
        worker.load("r", (0, 2, 3))
        assert not worker.loaded("r").failure
        assert worker.copies.take_stores() == {}
        backend.may_start.set()
        worker.stored(1)


@pytest.mark.parametrize("kind", ["store", "load"])
def test_a_copy_waits_for_what_the_model_was_given_before(kind: str) -> None:
    computed = FakeEvent()
    with closing(Worker(mark=lambda: computed)) as worker:
        if kind == "store":
            worker.store(1, (0, 1, 0))
        else:
            worker.load("r", (0, 1, 0))
        holds_for(lambda: not (worker.copies.take_stores() or worker.copies.take_loads()), 0.05)
        worker.device.memory[:] ^= 0xFF  # what the step before computes
        expected = worker.bytes_of(0, 1)[0]
        computed.reached.set()
        if kind == "load":
            worker.loaded("r")
            return
        worker.stored(1)
        worker.load("r", (0, 2, 0))
        worker.loaded("r")
        assert (worker.bytes_of(0, 2)[0] == expected).all()


@pytest.mark.parametrize("kind", ["store", "load"])
def test_descriptors_are_not_made_on_the_models_thread(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take 170 ms for 16,384 blocks of 124 runs each."""
    threads = set()
    made = HostLayout.loads  # of both directions

    def loads(self: HostLayout, *arguments: Any) -> Copies:
        threads.add(threading.current_thread().name)
        return made(self, *arguments)

    monkeypatch.setattr(HostLayout, "loads", loads)
    _, copier = faulty()
    with closing(Worker(stores=copier) if kind == "store" else Worker(loads=copier)) as worker:
        if kind == "store":
            worker.store(1, (0, 1, 0))
            worker.stored(1)
        else:
            worker.load("r", (0, 1, 0))
            worker.loaded("r")
    assert threads == {"copier under test"}


def test_a_copy_is_over_when_its_device_says_so() -> None:
    backend, copier = faulty(end=FakeEvent())
    with closing(Worker(loads=copier)) as worker:
        worker.load("r", (0, 1, 0))
        until(lambda: backend.started == 1)
        assert worker.copies.take_loads() == {}
        assert backend.end is not None
        backend.end.reached.set()
        assert not worker.loaded("r").failure


# Failures


def test_a_load_that_fails_is_told_as_failed() -> None:
    _, copier = faulty(failure=CopyFailed("the driver said 700", settled=True))
    with closing(Worker(loads=copier)) as worker:
        worker.load("r", (0, 1, 0), (0, 2, 1))
        end = worker.loaded("r")
        assert (end.blocks, end.copied_bytes, end.failure) == (2, 0, "the driver said 700")
        assert worker.copies.take_loads() == {}


def test_a_store_that_fails_is_told_as_failed() -> None:
    _, copier = faulty(failure=CopyFailed("the driver said 700", settled=True))
    with closing(Worker(stores=copier)) as worker:
        worker.store(1, (0, 1, 0))
        end, ends = worker.stored(1)
        assert (end.failure, ends) == ("the driver said 700", StoreEnds(1, failed=True))


@pytest.mark.parametrize("failure", [CopyFailed("gone", settled=False), ZeroDivisionError("unforeseen")])
def test_a_store_that_may_still_be_written_says_so(failure: Exception) -> None:
    _, copier = faulty(failure=failure)
    with closing(Worker(stores=copier)) as worker:
        worker.store(1, (0, 1, 0))
        assert worker.stored(1)[1] == StoreEnds(1, failed=True, unsettled=True)


def test_a_load_that_may_still_be_written_ends_the_worker() -> None:
    """The device may write to these blocks whenever it likes, whoever has them then."""
    _, copier = faulty(failure=CopyFailed("the device fell off the bus", settled=False))
    with closing(Worker(loads=copier)) as worker:
        worker.load("r", (0, 1, 0))
        with pytest.raises(UnsettledLoadError, match="blocks of request r could not be loaded: the device fell off"):
            until(lambda: bool(worker.copies.take_loads()))


def test_a_device_that_fails_under_way_ends_the_worker() -> None:
    _, copier = faulty(end=FakeEvent(error="lost"))
    with closing(Worker(loads=copier)) as worker:
        worker.load("r", (0, 1, 0))
        with pytest.raises(UnsettledLoadError, match="failed while the batch was under way: lost"):
            until(lambda: bool(worker.copies.take_loads()))


BAD = {
    "a block that there is not": ([(0, 1, 0), (0, 8, 1)], "block 8 does not exist"),
    "a slot that there is not": ([(0, 1, SLOTS)], f"host slot {SLOTS} does not exist"),
    "a slot before the first": ([(0, 1, -1)], "host slot -1 does not exist"),
    "a cache group that there is not": ([(1, 1, 0)], "cache group 1 does not exist"),
}


@pytest.mark.parametrize("bad", BAD)
def test_an_order_that_names_what_there_is_not_fails_and_copies_nothing(bad: str) -> None:
    triples, message = BAD[bad]
    with closing(Worker()) as worker:
        before = worker.device.memory.copy()
        worker.store(1, *triples)
        end, ends = worker.stored(1)
        assert message in end.failure
        assert ends == StoreEnds(1, failed=True)
        worker.load("r", *triples)
        end = worker.loaded("r")
        assert message in end.failure
        assert (end.blocks, end.copied_bytes) == (len(triples), 0)
        assert (worker.device.memory == before).all()
        assert (worker.memory == 7).all()


def test_after_a_failure_the_next_order_is_served() -> None:
    backend, copier = faulty(failure=CopyFailed("once", settled=True))
    with closing(Worker(stores=copier)) as worker:
        worker.store(1, (0, 1, 0))
        worker.stored(1)
        backend.failure = None
        worker.store(2, (0, 1, 0))
        assert worker.stored(2)[1] == StoreEnds(1)


@pytest.mark.parametrize("order", [lambda worker: worker.store(1, (0, 1, 0)), lambda worker: worker.load("r")])
def test_an_order_that_is_under_way_cannot_be_given_again(order: Callable[[Worker], None]) -> None:
    backend, copier = faulty()
    backend.may_start.clear()
    loads = BatchCopier(backend, "copier under test")
    with closing(Worker(stores=copier, loads=loads)) as worker:
        order(worker)
        with pytest.raises(AssertionError):
            order(worker)
        backend.may_start.set()


# The end


def test_closing_awaits_what_is_under_way_and_fails_what_has_not_begun() -> None:
    backend, copier = faulty()
    backend.may_start.clear()
    worker = Worker(stores=copier)
    worker.store(1, (0, 1, 0))
    worker.store(2, (0, 2, 1))
    until(lambda: backend.started == 1)
    closer = threading.Thread(target=worker.close)
    closer.start()
    until(copier._closing.is_set)
    holds_for(closer.is_alive, 0.05)
    backend.may_start.set()
    closer.join(WAIT_S)
    ends = worker.copies.take_stores()
    assert [ends[1][1], ends[2][1]] == [StoreEnds(1), StoreEnds(1, failed=True)]
    assert "closed" in ends[2][0].failure
    assert backend.started == 1


def test_orders_after_the_end_fail() -> None:
    worker = Worker()
    worker.close()
    worker.close()
    worker.store(1, (0, 1, 0))
    worker.load("r", (0, 1, 0))
    assert "closed" in worker.stored(1)[0].failure
    assert "closed" in worker.loaded("r").failure


def test_the_order_of_failures_of_submission_is_kept_apart_from_those_under_way() -> None:
    """A failure that is known at once waits for the next question like every other end."""
    with closing(Worker()) as worker:
        worker.load("bad", (0, 99, 0))
        worker.load("good", (0, 1, 0))
        ends: dict[str, CopyEnd] = {}
        until(lambda: bool(ends.update(worker.copies.take_loads()) or len(ends) == 2))
        assert [bool(ends[name].failure) for name in ("bad", "good")] == [True, False]


def test_what_is_asked_for_in_the_wrong_shape_is_a_failed_copy() -> None:
    with closing(Worker()) as worker:
        moves = replace(BlockMoves.of([(0, 1, 0)]), slots=np.arange(2))
        worker.copies.load(LoadOrder("r", moves, 16))
        assert "numbers must be equal" in worker.loaded("r").failure


def test_a_copy_ends_when_its_bytes_have_landed_and_not_when_it_is_seen() -> None:
    handle = Handle()
    handle.begun(None)
    time.sleep(0.001)
    assert handle.ended_at is not None
    end, _ = _poll(_InFlight(handle, 1, handle.ended_at - 0.5))
    assert end is not None
    assert end.seconds == pytest.approx(0.5, abs=1e-6)


# Before the device memory goes


@pytest.mark.parametrize("failure", [None, CopyFailed("refused", settled=True)])
def test_settling_waits_for_copies_which_are_reported_as_usual(failure: CopyFailed | None) -> None:
    backend, copier = faulty(failure=failure)
    backend.may_start.clear()
    with closing(Worker(stores=copier)) as worker:
        worker.store(4, (0, 1, 0))
        threading.Timer(0.1, backend.may_start.set).start()
        worker.copies.settle()
        (ends,) = worker.copies.take_stores().values()
        assert ends[1].failed == (failure is not None)


def test_settling_a_copy_that_may_still_run_fails() -> None:
    _, copier = faulty(failure=CopyFailed("the device is gone", settled=False))
    with closing(Worker(loads=copier)) as worker:
        worker.load("r", (0, 1, 0))
        with pytest.raises(CopyFailed, match="the device is gone"):
            worker.copies.settle()
