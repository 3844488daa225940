"""How many blocks of host memory the scheduler side deals with in one step, which vLLM waits for.

Leases and prompts have as many blocks as tokens, and to take, publish or give back a block takes about a microsecond.
"""

from collections.abc import Mapping, Sequence

#: Of a step that computes nothing: what it does instead delays nobody.
MOST_BLOCKS = 256
#: Of any step. All kinds of work that it does at once, each on so many blocks, take it less than 0.1 ms.
LEAST_BLOCKS = 16


def blocks_a_step(scheduled: Mapping[str, int], block_tokens: Sequence[int]) -> int:
    """Return on how many blocks a step may do one kind of work that computes ``scheduled`` tokens of each request.

    As many as the step fills, within bounds: what a prefill engine computes must leave the device as fast as it comes.
    vLLM spends as much on such a block itself, and far more on its tokens.

    ``block_tokens``: block size of each cache group, in tokens.
    """
    if not scheduled:
        return MOST_BLOCKS
    tokens = sum(scheduled.values())
    return min(max(sum(tokens // size for size in block_tokens), LEAST_BLOCKS), MOST_BLOCKS)
