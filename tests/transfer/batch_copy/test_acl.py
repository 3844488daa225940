"""What can be said of the ACL backend without its runtime. Its tests are in ``tests/npu_sim``.

Covers: transfer.batch_copy.acl_abi.
"""

import ctypes

import pytest

from transfer.batch_copy import acl_abi
from transfer.batch_copy.acl import AclRuntime
from transfer.batch_copy.base import CopierStartError


def test_the_destination_comes_first_in_a_batchs_attribute() -> None:
    attribute = acl_abi.MemcpyBatchAttr
    assert [attribute.dstLoc.offset, attribute.srcLoc.offset, attribute.rsv.offset] == [0, 8, 16]
    assert (ctypes.sizeof(attribute), ctypes.sizeof(acl_abi.PtrAttributes)) == (32, 28)


def test_a_library_that_is_not_the_runtime_is_refused() -> None:
    with pytest.raises(
        CopierStartError, match=r"has no aclrtMemcpyAsync, aclrtMallocHost, aclrtFreeHost: .* CANN 8\.0"
    ):
        AclRuntime(ctypes.CDLL("libc.so.6"), 0)
