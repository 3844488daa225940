"""The CUDA backend on a real GPU, where there is one: bytes, order behind the model's stream, and refusals."""

import ctypes
import time

import numpy as np
import pytest
import torch

from layout.copies import Copies
from tests.support.memory import noise, shuffled_copies
from tests.support.waiting import WAIT_S
from transfer.batch_copy.backends import Backend, open_copier, pinned_memory
from transfer.batch_copy.base import CopyFailed, Direction
from transfer.batch_copy.cuda import CudaRuntime

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

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
        loaded = load.submit(copies)
        whole = Copies(*(np.array([n]) for n in (back.region.address, cache.data_ptr(), total)))
        store.submit(whole, after=loaded).wait(WAIT_S)
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


def test_an_address_that_is_none_is_refused_and_the_device_goes_on() -> None:
    cache, memory = torch.zeros(64, dtype=torch.uint8, device="cuda"), pinned_memory(Backend.CUDA, 64)
    with open_copier(Backend.CUDA, LOAD) as load:
        with pytest.raises(CopyFailed) as caught:
            load.submit(Copies(*(np.array([n]) for n in (16, memory.region.address, 64)))).wait(WAIT_S)
        assert caught.value.settled
        load.submit(Copies(*(np.array([n]) for n in (cache.data_ptr(), memory.region.address, 64)))).wait(WAIT_S)


def test_the_driver_tells_pinned_memory_from_other() -> None:
    torch.zeros(1, device="cuda")
    runtime, memory = CudaRuntime.load(), pinned_memory(Backend.CUDA, 4096)
    assert not runtime.is_pageable(memory.region.address)
    assert runtime.is_pageable(noise(4096).ctypes.data)
