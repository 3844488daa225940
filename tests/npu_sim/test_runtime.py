"""The simulated runtime under the real torch_npu: what it runs, what it refuses, and where it is late on purpose."""

import ctypes
import signal
import threading
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.devices import npu_simulator
from tests.support.devices.npu_simulator import in_a_process

DEVICE = torch.device("npu:0")
INVALID, NO_CONTEXT, OTHER_DEVICE, LOST = 107000, 107002, 107003, 507010
HOST_TO_DEVICE = 1

Calls = Callable[[str], int]


def on_device(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=DEVICE)


def pinned(size: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(size).integers(0, 256, size, np.uint8)).pin_memory()


def in_a_thread(work: Callable[[], object]) -> object:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


# What runs


def test_the_real_torch_npu_runs_on_it() -> None:
    assert version("torch-npu").startswith("2.13.")
    assert torch.npu.is_available()
    assert torch.npu.device_count() == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.int64, torch.bool])
def test_tensors_go_to_the_device_and_back(dtype: torch.dtype) -> None:
    there = torch.from_numpy(np.arange(512) % 2).to(dtype)
    assert torch.equal(there.to(DEVICE).cpu(), there)


def test_a_machine_without_devices_has_none() -> None:
    done = in_a_process("assert not torch.npu.is_available()", SIMACL_DEVICES="0")
    assert done.returncode == 0, done.stderr


def test_operators_that_compute_do_not_run() -> None:
    done = in_a_process("(torch.empty(4, device='npu:0') + 1).cpu()")
    assert done.returncode != 0
    assert "RuntimeError" in done.stderr


# What it is strict about


def test_host_code_that_follows_a_device_pointer_dies() -> None:
    done = in_a_process("ctypes.string_at(torch.empty(64, device='npu:0').data_ptr(), 1)")
    assert done.returncode == -signal.SIGSEGV


def test_device_memory_that_was_freed_is_gone_even_for_copies() -> None:
    done = in_a_process(
        "acl = ctypes.CDLL('libascendcl.so'); memory, buffer = ctypes.c_void_p(), ctypes.create_string_buffer(64)\n"
        "acl.aclrtSetDevice(0); acl.aclrtMalloc(ctypes.byref(memory), ctypes.c_size_t(64), 0); acl.aclrtFree(memory)\n"
        "acl.aclrtMemcpy(memory, ctypes.c_size_t(64), buffer, ctypes.c_size_t(64), 1)"
    )
    assert done.returncode == -signal.SIGSEGV


def test_pinned_memory_that_was_freed_is_gone_too() -> None:
    done = in_a_process(
        "memory = ctypes.c_void_p(); acl.aclrtSetDevice(0)\n"
        "acl.aclrtMallocHost(ctypes.byref(memory), ctypes.c_size_t(64))\n"
        "ctypes.memset(memory, 0, 64); print('there', flush=True)\n"
        "acl.aclrtFreeHost(memory); ctypes.memset(memory, 0, 64)"
    )
    assert done.returncode == -signal.SIGSEGV
    assert done.stdout.endswith("there\n")


def test_a_thread_that_has_chosen_no_device_has_no_context(acl: ctypes.CDLL) -> None:
    target, source = on_device(64), pinned(64)
    pointers = ctypes.c_void_p(target.data_ptr()), ctypes.c_void_p(source.data_ptr())
    size = ctypes.c_size_t(64)

    def copy() -> object:
        return acl.aclrtMemcpyAsync(pointers[0], size, pointers[1], size, HOST_TO_DEVICE, None)

    assert copy() == 0
    assert in_a_thread(copy) == NO_CONTEXT
    assert in_a_thread(lambda: acl.aclrtSetDevice(0) or copy()) == 0
    torch.npu.synchronize()
    assert torch.equal(target.cpu(), source)


def test_a_stream_takes_no_work_from_a_thread_of_another_device(acl: ctypes.CDLL) -> None:
    stream, event = ctypes.c_void_p(), ctypes.c_void_p()
    assert acl.aclrtCreateEvent(ctypes.byref(event)) == 0

    def work() -> None:
        assert acl.aclrtSetDevice(1) == 0
        assert acl.aclrtCreateStream(ctypes.byref(stream)) == 0
        assert acl.aclrtRecordEvent(event, stream) == 0
        assert acl.aclrtSetDevice(0) == 0
        assert acl.aclrtRecordEvent(event, stream) == OTHER_DEVICE
        assert acl.aclrtStreamWaitEvent(stream, event) == OTHER_DEVICE
        assert acl.aclrtSynchronizeStream(stream) == OTHER_DEVICE

    in_a_thread(work)


def test_a_copy_that_leaves_its_allocation_fails(acl: ctypes.CDLL) -> None:
    memory = ctypes.c_void_p()
    size, more = ctypes.c_size_t(2 << 20), ctypes.c_size_t((2 << 20) + 1)
    buffer = ctypes.create_string_buffer(more.value)
    assert acl.aclrtMalloc(ctypes.byref(memory), size, 0) == 0
    assert acl.aclrtMemcpy(memory, size, buffer, size, HOST_TO_DEVICE) == 0
    assert acl.aclrtMemcpy(memory, more, buffer, more, HOST_TO_DEVICE) == INVALID
    assert acl.aclrtFree(memory) == 0
    assert acl.aclrtFree(memory) == INVALID


# When things happen


def test_copies_are_late_and_events_say_when_they_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    target, source, event = on_device(64), pinned(64), torch.npu.Event()
    torch.npu.synchronize()
    monkeypatch.setenv("SIMACL_COPY_US", "50000")
    target.copy_(source, non_blocking=True)
    event.record()
    assert not event.query()
    event.synchronize()
    assert event.query()
    monkeypatch.delenv("SIMACL_COPY_US")
    assert torch.equal(target.cpu(), source)


def test_a_lost_device_answers_no_more_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    target, source, event = on_device(64), pinned(64), torch.npu.Event()
    torch.npu.synchronize()
    monkeypatch.setenv("SIMACL_LOST", "1")
    target.copy_(source, non_blocking=True)
    event.record()
    # Waits until torch_npu's own queue has handed over the record: before, a query says "not yet" without asking.
    stream = torch.npu.current_stream()
    assert stream.npu_stream
    for ask in (event.query, event.synchronize, torch.npu.synchronize, stream.synchronize):
        with pytest.raises(RuntimeError, match=str(LOST)):
            ask()
    monkeypatch.delenv("SIMACL_LOST")
    torch.npu.synchronize()
    assert torch.equal(target.cpu(), source)


def test_a_stream_keeps_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    stages, source = [on_device(4096) for _ in range(6)], pinned(4096)
    stream = torch.npu.Stream(DEVICE)
    monkeypatch.setenv("SIMACL_COPY_US", "2000")
    with torch.npu.stream(stream):
        for before, after in zip([source, *stages[:-1]], stages, strict=True):
            after.copy_(before, non_blocking=True)
    stream.synchronize()
    assert torch.equal(stages[-1].cpu(), source)


def test_streams_wait_for_each_other_only_where_told(monkeypatch: pytest.MonkeyPatch) -> None:
    target, old, new = on_device(64), pinned(64), torch.zeros(64, dtype=torch.uint8).pin_memory()
    slow, quick = torch.npu.Stream(DEVICE), torch.npu.Stream(DEVICE)
    written, untouched = torch.npu.Event(), torch.npu.Event()
    monkeypatch.setenv("SIMACL_COPY_US", "30000")
    with torch.npu.stream(slow):
        target.copy_(old, non_blocking=True)
        written.record()
    untouched.record(quick)
    untouched.synchronize()
    assert not written.query()
    with torch.npu.stream(quick):
        quick.wait_event(written)
        target.copy_(new, non_blocking=True)
    quick.synchronize()
    assert written.query()
    assert torch.equal(target.cpu(), new)


def test_memory_that_is_not_pinned_makes_a_copy_wait(calls: Calls) -> None:
    target = on_device(64)
    target.copy_(pinned(64), non_blocking=True)
    torch.npu.synchronize()
    assert (calls("async_copies"), calls("pageable_copies")) == (1, 0)
    target.copy_(torch.zeros(64, dtype=torch.uint8), non_blocking=True)
    torch.npu.synchronize()
    assert calls("pageable_copies") == calls("async_copies") - 1


# What it is built from


def test_an_older_release_lacks_what_came_later(tmp_path: Path, acl: ctypes.CDLL) -> None:
    npu_simulator.build_runtime(tmp_path, ["CANN_8_5"])
    older = ctypes.CDLL(str(tmp_path / "libascendcl.so"))
    assert hasattr(older, "aclrtMemcpyBatchAsync")
    assert hasattr(acl, "aclrtMemcpyBatchAsyncV2")
    assert not hasattr(older, "aclrtMemcpyBatchAsyncV2")


def test_without_a_compiler_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(npu_simulator.BuildError, match="needs a C compiler: install gcc"):
        npu_simulator.build_runtime(tmp_path)


def test_it_is_not_loaded_after_torch() -> None:
    with pytest.raises(npu_simulator.BuildError, match="torch has been imported before"):
        npu_simulator.load_runtime()
