"""Engines for peers on one host, each as if in a process of its own, on fake drivers that share their memory."""

import ctypes
import itertools
import mmap
from collections.abc import Iterator, Sequence
from typing import cast

from layout.geometry import Region
from tests.support.devices.fake_cuda import FakeCuda, FakeStream
from tests.support.devices.shared_devices import SharedDevices
from transfer.copies.batch.cuda import CudaRuntime
from transfer.engine.cuda_ipc import CudaIpcEngine
from transfer.engine.cuda_ipc_address import ProcessPlace
from transfer.engine.identity import HostIdentityMemory

_PIDS = itertools.count(1000)  # of processes


class FakeIpcEngine(CudaIpcEngine):
    """The engine of a process of its own. What is registered becomes device memory of its driver."""

    def __init__(
        self,
        devices: SharedDevices,
        here: ProcessPlace | None = None,
        *,
        is_read: bool = True,
        has_batches: bool = True,
        gpu: int = 0,
    ) -> None:
        self.driver = FakeCuda(devices=devices, has_batches=has_batches)
        self.driver.uuid = bytes([gpu]) * 16
        identities = HostIdentityMemory(mmap.PAGESIZE)
        self.driver.adopt(identities.region)
        runtime = CudaRuntime(cast(ctypes.CDLL, self.driver))
        here = here or ProcessPlace("this boot", next(_PIDS), 1)
        super().__init__(runtime, lambda: FakeStream(self.driver), identities if is_read else None, here)

    def register(self, regions: Sequence[Region]) -> None:
        for region in regions:
            if region.size:
                self.driver.adopt(region)
        super().register(regions)

    def close(self) -> None:
        super().close()
        self.check_integrity()
        assert not self.driver.unmapped_in_use, "memory was unmapped under copies"
        self.driver.close()


def ipc_engines() -> Iterator[FakeIpcEngine]:
    devices = SharedDevices()
    while True:
        yield FakeIpcEngine(devices)
