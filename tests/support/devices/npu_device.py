"""The simulated Ascend device by the C interface alone, past torch: its memory, streams and events."""

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_int, c_int32, c_size_t, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from layout.geometry import Region
from tests.support.memory import Bytes
from tests.support.waiting import WAIT_S
from transfer.copies.batch.acl import AclRuntime
from transfer.copies.batch.base import Direction
from transfer.copies.batch.copier import BatchCopier
from transfer.copies.batch.device import DeviceBackend
from transfer.copies.batch.streams import DeviceStream
from transfer.memory import PinnedMemory

if TYPE_CHECKING:
    import torch

HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2
NOT_READY, COMPLETE = 0, 1


def must(code: int) -> None:
    if code:
        raise RuntimeError(f"the runtime answered {code}")


class RawEvent:
    def __init__(self, library: ctypes.CDLL, stream: c_void_p) -> None:
        self._library, self.raw = library, c_void_p()
        must(library.aclrtCreateEventWithFlag(byref(self.raw), 0))
        must(library.aclrtRecordEvent(self.raw, stream))

    def query(self) -> bool:
        status = c_int()
        must(self._library.aclrtQueryEventStatus(self.raw, byref(status)))
        assert status.value in (NOT_READY, COMPLETE)
        return status.value == COMPLETE

    def synchronize(self) -> None:
        must(self._library.aclrtSynchronizeEvent(self.raw))


class RawStream(DeviceStream):
    """A stream of one device, as the copier sees streams."""

    def __init__(self, library: ctypes.CDLL, device: int, *, sets_device: bool = True) -> None:
        self._library, self._device, self._sets_device = library, device, sets_device
        self.raw = c_void_p()
        must(library.aclrtSetDevice(device))
        must(library.aclrtCreateStream(byref(self.raw)))

    def enter_thread(self) -> None:
        if self._sets_device:
            must(self._library.aclrtSetDevice(self._device))

    def handle(self) -> int:
        return self.raw.value or 0

    def wait_event(self, event: object) -> None:
        assert isinstance(event, RawEvent)
        must(self._library.aclrtStreamWaitEvent(self.raw, event.raw))

    def record_event(self) -> RawEvent:
        return RawEvent(self._library, self.raw)

    def synchronize(self) -> None:
        must(self._library.aclrtSynchronizeStream(self.raw))

    def close(self) -> None:
        must(self._library.aclrtDestroyStream(self.raw))


class RawDevice:
    """One device of one build of the runtime: its memory, and copiers to and from it."""

    def __init__(self, library: Path, device: int) -> None:
        self._path, self.device = library, device
        self.library = self.open()
        must(self.library.aclrtSetDevice(device))
        self.runtime = AclRuntime(self.open(), device)
        self._memory: list[c_void_p] = []

    def open(self) -> ctypes.CDLL:
        """The library with prototypes of its own, apart from the one that torch_npu has loaded."""
        library = ctypes.CDLL(str(self._path), mode=os.RTLD_LOCAL | os.RTLD_DEEPBIND)
        library.aclrtMalloc.argtypes = (c_void_p, c_size_t, c_int)
        library.aclrtFree.argtypes = (c_void_p,)
        library.aclrtMemcpy.argtypes = (c_void_p, c_size_t, c_void_p, c_size_t, c_int)
        library.aclrtSetDevice.argtypes = (c_int32,)
        return library

    def count(self, name: str) -> int:
        self.library.simacl_count.restype = ctypes.c_long
        return int(self.library.simacl_count(name.encode()))

    def allocate(self, size: int) -> Region:
        """Memory of the device, that the host cannot reach."""
        address = c_void_p()
        must(self.library.aclrtMalloc(byref(address), size, 0))
        self._memory.append(address)
        region = Region(address.value or 0, size)
        self.put(region, np.zeros(size, np.uint8))
        return region

    def put(self, region: Region, values: Bytes) -> None:
        must(self.library.aclrtMemcpy(region.address, region.size, values.ctypes.data, values.nbytes, HOST_TO_DEVICE))

    def get(self, region: Region) -> Bytes:
        """What is in device memory now, whatever is under way."""
        values = np.empty(region.size, np.uint8)
        must(self.library.aclrtMemcpy(values.ctypes.data, values.nbytes, region.address, region.size, DEVICE_TO_HOST))
        return values

    @contextmanager
    def copier(self, direction: Direction, *, sets_device: bool = True) -> Iterator[BatchCopier]:
        stream = RawStream(self.library, self.device, sets_device=sets_device)
        with BatchCopier(DeviceBackend(self.runtime, stream, direction), "copier under test") as copier:
            yield copier
        stream.close()

    def close(self) -> None:
        for address in self._memory:
            must(self.library.aclrtFree(address))


@contextmanager
def held(acl: ctypes.CDLL, stream: int) -> Iterator[threading.Event]:
    """A stream stands still until the event is set, or the block is left, which waits for the stream."""
    go_on = threading.Event()

    def stand(_: object) -> None:
        go_on.wait(WAIT_S)

    wait = ctypes.CFUNCTYPE(None, c_void_p)(stand)
    must(acl.aclrtLaunchHostFunc(c_void_p(stream), wait, None))
    try:
        yield go_on
    finally:
        go_on.set()
        must(acl.aclrtSynchronizeStream(c_void_p(stream)))


def view(memory: PinnedMemory) -> Bytes:
    """Pinned memory as an array; ``memory`` must outlive it."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * memory.region.size).from_address(memory.region.address))


@dataclass
class DeviceBytes:
    """Device memory by address: what is there now, whatever is under way."""

    acl: ctypes.CDLL

    def _copy(self, to: int, start: int, size: int, kind: int) -> None:
        bytes_ = ctypes.c_size_t(size)
        assert self.acl.aclrtMemcpy(ctypes.c_void_p(to), bytes_, ctypes.c_void_p(start), bytes_, kind) == 0

    def at(self, address: int, size: int) -> Bytes:
        result = np.empty(size, np.uint8)
        self._copy(result.ctypes.data, address, size, DEVICE_TO_HOST)
        return result

    def of(self, tensor: "torch.Tensor") -> Bytes:
        return self.at(tensor.data_ptr(), tensor.numel() * tensor.element_size())

    def put(self, address: int, values: Bytes) -> None:
        self._copy(address, np.ascontiguousarray(values).ctypes.data, values.nbytes, HOST_TO_DEVICE)
