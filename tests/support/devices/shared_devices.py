"""Device memory that the fake drivers of several processes share by handles: pages of this process, mapped again."""

import ctypes
import os
from typing import TYPE_CHECKING

import numpy as np

from tests.support.memory import Bytes

if TYPE_CHECKING:
    from tests.support.devices.fake_cuda import FakeCuda

_MREMAP_MAYMOVE = 1
_LIBC = ctypes.CDLL(None)
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
    """The GPUs of a host, as the drivers of its processes see them."""

    def __init__(self) -> None:
        self.shared: dict[bytes, tuple[FakeCuda, Bytes]] = {}  # by handle

    def handle(self, owner: "FakeCuda", memory: Bytes) -> bytes:
        """The handle of an allocation: the same each time."""
        known = [name for name, (_, shared) in self.shared.items() if shared is memory]
        name = known[0] if known else os.urandom(64)
        self.shared[name] = owner, memory
        return name

    def die(self, owner: "FakeCuda") -> None:
        """A process ends: its handles open no more. What others have mapped stays."""
        self.shared = {name: shared for name, shared in self.shared.items() if shared[0] is not owner}
