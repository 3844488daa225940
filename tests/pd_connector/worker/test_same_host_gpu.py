"""Another process's memory, mapped on a real GPU, where there is one: bytes, rates, and what a dead peer leaves taken.

Not run on a GPU.
"""

import mmap
import multiprocessing
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import numpy as np
import pytest
import torch

from layout.geometry import Region
from pd_connector.worker.device_memory import DeviceIdentityMemory
from tests.support.memory import noise, shuffled_copies
from tests.support.waiting import WAIT_S, until
from transfer.copies.batch.cuda import CudaRuntime
from transfer.copies.batch.streams import DeviceStream
from transfer.engine.cuda_ipc import CudaIpcEngine, CudaIpcLink

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = torch.device("cuda", 0)
#: Where the peer's two tensors begin in the one allocation that they share, which has room before and behind them.
STARTS, TENSOR_BYTES, ALLOCATED_BYTES = (1 << 20, 100 << 20), 16 << 20, 256 << 20


def an_engine(identities: DeviceIdentityMemory | None = None) -> CudaIpcEngine:
    return CudaIpcEngine(CudaRuntime.load(), partial(DeviceStream, DEVICE.type, 0), identities)


def region_of(tensor: torch.Tensor) -> Region:
    return Region(tensor.data_ptr(), tensor.nbytes)


def serve(pipe: Connection) -> None:
    """Be the peer, until it is killed."""
    memory = torch.empty(ALLOCATED_BYTES, dtype=torch.uint8, device=DEVICE)
    tensors = [memory[start : start + TENSOR_BYTES] for start in STARTS]
    for seed, tensor in enumerate(tensors):
        tensor.copy_(torch.from_numpy(noise(TENSOR_BYTES, seed)))
    engine = an_engine(DeviceIdentityMemory(mmap.PAGESIZE, DEVICE))
    regions = [region_of(tensor) for tensor in tensors]
    engine.register(regions)
    pipe.send((engine.address, engine.refusal, regions))
    pipe.recv()


@contextmanager
def a_peer() -> Iterator[tuple[BaseProcess, str, list[Region]]]:
    """The process, its engine's address, and its tensors."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=serve, args=(theirs,))
    process.start()
    theirs.close()  # its end is then the pipe's
    try:
        address, refusal, regions = ours.recv()
        assert address, refusal
        yield process, address, regions
    finally:
        process.kill()
        process.join()
        ours.close()


def read_gb_per_s(
    link: CudaIpcLink, destination: torch.Tensor, source: Region, seed: int, runs: tuple[int, int]
) -> float:
    """Read ``runs``, a number of so many bytes, each to another place, and compare what arrives. Returns the rate."""
    count, size = runs
    copies, places = shuffled_copies(destination.data_ptr(), source.address, count, size)
    destination.zero_()
    torch.cuda.synchronize()
    start = time.perf_counter()
    link.read(copies, WAIT_S)
    seconds = time.perf_counter() - start
    sent = noise(TENSOR_BYTES, seed)[: count * size].reshape(runs)
    np.testing.assert_array_equal(destination[: count * size].cpu().numpy().reshape(runs), sent[places])
    return count * size / seconds / 1e9


def test_another_process_is_read_in_mapped_memory_and_leaves_nothing_taken(capsys: pytest.CaptureFixture[str]) -> None:
    destination = torch.zeros(TENSOR_BYTES, dtype=torch.uint8, device=DEVICE)
    engine = an_engine()
    engine.register([region_of(destination)])
    free_bytes, _ = torch.cuda.mem_get_info(DEVICE)
    with a_peer() as (process, address, regions):
        link = engine.open(address, regions)
        for runs in ((1, 1 << 20), (5000, 2 << 10), (64, 64 << 10)):
            rates = [read_gb_per_s(link, destination, each, seed, runs) for seed, each in enumerate(regions)]
            with capsys.disabled():
                sys.stdout.write("\n{} x {} bytes over CUDA IPC: {:.1f} and {:.1f} GB/s\n".format(*runs, *rates))
        link.prove(WAIT_S)
        process.kill()
        process.join()
        link.close()
    assert link.settled
    engine.check_integrity()
    until(
        lambda: torch.cuda.mem_get_info(DEVICE)[0] > free_bytes - ALLOCATED_BYTES // 2,
        "the device has what the peer had taken",
    )
    engine.close()
    engine.check_settled()
