"""Batches within host memory: exact, in the order asked for, and out of the way of other threads."""

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from layout.copies import EMPTY, Copies
from tests.support.memory import noise, shuffled_copies, whole_copy
from tests.support.waiting import WAIT_S
from transfer.copies.batch.backends import Backend, open_copier
from transfer.copies.batch.base import Direction
from transfer.copies.batch.copier import BatchCopier


@pytest.fixture
def copier() -> Iterator[BatchCopier]:
    with open_copier(Backend.HOST, Direction.DEVICE_TO_HOST) as made:
        yield made


@pytest.mark.parametrize(("count", "size"), [(1, 1), (7, 33), (64, 64), (300, 4096), (12, 1 << 20)])
def test_every_byte_arrives_in_its_place(copier: BatchCopier, count: int, size: int) -> None:
    source, target = noise(count * size), np.zeros(count * size, np.uint8)
    copies, places = shuffled_copies(target.ctypes.data, source.ctypes.data, count, size)
    copier.submit(copies).wait(WAIT_S)
    np.testing.assert_array_equal(target.reshape(count, size), source.reshape(count, size)[places])


def test_nothing_beside_a_copy_is_written(copier: BatchCopier) -> None:
    source, target = noise(300), np.zeros(300, np.uint8)
    copier.submit(whole_copy(target[100:177], source[:77])).wait(WAIT_S)
    np.testing.assert_array_equal(target[100:177], source[:77])
    assert not target[:100].any()
    assert not target[177:].any()


def test_an_empty_batch_and_copies_without_bytes_are_done(copier: BatchCopier) -> None:
    copier.submit(EMPTY).wait(WAIT_S)
    copier.submit(Copies(np.zeros(3, np.int64), np.zeros(3, np.int64), np.zeros(3, np.int64))).wait(WAIT_S)


def test_a_batch_waits_for_its_event(copier: BatchCopier) -> None:
    class Written:
        def __init__(self) -> None:
            self.event = threading.Event()

        def query(self) -> bool:
            return self.event.is_set()

        def synchronize(self) -> None:
            assert self.event.wait(WAIT_S)

    source, target, written = np.zeros(64, np.uint8), np.zeros(64, np.uint8), Written()
    handle = copier.submit(whole_copy(target, source), after=written)
    time.sleep(0.01)
    assert not handle.query()
    source[:] = 9
    written.event.set()
    handle.wait(WAIT_S)
    assert (target == 9).all()


def test_ten_thousand_descriptors_are_handed_over_quickly(copier: BatchCopier) -> None:
    count, size = 10_240, 512
    source, target = noise(count * size), np.zeros(count * size, np.uint8)
    spent = []
    for _ in range(20):
        start = time.perf_counter()
        copies, _ = shuffled_copies(target.ctypes.data, source.ctypes.data, count, size)
        handle = copier.submit(copies)
        spent.append(time.perf_counter() - start)
        handle.wait(WAIT_S)
    assert min(spent) < 5e-3  # usually a fifth of a millisecond; the benchmark gives the number


def test_python_goes_on_while_bytes_move(copier: BatchCopier) -> None:
    source, target = noise(1 << 20), np.zeros(1 << 20, np.uint8)
    times = 400
    copies = Copies(
        np.full(times, target.ctypes.data), np.full(times, source.ctypes.data), np.full(times, source.nbytes)
    )
    handle, turns = copier.submit(copies), 0
    while not handle.query():
        turns += 1
    assert turns > 1000
