"""A worker's share of host memory: what is refused, what the refusal advises, and what is opened."""

import logging
import mmap
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from layout.geometry import WorkerGeometry
from layout.host_blocks import host_layout
from pd_connector.config import ConfigError
from pd_connector.orders import BlockMoves, LoadOrder, Orders, StoreOrder
from pd_connector.stats import StatsRecorder
from pd_connector.worker.host import pool as host_pool
from pd_connector.worker.host.machine_memory import MachineMemory
from pd_connector.worker.host.placement import NearNode
from pd_connector.worker.host.pool import HostPool, HostQuota
from tests.support.connector.engines import placed
from tests.support.layout.oracle import Engine, Model, Rank, build
from tests.support.numa import needs_a_choice, online, policy
from tests.support.waiting import until
from transfer.copies.batch.backends import Backend, open_copier, pinned_memory
from transfer.copies.batch.base import CopierStartError, Direction
from transfer.copies.batch.copier import BatchCopier

AVAILABLE = 1 << 20
GQA = Model(2, (4, 4), 2, ((0, 1),), (0,))


@pytest.fixture
def rank() -> Rank:
    return placed(build(GQA, Engine(), 1, 1 << 40))[0]


@pytest.fixture
def geometry(rank: Rank) -> WorkerGeometry:
    return rank.geometry


@pytest.fixture
def slot_bytes(geometry: WorkerGeometry) -> int:
    return host_layout(geometry).slot_bytes


@pytest.fixture(autouse=True)
def _small_and_tidy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine with a MiB to spare, on which no thread is left."""
    monkeypatch.setattr(host_pool, "machine_memory", lambda: MachineMemory(2 * AVAILABLE, AVAILABLE))
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@contextmanager
def closing(pool: HostPool) -> Iterator[HostPool]:
    yield pool
    pool.join()


def open_pool(rank: Rank, geometry: WorkerGeometry, quota: HostQuota) -> HostPool:
    return HostPool.open(quota, geometry, [torch.from_numpy(rank.memory)], StatsRecorder())


def advised(error: BaseException) -> int:
    """The number of bytes that a refusal advises to set."""
    found = re.search(r"set it to (\d+)", str(error))
    assert found is not None, f"no advice in: {error}"
    return int(found[1])


# Too little, too much


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_a_share_of_less_than_a_block_is_refused_and_the_least_is_named(
    rank: Rank, geometry: WorkerGeometry, slot_bytes: int, workers: int
) -> None:
    share = HostQuota(slot_bytes * workers - 1, workers, 1)
    with pytest.raises(ConfigError, match=f"cpu_bytes_to_use = {share.total}: .* one block of {slot_bytes}") as refused:
        open_pool(rank, geometry, share)
    with closing(open_pool(rank, geometry, replace(share, total=advised(refused.value)))) as pool:
        assert pool.slots == 1


@pytest.mark.parametrize(("workers", "here"), [(1, 1), (2, 2), (4, 2), (3, 3)])
def test_more_than_the_machine_has_is_refused_and_what_fits_is_named(
    rank: Rank, geometry: WorkerGeometry, slot_bytes: int, workers: int, here: int
) -> None:
    share = HostQuota(AVAILABLE // here * workers + workers, workers, here)
    with pytest.raises(ConfigError, match=f"cpu_bytes_to_use = {share.total}: .* {AVAILABLE} are avail") as refused:
        open_pool(rank, geometry, share)
    with closing(open_pool(rank, geometry, replace(share, total=advised(refused.value)))) as pool:
        assert pool.slots == AVAILABLE // here // slot_bytes


def test_all_that_the_machine_has_is_accepted(rank: Rank, geometry: WorkerGeometry, slot_bytes: int) -> None:
    with closing(open_pool(rank, geometry, HostQuota(AVAILABLE, 1, 1))) as pool:
        assert pool.slots == AVAILABLE // slot_bytes


def test_workers_share_equally_and_only_those_on_this_machine_count(slot_bytes: int) -> None:
    share = HostQuota(10 * slot_bytes, workers=4, workers_here=2)
    assert share.bytes == 10 * slot_bytes // 4
    share.check_fits(MachineMemory(1 << 40, 2 * share.bytes), at_once=False)
    with pytest.raises(ConfigError, match=f"{2 * share.bytes} bytes would be taken"):
        share.check_fits(MachineMemory(1 << 40, 2 * share.bytes - 1), at_once=False)


@pytest.mark.parametrize("workers", [2, 8])
def test_what_other_workers_have_pinned_by_now_is_not_counted_twice(workers: int) -> None:
    share, total = HostQuota(1200, workers, workers), 1300
    for pinned in range(workers):
        share.check_fits(MachineMemory(total, total - pinned * share.bytes), at_once=True)


@pytest.mark.parametrize("memory", [MachineMemory(1199, 1199), MachineMemory(2000, 599), MachineMemory(1199, 2000)])
def test_what_does_not_fit_is_refused_though_it_is_pinned_by_one_after_the_other(memory: MachineMemory) -> None:
    with pytest.raises(ConfigError, match="1200 bytes would be taken") as refused:
        HostQuota(1200, 2, 2).check_fits(memory, at_once=True)
    HostQuota(advised(refused.value), 2, 2).check_fits(memory, at_once=True)


@pytest.mark.parametrize(("slots", "rest"), [(1, 0), (3, 0), (3, 1), (3, -1)])
def test_slots_are_whole(geometry: WorkerGeometry, slot_bytes: int, slots: int, rest: int) -> None:
    share = HostQuota(slots * slot_bytes + rest, 1, 1)
    assert share.slots(host_layout(geometry)) == (slots - 1 if rest < 0 else slots)


# Caches that cannot be kept


def test_caches_on_an_unknown_device_are_refused(geometry: WorkerGeometry) -> None:
    with pytest.raises(ConfigError, match="KV caches on meta cannot be kept in host memory; set it to 0"):
        HostPool.open(HostQuota(AVAILABLE, 1, 1), geometry, [torch.empty(4, device="meta")], StatsRecorder())


def test_caches_that_cannot_be_described_are_refused(rank: Rank, geometry: WorkerGeometry) -> None:
    [group] = geometry.groups
    [plane] = group.planes
    overlapping = replace(group, planes=(plane, replace(plane, address=plane.address + plane.item_size)))
    with pytest.raises(ConfigError, match=r"cpu_bytes_to_use: cache group 0: .*share.*; set it to 0"):
        open_pool(rank, replace(geometry, groups=(overlapping,)), HostQuota(AVAILABLE, 1, 1))


@pytest.mark.parametrize(
    "error", [CopierStartError("the driver pins no more"), OSError(12, "there is no more"), MemoryError("no more")]
)
def test_memory_that_cannot_be_pinned_is_refused(
    rank: Rank, geometry: WorkerGeometry, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuses(*_: object) -> None:
        raise error

    monkeypatch.setattr(host_pool, "pinned_memory", refuses)
    with pytest.raises(ConfigError, match=f"cpu_bytes_to_use = {AVAILABLE}: .*no more"):
        open_pool(rank, geometry, HostQuota(AVAILABLE, 1, 1))


@pytest.mark.parametrize("direction", [Direction.DEVICE_TO_HOST, Direction.HOST_TO_DEVICE])
def test_a_copier_that_does_not_start_is_refused_and_leaves_nothing(
    rank: Rank, geometry: WorkerGeometry, monkeypatch: pytest.MonkeyPatch, direction: Direction
) -> None:
    def fails(backend: Backend, opened: Direction, device: int) -> BatchCopier:
        if opened is direction:
            raise CopierStartError("no stream can be had")
        return open_copier(backend, opened, device)

    monkeypatch.setattr(host_pool, "open_copier", fails)
    with pytest.raises(ConfigError, match=f"cpu_bytes_to_use = {AVAILABLE}: no stream can be had"):
        open_pool(rank, geometry, HostQuota(AVAILABLE, 1, 1))


# What is opened


def test_a_block_makes_the_way_there_and_back(rank: Rank, geometry: WorkerGeometry, slot_bytes: int) -> None:
    with closing(open_pool(rank, geometry, HostQuota(5 * slot_bytes, 1, 1))) as pool:
        assert pool.slots == 5
        before = rank.memory.copy()
        moves = BlockMoves.of([(0, block, block - 1) for block in range(1, 6)])
        pool.copies.store(StoreOrder(0, moves))
        until(lambda: bool(pool.copies.take_stores()))
        rank.memory[:] = 0
        pool.copies.load(LoadOrder("r", moves, 80))
        until(lambda: bool(pool.copies.take_loads()))
        changed = before != rank.memory
        pool.copies.load(LoadOrder("again", moves, 80))
        until(lambda: bool(pool.copies.take_loads()))
        block_bytes = host_layout(geometry).groups[0].block_bytes
        assert int((rank.memory != 0).sum()) > 4 * block_bytes  # noise, of which a few bytes are zero
        assert not (changed & (rank.memory != 0)).any(), "what has come back is not what was there"


def test_stores_that_fail_in_every_step_are_counted_and_logged_once(
    rank: Rank, geometry: WorkerGeometry, slot_bytes: int, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(logging.getLogger("pd_connector"), "propagate", True)
    stats = StatsRecorder()
    pool = HostPool.open(HostQuota(5 * slot_bytes, 1, 1), geometry, [torch.from_numpy(rank.memory)], stats)
    with closing(pool):
        pool.copies._store_copier.close()  # takes nothing any more
        for store_id in range(3):
            pool.execute(Orders(stores=(StoreOrder(store_id, BlockMoves.of([(0, 1, 0)])),)))
            assert pool.take_report().stores[store_id].failed
    taken = stats.take()
    assert taken is not None
    assert taken["counts"] == {"host_failures:store": 3}
    assert caplog.text.count("1 blocks could not be stored in host memory") == 1


def test_its_memory_is_whole_pages_and_closing_it_twice_is_well(
    rank: Rank, geometry: WorkerGeometry, slot_bytes: int
) -> None:
    pool = open_pool(rank, geometry, HostQuota(5 * slot_bytes, 1, 1))
    region = pool._memory.region
    assert region.address % mmap.PAGESIZE == 0
    assert region.size == 5 * slot_bytes
    pool.join()
    pool.join()


@pytest.mark.parametrize("backend", [Backend.CUDA, Backend.ACL])
def test_where_memory_is_taken_as_it_is_pinned_other_workers_may_have_theirs(
    rank: Rank, geometry: WorkerGeometry, monkeypatch: pytest.MonkeyPatch, backend: Backend
) -> None:
    monkeypatch.setattr(host_pool, "machine_memory", lambda: MachineMemory(AVAILABLE, AVAILABLE // 2))
    share = HostQuota(AVAILABLE, 2, 2)
    with pytest.raises(ConfigError, match="would be taken"):
        open_pool(rank, geometry, share)
    monkeypatch.setitem(host_pool._BACKENDS, "cpu", backend)
    monkeypatch.setattr(host_pool, "open_copier", lambda _, *rest: open_copier(Backend.HOST, *rest))
    monkeypatch.setattr(host_pool, "pinned_memory", lambda _, *rest: pinned_memory(Backend.HOST, *rest))
    open_pool(rank, geometry, share).join()


# Where its memory lies


@needs_a_choice
def test_its_memory_prefers_the_node_that_is_near_and_a_line_says_so(
    rank: Rank, geometry: WorkerGeometry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    asked: list[torch.device] = []

    def near(device: torch.device) -> NearNode:
        asked.append(device)
        return NearNode(online(), "it is near")

    monkeypatch.setattr(host_pool, "near_node", near)
    tensors = [torch.from_numpy(rank.memory)]
    pool = HostPool.open(HostQuota(AVAILABLE, 1, 1), geometry, tensors, StatsRecorder())
    with closing(pool):
        assert asked == [tensors[0].device]
        assert policy(pool.region) == f"prefer:{online()}"
        assert f"NUMA node {online()} is preferred" in caplog.text
        assert "it is near" in caplog.text
