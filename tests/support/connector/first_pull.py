"""The first staged pull of a new process. Run as a module: prints what it compiled, and what was not there."""

import ctypes
import json
import mmap
import sys
from contextlib import closing

from numba.core.dispatcher import Dispatcher

from layout import staging
from tests.support.connector.engines import THEIRS, Site, pull_once
from tests.support.connector.staging import TWO_RANKS, stage
from transfer.copies.reshape import reshape
from transfer.memory import SlotPool

SLOT_BYTES = 4 << 20


def compiled() -> set[str]:
    """The compiled forms of all kernels that pulls use."""
    kernels = [
        value for module in (staging, reshape) for value in vars(module).values() if isinstance(value, Dispatcher)
    ]
    return {f"{kernel.py_func.__name__}{signature}" for kernel in kernels for signature in kernel.signatures}


def resident_pages(pool: SlotPool) -> int:
    """Pages of the staging buffer that are in memory."""
    count = pool.region.size // mmap.PAGESIZE
    present = (ctypes.c_ubyte * count)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(pool.region.address), ctypes.c_size_t(pool.region.size), present) == 0
    return sum(byte & 1 for byte in present)


def main() -> None:
    with closing(Site()) as site:
        prefill, (worker,) = site.prefill(TWO_RANKS), site.decode()
        pool = stage(worker, SLOT_BYTES)
        before, missing = compiled(), pool.region.size // mmap.PAGESIZE - resident_pages(pool)
        end = pull_once(site, prefill.prefill("r", THEIRS), worker)
        new = sorted(compiled() - before)
        json.dump({"cause": end.cause, "kernels": len(before), "new": new, "missing_pages": missing}, sys.stdout)


if __name__ == "__main__":
    main()
