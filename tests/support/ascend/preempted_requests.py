"""Requests that take blocks from each other on a simulated NPU, under vllm-ascend's recompute scheduler.

    python -m tests.support.ascend.preempted_requests MODEL_DIRECTORY HOST_BYTES [--no-enable-prefix-caching]

Prints as JSON how often a preempted request came back, how many tokens host memory had of it, and what each prompt's
answer was, beside others and alone.
"""

import json
import sys
from typing import Any

from tests.support.ascend.engine_process import TRANSFER_CONFIG, start_engine
from tests.support.ascend.servers import NPU_BLOCK_SIZE

PROMPTS, TOKENS, ANSWER = 4, 3 * NPU_BLOCK_SIZE - 16, 64
#: Three prompts fit, and none of their answers, which begin another block each.
DEVICE_BLOCKS = 3 * 3 + 1


def answers_of(engine: Any, prompts: list[list[int]]) -> list[tuple[list[int], str, str | None]]:
    """Return the tokens of each prompt's answer, and why it ended."""
    from vllm import SamplingParams  # noqa: PLC0415

    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    results = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    ends = (result.outputs[0] for result in results)
    return [(list(end.token_ids), end.finish_reason, end.stop_reason) for end in ends]


def main(model: str, host_bytes: int, *, finds_prefixes: bool) -> None:
    """See the module."""
    extra: Any = TRANSFER_CONFIG["kv_connector_extra_config"]
    engine = start_engine(
        model,
        transfer={"kv_role": "kv_consumer", "kv_connector_extra_config": extra | {"cpu_bytes_to_use": host_bytes}},
        additional_config={"recompute_scheduler_enable": True},
        num_gpu_blocks_override=DEVICE_BLOCKS,
        enable_prefix_caching=finds_prefixes,
    )
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    back: list[int] = []  # tokens that requests find in host memory when they come back
    allocated = scheduler.connector.update_state_after_alloc

    def note(request: Any, blocks: Any, external_tokens: int) -> None:
        if request.num_preemptions:
            back.append(external_tokens)
        allocated(request, blocks, external_tokens)

    scheduler.connector.update_state_after_alloc = note
    prompts = [[(7 * number + 13 * place) % 250 + 3 for place in range(TOKENS)] for number in range(PROMPTS)]
    together = answers_of(engine, prompts)
    found = {
        "scheduler": [each.__name__ for each in type(scheduler).__mro__],
        "back": len(back),
        "loaded": sum(back),
        "together": together,
        "alone": [answers_of(engine, [prompt])[0] for prompt in prompts],
    }
    print("FOUND", json.dumps(found))  # noqa: T201  its result


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), finds_prefixes=len(sys.argv) == 3)
