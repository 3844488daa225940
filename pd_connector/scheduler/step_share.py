"""How many blocks of host memory the scheduler side deals with in one step, which vLLM waits for.

Leases and prompts have as many blocks as tokens, and to take, publish or give back a block takes about a microsecond.
"""

from collections.abc import Mapping, Sequence

#: Of a step that computes nothing, which delays nobody, or for blocks that requests wait for.
MOST_BLOCKS = 256
#: Of any step. All kinds of work that it does at once, each on so many blocks, take it less than 0.1 ms.
LEAST_BLOCKS = 16


def blocks_a_step(scheduled: Mapping[str, int], block_tokens: Sequence[int], *, are_awaited: bool = False) -> int:
    """Return on how many blocks a step may do one kind of work.

    As many as the step fills, within bounds: what a prefill engine computes must leave the device as fast as it comes.
    vLLM spends as much on such a block itself, and far more on its tokens.

    Args:
        scheduled: tokens of each request that the step computes.
        block_tokens: block size of each cache group, in tokens.
        are_awaited: whether requests wait for what the work brings. That is longer than the work takes.
    """
    if not scheduled or are_awaited:
        return MOST_BLOCKS
    tokens = sum(scheduled.values())
    return min(max(sum(tokens // size for size in block_tokens), LEAST_BLOCKS), MOST_BLOCKS)
