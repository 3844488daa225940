"""Ranks of the oracles that read through staging and by the kernel, in the memory of a device of ``KERNEL_DEVICES``."""

import ctypes
from typing import Any

import torch

from layout.copies import Copies
from layout.cost import CostModel
from layout.geometry import Region
from layout.regions import RegionTable
from pd_connector.worker.device_fence import landing
from pd_connector.worker.remote_reader import SLOTS, RemoteReader
from tests.support.connector.nhd_pulls import LocalWire
from tests.support.connector.state_caches import StateRank
from tests.support.layout.oracle import Rank
from transfer.copies.reshape.reshape_kernel import KernelCopier, RunKernel

STAGING_BYTES = SLOTS * (512 << 10)


def wire_of(device: torch.device) -> LocalWire:
    """What stands for a transfer engine that reads from one memory of a device into another.

    On CUDA it copies as Mooncake does over TCP: on the default stream, and may return before the bytes are there.
    """
    return LocalWire() if device.type == "cpu" else LocalWire(copy=ctypes.CDLL("libcuda.so.1").cuMemcpy)


def reader_on(device: torch.device, regions: tuple[Region, ...], caches: list[torch.Tensor]) -> RemoteReader:
    """A reader of caches on a device, with a staging buffer there, that reshapes by the kernel."""
    cost, land = CostModel.of_protocol("tcp"), landing("tcp", device)
    reader = RemoteReader.with_device_staging(cost, regions, STAGING_BYTES, caches, land)
    assert isinstance(reader._copy, KernelCopier)
    return reader


class StagedRanks:
    """Carries out what ranks read. ``sizes``: of each read, the bytes that were staged."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.sizes: list[int] = []

    def replace_copies(self, monkeypatch: Any) -> "StagedRanks":
        """Have the oracles' ranks keep count of what is to be written, and write it by the reader only.

        The kernel is not tried at each start, which takes longer than a small pull.
        """
        monkeypatch.setattr(RunKernel, "_try", lambda *_: None)
        for kind in (Rank, StateRank):
            monkeypatch.setattr(kind, "receive", self._in_place_of(kind.receive))
        return self

    def _in_place_of(self, count: Any) -> Any:
        def receive(rank: Any, copies: Copies, source: Any) -> None:
            before = rank.memory.copy()
            count(rank, copies, source)
            rank.memory[:] = before
            self._read(rank, copies, source)

        return receive

    def _read(self, rank: Rank | StateRank, copies: Copies, source: Rank | StateRank) -> None:
        ours, theirs = (torch.from_numpy(each.memory).to(self._device) for each in (rank, source))
        here, there = (Region(each.data_ptr(), each.nbytes) for each in (ours, theirs))
        reader = reader_on(self._device, (here,), [ours])
        placed = Copies(
            copies.destinations - rank.base + here.address, copies.sources - source.base + there.address, copies.sizes
        )
        with reader.planned(placed, RegionTable((there,))) as schedule:
            reader.carry_out(wire_of(self._device), schedule, 60.0)
        reader.land()  # what was read without staging
        rank.memory[:] = ours.cpu().numpy()
        self.sizes.append(int(schedule.staged_bytes))
