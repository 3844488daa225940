"""What tests of servers with host memory have in common."""

import time

from tests.support.e2e.client import Metrics
from tests.support.e2e.cluster import BLOCK_SIZE, Server
from tests.support.e2e.pair import make_prompt
from tests.support.waiting import until

_LONGEST = 40 * BLOCK_SIZE  # of the prompts that evict others


def whole_blocks(tokens: int, block_size: int = BLOCK_SIZE) -> int:
    """Of so many tokens, those that fill blocks."""
    return tokens // block_size * block_size


def evict(server: Server, seed: object, blocks: int | None = None) -> None:
    """Compute prompts that take ``blocks`` blocks of the device which hold something else, or all of them."""
    left = server.client.cache_blocks() if blocks is None else blocks
    while left > 1:
        taken = min(left, _LONGEST // server.spec.block_size)
        server.client.complete(make_prompt(taken * server.spec.block_size - 1, (server.log.stem, seed, left)), 1)
        left -= taken


def metrics_after_a_step(server: Server) -> Metrics:
    """All counters and gauges of a server that may be at rest: a step brings the books up to date."""
    server.client.complete(make_prompt(8, ("a step", time.monotonic())), 1)
    return server.client.metrics()


def wait_until_nothing_is_lent(server: Server) -> None:
    """Wait until every slot of host memory can be evicted again."""

    def lent() -> float:
        return metrics_after_a_step(server).value("vllm:pd_host_blocks_lent")

    until(lambda: lent() == 0, f"{server.spec.name} to have its host memory back", within_s=30.0)
