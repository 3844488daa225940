"""vLLM's CPU worker for a pipeline stage, for ``--worker-cls``.

vLLM makes the buffers for what a stage gets from the one before when it warms up, which it never does on CPU with
``--enforce-eager``: the second stage then fails an assertion at the first request.
"""

from typing import Any

from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.worker.cpu_worker import CPUWorker


class StagedWorker(CPUWorker):  # type: ignore[misc]  # vLLM is untyped here
    """The worker, which has those buffers."""

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        runner = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )
        return times
