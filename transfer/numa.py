"""The NUMA node of memory: named before its pages are allocated, and asked of the kernel afterwards.

Uses Linux's system calls (mbind(2), set_mempolicy(2), move_pages(2)) through ctypes. The packages on PyPI that wrap
libnuma have not been kept for years, and libnuma need not be installed where vLLM runs.

A node is preferred, not forced: where it has too little memory, pages come from another one, while a forced node
(MPOL_BIND) would have the kernel end a process. What the kernel has done is then asked page by page.
"""

import ctypes
import errno
import mmap
import os
import platform
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from layout.geometry import Region


@dataclass(frozen=True)
class _Calls:
    """Numbers of the system calls on one architecture: asm/unistd.h of Linux."""

    mbind: int
    get_mempolicy: int
    set_mempolicy: int
    move_pages: int


_CALLS = {"x86_64": _Calls(237, 239, 238, 279), "aarch64": _Calls(235, 236, 237, 239)}

# linux/mempolicy.h
_DEFAULT = 0
_PREFERRED = 1
_NODES = 1024  # as many as any kernel is built for (CONFIG_NODES_SHIFT); get_mempolicy refuses a shorter mask
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)
_Mask = ctypes.c_ulong * (_NODES // _WORD_BITS)

#: What an error means here, besides the system's own word for it.
_MEANINGS = {
    errno.EPERM: "the container forbids it; Docker allows it with --cap-add SYS_NICE",
    errno.ENOSYS: "this system has no such call, or the container hides it",
    errno.EINVAL: "this process may take no memory of that node (cpuset), or there is no such node",
}


def prefer(region: Region, node: int) -> None:
    """Have the pages of ``region`` that are not allocated yet come from ``node``, as long as it has any.

    ``region`` must begin at a page.

    Raises:
        OSError: the system refuses; the message says which call, and why.
    """
    mask = _mask_of(node)
    _call("mbind", region.address, region.size, _PREFERRED, ctypes.byref(mask), _NODES + 1, 0)


@contextmanager
def preferring(node: int) -> Iterator[None]:
    """Have the pages that this thread allocates in a ``with`` block come from ``node``, as long as it has any.

    For memory that others allocate. Memory with a node of its own (``prefer``) is not touched by this.

    Raises:
        OSError: the system refuses; the message says which call, and why.
    """
    mode, before = ctypes.c_int(), _Mask()
    _call("get_mempolicy", ctypes.byref(mode), ctypes.byref(before), _NODES + 1, 0, 0)
    mask = _mask_of(node)
    _call("set_mempolicy", _PREFERRED, ctypes.byref(mask), _NODES + 1)
    try:
        yield
    finally:
        # The default takes no nodes; other modes are given back with theirs.
        if mode.value == _DEFAULT:
            _call("set_mempolicy", _DEFAULT, 0, 0)
        else:
            _call("set_mempolicy", mode.value, ctypes.byref(before), _NODES + 1)


def nodes_of(region: Region, samples: int = 1024) -> "Counter[int]":
    """Return on which nodes the pages of ``region`` lie: number of pages by node, of at most ``samples`` of them.

    The pages that are looked at are evenly spaced. Those that are not allocated yet, and those that the kernel does not
    know because a driver has mapped them, are left out.

    Raises:
        OSError: the system refuses; the message says which call, and why.
    """
    pages = -(-region.size // mmap.PAGESIZE)
    looked_at = np.unique(np.linspace(0, pages - 1, min(samples, pages)).astype(np.int64))
    addresses = np.ascontiguousarray(region.address + looked_at * mmap.PAGESIZE, np.uint64)
    nodes = np.full(len(addresses), -1, np.int32)
    _call("move_pages", 0, len(addresses), addresses.ctypes.data, 0, nodes.ctypes.data, 0)
    return Counter(nodes[nodes >= 0].tolist())


def _mask_of(node: int) -> Any:
    if not 0 <= node < _NODES:
        raise OSError(errno.EINVAL, f"there is no NUMA node {node}")
    mask = _Mask()
    mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
    return mask


def _call(name: str, *arguments: Any) -> None:
    """Make a system call; numbers are passed as words, as the kernel takes them."""
    calls = _CALLS.get(platform.machine())
    if calls is None or not hasattr(os, "sched_getaffinity"):  # of Linux
        raise OSError(errno.ENOSYS, f"{name} is not known on {platform.system()} {platform.machine()}")
    words = [ctypes.c_ulong(argument) if isinstance(argument, int) else argument for argument in arguments]
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    if library.syscall(ctypes.c_long(getattr(calls, name)), *words) < 0:
        code = ctypes.get_errno()
        meaning = _MEANINGS.get(code)
        raise OSError(code, f"{name}: {os.strerror(code)}" + (f" ({meaning})" if meaning else ""))
