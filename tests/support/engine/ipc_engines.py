"""Engines for peers on one host, each as if in a process of its own, on fake drivers that share their memory."""

import ctypes
import itertools
import mmap
from collections.abc import Iterator, Sequence
from functools import cache
from typing import cast

from layout.geometry import Region
from tests.support.devices.fake_cuda import FakeCuda, FakeStream
from tests.support.devices.shared_devices import SharedDevices
from transfer.copies.batch.cuda import CudaRuntime
from transfer.copies.reshape.reshape_kernel import RunKernel
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
        kernel: RunKernel | None = None,
    ) -> None:
        self.driver = FakeCuda(devices=devices, has_batches=has_batches)
        self.driver.uuid = bytes([gpu]) * 16
        identities = HostIdentityMemory(mmap.PAGESIZE)
        self.driver.adopt(identities.region)
        runtime = CudaRuntime(cast(ctypes.CDLL, self.driver))
        here = here or ProcessPlace("this boot", next(_PIDS), 1)
        super().__init__(runtime, lambda: FakeStream(self.driver), identities if is_read else None, here, kernel)

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


@cache
def kernel_or_skip() -> RunKernel:
    """The kernel as Triton's interpreter runs it, the same each time; skips a test where there is no Triton."""
    from tests.support.devices.kernel_devices import interpreted_kernel  # noqa: PLC0415  it does not run without

    return interpreted_kernel()


def ipc_engines(kernel: RunKernel | None = None) -> Iterator[FakeIpcEngine]:
    """Each on a GPU of its own."""
    devices = SharedDevices()
    for gpu in itertools.count():
        yield FakeIpcEngine(devices, kernel=kernel, gpu=gpu)
