"""The part of ``cuda.h`` that copies need, for ctypes: structures, constants and prototypes of the driver's API.

Taken from the headers of CUDA 12.8 and 13. The batch call is the one of 12.8 (version 12080), which later drivers still
return for that version. Makes no calls.
"""

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p

BATCH_VERSION = 12080
GET_PROC_ADDRESS_DEFAULT = 0

SUCCESS = 0
NOT_SUPPORTED = 801
NO_INDEX = ctypes.c_size_t(-1).value  # in failIdx: no single copy failed

SRC_ACCESS_ORDER_STREAM = 1

POINTER_ATTRIBUTE_MEMORY_TYPE = 2
MEMORY_TYPE_DEVICE = 2

IPC_HANDLE_BYTES = 64
IPC_LAZY_ENABLE_PEER_ACCESS = 1

MEM_HOST_REGISTER_PORTABLE = 1  # pinned for every context


class IpcHandle(ctypes.Structure):
    """``CUipcMemHandle``."""

    _fields_ = (("reserved", ctypes.c_ubyte * IPC_HANDLE_BYTES),)


class CudaMemLocation(ctypes.Structure):
    """``CUmemLocation``."""

    _fields_ = (("type", c_uint), ("id", c_int))


class MemcpyAttributes(ctypes.Structure):
    """``CUmemcpyAttributes``. The hints concern managed memory only and stay zero."""

    _fields_ = (
        ("srcAccessOrder", c_uint),
        ("srcLocHint", CudaMemLocation),
        ("dstLocHint", CudaMemLocation),
        ("flags", c_uint),
    )


#: ``cuMemcpyBatchAsync`` of version 12080: with ``failIdx``, which version 13000 no longer has.
BATCH_ARGUMENTS = (
    c_void_p,  # dsts
    c_void_p,  # srcs
    c_void_p,  # sizes
    c_size_t,  # count
    POINTER(MemcpyAttributes),
    POINTER(c_size_t),  # attrsIdxs
    c_size_t,  # numAttrs
    POINTER(c_size_t),  # failIdx
    c_void_p,  # stream
)

#: name -> argument types. All return a CUresult.
PROTOTYPES: dict[str, tuple[type, ...]] = {
    "cuGetProcAddress_v2": (c_char_p, POINTER(c_void_p), c_int, c_uint64, POINTER(c_int)),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuPointerGetAttribute": (c_void_p, c_int, c_uint64),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemGetAddressRange_v2": (POINTER(c_uint64), POINTER(c_size_t), c_uint64),
    "cuIpcGetMemHandle": (POINTER(IpcHandle), c_uint64),
    "cuIpcOpenMemHandle_v2": (POINTER(c_uint64), IpcHandle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuCtxGetDevice": (POINTER(c_int),),
    "cuDeviceGetUuid_v2": (c_char_p, c_int),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
}

#: Symbols that older drivers lack; without them copies are submitted one by one.
OPTIONAL = ("cuGetProcAddress_v2",)

#: code -> what it means here and what to do, in addition to the driver's own text.
ADVICE: dict[int, str] = {
    1: "an address is not in the memory that the direction requires, or the range ends outside it",
    2: "the host's memory or the limit on locked memory (ulimit -l) is too small; request less",
    201: "no device is set in the calling thread",
    400: "the stream does not belong to this device",
    700: "an earlier kernel or copy wrote out of bounds; the process must be restarted",
    712: "the memory is already pinned",
    801: "the driver or device does not support this",
}

#: The same for handles of another process's memory.
IPC_ADVICE: dict[int, str] = {
    1: "the memory comes from cuMemCreate (sleep mode, expandable segments), or its GPU is not in this container",
    201: "the two processes are in PID namespaces that cannot share memory: run both with the host's (hostPID)",
    205: "seen under Kubernetes' dynamic resource allocation",
    217: "the two GPUs cannot reach each other's memory (nvidia-smi topo -p2p r)",
    704: "other code of this process has opened its own access to that GPU",
    711: "too many GPUs have access to that one already",
    801: "this device shares no memory between processes (MIG, vGPU, confidential computing)",
}
