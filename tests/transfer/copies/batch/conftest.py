from collections.abc import Iterator

import pytest

from tests.support.devices.fake_cuda import CudaDevice, FakeCuda


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
