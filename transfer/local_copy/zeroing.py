"""Zeroes memory that the CPU can reach, with the GIL released. Decides nothing of which."""

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic

from layout.copies import NO_RUNS, MemoryRuns


def _emit_zero_bytes(_typing: Any, _address: Any, _size: Any) -> Any:
    """Emit ``zero_bytes(address, size)``: memset, which chooses the fastest stores for the size itself."""

    def emit(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        byte_pointer = ir.IntType(8).as_pointer()
        to = builder.inttoptr(arguments[0], byte_pointer)
        memset = builder.module.declare_intrinsic("llvm.memset", [byte_pointer, arguments[1].type])
        builder.call(memset, [to, ir.Constant(ir.IntType(8), 0), arguments[1], ir.Constant(ir.IntType(1), 0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


_zero_bytes = intrinsic(_emit_zero_bytes)


def _zero_each(addresses: Any, sizes: Any) -> None:
    for run in range(sizes.size):
        _zero_bytes(addresses[run], sizes[run])


_kernel = njit(nogil=True)(_zero_each)  # compiles at the first call, once per process


def zero_runs(runs: MemoryRuns) -> None:
    """Zero every run. All addresses must belong to this process; this cannot be checked. Any thread; releases the GIL.

    Raises:
        ValueError: a size is negative. Nothing was zeroed.
    """
    if len(runs) and int(runs.sizes.min()) < 0:
        raise ValueError(f"a run has a negative size: {int(runs.sizes.min())} bytes")
    _kernel(*(np.ascontiguousarray(a, np.int64) for a in (runs.addresses, runs.sizes)))


def warm_up() -> None:
    """Compile the kernel, which takes some tenths of a second."""
    zero_runs(NO_RUNS)
