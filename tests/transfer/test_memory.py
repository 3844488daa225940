"""Memory that is lent out: aligned, disjoint, never twice at once, never waited for longer than one wants."""

import ctypes
import gc
import mmap
import re
import threading
import weakref
from contextlib import ExitStack

import pytest

from layout.geometry import Region
from tests.support.memory import Memory, out_of_reach
from tests.support.waiting import WAIT_S, holds_for
from transfer import numa
from transfer.memory import HostMemory, SlotPool, is_readable


def pool_of(size: int, slots: int) -> SlotPool:
    memory = HostMemory(size)
    return SlotPool(memory.region, slots, memory)


def test_host_memory_is_page_aligned_and_can_be_written_from_end_to_end() -> None:
    memory = HostMemory(3 * mmap.PAGESIZE + 5)
    assert memory.region.size == 3 * mmap.PAGESIZE + 5
    assert memory.region.address % mmap.PAGESIZE == 0
    ctypes.memset(memory.region.address, 7, memory.region.size)
    assert ctypes.string_at(memory.region.end - 2, 2) == bytes([7, 7])


@pytest.mark.parametrize("size", [0, -1])
def test_host_memory_without_bytes_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"must be positive, not {size} bytes"):
        HostMemory(size)


def test_memory_that_the_cpu_does_not_reach_is_known() -> None:
    memory = Memory(2 * mmap.PAGESIZE)
    assert is_readable(memory.region.end - 1)
    with out_of_reach(memory.region):
        assert not is_readable(memory.region.address)
    assert is_readable(memory.region.address)


def test_slots_are_aligned_disjoint_and_inside_the_region() -> None:
    pool = pool_of(10 * mmap.PAGESIZE, 3)
    assert pool.slot_bytes == 3 * mmap.PAGESIZE
    with ExitStack() as stack:
        slots = sorted(stack.enter_context(pool.borrow()) or 0 for _ in range(3))
        assert slots == [pool.region.address + index * pool.slot_bytes for index in range(3)]
        assert slots[0] % mmap.PAGESIZE == 0
        assert slots[-1] + pool.slot_bytes == pool.region.end - mmap.PAGESIZE
        for number, slot in enumerate(slots):
            ctypes.memset(slot, number + 1, pool.slot_bytes)
        assert ctypes.string_at(slots[1], pool.slot_bytes) == bytes([2]) * pool.slot_bytes
        pool.check_integrity()
    pool.check_integrity()


@pytest.mark.thorough
def test_a_pool_keeps_its_memory_and_touches_none_of_it() -> None:
    class Owner:
        """Stands for a device's memory, which would fault if it were touched."""

    owner = Owner()
    gone = weakref.ref(owner)
    pool = SlotPool(Region(1 << 60, 1 << 20), 4, owner)
    del owner
    gc.collect()
    with pool.borrow() as slot:
        assert slot == (1 << 60) + (3 << 18)
        assert gone() is not None
    del pool
    gc.collect()
    assert gone() is None


def test_who_finds_nothing_free_gets_nothing_and_does_not_wait() -> None:
    pool = pool_of(mmap.PAGESIZE, 1)
    with pool.borrow() as first:
        assert first is not None
        with pool.borrow() as second:
            assert second is None
            pool.check_integrity()
        pool.check_integrity()
    with pool.borrow() as again:
        assert again == first


def test_who_is_patient_gets_the_slot_that_comes_back_or_nothing() -> None:
    """At once, and not when the patience is over."""
    pool = pool_of(mmap.PAGESIZE, 1)
    lent: list[int | None] = []

    def borrow(patience_s: float) -> threading.Thread:
        def work() -> None:
            with pool.borrow(patience_s) as slot:
                lent.append(slot)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread

    with pool.borrow() as first:
        borrow(0.01).join()
        assert lent == [None]
        patient = [borrow(100 * WAIT_S) for _ in range(3)]
        holds_for(lambda: lent == [None], 0.02)
    for thread in patient:
        thread.join(WAIT_S)
    assert lent == [None, first, first, first]
    pool.check_integrity()


def test_a_slot_comes_back_after_a_failure() -> None:
    pool = pool_of(mmap.PAGESIZE, 1)
    with pytest.raises(RuntimeError, match="read"), pool.borrow():
        raise RuntimeError("read failed")
    pool.check_integrity()
    with pool.borrow() as slot:
        assert slot is not None


def test_threads_never_hold_one_slot_at_once() -> None:
    pool = pool_of(4 * mmap.PAGESIZE, 4)
    held: set[int] = set()
    clashes: list[int] = []

    def work() -> None:
        for _ in range(500):
            with pool.borrow() as slot:
                if slot is not None:
                    if slot in held:
                        clashes.append(slot)
                    held.add(slot)
                    pool.check_integrity()
                    held.discard(slot)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clashes == []
    pool.check_integrity()


def test_books_that_do_not_balance_are_noticed() -> None:
    pool = pool_of(2 * mmap.PAGESIZE, 2)
    with pool.borrow() as slot:
        assert slot is not None
        pool._free.append(slot)
        with pytest.raises(AssertionError, match="free and lent at once"):
            pool.check_integrity()
        pool._free = [slot, slot]
        with pytest.raises(AssertionError, match="free twice"):
            pool.check_integrity()
        pool._free = []
        with pytest.raises(AssertionError, match="was lost"):
            pool.check_integrity()


def test_less_than_a_page_a_slot_is_refused_with_the_values() -> None:
    with pytest.raises(ValueError, match="1000 bytes cannot be cut into 4 slots"):
        pool_of(1000, 4)


# Where memory lies


def test_a_node_that_is_refused_is_logged_once_and_the_memory_is_good(caplog: pytest.LogCaptureFixture) -> None:
    memory = HostMemory(mmap.PAGESIZE, node=1023)
    ctypes.memset(memory.region.address, 7, memory.region.size)
    [line] = [record.getMessage() for record in caplog.records]
    assert re.match(r"host memory is not placed on NUMA node 1023: mbind: \w+", line), line


def test_memory_without_a_wish_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: object) -> None:
        raise AssertionError("a node was asked for")

    monkeypatch.setattr(numa, "prefer", asked)
    HostMemory(mmap.PAGESIZE)
