"""The part of Ascend's ``acl/acl_rt.h`` that copies need, for ctypes: structures, constants, prototypes, error names.

Taken from the headers in the wheel of torch_npu 2.13.0, and ``aclrtDeviceGetPCIBusId``, which older ones lack, from the
sources of CANN's runtime. A test compiles against the headers. Makes no calls.
"""

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_int32, c_size_t, c_uint8, c_uint32, c_void_p

MEMCPY_HOST_TO_DEVICE = 1
MEMCPY_DEVICE_TO_HOST = 2

LOCATION_HOST = 0
LOCATION_DEVICE = 1

SUCCESS = 0
INVALID_PARAM = 100000
RT_PARAM_INVALID = 107000
FEATURE_NOT_SUPPORT = 207000
NO_INDEX = ctypes.c_size_t(-1).value  # in failIndex: no single entry failed


class AclMemLocation(ctypes.Structure):
    """``aclrtMemLocation``."""

    _fields_ = (("id", c_uint32), ("type", c_int))


class MemcpyBatchAttr(ctypes.Structure):
    """``aclrtMemcpyBatchAttr``: the destination comes first, ``rsv`` must be zero."""

    _fields_ = (("dstLoc", AclMemLocation), ("srcLoc", AclMemLocation), ("rsv", c_uint8 * 16))


_BATCH = (c_void_p, c_void_p, c_void_p, c_void_p, c_size_t, POINTER(MemcpyBatchAttr), POINTER(c_size_t), c_size_t)

#: name -> (argument types, result type). Arrays and streams are passed as addresses.
PROTOTYPES: dict[str, tuple[tuple[type, ...], type]] = {
    "aclrtMemcpyBatchAsync": ((*_BATCH, POINTER(c_size_t), c_void_p), c_int),
    "aclrtMemcpyBatchAsyncV2": ((*_BATCH, c_void_p), c_int),
    "aclrtMemcpyAsync": ((c_void_p, c_size_t, c_void_p, c_size_t, c_int, c_void_p), c_int),
    "aclrtMallocHost": ((POINTER(c_void_p), c_size_t), c_int),
    "aclrtFreeHost": ((c_void_p,), c_int),
    "aclrtDeviceGetPCIBusId": ((c_int32, c_void_p, c_int32), c_int),
    "aclrtSetDevice": ((c_int32,), c_int),
    "aclGetRecentErrMsg": ((), c_char_p),
}

#: Symbols that copies cannot do without; the others may be missing.
REQUIRED = ("aclrtMemcpyAsync", "aclrtMallocHost", "aclrtFreeHost")

#: code -> (name, what it means here and what to do). Only the codes that copies are known to return.
ERRORS: dict[int, tuple[str, str]] = {
    INVALID_PARAM: ("ACL_ERROR_INVALID_PARAM", "the call was malformed"),
    RT_PARAM_INVALID: (
        "ACL_ERROR_RT_PARAM_INVALID",
        "an address is not in the memory that the direction requires, is on another device, or the range is too long",
    ),
    107001: ("ACL_ERROR_RT_INVALID_DEVICEID", "no such device; see ASCEND_RT_VISIBLE_DEVICES"),
    107002: ("ACL_ERROR_RT_CONTEXT_NULL", "no device is set in the calling thread"),
    107003: ("ACL_ERROR_RT_STREAM_CONTEXT", "the stream belongs to another device than the one set in this thread"),
    FEATURE_NOT_SUPPORT: ("ACL_ERROR_RT_FEATURE_NOT_SUPPORT", "the driver or chip does not support this"),
    207001: ("ACL_ERROR_RT_MEMORY_ALLOCATION", "out of memory; request less"),
    507000: ("ACL_ERROR_RT_INTERNAL_ERROR", "the runtime failed; see the device's log (~/ascend/log)"),
    507010: ("ACL_ERROR_RT_LOST_HEARTBEAT", "the device does not answer; restart the process, see npu-smi info"),
    507046: ("ACL_ERROR_RT_STREAM_SYNC_TIMEOUT", "the stream did not finish in time"),
    507053: ("ACL_ERROR_RT_DEVICE_MEM_ERROR", "the device's memory has an error; see npu-smi info"),
}
