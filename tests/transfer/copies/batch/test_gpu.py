"""The CUDA backend on a real GPU, where there is one: bytes, order behind the model's stream, and refusals."""

import ctypes
import time

import numpy as np
import pytest
import torch

from layout.copies import Copies
from layout.geometry import Region
from layout.regions import RegionTable
from tests.support.memory import noise, shuffled_copies
from tests.support.waiting import WAIT_S
from transfer.copies.batch.backends import Backend, open_copier, pinned_memory
from transfer.copies.batch.base import CopyBounds, CopyFailed, Direction
from transfer.copies.batch.copier import BatchCopier
from transfer.copies.batch.cuda import CudaRuntime
from transfer.copies.batch.device import DeviceBackend
from transfer.copies.batch.streams import DeviceStream

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LOAD, STORE = Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST


def host_view(address: int, size: int) -> torch.Tensor:
    return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)))


@pytest.mark.parametrize(("count", "size"), [(1, 1), (10_240, 512), (64, 1 << 20)])
def test_blocks_go_to_the_device_and_back(count: int, size: int) -> None:
    total = count * size
    cache = torch.zeros(total, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    source, back = pinned_memory(Backend.CUDA, total), pinned_memory(Backend.CUDA, total)
    values = noise(total)
    host_view(source.region.address, total).copy_(torch.from_numpy(values))
    with open_copier(Backend.CUDA, LOAD) as load, open_copier(Backend.CUDA, STORE) as store:
        copies, places = shuffled_copies(cache.data_ptr(), source.region.address, count, size)
        load.submit(copies).wait(WAIT_S)
        whole = Copies(*(np.array([n]) for n in (back.region.address, cache.data_ptr(), total)))
        store.submit(whole).wait(WAIT_S)
    stored = host_view(back.region.address, total).numpy().reshape(count, size)
    np.testing.assert_array_equal(stored, values.reshape(count, size)[places])


def test_a_store_sees_what_the_kernels_before_its_event_wrote() -> None:
    size = 1 << 20
    cache = torch.zeros(size, dtype=torch.uint8, device="cuda")
    back = pinned_memory(Backend.CUDA, size)
    with open_copier(Backend.CUDA, STORE) as store:
        for value in range(1, 100):
            torch.cuda._sleep(1_000_000)
            cache.fill_(value)
            written = torch.cuda.Event()
            written.record()
            whole = Copies(*(np.array([n]) for n in (back.region.address, cache.data_ptr(), size)))
            store.submit(whole, after=written).wait(WAIT_S)
            assert (host_view(back.region.address, size) == value).all()


def test_the_caller_goes_on_while_the_device_is_busy() -> None:
    size, count = 64, 10_240
    cache, back = torch.zeros(size * count, dtype=torch.uint8, device="cuda"), pinned_memory(Backend.CUDA, size * count)
    with open_copier(Backend.CUDA, STORE) as store:
        torch.cuda._sleep(500_000_000)  # about a quarter of a second
        written = torch.cuda.Event()
        written.record()
        start = time.perf_counter()
        handle = store.submit(shuffled_copies(back.region.address, cache.data_ptr(), count, size)[0], after=written)
        assert time.perf_counter() - start < 0.1
        assert not handle.query()
        handle.wait(WAIT_S)


class LegacyStream(DeviceStream):
    """A stream whose handle is that of the legacy default stream, to which no batch may be submitted."""

    def handle(self) -> int:
        return 0


def test_what_the_driver_refuses_fails_and_the_device_goes_on() -> None:
    """By an argument that it is documented to check. It need not check addresses: a wild one ends the process."""
    runtime = CudaRuntime.load()
    if not runtime.takes_batches:
        pytest.skip("the driver has no batches, whose stream it would check")
    cache, memory = torch.zeros(64, dtype=torch.uint8, device="cuda"), pinned_memory(Backend.CUDA, 64)
    copies = Copies(*(np.array([n]) for n in (cache.data_ptr(), memory.region.address, 64)))
    backend = DeviceBackend(runtime, LegacyStream("cuda", 0), LOAD)
    with BatchCopier(backend, "copier under test") as copier, pytest.raises(CopyFailed, match="refused") as caught:
        copier.submit(copies).wait(WAIT_S)
    assert caught.value.settled
    with open_copier(Backend.CUDA, LOAD) as load:
        load.submit(copies).wait(WAIT_S)


@pytest.mark.parametrize("wild", [16, 0x7F0000000000])
def test_an_address_that_is_none_does_not_reach_the_driver(wild: int) -> None:
    cache, memory = torch.zeros(64, dtype=torch.uint8, device="cuda"), pinned_memory(Backend.CUDA, 64)
    device, host = RegionTable([Region(cache.data_ptr(), 64)]), RegionTable([memory.region])
    with open_copier(Backend.CUDA, LOAD) as load, open_copier(Backend.CUDA, STORE) as store:
        for copier, within, ends in (
            (load, CopyBounds(device, host), (wild, memory.region.address)),
            (load, CopyBounds(device, host), (cache.data_ptr(), wild)),
            (store, CopyBounds(host, device), (wild, cache.data_ptr())),
        ):
            with pytest.raises(CopyFailed, match="outside") as caught:
                copier.submit(Copies(*(np.array([n]) for n in (*ends, 64))), within=within).wait(WAIT_S)
            assert caught.value.settled
        whole = Copies(*(np.array([n]) for n in (cache.data_ptr(), memory.region.address, 64)))
        load.submit(whole, within=CopyBounds(device, host)).wait(WAIT_S)
