"""The ACL backend on the simulated runtime, without torch: bytes, chunks, fallbacks, failures and pinned memory.

Both as CANN 9.1 has it, with the second form of the batch call, and as CANN 8.5 has it, without.
"""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from layout.copies import Copies
from tests.support.devices import npu_simulator
from tests.support.devices.npu_device import RawDevice, view
from tests.support.memory import Bytes, one_copy, shuffled_copies
from tests.support.waiting import WAIT_S
from transfer.copies.batch.acl import AclRuntime
from transfer.copies.batch.base import CopyFailed, Direction
from transfer.memory import PinnedMemory

LOAD, STORE = Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST
CHUNK = 4096


@pytest.fixture(scope="session", params=["CANN 9.1", "CANN 8.5"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("acl")
    npu_simulator.build_runtime(folder, ["CANN_8_5"] if request.param == "CANN 8.5" else [])
    return folder / "libascendcl.so"


@pytest.fixture(params=[0, 1], ids=["device 0", "device 1"])
def device(library: Path, request: pytest.FixtureRequest) -> Iterator[RawDevice]:
    made = RawDevice(library, request.param)
    yield made
    made.close()


def pinned(device: RawDevice, size: int, seed: int) -> tuple[PinnedMemory, Bytes]:
    memory = device.runtime.pinned(size)
    view(memory)[:] = np.random.default_rng(seed).integers(1, 256, size, np.uint8)
    return memory, view(memory)


def calls(device: RawDevice) -> tuple[int, int]:
    """Batch calls of the right form, and single copies that were not part of one, so far."""
    v1, v2 = device.count("batches"), device.count("batches_v2")
    return v1 + v2, device.count("async_copies") - device.count("batch_entries")


# Bytes


@pytest.mark.parametrize(("count", "size"), [(1, 1), (5, 4096), (10_240, 64), (3, 1 << 20)])
def test_blocks_go_to_the_device_and_back(device: RawDevice, count: int, size: int) -> None:
    there = device.allocate(count * size)
    source_memory, source = pinned(device, count * size, 1)
    back_memory, back = pinned(device, count * size, 2)
    copies, places = shuffled_copies(there.address, source_memory.region.address, count, size)
    back_copies, back_places = shuffled_copies(back_memory.region.address, there.address, count, size)
    with device.copier(LOAD) as load, device.copier(STORE) as store:
        load.submit(copies).wait(WAIT_S)
        store.submit(back_copies).wait(WAIT_S)
    expected = source.reshape(count, size)[places]
    np.testing.assert_array_equal(device.get(there).reshape(count, size), expected)
    np.testing.assert_array_equal(back.reshape(count, size), expected[back_places])


def test_a_batch_is_cut_into_calls_of_4096(device: RawDevice) -> None:
    count, size = 2 * CHUNK + 1, 16
    there, (memory, source) = device.allocate(count * size), pinned(device, count * size, 1)
    before, entries = calls(device), device.count("batch_entries")
    with device.copier(LOAD) as load:
        load.submit(shuffled_copies(there.address, memory.region.address, count, size)[0]).wait(WAIT_S)
    after = calls(device)
    assert (after[0] - before[0], after[1] - before[1]) == (3, 0)
    assert device.count("batch_entries") - entries == count
    assert sorted(device.get(there)) == sorted(source)


def test_the_newer_call_is_used_where_there_is_one(device: RawDevice) -> None:
    there, (memory, _) = device.allocate(64), pinned(device, 64, 1)
    before = device.count("batches"), device.count("batches_v2")
    with device.copier(LOAD) as load:
        load.submit(one_copy(there.address, memory.region.address, 64)).wait(WAIT_S)
    after = device.count("batches"), device.count("batches_v2")
    has_newer = hasattr(device.library, "aclrtMemcpyBatchAsyncV2")
    assert (after[0] - before[0], after[1] - before[1]) == ((0, 1) if has_newer else (1, 0))


def test_copies_without_bytes_are_left_out(device: RawDevice) -> None:
    there, (memory, source) = device.allocate(64), pinned(device, 64, 1)
    starts, sizes = np.arange(4) * 16, np.array([16, 0, 16, 0])
    with device.copier(LOAD) as load:
        load.submit(Copies(there.address + starts, memory.region.address + starts, sizes)).wait(WAIT_S)
    np.testing.assert_array_equal(device.get(there).reshape(4, 16)[::2], source.reshape(4, 16)[::2])
    assert not device.get(there).reshape(4, 16)[1::2].any()


def test_the_bytes_cannot_have_come_past_the_runtime(library: Path) -> None:
    """A copier of the CPU that is given device memory takes the process with it."""
    code = f"""
import numpy as np; from pathlib import Path
from layout.copies import Copies; from tests.support.devices.npu_device import RawDevice
from transfer.copies.batch.backends import Backend, open_copier; from transfer.copies.batch.base import Direction
there, here = RawDevice(Path({str(library)!r}), 0).allocate(64), np.zeros(64, np.uint8)
copies = Copies(*(np.array([n]) for n in (here.ctypes.data, there.address, 64)))
copier = open_copier(Backend.HOST, Direction.DEVICE_TO_HOST)
print("begins", flush=True)
copier.submit(copies).wait(20)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, "begins\n"), done.stderr


# Order


def test_a_batch_follows_its_event_and_its_handle_the_device(
    device: RawDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = device.allocate(64)
    (source_memory, source), (back_memory, back) = pinned(device, 64, 1), pinned(device, 64, 2)
    with device.copier(LOAD) as load, device.copier(STORE) as store:
        monkeypatch.setenv("SIMACL_COPY_US", "30000")
        loaded = load.submit(one_copy(there.address, source_memory.region.address, 64))
        assert not loaded.query()
        loaded._begun.wait(WAIT_S)
        written = loaded._end  # an event that the device has not reached
        stored = store.submit(one_copy(back_memory.region.address, there.address, 64), after=written)
        stored.wait(WAIT_S)
        assert loaded.query()
    np.testing.assert_array_equal(back, source)


def test_closing_awaits_what_is_under_way(device: RawDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    there, (memory, source) = device.allocate(64), pinned(device, 64, 1)
    with device.copier(LOAD) as load:
        monkeypatch.setenv("SIMACL_COPY_US", "30000")
        handle = load.submit(one_copy(there.address, memory.region.address, 64))
        handle._begun.wait(WAIT_S)
    assert handle.query()
    np.testing.assert_array_equal(device.get(there), source)


# Fallback


def test_a_driver_without_batches_is_asked_once(
    device: RawDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    count = CHUNK + 10
    there, (memory, source) = device.allocate(count * 16), pinned(device, count * 16, 1)
    copies, places = shuffled_copies(there.address, memory.region.address, count, 16)
    before = calls(device)
    with device.copier(LOAD) as load:
        monkeypatch.setenv("SIMACL_BATCH_UNSUPPORTED", "1")
        load.submit(copies).wait(WAIT_S)
        monkeypatch.delenv("SIMACL_BATCH_UNSUPPORTED")  # would be taken now, and is not tried again
        load.submit(copies).wait(WAIT_S)
    assert (calls(device)[0] - before[0], calls(device)[1] - before[1]) == (1, 2 * count)
    np.testing.assert_array_equal(device.get(there).reshape(count, 16), source.reshape(count, 16)[places])
    assert caplog.text.count("is not supported by this driver or chip (207000 ACL_ERROR_RT_FEATURE_NOT_SUPPORT)") == 1


def test_a_runtime_from_before_batches_copies_one_by_one_and_says_so_at_once(
    device: RawDevice, caplog: pytest.LogCaptureFixture
) -> None:
    library = device.open()

    class Older:
        def __getattr__(self, name: str) -> object:
            if "Batch" in name:
                raise AttributeError(name)
            return getattr(library, name)

    device.runtime = AclRuntime(Older(), device.device)  # type: ignore[arg-type]
    assert not device.runtime.takes_batches
    there, (memory, source) = device.allocate(64), pinned(device, 64, 1)
    with device.copier(LOAD) as load:
        [line] = caplog.messages
        assert line.startswith("acl, host to device: the installed library has no aclrtMemcpyBatchAsync (CANN 8.5 has")
        load.submit(shuffled_copies(there.address, memory.region.address, 1, 64)[0]).wait(WAIT_S)
    np.testing.assert_array_equal(device.get(there), source)


def test_a_batch_that_is_refused_though_its_copies_are_right_is_copied_one_by_one(
    device: RawDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    count = CHUNK + 10
    there, (memory, source) = device.allocate(count * 16), pinned(device, count * 16, 1)
    copies, places = shuffled_copies(there.address, memory.region.address, count, 16)
    before, entries = calls(device)[0], device.count("batch_entries")
    with device.copier(LOAD) as load:
        monkeypatch.setenv("SIMACL_REFUSE_BATCHES", "3")
        for _ in range(12):
            device.put(there, np.zeros(count * 16, np.uint8))
            load.submit(copies).wait(WAIT_S)
            np.testing.assert_array_equal(device.get(there).reshape(count, 16), source.reshape(count, 16)[places])
    assert calls(device)[0] - before == 24, "a batch between those that are taken ends the use of batches"
    assert 0 < device.count("batch_entries") - entries < 12 * count
    [line] = caplog.messages
    assert line.startswith("acl, host to device: aclrtMemcpyBatchAsync")
    assert "(107000 ACL_ERROR_RT_PARAM_INVALID) and took each of them on its own" in line


def test_batches_are_given_up_when_eight_in_a_row_are_refused(
    device: RawDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    there, (memory, source) = device.allocate(4 * 64), pinned(device, 4 * 64, 1)
    copies, places = shuffled_copies(there.address, memory.region.address, 4, 64)
    before = calls(device)[0]
    with device.copier(LOAD) as load:
        monkeypatch.setenv("SIMACL_REFUSE_BATCHES", "1")
        for _ in range(12):
            load.submit(copies).wait(WAIT_S)
    assert calls(device)[0] - before == 8
    np.testing.assert_array_equal(device.get(there).reshape(4, 64), source.reshape(4, 64)[places])
    assert len(caplog.messages) == 2
    assert "has refused 8 batches in a row, whose copies were taken (107000 ACL_ERROR_RT_P" in caplog.messages[1]


def test_batches_are_not_given_up_for_copies_that_are_wrong(
    device: RawDevice, caplog: pytest.LogCaptureFixture
) -> None:
    there, (memory, _) = device.allocate(64), pinned(device, 64, 1)
    before = calls(device)[0]
    with device.copier(LOAD) as load:
        for _ in range(9):
            with pytest.raises(CopyFailed):
                load.submit(one_copy(memory.region.address, there.address, 64)).wait(WAIT_S)
        load.submit(one_copy(there.address, memory.region.address, 64)).wait(WAIT_S)
    assert calls(device)[0] - before == 10
    assert not caplog.messages


# Failures


def test_a_batch_that_fails_half_way_has_come_to_rest_when_it_is_reported(
    device: RawDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, (memory, source) = device.allocate(8 * 64), pinned(device, 8 * 64, 1)
    starts = np.arange(8) * 64
    copies = Copies(there.address + starts, memory.region.address + starts, np.full(8, 64))
    with device.copier(LOAD) as load:
        monkeypatch.setenv("SIMACL_FAIL_AT", "5")  # by itself as well, when the first five are under way once more
        monkeypatch.setenv("SIMACL_COPY_US", "10000")
        with pytest.raises(CopyFailed) as caught:
            load.submit(copies).wait(WAIT_S)
        np.testing.assert_array_equal(device.get(there)[: 5 * 64], source[: 5 * 64])
        assert not device.get(there)[5 * 64 :].any()
        monkeypatch.delenv("SIMACL_FAIL_AT")
        load.submit(copies).wait(WAIT_S)
    error = caught.value
    assert error.settled
    assert ": 107000 ACL_ERROR_RT_PARAM_INVALID: " in str(error)
    assert "acl, host to device: aclrtMemcpyAsync refused copy 5 of 8 (64 bytes" in str(error)
    assert "an address is not in the memory that the direction requires" in str(error)
    np.testing.assert_array_equal(device.get(there), source)


def test_a_wrong_address_behind_the_first_chunk_is_named(device: RawDevice) -> None:
    count = CHUNK + 100
    there, (memory, source) = device.allocate(count * 16), pinned(device, count * 16, 1)
    starts = np.arange(count) * 16
    copies = Copies(there.address + starts, memory.region.address + starts, np.full(count, 16))
    copies.destinations[CHUNK + 50] = memory.region.address
    with device.copier(LOAD) as load, pytest.raises(CopyFailed) as caught:
        load.submit(copies).wait(WAIT_S)
    assert f"aclrtMemcpyAsync refused copy {CHUNK + 50} of {count} (16" in str(caught.value)
    assert caught.value.settled
    np.testing.assert_array_equal(device.get(there)[: (CHUNK + 50) * 16], source[: (CHUNK + 50) * 16])


@pytest.mark.parametrize("direction", [LOAD, STORE])
def test_the_wrong_direction_is_refused(device: RawDevice, direction: Direction) -> None:
    there, (memory, _) = device.allocate(64), pinned(device, 64, 1)
    ends = (there.address, memory.region.address)
    to, origin = ends if direction is STORE else ends[::-1]
    with device.copier(direction) as copier, pytest.raises(CopyFailed) as caught:
        copier.submit(one_copy(to, origin, 64)).wait(WAIT_S)
    assert ": 107000 " in str(caught.value)


def test_memory_of_another_device_is_refused(device: RawDevice, library: Path) -> None:
    there, (memory, _) = device.allocate(64), pinned(device, 64, 1)
    other = RawDevice(library, 1 - device.device)
    with other.copier(LOAD) as copier, pytest.raises(CopyFailed) as caught:
        copier.submit(one_copy(there.address, memory.region.address, 64)).wait(WAIT_S)
    assert ": 107000 " in str(caught.value)
    assert device.library.aclrtSetDevice(device.device) == 0


def test_a_thread_without_a_device_gets_nothing_done(device: RawDevice) -> None:
    there, (memory, _) = device.allocate(64), pinned(device, 64, 1)
    with device.copier(LOAD, sets_device=False) as copier, pytest.raises(CopyFailed) as caught:
        copier.submit(one_copy(there.address, memory.region.address, 64)).wait(WAIT_S)
    assert "107002 ACL_ERROR_RT_CONTEXT_NULL: no device is set in the calling thread" in str(caught.value)


# Host memory


def test_pinned_memory_is_whole_pages_that_the_runtime_knows(
    device: RawDevice, caplog: pytest.LogCaptureFixture
) -> None:
    there, before = device.allocate(10_000), device.count("pageable_copies")
    memory = device.runtime.pinned(10_000)
    assert memory.region.address % 4096 == 0
    view(memory)[:] = 3
    with device.copier(LOAD) as load:
        load.submit(one_copy(there.address, memory.region.address, 10_000)).wait(WAIT_S)
    assert (device.get(there) == 3).all()
    assert device.count("pageable_copies") == before
    assert not caplog.records
    memory.close()
    memory.close()
