import ctypes
from collections.abc import Iterator
from typing import cast

import pytest

from tests.transfer.batch_copy.fake_cuda import FakeCuda, FakeStream
from transfer.batch_copy.base import Direction
from transfer.batch_copy.copier import ThreadedCopier
from transfer.batch_copy.cuda import CudaRuntime
from transfer.batch_copy.device import DeviceBackend


class CudaDevice:
    """Copiers on a fake driver."""

    def __init__(self, driver: FakeCuda) -> None:
        self.driver = driver
        self.runtime = CudaRuntime(cast(ctypes.CDLL, driver))
        self._copiers: list[ThreadedCopier] = []

    def copier(self, direction: Direction) -> ThreadedCopier:
        return self.copier_and_stream(direction)[0]

    def copier_and_stream(self, direction: Direction) -> tuple[ThreadedCopier, FakeStream]:
        stream = FakeStream(self.driver)
        copier = ThreadedCopier(DeviceBackend(self.runtime, stream, direction), "copier under test")
        self._copiers.append(copier)
        return copier, stream

    def close(self) -> None:
        self.driver.running.set()
        for copier in self._copiers:
            copier.close()
        self.driver.close()


@pytest.fixture(params=[True, False], ids=["batches", "single copies"])
def any_cuda(request: pytest.FixtureRequest) -> Iterator[CudaDevice]:
    """Both a driver of 12.8 and one from before there were batches."""
    device = CudaDevice(FakeCuda(has_batches=request.param))
    yield device
    device.close()


@pytest.fixture
def cuda() -> Iterator[CudaDevice]:
    device = CudaDevice(FakeCuda())
    yield device
    device.close()
