"""The worker half of the host tier over the CUDA backend, on a simulated driver: no GPU is involved.

Caches are described as the connector does, blocks go to host memory and back by ``HostCopies``, and the device stands
still or fails in between. Where ``HostPool`` takes ``torch.cuda``'s streams there are the simulated driver's here, and
its device memory is memory of this process that the driver keeps apart.
"""

import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
import pytest
import torch

from layout.host_blocks import host_layout
from pd_connector.orders import BlockMoves, LoadOrder, StoreEnds, StoreOrder
from pd_connector.vllm.cache_groups import GroupSpec, Ranks
from pd_connector.worker.caches import describe_caches
from pd_connector.worker.host_copies import HostCopies, UnsettledLoadError
from tests.support.connector.tensors import stated_of
from tests.support.devices.fake_cuda import STREAM_ORDER, CudaDevice, FakeCuda, FakeEvent, FakeStream
from tests.support.memory import Bytes, noise
from tests.support.waiting import WAIT_S, until
from transfer.batch_copy.base import Direction

LOAD, STORE = Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST
LAYERS, BLOCKS, HEADS, TOKENS, CONTENT, SLOTS = 3, 8, 2, 16, 32, 4
BLOCK_BYTES = HEADS * TOKENS * CONTENT  # of a layer

Key = TypeVar("Key")
End = TypeVar("End")


class Worker:
    """A rank's caches in the driver's device memory, its host slots, and the stream that its model works on."""

    def __init__(self, cuda: CudaDevice, *, cross_layer: bool) -> None:
        memory = cuda.driver.device_memory(LAYERS * BLOCKS * BLOCK_BYTES)
        memory[:] = noise(len(memory), 1)
        self.caches: Bytes = (  # [layers, blocks, bytes]
            memory.reshape(BLOCKS, LAYERS, BLOCK_BYTES).transpose(1, 0, 2)
            if cross_layer
            else memory.reshape(LAYERS, BLOCKS, BLOCK_BYTES)
        )
        tensors = {
            f"layer {number}": torch.from_numpy(cache).view(BLOCKS, HEADS, TOKENS, CONTENT)
            for number, cache in enumerate(self.caches)
        }
        stated = {name: stated_of(tensor) for name, tensor in tensors.items()}
        groups = [GroupSpec(tuple(tensors), TOKENS, 0, BLOCKS, stated)]
        layout = host_layout(describe_caches(tensors, groups, Ranks(0, 1, 0, 1), ""))
        self.driver = cuda.driver
        self.go_on = threading.Event()
        self.runs = len(layout.groups[0])
        self.pinned = cuda.runtime.pinned(SLOTS * layout.slot_bytes)
        self.model = cuda.copier_and_stream(LOAD)[1]
        stores, self.stores_stream = cuda.copier_and_stream(STORE)
        loads, self.loads_stream = cuda.copier_and_stream(LOAD)
        self.copies = HostCopies(layout, self.pinned.region, stores, loads, self._mark)

    def _mark(self) -> FakeEvent:
        event = self.model.record_event()
        self.model.handle()
        return event

    def compute(self, block: int, values: Bytes) -> None:
        """Queue the writing of a block on the model's stream."""
        self.model.push(lambda: self.caches.__setitem__((slice(None), block), values))

    def hold(self, stream: FakeStream) -> None:
        """Let a stream wait for ``go_on``, and no other."""
        stream.push(lambda: self.go_on.wait(WAIT_S))

    def store(self, *pairs: tuple[int, int]) -> None:
        self.copies.store(StoreOrder(0, BlockMoves.of([(0, *pair) for pair in pairs])))

    def load(self, *pairs: tuple[int, int]) -> None:
        self.copies.load(LoadOrder("request", BlockMoves.of([(0, *pair) for pair in pairs]), TOKENS))

    def ended(self, take: Callable[[], dict[Key, End]]) -> End:
        """Ask until something has ended; nothing else is under way."""
        ((_, end),) = until(take, "a copy has ended").items()
        return end

    def close(self) -> None:
        self.driver.running.set()
        self.go_on.set()
        self.stores_stream.lost = self.loads_stream.lost = ""
        self.copies.check_integrity()
        self.copies.close()
        for stream in (self.model, self.stores_stream, self.loads_stream):
            stream.synchronize()  # a test that has failed may have left work to them
        self.pinned.close()


@pytest.fixture(params=[True, False], ids=["batches", "single copies"])
def cuda(request: pytest.FixtureRequest) -> Iterator[CudaDevice]:
    device = CudaDevice(FakeCuda(has_batches=request.param))
    yield device
    device.close()


@pytest.fixture(params=[False, True], ids=["by layer", "cross-layer"])
def worker(request: pytest.FixtureRequest, cuda: CudaDevice) -> Iterator[Worker]:
    made = Worker(cuda, cross_layer=request.param)
    yield made
    made.close()


def fresh(seed: int) -> Bytes:
    """New contents of a block: [layers, bytes]."""
    return noise(LAYERS * BLOCK_BYTES, seed).reshape(LAYERS, BLOCK_BYTES)


def stored(worker: Worker, *pairs: tuple[int, int]) -> None:
    worker.store(*pairs)
    end, ends = worker.ended(worker.copies.take_stores)
    assert (end.failure, end.blocks, ends) == ("", len(pairs), StoreEnds(1))


def test_blocks_come_back_byte_for_byte(worker: Worker) -> None:
    before = worker.caches.copy()
    stored(worker, (1, 0), (2, 1), (5, 3))
    np.testing.assert_array_equal(worker.caches, before)
    worker.caches[:] = noise(before.size, 2).reshape(before.shape)
    expected = worker.caches.copy()
    expected[:, [7, 2, 1]] = before[:, [1, 2, 5]]
    worker.load((7, 0), (2, 1), (1, 3))
    end = worker.ended(worker.copies.take_loads)
    assert (end.failure, end.copied_bytes) == ("", 3 * LAYERS * BLOCK_BYTES)
    np.testing.assert_array_equal(worker.caches, expected)


def test_a_store_waits_for_what_the_model_writes(worker: Worker) -> None:
    worker.driver.running.clear()
    worker.compute(3, fresh(5))
    worker.store((3, 0))
    assert worker.copies.take_stores() == {}
    worker.driver.running.set()
    assert worker.ended(worker.copies.take_stores)[1] == StoreEnds(1)
    worker.load((6, 0))
    assert not worker.ended(worker.copies.take_loads).failure
    np.testing.assert_array_equal(worker.caches[:, 6], fresh(5))


def test_a_load_waits_for_what_the_model_still_reads(worker: Worker) -> None:
    stored(worker, (1, 0))
    old, seen = worker.caches[:, 3].copy(), np.zeros((LAYERS, BLOCK_BYTES), np.uint8)
    worker.hold(worker.model)
    worker.model.push(lambda: seen.__setitem__(slice(None), worker.caches[:, 3]))
    worker.load((3, 0))
    time.sleep(0.01)  # time enough to be wrong
    assert worker.copies.take_loads() == {}
    worker.go_on.set()
    assert not worker.ended(worker.copies.take_loads).failure
    np.testing.assert_array_equal(seen, old)
    np.testing.assert_array_equal(worker.caches[:, 3], worker.caches[:, 1])


def test_sources_are_read_in_the_order_of_the_stream(worker: Worker) -> None:
    """Behind a mark nothing may be read early, not even host memory."""
    stored(worker, (1, 0))
    worker.load((3, 0))
    worker.ended(worker.copies.take_loads)
    assert {order for order, _ in worker.driver.batches} <= {STREAM_ORDER}
    assert len(worker.driver.singles) + sum(len(entries) for _, entries in worker.driver.batches) == 2 * worker.runs


def test_a_store_that_fails_half_way_is_reported(worker: Worker) -> None:
    worker.driver.fail_at = 1
    worker.store((1, 0), (3, 1), (5, 2))
    end, ends = worker.ended(worker.copies.take_stores)
    assert ends == StoreEnds(1, failed=True, unsettled=False)
    assert (end.blocks, end.copied_bytes) == (3, 0)
    assert "cuda, device to host: " in end.failure
    worker.driver.fail_at = None
    stored(worker, (1, 0), (3, 1), (5, 2))


def test_a_load_that_fails_half_way_writes_no_more_when_it_is_reported(worker: Worker) -> None:
    stored(worker, (1, 0), (3, 1), (5, 2))
    worker.driver.fail_at = len(worker.driver.singles) + 1
    worker.hold(worker.loads_stream)
    worker.load((0, 0), (2, 1), (4, 2))
    time.sleep(0.01)  # time enough to be wrong
    assert worker.copies.take_loads() == {}, "the copies before the refused one are still under way"
    worker.go_on.set()
    end = worker.ended(worker.copies.take_loads)
    assert (end.blocks, end.copied_bytes) == (3, 0)
    assert "1 CUDA_ERROR_INVALID_VALUE" in end.failure


def test_a_device_that_is_lost_leaves_slots_unsettled_and_ends_the_engine(worker: Worker) -> None:
    worker.driver.fail_at = 0
    worker.stores_stream.lost = worker.loads_stream.lost = "CUDA error: unspecified launch failure"
    worker.store((1, 0))
    assert worker.ended(worker.copies.take_stores)[1] == StoreEnds(1, failed=True, unsettled=True)
    worker.load((3, 0))
    with pytest.raises(UnsettledLoadError, match=r"request request could not be loaded: .*unspecified launch failure"):
        worker.ended(worker.copies.take_loads)


def test_closing_awaits_the_copies_under_way(worker: Worker) -> None:
    expected = worker.caches[:, 1].copy()
    worker.store((1, 0))
    worker.ended(worker.copies.take_stores)
    worker.hold(worker.loads_stream)
    worker.load((3, 0))
    while len(worker.driver.singles) + len(worker.driver.batches) < (2 * worker.runs if worker.driver.singles else 2):
        time.sleep(1e-3)
    closing = threading.Thread(target=worker.copies.close)
    closing.start()
    closing.join(0.02)
    assert closing.is_alive(), "the memory would be freed under the copies"
    worker.go_on.set()
    closing.join(WAIT_S)
    np.testing.assert_array_equal(worker.caches[:, 3], expected)
