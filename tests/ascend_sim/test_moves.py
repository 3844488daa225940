"""A lease that moves to host memory while the device lags, under the real torch_npu with kernels that are queued.

The scheduler's books, vLLM's cache manager and a worker's copies are real. When the copy of the lease's blocks is
ordered, the kernels that write them have been launched and have not run.
"""

import pytest

from tests.support.ascend.device_process import on_device

pytestmark = pytest.mark.ascend_short

MOVED = """
import ctypes, threading
from contextlib import contextmanager
from pathlib import Path
from pd_connector.orders import Orders, StoreEnds
from pd_connector.worker.host.device_copies import HostCopies
from tests.support.ascend.faults import STORE, Faults, RunningFaults
from tests.support.devices import npu_caches
from tests.support.devices.npu_device import DeviceBytes
from tests.support.host_tier.leasing import BLOCKS, SETUP, LeasingEngine
from tests.support.waiting import WAIT_S, holds_for, until
from transfer.control.messages import Place

caches = npu_caches.keys_and_values(device, DeviceBytes(ctypes.CDLL("libascendcl.so")))
caches.fill(1)
engine, pool = LeasingEngine(), npu_caches.open_pool(caches, SETUP.slots)

go_on = threading.Event()  # until then the device stands still

@contextmanager
def everything_ends():
    try:
        yield
    finally:
        go_on.set()
        here.synchronize()
        pool.join()

def compute(addend):
    for block in engine.tables["lease"][0]:
        for part in caches.parts:
            part.rows(block).fill_(block + addend)

def begin_to_move(*without):
    faults = RunningFaults(Path("no file"))
    faults.now = Faults(without)
    HostCopies._submit = faults._submitting(HostCopies._submit)
    assert engine.prefill("lease", 0)
    host.launch(lambda: go_on.wait(WAIT_S))
    compute(1)
    engine.is_short = True
    (order,) = engine.moves.step_orders({}).stores
    pool.execute(Orders(stores=(order,)))
    assert engine.blocks.leased == BLOCKS
    return order

def end_of_move(order):
    assert until(lambda: pool.take_report().stores) == {order.store_id: StoreEnds(1)}
    engine.under_way.append(order.store_id)
    engine.end_store(order.store_id)
    assert (engine.leases.locate("lease").place, engine.blocks.leased) == (Place.HOST, 0)

def are_right(order):
    def held(slot):
        size = pool.copies.layout.slot_bytes
        values = bytearray(ctypes.string_at(pool.region.address + int(slot) * size, size))
        return set(torch.frombuffer(values, dtype=torch.bfloat16).tolist())
    return [held(slot) == {block + 1.0} for block, slot in zip(order.moves.blocks, order.moves.slots)]
"""


def test_a_move_waits_for_kernels_and_its_blocks_go_only_after_it() -> None:
    on_device(
        MOVED
        + """
with everything_ends():
    order = begin_to_move()
    holds_for(lambda: not pool.take_report().stores, 0.05)
    go_on.set()
    end_of_move(order)
    compute(100)  # the prompt that gets the blocks next
    here.synchronize()
    assert are_right(order) == [True] * BLOCKS
"""
    )


def test_without_its_mark_a_move_would_overtake_them() -> None:
    on_device(
        MOVED
        + """
with everything_ends():
    order = begin_to_move(STORE)
    end_of_move(order)
    assert are_right(order) == [False] * BLOCKS
"""
    )
