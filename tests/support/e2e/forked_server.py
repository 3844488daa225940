"""vLLM's API server, whose engine core and workers are forked from it: ``python -m tests.support.e2e.forked_server``.

On CPU vLLM spawns them, and each imports vLLM for itself: two thirds of a start. On other platforms it forks them, and
its code for that is used here. The arguments are those of vLLM's module.
"""

import multiprocessing
import runpy
import sys
from multiprocessing.context import BaseContext

from vllm.utils import system_utils

_MODULE = "vllm.entrypoints.openai.api_server"


def forking() -> BaseContext:
    """What vLLM makes processes with."""
    # vLLM looks for kernels in all modules of a worker, and the loader that numba has there cannot be looked at.
    sys.modules.pop("llvmlite.binding.ffi", None)
    return multiprocessing.get_context("fork")


if __name__ == "__main__":
    system_utils.get_mp_context = forking
    runpy.run_module(_MODULE, run_name="__main__", alter_sys=True)
