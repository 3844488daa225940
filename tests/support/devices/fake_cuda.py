"""A CUDA driver of one device, in Python, behind the C interface that the copier calls. No GPU, no compiler.

It is as late and as strict as it may be: copies run on a thread of their stream, those of a batch in random order;
sources are read at once where the batch allows it, else when the stream gets there; addresses must be known. What
torch's streams ask for reaches a stream only when its handle is taken, as in torch_npu's task queue, so that a handle
kept from before lets a copy overtake the event that it waits for.
"""

import ctypes
import random
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, cast

import numpy as np

from layout.geometry import Region
from tests.support.devices.shared_devices import SharedDevices, bytes_at
from tests.support.memory import Bytes
from tests.support.waiting import WAIT_S
from transfer.copies.batch.base import Direction
from transfer.copies.batch.copier import BatchCopier
from transfer.copies.batch.cuda import CudaRuntime
from transfer.copies.batch.cuda_abi import IpcHandle
from transfer.copies.batch.device import DeviceBackend
from transfer.copies.batch.streams import DeviceStream

SUCCESS, INVALID_VALUE, INVALID_CONTEXT, NOT_FOUND, LAUNCH_FAILED, UNSUPPORTED = 0, 1, 201, 500, 719, 801
NAMES = {
    INVALID_VALUE: (b"CUDA_ERROR_INVALID_VALUE", b"invalid argument"),
    INVALID_CONTEXT: (b"CUDA_ERROR_INVALID_CONTEXT", b"invalid device context"),
    UNSUPPORTED: (b"CUDA_ERROR_NOT_SUPPORTED", b"operation not supported"),
}
STREAM_ORDER, ANY_ORDER = 1, 3
NO_INDEX = 2**64 - 1

Int, Word, Text = ctypes.c_int, ctypes.c_uint64, ctypes.c_char_p


@dataclass(frozen=True)
class Entry:
    """One copy as the driver got it."""

    to: int
    origin: int
    size: int


@dataclass
class FakeEvent:
    """Reached when its stream gets to it."""

    reached: threading.Event = field(default_factory=threading.Event)
    error: str = ""
    driver: "FakeCuda | None" = None

    def query(self) -> bool:
        if self.error or (self.driver is not None and self.driver.sticky):
            raise RuntimeError(self.error or "CUDA error: unspecified launch failure")
        return self.reached.is_set()

    def synchronize(self) -> None:
        assert self.reached.wait(WAIT_S), "an event was never reached"


class FakeStream(DeviceStream):
    """A stream of the fake driver, as the copier sees streams."""

    def __init__(self, driver: "FakeCuda") -> None:
        self._driver = driver
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._asked: list[Callable[[], object]] = []  # by the framework, and not in the stream yet
        self.raw = driver.add_stream(self)
        self.synchronized = 0
        self.lost = ""  # what waiting for the stream raises, if anything
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def enter_thread(self) -> None:
        self._driver.threads.add(threading.get_ident())

    def handle(self) -> int:
        for work in self._asked:
            self._work.put(work)
        self._asked = []
        return self.raw

    def run(self, submit: Callable[[], None]) -> None:
        """What ``submit`` gives to the stream begins when the stream gets there."""
        if self._driver.takes_kernels == self._driver.launches:
            raise RuntimeError("CUDA error: too many resources requested for launch")
        self._driver.launches += 1
        self._driver.in_flight += 1
        self._asked.append(partial(self._driver.compute, submit))

    def wait_event(self, event: Any) -> None:
        self._asked.append(event.synchronize)

    def record_event(self) -> FakeEvent:
        event = FakeEvent(driver=self._driver)
        self._asked.append(event.reached.set)
        return event

    def synchronize(self) -> None:
        if self.lost or self._driver.sticky:
            raise RuntimeError(self.lost or "CUDA error: unspecified launch failure")
        self.synchronized += 1
        end = self.record_event()
        self.handle()
        end.synchronize()

    def push(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            assert self._driver.running.wait(WAIT_S), "the device was never told to go on"
            work()


class FakeCuda:
    """The driver. Its attributes ``cu...`` are C functions; the others are for tests."""

    def __init__(self, *, has_batches: bool = True, devices: "SharedDevices | None" = None) -> None:
        self.devices = devices or SharedDevices()  # of the host
        self.uuid = bytes(range(16))  # of this process's GPU
        self.sticky = SUCCESS  # else the error with which a kernel has ended this context
        self.open_error = SUCCESS  # of handles of other processes
        self.has_handles = True  # its own memory comes from cuMemAlloc
        self.launches = 0  # of kernels
        self.takes_kernels: int | None = None  # until so many launches
        self.in_flight = 0  # copies and kernels
        self.unmapped_in_use = 0  # times that memory was unmapped while copies were in flight
        self.opened: dict[int, tuple[bytes, int]] = {}  # by address here: the handle, and how often it is open
        self.running = threading.Event()  # cleared: streams stand still
        self.running.set()
        self.threads: set[int] = set()  # those that have made the device current
        self.batches: list[tuple[int, list[Entry]]] = []  # source access order, entries
        self.singles: list[Entry] = []
        self.fail_at: int | None = None  # this copy of every submission is refused
        self.unsupported = False  # batches are, by the device
        self.pin_error = SUCCESS
        self._random = random.Random(0)
        self._streams: dict[int, FakeStream] = {}
        self._device: list[Bytes] = []
        self._pinned: dict[int, int] = {}
        self._define(has_batches)

    def compute(self, kernel: Callable[[], None]) -> None:
        """Have a kernel run to its end. In a context that has failed, none does."""
        if not self.sticky:
            kernel()
        self.in_flight -= 1

    def device_memory(self, size: int) -> Bytes:
        """Memory of the device. Tests look into it when the streams stand still or are done."""
        self._device.append(np.zeros(size, np.uint8))
        return self._device[-1]

    def adopt(self, region: Region) -> None:
        """Take whole pages of this process for an allocation of the device, which other drivers can map."""
        self._device.append(bytes_at(region.address, region.size))

    def pin(self, memory: Bytes) -> Bytes:
        self._pinned[memory.ctypes.data] = memory.nbytes
        return memory

    @property
    def pinned_ranges(self) -> dict[int, int]:
        return dict(self._pinned)

    def add_stream(self, stream: FakeStream) -> int:
        self._streams[0x5000 + len(self._streams)] = stream
        return 0x4FFF + len(self._streams)

    def close(self) -> None:
        self.running.set()
        for stream in self._streams.values():
            stream.close()

    # What the C functions do

    def _batch(self, to: int, origin: int, sizes: int, count: int, *rest: int) -> int:
        attributes, begins, attribute_count, fail_index, stream = rest
        columns = [np.frombuffer(ctypes.string_at(a, 8 * count), np.uint64).tolist() for a in (to, origin, sizes)]
        entries = [Entry(*row) for row in zip(*columns, strict=True)]
        order, *hints_and_flags = struct.unpack("=IIiIiI", ctypes.string_at(attributes, 24))
        first = struct.unpack("=Q", ctypes.string_at(begins, 8))[0]
        failed = ctypes.c_uint64.from_address(fail_index)
        failed.value = NO_INDEX
        if self.unsupported or self.sticky:
            return self.sticky or UNSUPPORTED
        if threading.get_ident() not in self.threads:
            return INVALID_CONTEXT
        if not count or attribute_count != 1 or first != 0 or any(hints_and_flags) or stream not in self._streams:
            return INVALID_VALUE
        if order not in (STREAM_ORDER, ANY_ORDER):
            return INVALID_VALUE
        self.batches.append((order, entries))
        refused = next((i for i, entry in enumerate(entries) if self._is_refused(i, entry)), None)
        accepted = entries[:refused]
        self._random.shuffle(accepted)
        for entry in accepted:
            self._submit(entry, self._streams[stream], early=order == ANY_ORDER)
        if refused is not None:
            failed.value = refused
            return INVALID_VALUE
        return SUCCESS

    def _single(self, to: int, origin: int, size: int, stream: int) -> int:
        if threading.get_ident() not in self.threads:
            return INVALID_CONTEXT
        entry = Entry(to, origin, size)
        if self._is_refused(len(self.singles), entry):
            return INVALID_VALUE
        self.singles.append(entry)
        self._submit(entry, self._streams[stream], early=False)
        return SUCCESS

    def _submit(self, entry: Entry, stream: FakeStream, *, early: bool) -> None:
        data = ctypes.string_at(entry.origin, entry.size) if early else None
        self.in_flight += 1
        stream.push(partial(self._move, entry, data))

    def _move(self, entry: Entry, data: bytes | None) -> None:
        if not self.sticky:
            ctypes.memmove(entry.to, data or entry.origin, entry.size)
        self.in_flight -= 1

    def _is_refused(self, i: int, entry: Entry) -> bool:
        on_device = [self._is_device(address, entry.size) for address in (entry.to, entry.origin)]
        return i == self.fail_at or not entry.size or not any(on_device)

    def _is_device(self, address: int, size: int) -> bool:
        return any(0 <= address - m.ctypes.data <= m.nbytes - size for m in self._device)

    def _attribute(self, answer: int, attribute: int, address: int) -> int:
        assert attribute == 2, "only the kind of memory is asked for"
        if any(start <= address < start + size for start, size in self._pinned.items()):
            ctypes.c_uint.from_address(answer).value = 1
        elif self._is_device(address, 1):
            ctypes.c_uint.from_address(answer).value = 2
        else:
            return INVALID_VALUE
        return SUCCESS

    def _register(self, start: int, size: int, flags: int) -> int:
        assert flags == 1, "memory is pinned for every context"
        if self.pin_error == SUCCESS:
            self._pinned[start] = size
        return self.pin_error

    def _unregister(self, start: int) -> int:
        return SUCCESS if self._pinned.pop(start, None) else INVALID_VALUE

    def _range(self, base: int, size: int, address: int) -> int:
        found = [m for m in self._device if 0 <= address - m.ctypes.data < m.nbytes]
        if not found:
            return NOT_FOUND
        ctypes.c_uint64.from_address(base).value = found[0].ctypes.data
        ctypes.c_uint64.from_address(size).value = found[0].nbytes
        return SUCCESS

    def _get_handle(self, answer: int, base: int) -> int:
        memory = [m for m in self._device if m.ctypes.data == base]
        if not memory or not self.has_handles or base in self.opened:
            return INVALID_VALUE
        ctypes.memmove(answer, self.devices.handle(self, memory[0]), 64)
        return SUCCESS

    def _open_handle(self, answer: int, handle: IpcHandle, flags: int) -> int:
        asked = bytes(handle.reserved)
        if self.open_error or threading.get_ident() not in self.threads or self.devices.is_of(self, asked):
            return self.open_error or INVALID_CONTEXT
        here = next((at for at, (known, _) in self.opened.items() if known == asked), None)
        if here is None:
            if flags != 1 or (memory := self.devices.opened(asked)) is None:
                return INVALID_VALUE
            self._device.append(memory)
            here = memory.ctypes.data
        self.opened[here] = asked, self.opened.get(here, (asked, 0))[1] + 1
        ctypes.c_uint64.from_address(answer).value = here
        return SUCCESS

    def _close_handle(self, here: int) -> int:
        if here not in self.opened or threading.get_ident() not in self.threads:
            return INVALID_VALUE
        handle, times = self.opened.pop(here)
        if times > 1:
            self.opened[here] = handle, times - 1
            return SUCCESS
        self.unmapped_in_use += bool(self.in_flight)
        self._device = [m for m in self._device if m.ctypes.data != here]
        return SUCCESS

    def _current_device(self, answer: int) -> int:
        ctypes.c_int.from_address(answer).value = 0
        return SUCCESS if threading.get_ident() in self.threads else INVALID_CONTEXT

    def _uuid(self, answer: int, _device: int) -> int:
        ctypes.memmove(answer, self.uuid, 16)
        return SUCCESS

    def _find(self, name: bytes, address: int, version: int, _flags: int, _found: int) -> int:
        if (name, version) != (b"cuMemcpyBatchAsync", 12080):
            return NOT_FOUND
        ctypes.c_void_p.from_address(address).value = ctypes.cast(self._batch_function, ctypes.c_void_p).value
        return SUCCESS

    def _text(self, part: int) -> Callable[[int, int], int]:
        kept = {code: texts[part] for code, texts in NAMES.items()}

        def find(code: int, answer: int) -> int:
            if code not in kept:
                return INVALID_VALUE
            ctypes.c_char_p.from_address(answer).value = kept[code]
            return SUCCESS

        return find

    def _define(self, has_batches: bool) -> None:
        def function(arguments: Sequence[Any], body: Callable[..., int]) -> Any:
            return ctypes.CFUNCTYPE(Int, *arguments)(body)

        self._batch_function = function([Word] * 9, self._batch)
        if has_batches:
            self.cuGetProcAddress_v2 = function([Text, Word, Int, Word, Word], self._find)
        self.cuMemcpyAsync = function([Word] * 4, self._single)
        self.cuPointerGetAttribute = function([Word, Int, Word], self._attribute)
        self.cuMemHostRegister_v2 = function([Word, Word, ctypes.c_uint], self._register)
        self.cuMemHostUnregister = function([Word], self._unregister)
        self.cuMemGetAddressRange_v2 = function([Word, Word, Word], self._range)
        self.cuIpcGetMemHandle = function([Word, Word], self._get_handle)
        self.cuIpcOpenMemHandle_v2 = function([Word, IpcHandle, ctypes.c_uint], self._open_handle)
        self.cuIpcCloseMemHandle = function([Word], self._close_handle)
        self.cuCtxGetDevice = function([Word], self._current_device)
        self.cuDeviceGetUuid_v2 = function([Word, Int], self._uuid)
        self.cuGetErrorName = function([Int, Word], self._text(0))
        self.cuGetErrorString = function([Int, Word], self._text(1))


class CudaDevice:
    """Copiers on a fake driver."""

    def __init__(self, driver: FakeCuda) -> None:
        self.driver = driver
        self.runtime = CudaRuntime(cast(ctypes.CDLL, driver))
        self._copiers: list[BatchCopier] = []

    def copier(self, direction: Direction) -> BatchCopier:
        return self.copier_and_stream(direction)[0]

    def copier_and_stream(self, direction: Direction) -> tuple[BatchCopier, FakeStream]:
        stream = FakeStream(self.driver)
        copier = BatchCopier(DeviceBackend(self.runtime, stream, direction), "copier under test")
        self._copiers.append(copier)
        return copier, stream

    def close(self) -> None:
        self.driver.running.set()
        for copier in self._copiers:
            copier.close()
        self.driver.close()
