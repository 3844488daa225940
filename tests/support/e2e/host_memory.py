"""What tests of servers with host memory have in common."""

from tests.support.e2e.cluster import BLOCK_SIZE, Server
from tests.support.e2e.pair import make_prompt


def whole_blocks(tokens: int) -> int:
    """Of so many tokens, those that fill blocks."""
    return tokens // BLOCK_SIZE * BLOCK_SIZE


def evict(server: Server, seed: object, blocks: int | None = None) -> None:
    """Compute prompts that take ``blocks`` blocks of the device which hold something else, or all of them."""
    left = server.client.cache_blocks() if blocks is None else blocks
    while left > 1:
        taken = min(left, 40)
        server.client.complete(make_prompt(taken * BLOCK_SIZE - 1, (server.log.stem, seed, left)), 1)
        left -= taken
