"""Processes of this host that share device memory until they are killed: on a GPU, or on fake drivers."""

import mmap
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Protocol

import torch

from layout.geometry import Region
from tests.support.devices.shared_devices import DevicesOfProcesses
from tests.support.engine.ipc_engines import FakeIpcEngine
from tests.support.memory import Memory, noise
from transfer.copies.batch.cuda import CudaRuntime
from transfer.copies.batch.streams import DeviceStream
from transfer.engine.cuda_ipc import CudaIpcEngine
from transfer.engine.cuda_ipc_address import ProcessPlace

#: Where a peer's two tensors begin in the one allocation that they share, which has room before and behind them.
STARTS = (1 << 20, 100 << 20)


class SharingDevice(Protocol):
    """What a process has its memory on."""

    allocated_bytes: int
    tensor_bytes: int
    kills: int  # of a test that kills peers

    def engine(self, *, is_read: bool) -> CudaIpcEngine:
        """This process's engine."""

    def allocate(self, size: int) -> torch.Tensor:
        """Zeros."""

    def taken_bytes(self) -> int:
        """Memory that is not free, though its owner may be dead."""


class Gpu:
    """The first one."""

    allocated_bytes, tensor_bytes, kills = 256 << 20, 16 << 20, 50
    device = torch.device("cuda", 0)

    def engine(self, *, is_read: bool) -> CudaIpcEngine:
        from pd_connector.worker.device_memory import DeviceIdentityMemory  # noqa: PLC0415  imports vLLM

        identities = DeviceIdentityMemory(mmap.PAGESIZE, self.device) if is_read else None
        return CudaIpcEngine(CudaRuntime.load(), partial(DeviceStream, "cuda", 0), identities)

    def allocate(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self.device)

    def taken_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self.device)
        return int(total - free)


class FakeGpu:
    """Memory of the fake driver."""

    allocated_bytes, tensor_bytes, kills = 128 << 20, 4 << 20, 8

    def engine(self, *, is_read: bool) -> CudaIpcEngine:
        return FakeIpcEngine(DevicesOfProcesses(), ProcessPlace.here(), is_read=is_read)

    def allocate(self, size: int) -> torch.Tensor:
        return torch.from_numpy(Memory(size).view)

    def taken_bytes(self) -> int:
        return DevicesOfProcesses.taken_bytes()


def region_of(tensor: torch.Tensor) -> Region:
    """Its bytes."""
    return Region(tensor.data_ptr(), tensor.nbytes)


def sent(device: SharingDevice, number: int) -> torch.Tensor:
    """What a peer has in one of its tensors."""
    return torch.from_numpy(noise(device.tensor_bytes, number))


def _serve(device: SharingDevice, pipe: Connection) -> None:
    """Be the peer, until it is killed."""
    memory = device.allocate(device.allocated_bytes)
    tensors = [memory[start : start + device.tensor_bytes] for start in STARTS]
    for number, tensor in enumerate(tensors):
        tensor.copy_(sent(device, number))
        tensor[-1].item()  # waits until it is there
    engine = device.engine(is_read=True)
    regions = [region_of(tensor) for tensor in tensors]
    engine.register(regions)
    pipe.send((engine.address, engine.refusal, regions))
    pipe.recv()


@contextmanager
def a_peer(device: SharingDevice) -> Iterator[tuple[BaseProcess, str, list[Region]]]:
    """The process, its engine's address, and its tensors."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # no process waits for imports, and none has a CUDA context before
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(device, theirs))
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
