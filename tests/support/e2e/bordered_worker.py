"""vLLM's CPU worker for models of Mamba2 layers that find prefixes, for ``--worker-cls``.

Since vLLM 0.32 the scan of these layers hands out the states at borders of blocks, and steps end where they will. The
scan for CPUs has no such states, and the prefixes found hold others. Here steps end at borders, as for other layers.
"""

from typing import Any

from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.v1.worker.cpu_worker import CPUWorker


class BorderedWorker(CPUWorker):  # type: ignore[misc]  # vLLM is untyped here
    """The worker, which says that no state comes from within a step."""

    def get_kv_cache_spec(self) -> Any:
        MambaMixer2.get_kv_cache_spec = MambaBase.get_kv_cache_spec
        return super().get_kv_cache_spec()
