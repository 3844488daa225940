"""Requests that hold all blocks of a simulated NPU, and each lack one: first prompts that are loaded, then answers.

    python -m tests.support.ascend.scarce_blocks MODEL_DIRECTORY HOST_BYTES ROLE JSON

The JSON is vllm-ascend's ``additional_config``. Prints as JSON which requests have not ended after many steps, how many
tokens were loaded of which prompts, and what the answers are, beside others and alone.
"""

import json
import sys
from collections.abc import Callable
from itertools import count
from typing import Any

from tests.support.ascend.engine_process import TRANSFER_CONFIG, start_engine
from tests.support.ascend.servers import NPU_BLOCK_SIZE

USABLE_BLOCKS = 11
#: Prompts that come together: blocks of each that host memory holds, and that it needs besides. In the first pair, each
#: needs more than the other leaves; in the second, the first does, where the second finds all of its own.
LOADED = (((5, 2), (5, 2)), ((2, 5), (6, 1)))
#: Blocks of prompts that need all, and whose answers begin another block each.
ANSWERED = (4, 4, 3)
#: Where requests end, they do in fewer than a hundred.
MOST_STEPS = 2000


class SteppedEngine:
    """An engine in this process, which runs only while it is asked something."""

    def __init__(self, engine: Any, has_work: Callable[[], bool]) -> None:
        """``has_work`` returns whether blocks are still being stored in host memory."""
        self._engine, self._has_work = engine.llm_engine, has_work
        self._names = count()

    def ask(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """Return the answers to prompts that are given at once; those of requests that have not ended are empty."""
        from vllm import SamplingParams  # noqa: PLC0415

        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        names = [str(next(self._names)) for _ in prompts]
        for name, prompt in zip(names, prompts, strict=True):
            self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        ended: dict[str, list[int]] = {}
        for _ in range(MOST_STEPS):
            if not self._engine.has_unfinished_requests():
                break
            ended |= {each.request_id: list(each.outputs[0].token_ids) for each in self._engine.step() if each.finished}
        self._engine.abort_request([name for name in names if name not in ended])
        while self._has_work():
            self._engine.step()
        return [ended.get(name, []) for name in names]


def prompt(number: int, tokens: int) -> list[int]:
    """Return a prompt that shares no block with those of other numbers."""
    return [(7 * number + 13 * place) % 250 + 3 for place in range(tokens)]


def main(model: str, host_bytes: int, role: str, options: dict[str, object]) -> None:
    """See the module."""
    extra: Any = TRANSFER_CONFIG["kv_connector_extra_config"]
    engine = start_engine(
        model,
        transfer={"kv_role": role, "kv_connector_extra_config": extra | {"cpu_bytes_to_use": host_bytes}},
        additional_config=options,
        num_gpu_blocks_override=USABLE_BLOCKS + 1,  # vLLM keeps one
        enable_prefix_caching=True,
    )
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    stepped, loaded = SteppedEngine(engine, scheduler.connector.has_pending_push_work), list[int]()
    allocated = scheduler.connector.update_state_after_alloc

    def note(request: Any, blocks: Any, external_tokens: int) -> None:
        loaded.append(external_tokens // NPU_BLOCK_SIZE)
        allocated(request, blocks, external_tokens)

    scheduler.connector.update_state_after_alloc = note
    first_tokens = []
    for pair, sizes in enumerate(LOADED):
        for number, (held, _) in enumerate(sizes, 10 * pair):
            stepped.ask([prompt(number, held * NPU_BLOCK_SIZE + 20)], 1)
        for number in (2, 3):  # so that the device holds nothing of them
            stepped.ask([prompt(10 * pair + number, 1000)], 1)
        prompts = [prompt(each, sum(blocks) * NPU_BLOCK_SIZE - 8) for each, blocks in enumerate(sizes, 10 * pair)]
        first_tokens += stepped.ask(prompts, 1)
    prompts = [prompt(20 + number, blocks * NPU_BLOCK_SIZE - 16) for number, blocks in enumerate(ANSWERED)]
    found = {
        "scheduler": [each.__name__ for each in type(scheduler).__mro__],
        "loaded": [blocks for blocks in loaded if blocks],
        "first tokens": first_tokens,
        "together": stepped.ask(prompts, 64),
        "alone": [stepped.ask([each], 64)[0] for each in prompts],
    }
    print("FOUND", json.dumps(found))  # noqa: T201  its result


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
