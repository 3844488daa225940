"""What can be said of the ACL backend without its runtime. Its tests are in ``tests/npu_sim``.

Covers: transfer.copies.batch.acl_abi.
"""

import ctypes
import mmap
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.memory import Memory
from tests.support.numa import needs_a_choice, online, policy
from transfer.copies.batch import acl_abi
from transfer.copies.batch.acl import AclRuntime
from transfer.copies.batch.base import CopierStartError


def test_the_destination_comes_first_in_a_batchs_attribute() -> None:
    attribute = acl_abi.MemcpyBatchAttr
    assert [attribute.dstLoc.offset, attribute.srcLoc.offset, attribute.rsv.offset] == [0, 8, 16]
    assert ctypes.sizeof(attribute) == 32


def test_a_library_that_is_not_the_runtime_is_refused() -> None:
    with pytest.raises(
        CopierStartError, match=r"has no aclrtMemcpyAsync, aclrtMallocHost, aclrtFreeHost: .* CANN 8\.0"
    ):
        AclRuntime(ctypes.CDLL("libc.so.6"), 0)


# Where a device is


def runtime_that_tells(place: bytes, code: int = acl_abi.SUCCESS) -> AclRuntime:
    def tell(device: int, text: int, size: int) -> int:
        assert (device, size >= 13) == (3, True)
        ctypes.memmove(text, place + b"\0", len(place) + 1)
        return code

    number = ctypes.c_int32
    library = {name: ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0) for name in acl_abi.REQUIRED}
    library["aclrtDeviceGetPCIBusId"] = ctypes.CFUNCTYPE(ctypes.c_int, number, ctypes.c_uint64, number)(tell)
    return AclRuntime(cast("Any", SimpleNamespace(**library)), 3)


def test_a_runtime_tells_the_place_of_its_device_as_linux_writes_it() -> None:
    assert runtime_that_tells(b"0000:3D:00.0").pci_address() == "0000:3d:00.0"


def test_a_runtime_that_refuses_or_lacks_the_call_tells_no_place() -> None:
    assert runtime_that_tells(b"0000:3d:00.0", acl_abi.FEATURE_NOT_SUPPORT).pci_address() == ""
    assert Allocator().runtime.pci_address() == ""


# Where pinned memory comes from


class Allocator:
    """The runtime's allocator, which takes its pages on the calling thread, and nothing else of the runtime."""

    def __init__(self) -> None:
        self.memory = Memory(8 * mmap.PAGESIZE)
        self.preferred: list[str] = []  # by the thread that has asked
        self.freed: list[int] = []
        library = {name: ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0) for name in acl_abi.REQUIRED}
        word = ctypes.c_uint64
        library["aclrtMallocHost"] = ctypes.CFUNCTYPE(ctypes.c_int, word, word)(self._allocate)
        library["aclrtFreeHost"] = ctypes.CFUNCTYPE(ctypes.c_int, word)(self._free)
        self.runtime = AclRuntime(cast("Any", SimpleNamespace(**library)), 0)

    def _allocate(self, answer: int, size: int) -> int:
        assert size <= self.memory.region.size
        self.preferred.append(policy(self.memory.region))
        ctypes.c_uint64.from_address(answer).value = self.memory.region.address
        return acl_abi.SUCCESS

    def _free(self, address: int) -> int:
        self.freed.append(address)
        return acl_abi.SUCCESS


@needs_a_choice
def test_the_runtime_allocates_on_a_thread_that_prefers_the_node() -> None:
    allocator = Allocator()
    allocator.runtime.pinned(mmap.PAGESIZE, node=online()).close()
    assert allocator.preferred == [f"prefer:{online()}"]
    assert policy(allocator.memory.region) == "default", "the thread still prefers it"
    allocator.runtime.pinned(mmap.PAGESIZE).close()
    assert allocator.preferred[1] == "default"
    assert len(allocator.freed) == 2


def test_a_node_that_is_refused_costs_one_line_and_no_memory(caplog: pytest.LogCaptureFixture) -> None:
    allocator = Allocator()
    allocator.runtime.pinned(mmap.PAGESIZE, node=1023).close()
    assert allocator.preferred == ["default"]
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("host memory is not placed on NUMA node 1023: ")
