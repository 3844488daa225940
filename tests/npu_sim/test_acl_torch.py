"""The ACL backend under the real torch_npu on the simulated runtime: its streams, its events, its task queue, devices.

torch_npu hands copies, records and waits to a queue that another thread empties; whoever calls the runtime directly
must not overtake it. Nothing here has run on an NPU.
"""

import ctypes
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from tests.support.devices.npu_device import view
from tests.support.memory import Bytes, one_copy, shuffled_copies
from tests.support.waiting import WAIT_S
from transfer.copies.batch.acl import AclRuntime
from transfer.copies.batch.backends import Backend, open_copier, pinned_memory
from transfer.copies.batch.base import CopierStartError, Direction
from transfer.copies.batch.copier import BatchCopier
from transfer.copies.batch.device import DeviceBackend
from transfer.copies.batch.streams import DeviceStream
from transfer.memory import PinnedMemory

LOAD, STORE = Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST
SIZE = 64

Calls = Callable[[str], int]


@pytest.fixture(params=[0, 1], ids=["npu:0", "npu:1"])
def device(request: pytest.FixtureRequest) -> Iterator[int]:
    torch.npu.set_device(request.param)
    yield request.param
    torch.npu.set_device(0)


def pinned(device: int, size: int, seed: int) -> tuple[PinnedMemory, Bytes]:
    memory = pinned_memory(Backend.ACL, size, device)
    view(memory)[:] = np.random.default_rng(seed).integers(1, 256, size, np.uint8)
    return memory, view(memory)


def zeros(device: int, size: int) -> torch.Tensor:
    tensor = torch.empty(size, dtype=torch.uint8, device=f"npu:{device}")
    tensor.copy_(torch.zeros(size, dtype=torch.uint8))
    torch.npu.synchronize(device)
    return tensor


@pytest.mark.parametrize(("count", "size"), [(1, 1), (10_240, 64), (8, 1 << 20)])
def test_blocks_go_to_the_device_and_back(device: int, count: int, size: int) -> None:
    cache = zeros(device, count * size)
    (source_memory, source), (back_memory, back) = pinned(device, count * size, 1), pinned(device, count * size, 2)
    copies, places = shuffled_copies(cache.data_ptr(), source_memory.region.address, count, size)
    with open_copier(Backend.ACL, LOAD, device) as load, open_copier(Backend.ACL, STORE, device) as store:
        load.submit(copies).wait(WAIT_S)
        store.submit(one_copy(back_memory.region.address, cache.data_ptr(), count * size)).wait(WAIT_S)
    np.testing.assert_array_equal(back.reshape(count, size), source.reshape(count, size)[places])
    np.testing.assert_array_equal(cache.cpu().numpy(), back)


def test_two_devices_copy_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMACL_COPY_US", "100")
    count = 200
    caches = [zeros(device, count * SIZE) for device in (0, 1)]
    sources = [pinned(0, count * SIZE, seed) for seed in (1, 2)]
    copiers = [open_copier(Backend.ACL, LOAD, device) for device in (0, 1)]
    places, handles = [], []
    for cache, (memory, _), copier in zip(caches, sources, copiers, strict=True):
        copies, place = shuffled_copies(cache.data_ptr(), memory.region.address, count, SIZE)
        places.append(place)
        handles.append(copier.submit(copies))
    for handle, copier in zip(handles, copiers, strict=True):
        handle.wait(WAIT_S)
        copier.close()
    for cache, (_, source), place in zip(caches, sources, places, strict=True):
        np.testing.assert_array_equal(cache.cpu().numpy().reshape(-1, SIZE), source.reshape(-1, SIZE)[place])


def test_pinned_memory_is_pinned_for_torch_too(device: int, calls: Calls) -> None:
    memory, source = pinned(device, SIZE, 1)
    cache = torch.empty(SIZE, dtype=torch.uint8, device=f"npu:{device}")
    with open_copier(Backend.ACL, LOAD, device) as load:
        load.submit(one_copy(cache.data_ptr(), memory.region.address, SIZE)).wait(WAIT_S)
    assert calls("pageable_copies") == 0
    np.testing.assert_array_equal(cache.cpu().numpy(), source)


# Streams, events and the task queue


class KeptHandle(DeviceStream):
    """What must not be done: the handle is asked for once and kept."""

    def __init__(self, platform: str, device: int) -> None:
        super().__init__(platform, device)
        self._kept = super().handle()

    def handle(self) -> int:
        return self._kept


def wrong_stores(store: BatchCopier, device: int, rounds: int, *, until_wrong: bool = False) -> int:
    """Write a block on the model's stream, store it behind an event; how often the stored bytes are not those."""
    cache = torch.empty(SIZE, dtype=torch.uint8, device=f"npu:{device}")
    values = [torch.full((SIZE,), n, dtype=torch.uint8).pin_memory() for n in range(2)]
    memory, back = pinned(device, SIZE, 1)
    wrong = 0
    for n in range(rounds):
        for _ in range(20):  # keeps the task queue busy
            cache.copy_(values[1 - n % 2], non_blocking=True)
        cache.copy_(values[n % 2], non_blocking=True)
        written = torch.npu.Event()
        written.record()
        store.submit(one_copy(memory.region.address, cache.data_ptr(), SIZE), after=written).wait(WAIT_S)
        wrong += bool((back != n % 2).any())
        torch.npu.synchronize(device)
        if wrong and until_wrong:
            break
    return wrong


@pytest.mark.parametrize("copy_us", ["0", "200"])
def test_a_store_never_overtakes_the_event_that_it_waits_for(
    device: int, copy_us: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIMACL_COPY_US", copy_us)
    with open_copier(Backend.ACL, STORE, device) as store:
        assert wrong_stores(store, device, 100) == 0


def test_with_a_kept_handle_it_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hazard is there, so that the test above can fail."""
    monkeypatch.setenv("SIMACL_COPY_US", "200")
    runtime = AclRuntime.load(0)
    with BatchCopier(DeviceBackend(runtime, KeptHandle("npu", 0), STORE), "kept handle") as store:
        assert wrong_stores(store, 0, 500, until_wrong=True) > 0


def test_a_handle_is_not_done_before_its_copies_are(device: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, (memory, source) = zeros(device, SIZE), pinned(device, SIZE, 1)
    there = np.zeros(SIZE, np.uint8)
    acl = ctypes.CDLL("libascendcl.so")
    acl.aclrtMemcpy.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with open_copier(Backend.ACL, LOAD, device) as load:
        monkeypatch.setenv("SIMACL_COPY_US", "2000")
        for n in range(50):
            view(memory)[:] = n
            handle = load.submit(one_copy(cache.data_ptr(), memory.region.address, SIZE))
            while not handle.query():
                pass
            assert acl.aclrtMemcpy(there.ctypes.data, SIZE, cache.data_ptr(), SIZE, 2) == 0  # past every stream
            np.testing.assert_array_equal(there, source)


def test_a_slow_model_does_not_hold_the_caller(device: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, (memory, _) = zeros(device, SIZE), pinned(device, SIZE, 1)
    value = torch.full((SIZE,), 7, dtype=torch.uint8).pin_memory()
    with open_copier(Backend.ACL, STORE, device) as store:
        monkeypatch.setenv("SIMACL_COPY_US", "100000")
        cache.copy_(value, non_blocking=True)
        written = torch.npu.Event()
        written.record()
        handle = store.submit(one_copy(memory.region.address, cache.data_ptr(), SIZE), after=written)
        assert not written.query()  # submitted, and back here, while the model still computes
        assert not handle.query()
        handle.wait(WAIT_S)
    assert (view(memory) == 7).all()


def test_handles_may_be_asked_in_another_thread(device: int) -> None:
    cache, (memory, _) = zeros(device, SIZE), pinned(device, SIZE, 1)
    errors: list[Exception] = []
    with open_copier(Backend.ACL, LOAD, device) as load:
        handle = load.submit(one_copy(cache.data_ptr(), memory.region.address, SIZE))

        def ask() -> None:
            try:
                handle.wait(WAIT_S)
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert not errors


def test_the_device_is_the_copiers_in_its_thread(device: int) -> None:
    """torch would make do without; the runtime refuses streams of another device than the thread's."""
    acl, found = ctypes.CDLL("libascendcl.so"), ctypes.c_int32(-1)
    stream = DeviceStream("npu", device)

    def enter() -> None:
        stream.enter_thread()
        assert acl.aclrtGetDevice(ctypes.byref(found)) == 0

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert found.value == device


def test_a_device_that_is_not_there_makes_no_copier() -> None:
    with pytest.raises(CopierStartError, match=r"no stream on npu:7: .*107001.*\. It needs torch and torch_npu"):
        open_copier(Backend.ACL, LOAD, 7)
