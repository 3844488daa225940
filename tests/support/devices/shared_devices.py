"""Device memory that fake drivers share by handles: between what stands for processes, or between real ones."""

import ctypes
import mmap
import os
import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tests.support.memory import Bytes

if TYPE_CHECKING:
    from tests.support.devices.fake_cuda import FakeCuda

_MREMAP_MAYMOVE = 1
_MAP_FIXED = 16
_FILE = "fake device memory"
_HANDLE = struct.Struct("=qqq40x")  # process, its descriptor of the file, bytes
_LIBC = ctypes.CDLL(None)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_LIBC.mremap.restype = ctypes.c_void_p
_LIBC.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]


def bytes_at(address: int, size: int) -> Bytes:
    """Memory of somebody else, who keeps it."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def mapped_again(memory: Bytes) -> Bytes:
    """The same pages at another address, or at the same one if they are not those of an ``mmap``."""
    address = _LIBC.mremap(memory.ctypes.data, 0, memory.nbytes, _MREMAP_MAYMOVE)
    refused = address in (None, ctypes.c_void_p(-1).value)
    return bytes_at(memory.ctypes.data if refused else address, memory.nbytes)


class SharedDevices:
    """The GPUs of a host, as the drivers of its processes see them, which are all in this one."""

    def __init__(self) -> None:
        self.shared: dict[bytes, tuple[FakeCuda, Bytes]] = {}  # by handle

    def handle(self, owner: "FakeCuda", memory: Bytes) -> bytes:
        """The handle of an allocation: the same each time."""
        known = [name for name, (_, shared) in self.shared.items() if shared is memory]
        name = known[0] if known else os.urandom(64)
        self.shared[name] = owner, memory
        return name

    def is_of(self, owner: "FakeCuda", handle: bytes) -> bool:
        """Whether a driver would open its own handle."""
        return handle in self.shared and self.shared[handle][0] is owner

    def opened(self, handle: bytes) -> Bytes | None:
        """Map the memory of a handle once more; None: it opens nothing."""
        return mapped_again(self.shared[handle][1]) if handle in self.shared else None

    def die(self, owner: "FakeCuda") -> None:
        """A process ends: its handles open no more. What others have mapped stays."""
        self.shared = {name: shared for name, shared in self.shared.items() if shared[0] is not owner}


class DevicesOfProcesses(SharedDevices):
    """The same for one process of several. Memory that has a handle is a file without a name.

    When its owner dies, the handle opens no more, and the memory is taken until all who have mapped it let go of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._files: dict[int, int] = {}  # descriptors, by address

    def handle(self, owner: "FakeCuda", memory: Bytes) -> bytes:
        start, size = memory.ctypes.data, memory.nbytes
        if start not in self._files:
            file = self._files[start] = os.memfd_create(_FILE)
            os.ftruncate(file, size)
            os.pwrite(file, memory.tobytes(), 0)
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            assert _LIBC.mmap(start, size, protection, mmap.MAP_SHARED | _MAP_FIXED, file, 0) == start
        return _HANDLE.pack(os.getpid(), self._files[start], size)

    def is_of(self, owner: "FakeCuda", handle: bytes) -> bool:
        return bool(_HANDLE.unpack(handle)[0] == os.getpid())

    def opened(self, handle: bytes) -> Bytes | None:
        process, file, size = _HANDLE.unpack(handle)
        try:
            with Path(f"/proc/{process}/fd/{file}").open("r+b") as opened:
                return np.frombuffer(mmap.mmap(opened.fileno(), size), np.uint8)
        except OSError:
            return None

    @staticmethod
    def taken_bytes() -> int:
        """What this process has mapped of others and of its own."""
        lines = re.findall(rf"^(\w+)-(\w+) .*/memfd:{_FILE}", Path("/proc/self/maps").read_text(), re.MULTILINE)
        return sum(int(end, 16) - int(start, 16) for start, end in lines)
