"""How many blocks a step deals with beside what it computes."""

from collections.abc import Sequence

import pytest

from pd_connector.scheduler.step_share import LEAST_BLOCKS, MOST_BLOCKS, blocks_a_step


@pytest.mark.parametrize(
    ("tokens", "block_tokens", "blocks"),
    [
        ([], [16], MOST_BLOCKS),
        ([1] * 64, [16], LEAST_BLOCKS),
        ([1024], [16], 64),
        ([1000, 24], [16], 64),
        ([1024], [16, 32], 96),
        ([8192], [128], 64),
        ([8192], [16], MOST_BLOCKS),
    ],
    ids=["nothing", "decode", "prompt", "prompts", "two cache groups", "large blocks", "long prompt"],
)
def test_a_step_deals_with_as_many_blocks_as_it_fills_within_bounds(
    tokens: list[int], block_tokens: Sequence[int], blocks: int
) -> None:
    scheduled = {f"r{number}": count for number, count in enumerate(tokens)}
    assert blocks_a_step(scheduled, block_tokens) == blocks


def test_blocks_that_requests_wait_for_come_as_fast_as_if_nothing_ran() -> None:
    assert blocks_a_step({"r": 1}, [16], are_awaited=True) == MOST_BLOCKS
