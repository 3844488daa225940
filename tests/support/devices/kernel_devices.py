"""The kernel that reshapes, where tests run it: interpreted on the CPU, and compiled on a GPU if there is one.

A module that imports this needs Triton.
"""

import importlib.util
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from pd_connector.worker import remote_reader

triton: Any = pytest.importorskip("triton")
from transfer.copies.reshape import run_kernel  # noqa: E402  needs Triton
from transfer.copies.reshape.reshape_kernel import RunKernel  # noqa: E402

#: The kernel as it is defined, for Triton to compile.
compiled_kernel: Any = run_kernel.copy_runs

_without_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="the compiled kernel needs a CUDA device")

#: Parameters of tests that run the kernel: names of devices.
KERNEL_DEVICES = ("cpu", pytest.param("cuda", marks=(pytest.mark.cuda, _without_gpu)))


#: Marks of such tests: what Triton warns of in them.
kernel_marks = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in (
        "Conversion of an array with ndim:DeprecationWarning",  # how 3.6's interpreter reads scalars
        "TRITON_DEFAULT_FP_FUSION is unset:UserWarning",  # of 3.9's compiler; the kernel computes nothing
    )
]


class _OneAtATime:
    """The interpreter keeps its place in the kernel for all threads together."""

    def __init__(self, kernel: Any) -> None:
        self._kernel, self._lock = kernel, threading.Lock()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            with self._lock:
                self._kernel[grid](*arguments, **options)

        return launch


def _interpreted() -> Any:
    """The kernel as the interpreter runs it: Triton decides that where a kernel is defined, so it is defined again."""
    spec: Any = run_kernel.__spec__
    again: Any = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "interpret", True)
        spec.loader.exec_module(again)
    return _OneAtATime(again.copy_runs)


def interpreted_kernel() -> RunKernel:
    """The kernel for whatever copies between addresses of this process."""
    with kernel_on("cpu") as device:
        return RunKernel(device)


@contextmanager
def kernel_on(device: str) -> Iterator[torch.device]:
    """Have the kernel run on a device inside the ``with`` block."""
    with pytest.MonkeyPatch.context() as patch:
        if device == "cpu":
            patch.setattr(run_kernel, "copy_runs", _interpreted())
        yield torch.device(device)


@contextmanager
def pulls_by_kernel(device: str) -> Iterator[torch.device]:
    """Have pulls on a device, also on the CPU, be reshaped by the kernel inside the ``with`` block."""
    with pytest.MonkeyPatch.context() as patch, kernel_on(device) as found:
        patch.setattr(remote_reader, "_has_kernel", lambda _: True)
        yield found
