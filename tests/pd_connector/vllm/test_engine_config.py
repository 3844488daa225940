"""What is read from vLLM's configuration, where no test of a whole connector shows it."""

from types import SimpleNamespace
from typing import Any

import pytest

from pd_connector.vllm.engine_config import max_blocks_per_step


@pytest.mark.parametrize(
    ("block_tokens", "blocks"),
    [
        ([16], 512 + 256 + 4 * 63),  # computed tokens, a begun block for each request, four prompts that are pulled
        ([16, 16], 2 * (512 + 256 + 4 * 63)),
        ([128], 64 + 256 + 4 * 8),
    ],
)
def test_a_step_takes_blocks_for_what_it_computes_and_for_prompts_that_are_pulled(
    block_tokens: list[int], blocks: int
) -> None:
    scheduler = SimpleNamespace(max_num_batched_tokens=8192, max_num_seqs=256)
    config: Any = SimpleNamespace(scheduler_config=scheduler, model_config=SimpleNamespace(max_model_len=1000))
    assert max_blocks_per_step(config, block_tokens) == blocks
