"""Loops that call a C function once per copy, without the interpreter, for drivers without batches.

A Python loop would release and retake the GIL for every copy, and could wait for a model thread's switch interval
(5 ms) each time. These loops run without the GIL. Functions are given by address; nothing here knows a library.
"""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic

_INT, _WORD = ir.IntType(32), ir.IntType(64)


def _call(builder: Any, address: Any, parameters: list[Any], arguments: list[Any]) -> Any:
    """Emit a call of ``int function(parameters...)`` at ``address``."""
    pointer = builder.inttoptr(address, ir.FunctionType(_INT, parameters).as_pointer())
    return builder.call(pointer, arguments)


def _emit_acl(_typing: Any, _function: Any, _to: Any, _origin: Any, _size: Any, _kind: Any, _stream: Any) -> Any:
    """Emit ``aclrtMemcpyAsync(to, size, origin, size, kind, stream)``: kind is an enum, the others are words."""

    def emit(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        function, to, origin, size, kind, stream = arguments
        parameters = [_WORD, _WORD, _WORD, _WORD, _INT, _WORD]
        return _call(builder, function, parameters, [to, size, origin, size, builder.trunc(kind, _INT), stream])

    return types.int32(*(types.int64,) * 6), emit


def _emit_cuda(_typing: Any, _function: Any, _to: Any, _origin: Any, _size: Any, _stream: Any) -> Any:
    """Emit ``cuMemcpyAsync(to, origin, size, stream)``, all words."""

    def emit(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return _call(builder, arguments[0], [_WORD] * 4, list(arguments[1:]))

    return types.int32(*(types.int64,) * 5), emit


_call_acl, _call_cuda = intrinsic(_emit_acl), intrinsic(_emit_cuda)


def _acl_loop(function: Any, destinations: Any, sources: Any, sizes: Any, kind: Any, stream: Any) -> tuple[int, int]:
    for i in range(sizes.size):
        code = _call_acl(function, destinations[i], sources[i], sizes[i], kind, stream)
        if code != 0:
            return i, code
    return -1, 0


def _cuda_loop(function: Any, destinations: Any, sources: Any, sizes: Any, stream: Any) -> tuple[int, int]:
    for i in range(sizes.size):
        code = _call_cuda(function, destinations[i], sources[i], sizes[i], stream)
        if code != 0:
            return i, code
    return -1, 0


#: Called with (function, destinations, sources, sizes, kind, stream), all int64 and the arrays contiguous. Returns the
#: index and error code of the first refused copy, or (-1, 0). Compiled at the first call.
acl_copies = njit(nogil=True)(_acl_loop)
#: The same, without ``kind``.
cuda_copies = njit(nogil=True)(_cuda_loop)
