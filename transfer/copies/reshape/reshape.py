"""Executes local copies: the last step of a staged pull, and every change of layout on arrival.

Moves bytes between addresses that the CPU can reach, with the GIL released. ``layout.plan`` and ``layout.staging``
decide which bytes go where. Must not decide, allocate or keep anything.

The destination is written once and read much later by other code. Whole cache lines therefore bypass the caches
(non-temporal stores): otherwise a scattered destination costs a read of every line before the write.
"""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic

from layout.copies import EMPTY, Copies

_LINE_BYTES = 64  # a cache line


def _emit_copy_bytes(_typing: Any, _destination: Any, _source: Any, _size: Any) -> Any:
    """Emit ``copy_bytes(destination, source, size)``: memcpy between two addresses."""

    def emit(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        byte_pointer = ir.IntType(8).as_pointer()
        to, origin = (builder.inttoptr(address, byte_pointer) for address in arguments[:2])
        memcpy = builder.module.declare_intrinsic("llvm.memcpy", [byte_pointer, byte_pointer, arguments[2].type])
        builder.call(memcpy, [to, origin, arguments[2], ir.Constant(ir.IntType(1), 0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


def _emit_store_line(_typing: Any, _destination: Any, _source: Any) -> Any:
    """Emit ``store_line(destination, source)``, which stores one aligned cache line without reading it first."""

    def emit(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        line_pointer = ir.VectorType(ir.IntType(64), _LINE_BYTES // 8).as_pointer()
        to, origin = (builder.inttoptr(address, line_pointer) for address in arguments)
        store = builder.store(builder.load(origin, align=1), to, align=_LINE_BYTES)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


def _emit_fence(_typing: Any) -> Any:
    """Emit ``fence()``, which orders the stores before and after it, including non-temporal ones."""

    def emit(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), emit


_copy_bytes, _store_line, _fence = (intrinsic(emit) for emit in (_emit_copy_bytes, _emit_store_line, _emit_fence))


def _copy_runs(destinations: Any, sources: Any, sizes: Any) -> None:
    for run in range(sizes.size):
        to, origin, size = destinations[run], sources[run], sizes[run]
        if (to | size) & (_LINE_BYTES - 1):
            _copy_bytes(to, origin, size)
        else:
            for offset in range(0, size, _LINE_BYTES):
                _store_line(to + offset, origin + offset)
    _fence()


_kernel = njit(nogil=True)(_copy_runs)  # compiles at the first call, once per process


def run_copies(copies: Copies) -> None:
    """Copy every run, in the order given. When this returns, every thread sees the bytes.

    All addresses must belong to this process and be reachable by the CPU; this cannot be checked. Sources and
    destinations must not overlap. Fastest if destinations and sizes are multiples of 64. May be called from any thread;
    releases the GIL.

    Raises:
        ValueError: a size is negative. Nothing was copied.
    """
    copies.check_sizes()
    _kernel(*copies.contiguous().columns)


def warm_up() -> None:
    """Compile the kernel, which takes about half a second, so that the first pull does not wait for it."""
    run_copies(EMPTY)
