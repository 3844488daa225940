"""A lease that moves to host memory while the device lags, on a simulated CUDA driver: no GPU is involved.

The scheduler's books and a rank's copies are real. When the copy of the lease's blocks is ordered, what the device
writes to them is still queued on the model's stream.
"""

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest

from pd_connector.orders import StoreEnds, StoreOrder
from tests.support.devices.cuda_worker import BLOCK_BYTES, LAYERS, CudaWorker, fresh_block
from tests.support.devices.fake_cuda import CudaDevice, FakeCuda
from tests.support.host_tier.leasing import BLOCKS, LeasingEngine
from tests.support.memory import Bytes
from tests.support.waiting import holds_for
from transfer.control.messages import Place


@pytest.fixture
def cuda() -> Iterator[CudaDevice]:
    device = CudaDevice(FakeCuda(has_batches=True))
    yield device
    device.close()


def in_slot(worker: CudaWorker, slot: int) -> Bytes:
    """The bytes of a slot, [layers, bytes]: what is read there from afar."""
    address = worker.pinned.region.address + slot * worker.copies.layout.slot_bytes
    return np.frombuffer(ctypes.string_at(address, LAYERS * BLOCK_BYTES), np.uint8).reshape(LAYERS, BLOCK_BYTES)


def begin_to_move(engine: LeasingEngine, worker: CudaWorker) -> StoreOrder:
    """Compute a prompt on a device that stands still, and order its lease to be copied to host memory."""
    assert engine.prefill("lease", 0)
    worker.hold(worker.model)
    for block in engine.tables["lease"][0]:
        worker.compute(block, fresh_block(block))
    engine.is_short = True
    (order,) = engine.moves.step_orders({}).stores
    worker.copies.store(order)
    return order


def end_of_move(engine: LeasingEngine, worker: CudaWorker, order: StoreOrder) -> dict[int, int]:
    """Wait for the copies and report them; the slot of each block."""
    assert worker.ended(worker.copies.take_stores)[1] == StoreEnds(1)
    engine.under_way.append(order.store_id)
    engine.end_store(order.store_id)
    assert engine.leases.locate("lease").place == Place.HOST
    return dict(zip(order.moves.blocks.tolist(), order.moves.slots.tolist(), strict=True))


@pytest.mark.parametrize("cross_layer", [False, True], ids=["by layer", "cross-layer"])
def test_a_move_waits_for_what_the_device_writes_and_its_blocks_go_only_after_it(
    cuda: CudaDevice, *, cross_layer: bool
) -> None:
    engine, worker = LeasingEngine(), CudaWorker(cuda, cross_layer=cross_layer)
    order = begin_to_move(engine, worker)
    holds_for(lambda: not worker.copies.take_stores(), 0.02)
    assert engine.blocks.leased == BLOCKS
    worker.go_on.set()
    slots = end_of_move(engine, worker, order)
    assert engine.blocks.leased == 0
    for block in slots:
        worker.compute(block, fresh_block(100 + block))  # the prompt that gets it next
    worker.model.synchronize()
    for block, slot in slots.items():
        np.testing.assert_array_equal(in_slot(worker, slot), fresh_block(block))
        np.testing.assert_array_equal(worker.caches[:, block], fresh_block(100 + block))
    worker.close()


def test_without_its_mark_a_move_would_overtake_the_device(cuda: CudaDevice) -> None:
    """The hazard is there, so that the test above can fail."""
    engine, worker = LeasingEngine(), CudaWorker(cuda, cross_layer=False, waits=False)
    slots = end_of_move(engine, worker, begin_to_move(engine, worker))
    assert not any(np.array_equal(in_slot(worker, slot), fresh_block(block)) for block, slot in slots.items())
    worker.close()
