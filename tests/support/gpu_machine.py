"""What a machine lacks for the tests and benchmarks that need a CUDA GPU: ``python -m tests.support.gpu_machine``.

It imports nothing that is installed, so that it can be asked before anything is.
"""

import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

#: With any value, the servers of ``tests/cuda`` run on the CPU.
ON_CPU_VARIABLE = "PD_CONNECTOR_CUDA_ON_CPU"
#: The first driver for each major version of CUDA that there are wheels for.
_DRIVERS = {"12": 525, "13": 580}
_WITHOUT = f"Without a GPU, {ON_CPU_VARIABLE}=1 runs the servers' tests on the CPU"


def is_on_cpu() -> bool:
    """Whether the servers of ``tests/cuda`` are to run on the CPU."""
    return bool(os.environ.get(ON_CPU_VARIABLE))


def lacking(load: Callable[[str], Any] = importlib.import_module) -> str:
    """What is missing and the way out, in a line; empty if there is a GPU that this Python can use, as far as known.

    ``load`` imports PyTorch, if there is one.
    """
    if shutil.which("nvidia-smi") is None:
        return (
            "no NVIDIA driver: there is no nvidia-smi. Install the driver, 580 or newer for CUDA 13; a container has "
            f"it only if it was started with access to the GPU (docker run --gpus all). {_WITHOUT}"
        )
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    listed = subprocess.run(query, capture_output=True, text=True, check=False)
    if listed.returncode or not listed.stdout.strip():
        said = " ".join((listed.stdout + listed.stderr).split()) or "nothing"
        return (
            f"no GPU: nvidia-smi says {said!r}. Load the driver's kernel module, or give the container a GPU "
            f"(docker run --gpus all). {_WITHOUT}"
        )
    return _of_torch(load, listed.stdout.splitlines()[0].rpartition(",")[2].strip())


def _of_torch(load: Callable[[str], Any], driver: str) -> str:
    """What keeps this Python's PyTorch, if there is one, from using the GPU."""
    try:
        torch = load("torch")
    except ImportError:
        return ""
    cuda = torch.version.cuda
    if cuda is None:
        return "the PyTorch of this environment is built without CUDA: make test-cuda makes one that is"
    if torch.cuda.is_available():
        return ""
    oldest = _DRIVERS.get(cuda.partition(".")[0], "a newer one")
    return (
        f"PyTorch for CUDA {cuda} finds no GPU under driver {driver}: it needs driver {oldest} or newer, and "
        f"CUDA_VISIBLE_DEVICES = {os.environ.get('CUDA_VISIBLE_DEVICES')!r} must name a GPU or be unset"
    )


if __name__ == "__main__":
    sys.exit(lacking() or 0)
