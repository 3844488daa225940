"""Loops that call a C function once per copy, without the interpreter, for drivers without batches.

A Python loop would release and retake the GIL for every copy, and could wait for a model thread's switch interval
(5 ms) each time. These loops run without the GIL. Functions are ctypes', with prototypes; nothing here knows a library.
"""

from typing import Any

from numba import njit


def _acl_loop(memcpy: Any, destinations: Any, sources: Any, sizes: Any, kind: Any, stream: Any) -> tuple[int, int]:
    for i in range(sizes.size):
        code = memcpy(destinations[i], sizes[i], sources[i], sizes[i], kind, stream)
        if code != 0:
            return i, code
    return -1, 0


def _cuda_loop(memcpy: Any, destinations: Any, sources: Any, sizes: Any, stream: Any) -> tuple[int, int]:
    for i in range(sizes.size):
        code = memcpy(destinations[i], sources[i], sizes[i], stream)
        if code != 0:
            return i, code
    return -1, 0


#: Called with (``aclrtMemcpyAsync``, destinations, sources, sizes, kind, stream): int64, and the arrays contiguous.
#: Returns the index and error code of the first refused copy, or (-1, 0). Compiled at the first call.
acl_copies = njit(nogil=True)(_acl_loop)
#: The same with ``cuMemcpyAsync``, without ``kind``.
cuda_copies = njit(nogil=True)(_cuda_loop)
