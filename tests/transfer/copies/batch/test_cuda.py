"""The CUDA backend on a simulated driver: what is submitted, in which order it happens, and what goes wrong.

No GPU is involved. The driver's own rules are in ``fake_cuda``; the interface is CUDA 12.8's.

Covers: transfer.copies.batch.cuda_abi, transfer.copies.batch.device, transfer.copies.batch.single.
"""

import ctypes
from typing import Any, cast

import numpy as np
import pytest

from layout.copies import EMPTY, Copies
from layout.geometry import Region
from tests.support.devices.fake_cuda import INVALID_VALUE, STREAM_ORDER, UNSUPPORTED, CudaDevice, FakeCuda
from tests.support.memory import noise, shuffled_copies, whole_copy
from tests.support.numa import needs_a_choice, online, policy
from tests.support.waiting import WAIT_S
from transfer.copies.batch import cuda_abi
from transfer.copies.batch.base import CopierStartError, CopyFailed, Direction
from transfer.copies.batch.cuda import CudaRuntime

LOAD, STORE = Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST


# Bytes


@pytest.mark.parametrize(("count", "size"), [(1, 1), (5, 4096), (10_240, 64)])
def test_blocks_go_to_the_device_and_back(any_cuda: CudaDevice, count: int, size: int) -> None:
    there = any_cuda.driver.device_memory(count * size)
    source, back = (any_cuda.driver.pin(noise(count * size, seed)) for seed in (1, 2))
    copies, places = shuffled_copies(there.ctypes.data, source.ctypes.data, count, size)
    any_cuda.copier(LOAD).submit(copies).wait(WAIT_S)
    any_cuda.copier(STORE).submit(whole_copy(back, there)).wait(WAIT_S)
    np.testing.assert_array_equal(back.reshape(count, size), source.reshape(count, size)[places])


def test_copies_without_bytes_are_not_shown_to_the_driver(any_cuda: CudaDevice) -> None:
    there, source = any_cuda.driver.device_memory(64), any_cuda.driver.pin(noise(64))
    copies = Copies(
        there.ctypes.data + np.arange(4) * 16, source.ctypes.data + np.arange(4) * 16, np.array([16, 0] * 2)
    )
    any_cuda.copier(LOAD).submit(copies).wait(WAIT_S)
    np.testing.assert_array_equal(there.reshape(4, 16)[::2], source.reshape(4, 16)[::2])
    assert not there.reshape(4, 16)[1::2].any()


def test_arrays_of_descriptors_may_have_strides(any_cuda: CudaDevice) -> None:
    there, source = any_cuda.driver.device_memory(256), any_cuda.driver.pin(noise(256))
    places = np.arange(0, 256, 32)[::2]
    any_cuda.copier(LOAD).submit(
        Copies(there.ctypes.data + places, source.ctypes.data + places, np.full(8, 32)[::2])
    ).wait(WAIT_S)
    np.testing.assert_array_equal(there.reshape(4, 2, 32)[:, 0], source.reshape(4, 2, 32)[:, 0])
    assert not there.reshape(4, 2, 32)[:, 1].any()


def test_a_batch_is_one_call(cuda: CudaDevice) -> None:
    there, source = cuda.driver.device_memory(64 * 10_240), cuda.driver.pin(noise(64 * 10_240))
    cuda.copier(LOAD).submit(shuffled_copies(there.ctypes.data, source.ctypes.data, 10_240, 64)[0]).wait(WAIT_S)
    assert [(order, len(entries)) for order, entries in cuda.driver.batches] == [(STREAM_ORDER, 10_240)]
    assert not cuda.driver.singles


# Order


def test_a_handle_says_when_the_device_is_through(any_cuda: CudaDevice) -> None:
    there, source = any_cuda.driver.device_memory(64), any_cuda.driver.pin(noise(64))
    any_cuda.driver.running.clear()
    handle = any_cuda.copier(LOAD).submit(whole_copy(there, source))
    with pytest.raises(TimeoutError):
        handle.wait(0.02)
    assert not there.any()
    any_cuda.driver.running.set()
    handle.wait(WAIT_S)
    np.testing.assert_array_equal(there, source)


@pytest.mark.parametrize("direction", [LOAD, STORE])
def test_a_batch_sees_what_was_written_before_its_event(any_cuda: CudaDevice, direction: Direction) -> None:
    """The event is reached, and its data written, long after the batch was submitted to the stream."""
    memory, host = any_cuda.driver.device_memory(128), any_cuda.driver.pin(noise(64))
    target, source = (host, memory[:64]) if direction is STORE else (memory[64:], host)
    source[:], fresh = 0, noise(64, 5)
    _, compute = any_cuda.copier_and_stream(LOAD)
    copier, stream = any_cuda.copier_and_stream(direction)
    any_cuda.driver.running.clear()
    compute.push(lambda: source.__setitem__(slice(None), fresh))
    written = compute.record_event()
    compute.handle()
    handle = copier.submit(whole_copy(target, source), after=written)
    assert handle._begun.wait(WAIT_S)  # all of it is submitted
    any_cuda.driver.running.set()
    handle.wait(WAIT_S)
    np.testing.assert_array_equal(target, fresh)
    assert stream.raw != compute.raw


def test_batches_of_one_copier_stay_in_order_on_the_device(any_cuda: CudaDevice) -> None:
    there = any_cuda.driver.device_memory(64)
    copier = any_cuda.copier(LOAD)
    sources = [any_cuda.driver.pin(noise(64, seed)) for seed in range(20)]
    handles = [copier.submit(whole_copy(there, source)) for source in sources]
    handles[-1].wait(WAIT_S)
    assert all(handle.query() for handle in handles)
    np.testing.assert_array_equal(there, sources[-1])


def test_an_empty_batch_still_comes_after_its_event(any_cuda: CudaDevice) -> None:
    copier, stream = any_cuda.copier_and_stream(LOAD)
    never = any_cuda.copier_and_stream(LOAD)[1].record_event()
    handle = copier.submit(EMPTY, after=never)
    with pytest.raises(TimeoutError):
        handle.wait(0.02)
    never.reached.set()
    handle.wait(WAIT_S)
    assert not stream.synchronized


def test_closing_awaits_what_is_under_way(any_cuda: CudaDevice) -> None:
    there, source = any_cuda.driver.device_memory(64), any_cuda.driver.pin(noise(64))
    copier, stream = any_cuda.copier_and_stream(LOAD)
    handle = copier.submit(whole_copy(there, source))
    handle._begun.wait(WAIT_S)
    copier.close()
    assert stream.synchronized == 1
    assert handle.query()


# Failures


def blocks(cuda: CudaDevice, count: int) -> tuple[Any, Any, Copies]:
    there, source = cuda.driver.device_memory(count * 64), cuda.driver.pin(noise(count * 64))
    return there, source, Copies(
        there.ctypes.data + np.arange(count) * 64, source.ctypes.data + np.arange(count) * 64, np.full(count, 64)
    )  # fmt: skip


def test_a_batch_refused_half_way_has_come_to_rest_when_it_is_reported(any_cuda: CudaDevice) -> None:
    there, source, copies = blocks(any_cuda, 8)
    copier, stream = any_cuda.copier_and_stream(LOAD)
    any_cuda.driver.fail_at = 5
    with pytest.raises(CopyFailed) as caught:
        copier.submit(copies).wait(WAIT_S)
    error, call = caught.value, "cuMemcpyBatchAsync" if any_cuda.driver.batches else "cuMemcpyAsync"
    assert error.settled
    assert f"cuda, host to device: {call} refused copy 5 of 8 (64 bytes from {copies.sources[5]:#x} to" in str(error)
    assert f": {INVALID_VALUE} CUDA_ERROR_INVALID_VALUE: " in str(error)
    assert "an address is not in the memory that the direction requires" in str(error)
    assert stream.synchronized == 1
    np.testing.assert_array_equal(there[: 5 * 64], source[: 5 * 64])  # no byte is still on its way
    assert not there[5 * 64 :].any()
    any_cuda.driver.fail_at = None
    copier.submit(copies).wait(WAIT_S)
    np.testing.assert_array_equal(there, source)


def test_a_stream_that_cannot_be_waited_for_leaves_the_batch_unsettled(any_cuda: CudaDevice) -> None:
    _, _, copies = blocks(any_cuda, 2)
    copier, stream = any_cuda.copier_and_stream(LOAD)
    any_cuda.driver.fail_at, stream.lost = 1, "CUDA error: unspecified launch failure"
    with pytest.raises(CopyFailed, match="it may still write: CUDA error: unspecified launch failure") as caught:
        copier.submit(copies).wait(WAIT_S)
    assert not caught.value.settled
    stream.lost = ""


def test_an_error_of_the_stream_itself_fails_the_batch(cuda: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    there, _, copies = blocks(cuda, 2)
    copier, stream = cuda.copier_and_stream(LOAD)

    def broken(_event: object) -> None:
        raise RuntimeError("event on another device")

    monkeypatch.setattr(stream, "wait_event", broken)
    event = cuda.copier_and_stream(LOAD)[1].record_event()
    with pytest.raises(CopyFailed, match="the stream failed: event on another device") as caught:
        copier.submit(copies, after=event).wait(WAIT_S)
    assert caught.value.settled
    assert not there.any()


def test_a_device_without_batches_is_asked_once(cuda: CudaDevice, caplog: pytest.LogCaptureFixture) -> None:
    there, source, copies = blocks(cuda, 8)
    copier = cuda.copier(LOAD)
    cuda.driver.unsupported = True
    copier.submit(copies).wait(WAIT_S)
    np.testing.assert_array_equal(there, source)
    cuda.driver.unsupported = False  # would be taken now, and is not tried again
    copier.submit(copies).wait(WAIT_S)
    assert (len(cuda.driver.batches), len(cuda.driver.singles)) == (0, 16)
    assert caplog.text.count("cuMemcpyBatchAsync is not supported by this driver or chip (801 CUDA_ERROR_NOT_SU") == 1


def test_a_driver_from_before_batches_is_told_of_before_the_first_copy(caplog: pytest.LogCaptureFixture) -> None:
    older, newer = CudaDevice(FakeCuda(has_batches=False)), CudaDevice(FakeCuda())
    for direction in (LOAD, STORE):
        newer.copier(direction)
    assert not caplog.messages
    for direction in (LOAD, STORE):
        older.copier(direction)
    (line,) = caplog.messages
    assert line.startswith("cuda, host to device: the installed library has no cuMemcpyBatchAsync (")
    for device in (older, newer):
        device.close()


def test_an_error_that_the_driver_cannot_name_is_given_by_number(cuda: CudaDevice) -> None:
    assert cuda.runtime.explain(12345) == ("unnamed CUDA error", "unknown to this driver")
    meaning = "operation not supported: the driver or device does not support this"
    assert cuda.runtime.explain(UNSUPPORTED).meaning == meaning


# Pinned memory


def test_pinned_memory_is_known_to_the_driver_while_it_lives(cuda: CudaDevice) -> None:
    memory = cuda.runtime.pinned(100_000)
    assert cuda.driver.pinned_ranges == {memory.region.address: 100_000}
    assert memory.region.address % 4096 == 0
    there = cuda.driver.device_memory(100_000)
    ctypes.memset(memory.region.address, 3, 100_000)
    cuda.copier(LOAD).submit(
        Copies(*(np.array([n]) for n in (there.ctypes.data, memory.region.address, 100_000)))
    ).wait(WAIT_S)
    assert (there == 3).all()
    memory.close()
    memory.close()
    assert not cuda.driver.pinned_ranges


@needs_a_choice
def test_pinned_memory_prefers_its_node_before_the_driver_pins_it(
    cuda: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pinning allocates the pages, and a node that is named later moves none of them."""
    preferred: list[str] = []
    pin = cuda.runtime._functions["cuMemHostRegister_v2"]

    def pinning(address: int, size: int, flags: int) -> int:
        preferred.append(policy(Region(address, size)))
        return int(pin(address, size, flags))

    monkeypatch.setitem(cuda.runtime._functions, "cuMemHostRegister_v2", pinning)
    memory = cuda.runtime.pinned(100_000, online())
    assert preferred == [f"prefer:{online()}"]
    assert cuda.driver.pinned_ranges == {memory.region.address: 100_000}
    memory.close()


def test_pinned_memory_goes_with_its_object(cuda: CudaDevice) -> None:
    memory = cuda.runtime.pinned(4096)
    assert cuda.driver.pinned_ranges
    del memory
    assert not cuda.driver.pinned_ranges


def test_memory_that_cannot_be_pinned_is_an_error_with_a_way_out(cuda: CudaDevice) -> None:
    cuda.driver.pin_error = 2
    with pytest.raises(CopierStartError, match=r"cuMemHostRegister refused 4096 bytes: 2 .*ulimit -l"):
        cuda.runtime.pinned(4096)


# The interface


def test_the_structures_are_those_of_the_header() -> None:
    attributes = cuda_abi.MemcpyAttributes
    offsets = [getattr(attributes, name).offset for name in ("srcAccessOrder", "srcLocHint", "dstLocHint", "flags")]
    assert (offsets, ctypes.sizeof(attributes)) == ([0, 4, 12, 20], 24)


def test_a_library_that_is_not_the_driver_is_refused() -> None:
    class Other:
        pass

    with pytest.raises(CopierStartError, match=r"libcuda\.so\.1 has no cuMemcpyAsync, .*: it is not NVIDIA's driver"):
        CudaRuntime(cast(ctypes.CDLL, Other()))


def test_a_driver_from_before_batches_is_recognised() -> None:
    assert not CudaRuntime(cast(ctypes.CDLL, FakeCuda(has_batches=False))).takes_batches
    assert CudaRuntime(cast(ctypes.CDLL, FakeCuda())).takes_batches
