"""Copies on the device by tensor operators, under the real torch_npu with kernels that are queued."""

import pytest

from tests.support.ascend.device_process import on_device

pytestmark = pytest.mark.ascend_short

SCATTERED = """
from pathlib import Path
import numpy as np
from layout.copies import Copies
from tests.support.ascend.faults import SIDE_STREAM, Faults, RunningFaults
from transfer.copies.reshape.reshape_torch import SideStream, TensorCopier

source = torch.arange(8192, dtype=torch.int32, device=device)
target = torch.zeros_like(source)
here.synchronize()
rows, order = np.arange(128), np.random.default_rng(7).permutation(128)
copies = Copies(target.data_ptr() + rows * 256, source.data_ptr() + order * 256, np.full(128, 256))
right = torch.arange(8192, dtype=torch.int32).view(128, 64)[torch.from_numpy(order)].flatten()

def copy(*without):
    faults = RunningFaults(Path("no file"))
    faults.now = Faults(without, side_kernel_s=0.5)
    SideStream.running = faults.on_side_stream(SideStream.running)
    TensorCopier([source, target])(copies)
    return read_on(there, target)
"""


def test_bytes_are_in_place_for_other_streams_when_the_call_returns() -> None:
    on_device(SCATTERED + "assert torch.equal(copy(), right)")


def test_without_its_wait_they_are_not() -> None:
    # A process that ends before its kernels have, which are Python here, waits for them for ever.
    on_device(SCATTERED + "found = copy(SIDE_STREAM)\ntorch.npu.synchronize()\nassert found.eq(0).all()")


BATCHED = """
import ctypes, os
import numpy as np
from layout.copies import Copies
from transfer.copies.batch.backends import Backend, open_copier, pinned_memory
from transfer.copies.batch.base import Direction

SIZE = 4096
block = torch.zeros(SIZE, dtype=torch.uint8, device=device)
memory = pinned_memory(Backend.ACL, SIZE, 0)
host_bytes = np.ctypeslib.as_array((ctypes.c_uint8 * SIZE).from_address(memory.region.address))
one = lambda to, start: Copies(*(np.array([value]) for value in (to, start, SIZE)))
here.synchronize()

def check(direction, copied):
    with open_copier(Backend.ACL, direction, 0) as copier:
        for value, waits in ((7, False), (9, True)):
            before = int(block.cpu()[0])
            seen = copied(copier, value, waits)
            assert seen == {value if waits else before}, (seen, value, waits)
"""


def test_a_store_that_does_not_wait_for_its_event_stores_what_was_there_before() -> None:
    on_device(
        BATCHED
        + """
def stored(copier, value, waits):
    host.slow_down(0.5)
    block.fill_(value)
    event = here.record_event()
    copier.submit(one(memory.region.address, block.data_ptr()), event if waits else None).wait()
    host.slow_down(0)
    return set(host_bytes)

check(Direction.DEVICE_TO_HOST, stored)
"""
    )


def test_a_kernel_that_does_not_wait_for_the_end_of_a_load_reads_what_was_there_before() -> None:
    on_device(
        BATCHED
        + """
def loaded(copier, value, waits):
    host_bytes[:] = value
    os.environ["SIMACL_COPY_US"] = "500000"
    handle = copier.submit(one(block.data_ptr(), memory.region.address))
    if waits:
        handle.wait()
    seen = block + 0
    here.synchronize()
    handle.wait()
    os.environ["SIMACL_COPY_US"] = "0"
    return set(seen.cpu().tolist())

check(Direction.HOST_TO_DEVICE, loaded)
"""
    )
