"""Builds the simulated ACL runtime, and loads it into this process in place of CANN's.

    npu_runtime/sim.h  what the parts share
    npu_runtime/*.c    the runtime: devices, memory, streams and events, copies, batches of copies
    npu_runtime/*.txt  symbols that torch_npu is linked with, but that do nothing here (idle) or always fail (failing:
                       what launches kernels; atb: all of the ATB library)

The unchanged torch_npu of PyPI then runs on it: tensors, contiguous copies, pinned memory, streams and events of
``npu:0``. Kernels do not: an operator that computes or gathers raises, unless the kernels of ``tests.support.ascend``
are installed. Must not be used for timing, nor called an NPU.

Environment variables, read at every call:

    SIMACL_DEVICES=n             devices, 1 by default; torch asks only once
    SIMACL_COPY_US=n             how long each copy on a stream takes at least
    SIMACL_FAIL_AT=i             entry i of a batch of copies fails, also by itself; those before it are under way
    SIMACL_REFUSE_BATCHES=n      every n-th batch is refused half way, though each of its copies is right
    SIMACL_BATCH_UNSUPPORTED=1   the call for batches answers FEATURE_NOT_SUPPORT
    SIMACL_LOST=1                whoever asks how far the device is gets LOST_HEARTBEAT; it goes on with its work
    SIMACL_NIC=1                 the process reaches device memory at its addresses: its network engine plays a NIC

Programs without a line of Python before torch find the libraries by LD_LIBRARY_PATH: ``runtime_directory``.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

RUNTIME = Path(__file__).parent / "npu_runtime"
#: Libraries that torch_npu is linked with and takes nothing from here.
EMPTY = ("hccl", "ge_runner", "graph", "acl_tdt_channel")
#: ACL_ERROR_OP_NOT_FOUND
NO_KERNELS = 100024
#: ATB's ERROR_INVALID_PARAM
NO_ATB = 1

_FLAGS = ("-std=gnu11", "-O2", "-g", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-missing-field-initializers")


class BuildError(RuntimeError):
    """The simulated runtime cannot be built; the message says what is missing."""


def load_runtime() -> ctypes.CDLL:
    """The simulated runtime, built if need be. Call it before torch is imported, which imports torch_npu.

    Raises:
        BuildError: no compiler, no torch_npu, or it does not compile.
    """
    if "torch" in sys.modules:
        raise BuildError("torch has been imported before the simulated runtime was loaded")
    out = runtime_directory()
    # Global, and before torch_npu asks for libraries of these names.
    libraries = [ctypes.CDLL(str(out / f"lib{name}.so"), ctypes.RTLD_GLOBAL) for name in _names()]
    return libraries[0]


def runtime_directory() -> Path:
    """Where the runtime's libraries are, built if need be.

    Raises:
        BuildError: as above.
    """
    out = Path(sys.prefix) / "simulated-acl"
    if not _is_fresh(out):
        build_runtime(out)
    return out


def in_a_process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a process of its own, where ``acl`` is the simulated runtime and torch was imported on it."""
    start = (
        "from tests.support.devices import npu_simulator; acl = npu_simulator.load_runtime(); import torch, ctypes\n"
    )
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", start + code],
        capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **environment},
    )  # fmt: skip


def build_runtime(out: Path, defines: Iterable[str] = ()) -> None:
    """Compile all libraries into ``out``. ``defines``: "CANN_8_5" leaves out what that release lacks."""
    headers = acl_headers()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        stubs, atb = Path(folder) / "stubs.c", Path(folder) / "atb.c"
        stubs.write_text("".join(_stubs("idle_symbols.txt", 0)) + "".join(_stubs("failing_symbols.txt", NO_KERNELS)))
        atb.write_text("".join(_stubs("atb_symbols.txt", NO_ATB)))
        sources = [path for path in sorted(RUNTIME.glob("*.c")) if path.name != "op_compiler.c"]
        options = [f"-I{headers}", *(f"-D{name}" for name in defines), "-pthread"]
        _compile(out, "ascendcl", [*sources, stubs], *options)
        _compile(out, "atb", [atb])
    # torch_npu's own list of libraries is short: it reaches the runtime through this one as well.
    _compile(out, "acl_op_compiler", [RUNTIME / "op_compiler.c"], f"-L{out}", "-Wl,--no-as-needed", "-lascendcl")
    for name in EMPTY:
        _compile(out, name, [])


def _names() -> tuple[str, ...]:
    return "ascendcl", "acl_op_compiler", "atb", *EMPTY


def _is_fresh(out: Path) -> bool:
    built = [out / f"lib{name}.so" for name in _names()]
    if not all(path.exists() for path in built):
        return False
    sources = [Path(__file__), *RUNTIME.iterdir()]
    return min(path.stat().st_mtime for path in built) > max(path.stat().st_mtime for path in sources)


def acl_headers() -> Path:
    """The directory of ACL's headers that torch_npu brings."""
    include = _torch_npu() / "include"
    older = include / "third_party" / "acl" / "inc"  # where torch_npu 2.10 has them
    return older if older.exists() else include


def _torch_npu() -> Path:
    spec = find_spec("torch_npu")
    if spec is None or spec.origin is None:
        raise BuildError("torch_npu is not installed here: `make test-npu-sim` makes an environment that has it")
    return Path(spec.origin).parent


def _stubs(names: str, answer: int) -> Iterable[str]:
    for symbol in (RUNTIME / names).read_text().split():
        yield f"long {symbol}(void) {{ return {answer}; }}\n"


def _compile(out: Path, name: str, sources: Iterable[Path], *options: str) -> None:
    compiler = shutil.which(os.environ.get("CC", "gcc"))
    if compiler is None:
        raise BuildError("the simulated runtime needs a C compiler: install gcc, or name one in the variable CC")
    library = out / f"lib{name}.so"
    inputs = [str(path) for path in sources] or ["-x", "c", "/dev/null"]
    command = [compiler, "-shared", *_FLAGS, *inputs, "-o", str(library), f"-Wl,-soname,{library.name}", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command)} failed:\n{done.stderr}")
