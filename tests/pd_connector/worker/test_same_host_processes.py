"""Another process's memory, mapped: bytes, rates, and what a peer that is killed leaves taken.

On fake drivers, and on a GPU where there is one. Not run on a GPU.
"""

import random
import sys
import threading
import time

import numpy as np
import pytest
import torch

from layout.geometry import Region
from tests.support.engine.sharing_processes import FakeGpu, Gpu, SharingDevice, a_peer, region_of, sent
from tests.support.memory import shuffled_copies
from tests.support.waiting import WAIT_S, until
from transfer.engine.cuda_ipc import CudaIpcEngine, CudaIpcLink
from transfer.engine.interface import ReadFailed

on_a_gpu = (pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))
devices = pytest.mark.parametrize("device", [FakeGpu(), pytest.param(Gpu(), marks=on_a_gpu)], ids=["fake", "GPU"])


def read_gb_per_s(
    link: CudaIpcLink, destination: torch.Tensor, source: Region, wanted: torch.Tensor, runs: tuple[int, int]
) -> float:
    """Read ``runs``, a number of so many bytes, each to another place, and compare what arrives. Returns the rate."""
    count, size = runs
    copies, places = shuffled_copies(destination.data_ptr(), source.address, count, size)
    destination.zero_()
    if destination.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    link.read(copies, WAIT_S)
    seconds = time.perf_counter() - start
    arrived = destination[: count * size].cpu().numpy().reshape(runs)
    np.testing.assert_array_equal(arrived, wanted[: count * size].numpy().reshape(runs)[places])
    return count * size / seconds / 1e9


@pytest.mark.thorough
@devices
def test_another_process_is_read_in_mapped_memory_and_leaves_nothing_taken(
    device: SharingDevice, capsys: pytest.CaptureFixture[str]
) -> None:
    destination = device.allocate(device.tensor_bytes)
    engine = device.engine(is_read=False)
    engine.register([region_of(destination)])
    taken = device.taken_bytes()
    with a_peer(device) as (process, address, regions):
        link = engine.open(address, regions)
        for runs in ((1, 1 << 20), (2000, 2 << 10), (64, 64 << 10)):
            rates = [
                read_gb_per_s(link, destination, each, sent(device, number), runs)
                for number, each in enumerate(regions)
            ]
            with capsys.disabled():
                sys.stdout.write("\n{} x {} bytes over CUDA IPC: {:.1f} and {:.1f} GB/s\n".format(*runs, *rates))
        link.prove(WAIT_S)
        process.kill()
        process.join()
        assert device.taken_bytes() > taken
        link.close()
    assert link.settled
    engine.check_integrity()
    until(lambda: device.taken_bytes() < taken + device.tensor_bytes, "the device has what the peer had taken")
    engine.close()
    engine.check_settled()


class Reads(threading.Thread):
    """Reads all of a peer's tensor again and again, until that fails, and compares every byte."""

    def __init__(self, link: CudaIpcLink, destination: torch.Tensor, source: Region, wanted: torch.Tensor) -> None:
        super().__init__()
        self.link, self._destination = link, destination
        self._copies, places = shuffled_copies(destination.data_ptr(), source.address, 1024, source.size // 1024)
        self._wanted = wanted.view(1024, -1)[places.tolist()].ravel()
        self.right, self.wrong = 0, 0
        self.failure: ReadFailed | None = None

    def run(self) -> None:
        try:
            while True:
                self._destination.zero_()
                if self._destination.is_cuda:
                    torch.cuda.synchronize()
                self.link.read(self._copies, WAIT_S)
                is_right = torch.equal(self._destination, self._wanted)
                self.right, self.wrong = self.right + is_right, self.wrong + (not is_right)
        except ReadFailed as error:
            self.failure = error


def read_and_kill(device: SharingDevice, engine: CudaIpcEngine, destination: torch.Tensor, after_s: float) -> None:
    """Kill a peer while all that it has is read; the link is abandoned as when the control connection ends."""
    with a_peer(device) as (process, address, regions):
        reads = Reads(engine.open(address, regions), destination, regions[1], sent(device, 1).to(destination.device))
        reads.start()
        until(lambda: reads.right, "it reads")
        time.sleep(after_s)
        process.kill()
        process.join()
        before = reads.right
        until(lambda: reads.right > before + 1, "what is mapped is read after its owner's death")
        reads.link.abandon()
        reads.join(WAIT_S)
    assert reads.failure is not None
    assert reads.failure.settled, reads.failure
    assert "closed" in str(reads.failure)
    assert not reads.wrong


@pytest.mark.thorough
@devices
def test_a_peer_that_is_killed_in_the_middle_of_copies_costs_the_reader_no_byte_and_no_memory(
    device: SharingDevice,
) -> None:
    """At any moment; the next peer is read as the first one was."""
    destination = device.allocate(device.tensor_bytes)
    engine = device.engine(is_read=False)
    engine.register([region_of(destination)])
    taken, moments = device.taken_bytes(), random.Random(0)
    for _ in range(device.kills):
        read_and_kill(device, engine, destination, moments.uniform(0.0, 0.02))
        until(lambda: device.taken_bytes() < taken + device.tensor_bytes, "what the peer had is free")
        engine.check_integrity()
    engine.close()
    engine.check_settled()
