"""vLLM's API server on CPU, whose workers are Ray's actors: ``python -m tests.support.e2e.ray_on_cpu``.

vLLM does not ask Ray for CPUs. Here it asks for GPUs, of which Ray believes that there are some. The arguments are
those of vLLM's module, with ``--distributed-executor-backend ray``.
"""

import runpy
from importlib import import_module

from vllm.platforms.cpu import CpuPlatform
from vllm.utils import system_utils
from vllm.v1.executor import ray_executor, ray_executor_v2

from tests.support.e2e.forked_server import forking

CpuPlatform.ray_device_key = "GPU"


class RayWorker(ray_executor_v2.RayWorkerProc):  # type: ignore[misc]  # vLLM is untyped here
    """The worker, with which this module comes into its process."""


class OldRayWorker(ray_executor.RayWorkerWrapper):  # type: ignore[misc]
    """The same of the old executor."""


def main() -> None:
    """Serve until told to stop."""
    ray_executor_v2.RayWorkerProc = RayWorker
    ray_executor.RayWorkerWrapper = OldRayWorker
    system_utils.get_mp_context = forking
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    import_module("tests.support.e2e.ray_on_cpu").main()  # Ray's processes know its classes by this name
