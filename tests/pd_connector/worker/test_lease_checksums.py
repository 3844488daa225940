"""A prefill worker's checksums: taken in order beside the model, reported once, given up at once at shutdown.

Covers: transfer.copies.checksums.device_reader.
"""

import logging
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from layout.copies import Int64Array
from layout.geometry import Plane, Region, WorkerGeometry
from layout.plan import BlockTable
from pd_connector.orders import ChecksumOrder, ChecksumReport, Orders
from pd_connector.worker import lease_checksums as checksums
from pd_connector.worker.lease_checksums import CacheChecksums, LeaseChecksums
from tests.support.connector.engines import MODEL, PREFILL, placed
from tests.support.layout.oracle import LAYOUTS, Engine, Extra, Model, Rank, build
from tests.support.waiting import until
from transfer.copies.checksums.block_checksums import ReadableBlocks, in_place, sum_plane
from transfer.copies.checksums.device_reader import DeviceReader


@pytest.fixture
def rank() -> Rank:
    return placed(build(MODEL, PREFILL, 1, 1 << 40))[0]


class Gate:
    """A reader that waits until it is let through, and counts how often it was asked."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()
        self.reads = 0

    def __call__(self, plane: Plane, blocks: Int64Array) -> ReadableBlocks:
        self.reads += 1
        self.entered.set()
        assert self.open.wait(5.0)
        return in_place(plane, blocks)


@pytest.fixture
def gate() -> Iterator[Gate]:
    before = set(threading.enumerate())
    yield Gate()
    assert set(threading.enumerate()) <= before


def an_order(lease_id: str, blocks: tuple[int, ...] = (5, 3, 0, 2)) -> ChecksumOrder:
    return ChecksumOrder(lease_id, (blocks,), 60)


def close(service: LeaseChecksums) -> None:
    service.close()
    service.join()


def taken(service: LeaseChecksums, number: int) -> list[ChecksumReport]:
    found: list[ChecksumReport] = []

    def enough() -> bool:
        found.extend(service.take_report().checksums)
        return len(found) >= number

    until(enough)
    return found


def test_every_order_is_reported_once_with_the_sums_of_its_blocks(rank: Rank) -> None:
    service = LeaseChecksums(CacheChecksums(rank.geometry), 3)
    service.execute(Orders(checksums=(an_order("a"),)))
    service.execute(Orders(checksums=(an_order("b", (1, 2, 3, 4)),)))
    reports = taken(service, 2)
    assert [(report.lease_id, report.worker) for report in reports] == [("a", 3), ("b", 3)]
    (plane,) = rank.geometry.groups[0].planes
    for report, ids in zip(reports, ([5, 3, -1, 2], [1, 2, 3, 4]), strict=True):
        assert report.groups is not None
        expected = sum_plane(plane, 16, BlockTable.of(ids), 0, 60)
        assert report.groups[0][0].totals.tolist() == expected.totals.tolist()
    assert not service.take_report()
    close(service)


def test_an_order_is_not_waited_for(rank: Rank, gate: Gate) -> None:
    service = LeaseChecksums(CacheChecksums(rank.geometry, gate), 0)
    service.execute(Orders(checksums=(an_order("a"),)))
    assert gate.entered.wait(5.0)
    assert not service.take_report()
    gate.open.set()
    assert len(taken(service, 1)) == 1
    close(service)


def test_an_engine_that_shuts_down_reads_no_more_memory(rank: Rank, gate: Gate) -> None:
    service = LeaseChecksums(CacheChecksums(rank.geometry, gate), 0)
    for lease_id in "abc":
        service.execute(Orders(checksums=(an_order(lease_id),)))
    assert gate.entered.wait(5.0)
    later = threading.Timer(0.05, gate.open.set)
    later.start()
    close(service)
    later.join()
    assert gate.reads == 1
    assert len(service.take_report().checksums) <= 1


def test_blocks_that_cannot_be_read_are_reported_as_such_and_the_next_are_read(
    rank: Rank, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("pd_connector"), "propagate", True)
    service = LeaseChecksums(CacheChecksums(rank.geometry), 0)
    service.execute(Orders(checksums=(an_order("a", (5, 3, 99, 2)),)))
    service.execute(Orders(checksums=(an_order("b"),)))
    failed, right = taken(service, 2)
    assert failed.groups is None
    assert right.groups is not None
    assert "no checksums of lease a" in caplog.text
    assert "block 99 does not exist" in caplog.text
    close(service)


# By way of a device


FORMS = ["fused", "views", "apart", "transposed"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", FORMS)
def test_what_a_device_copies_to_the_host_has_the_same_sums(layout: str, form: str) -> None:
    """On the CPU, whose tensors the same operators copy."""
    model = Model(4, (6, 10), 2, ((0, 2), (1,)), (0, 0), (Extra("scale", 1, 4),))
    (rank,) = placed(build(model, Engine(layout, form), 1, 1 << 40))
    reader = DeviceReader([torch.from_numpy(rank.memory)])
    ids = ((5, 3, 0, 2), (1, 0, 7, 6))
    direct, copied = (CacheChecksums(rank.geometry, read) for read in (in_place, reader))
    for here, there in zip(*(each.sums(ids, 0, 60, threading.Event()) for each in (direct, copied)), strict=True):
        assert [plane.totals.tolist() for plane in here] == [plane.totals.tolist() for plane in there]


def test_a_worker_without_caches_has_no_sums() -> None:
    empty = WorkerGeometry(0, 1, 0, 1, "", (), (Region(1, 1),))
    assert CacheChecksums(empty).sums((), 0, 60, threading.Event()) == ()


def test_only_the_blocks_asked_for_are_copied(rank: Rank) -> None:
    (plane,) = rank.geometry.groups[0].planes
    readable = DeviceReader([torch.from_numpy(rank.memory)])(plane, np.array([5, 2]))
    assert isinstance(readable.owner, torch.Tensor)
    assert readable.owner.numel() == 2 * plane.block_bytes
    assert readable.plane.blocks == 2


def test_memory_that_may_still_be_read_is_not_given_up(rank: Rank, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    service = LeaseChecksums(CacheChecksums(rank.geometry, gate), 0)
    service.execute(Orders(checksums=(an_order("a"),)))
    assert gate.entered.wait(5.0)
    monkeypatch.setattr(checksums, "_CLOSE_TIMEOUT_S", 0.05)
    close(service)
    with pytest.raises(RuntimeError, match="did not end"):
        service.check_ended()
    gate.open.set()
    monkeypatch.setattr(checksums, "_CLOSE_TIMEOUT_S", 5.0)
    service.join()
    service.check_ended()
