"""The worker half of the host tier over the CUDA backend, on a simulated driver: no GPU is involved.

Caches are described as the connector does, blocks go to host memory and back by ``HostCopies``, and the device stands
still or fails in between. Where ``HostPool`` takes ``torch.cuda``'s streams there are the simulated driver's here, and
its device memory is memory of this process that the driver keeps apart.
"""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest

from pd_connector.orders import StoreEnds
from pd_connector.worker.host.device_copies import UnsettledLoadError
from tests.support.devices.cuda_worker import BLOCK_BYTES, LAYERS, CudaWorker, fresh_block
from tests.support.devices.fake_cuda import STREAM_ORDER, CudaDevice, FakeCuda
from tests.support.memory import noise
from tests.support.waiting import WAIT_S


@pytest.fixture(params=[True, False], ids=["batches", "single copies"])
def cuda(request: pytest.FixtureRequest) -> Iterator[CudaDevice]:
    device = CudaDevice(FakeCuda(has_batches=request.param))
    yield device
    device.close()


@pytest.fixture(params=[False, True], ids=["by layer", "cross-layer"])
def worker(request: pytest.FixtureRequest, cuda: CudaDevice) -> Iterator[CudaWorker]:
    made = CudaWorker(cuda, cross_layer=request.param)
    yield made
    made.close()


def stored(worker: CudaWorker, *pairs: tuple[int, int]) -> None:
    worker.store(*pairs)
    end, ends = worker.ended(worker.copies.take_stores)
    assert (end.failure, end.blocks, ends) == ("", len(pairs), StoreEnds(1))


def test_blocks_come_back_byte_for_byte(worker: CudaWorker) -> None:
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


def test_a_store_waits_for_what_the_model_writes(worker: CudaWorker) -> None:
    worker.driver.running.clear()
    worker.compute(3, fresh_block(5))
    worker.store((3, 0))
    assert worker.copies.take_stores() == {}
    worker.driver.running.set()
    assert worker.ended(worker.copies.take_stores)[1] == StoreEnds(1)
    worker.load((6, 0))
    assert not worker.ended(worker.copies.take_loads).failure
    np.testing.assert_array_equal(worker.caches[:, 6], fresh_block(5))


def test_a_load_waits_for_what_the_model_still_reads(worker: CudaWorker) -> None:
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


def test_sources_are_read_in_the_order_of_the_stream(worker: CudaWorker) -> None:
    """Behind a mark nothing may be read early, not even host memory."""
    stored(worker, (1, 0))
    worker.load((3, 0))
    worker.ended(worker.copies.take_loads)
    assert {order for order, _ in worker.driver.batches} <= {STREAM_ORDER}
    assert len(worker.driver.singles) + sum(len(entries) for _, entries in worker.driver.batches) == 2 * worker.runs


def test_a_store_that_fails_half_way_is_reported(worker: CudaWorker) -> None:
    worker.driver.fail_at = 1
    worker.store((1, 0), (3, 1), (5, 2))
    end, ends = worker.ended(worker.copies.take_stores)
    assert ends == StoreEnds(1, failed=True, unsettled=False)
    assert (end.blocks, end.copied_bytes) == (3, 0)
    assert "cuda, device to host: " in end.failure
    worker.driver.fail_at = None
    stored(worker, (1, 0), (3, 1), (5, 2))


def test_a_load_that_fails_half_way_writes_no_more_when_it_is_reported(worker: CudaWorker) -> None:
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


def test_a_layout_that_leads_out_of_the_caches_or_the_slots_never_reaches_the_driver(worker: CudaWorker) -> None:
    """It takes an address that it does not know for host memory, and the process would end."""
    far, (group,) = 1 << 40, worker.copies.layout.groups
    for moved in (replace(group, starts=group.starts + far), replace(group, offsets=group.offsets + far)):
        with patch.object(worker.copies, "layout", replace(worker.copies.layout, groups=(moved,))):
            worker.store((1, 0))
            end, ends = worker.ended(worker.copies.take_stores)
            assert "outside the memory" in end.failure
            assert ends == StoreEnds(1, failed=True, unsettled=False)
            worker.load((3, 0))
            assert "outside the memory" in worker.ended(worker.copies.take_loads).failure
    assert worker.driver.batches == []
    assert worker.driver.singles == []


def test_a_device_that_is_lost_leaves_slots_unsettled_and_ends_the_engine(worker: CudaWorker) -> None:
    worker.driver.fail_at = 0
    worker.stores_stream.lost = worker.loads_stream.lost = "CUDA error: unspecified launch failure"
    worker.store((1, 0))
    assert worker.ended(worker.copies.take_stores)[1] == StoreEnds(1, failed=True, unsettled=True)
    worker.load((3, 0))
    with pytest.raises(UnsettledLoadError, match=r"request request could not be loaded: .*unspecified launch failure"):
        worker.ended(worker.copies.take_loads)


def test_closing_awaits_the_copies_under_way(worker: CudaWorker) -> None:
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
