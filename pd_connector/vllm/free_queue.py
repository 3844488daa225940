"""A cursor over the front of vLLM's free block queue, where the blocks are that vLLM evicts next.

Reaches into vLLM's objects. vLLM's ``BlockPool`` takes blocks from the front of its queue and, on a prefix hit, from
the middle; it appends freed blocks that have contents and prepends those that have none (vLLM 0.23 appends those too,
see ``release_023``). All methods belong to the scheduler's thread.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock


class FreeQueueCursor:
    """Visits the first ``depth`` blocks of the queue, each once, and remembers which it has visited.

    A step costs time for the blocks that came and went, whatever the depth. A block that vLLM moved without the cursor
    being told is noticed when it should be the first or the last visited one. Until then fewer blocks are visited, and
    some may be evicted before they are stored; no byte is ever wrong.
    """

    def __init__(self, pool: "BlockPool", depth: int) -> None:
        """Start at the front of ``pool``'s queue, with nothing visited."""
        self._queue = pool.free_block_queue
        self._depth = depth
        self._visited: OrderedDict[int, KVCacheBlock] = OrderedDict()  # by block id, in the order of the queue

    def advance(self) -> "Iterator[KVCacheBlock]":
        """Yield the blocks that have entered the first ``depth`` since the last call.

        A block counts as visited when the next one is asked for: one at which the caller stops is yielded again.
        """
        self._drop_allocated()
        if len(self._visited) >= self._depth:
            return
        last = self._last_visited()
        if last is not None and self._is_tail(last) and self._has_unvisited_before_tail():
            self._visited.clear()  # the last one was allocated and freed without the cursor being told
            last = None
        for block in islice(_blocks_after(self._queue, last), self._depth - len(self._visited)):
            yield block
            self._visited[block.block_id] = block

    def reset(self) -> None:
        """Forget what was visited, so that all blocks are visited again."""
        self._visited.clear()

    def remove(self, blocks: "Iterable[KVCacheBlock]") -> None:
        """Drop blocks that are now in use."""
        for block in blocks:
            self._visited.pop(block.block_id, None)

    def restore(self, blocks: "Sequence[KVCacheBlock]", *, visited: bool) -> None:
        """Give back references to removed blocks, and queue those that become free right after all visited blocks.

        That is the middle of the queue, and keeps the LRU order: at the front they would be evicted before blocks that
        were stored earlier, at the end after blocks that were used later. Unless ``visited``, they are yielded again.
        """
        for block in blocks:
            block.ref_cnt -= 1
        free = [block for block in blocks if block.ref_cnt == 0]
        self._insert(self._last_visited() or self._last_empty(), free)
        if visited:
            self._visited.update((block.block_id, block) for block in free)

    def _drop_allocated(self) -> None:
        """Drop the blocks that vLLM has allocated from the front, and from the middle up to there."""
        while self._visited and self._was_allocated(next(iter(self._visited.values()))):
            self._visited.popitem(last=False)

    def _was_allocated(self, first: "KVCacheBlock") -> bool:
        """Return whether the first visited block is in use, or was, and now follows blocks with contents."""
        before = first.prev_free_block
        return before is None or before.block_hash is not None

    def _has_unvisited_before_tail(self) -> bool:
        """Return whether unvisited blocks lie among the visited ones. Empty blocks may lie before all of them."""
        before = takewhile(lambda block: block.block_id not in self._visited, _blocks_after(self._queue))
        return sum(1 for _ in before) + len(self._visited) < int(self._queue.num_free_blocks)

    def _last_visited(self) -> "KVCacheBlock | None":
        """Return the last visited block that is still free."""
        while self._visited and next(reversed(self._visited.values())).ref_cnt:
            self._visited.popitem()
        return next(reversed(self._visited.values()), None)

    def _last_empty(self) -> "KVCacheBlock | None":
        """Return the last of the blocks without contents at the front of the queue."""
        empty = takewhile(lambda block: block.block_hash is None, _blocks_after(self._queue))
        return next(iter(deque(empty, maxlen=1)), None)

    def _is_tail(self, block: "KVCacheBlock") -> bool:
        return block.next_free_block is self._queue.fake_free_list_tail

    def _insert(self, after: "KVCacheBlock | None", blocks: "list[KVCacheBlock]") -> None:
        if after is None:
            self._queue.prepend_n(blocks)
        elif self._is_tail(after):
            self._queue.append_n(blocks)
        else:
            following = after.next_free_block
            for block in blocks:
                after.next_free_block, block.prev_free_block = block, after
                after = block
            after.next_free_block, following.prev_free_block = following, after
            self._queue.num_free_blocks += len(blocks)


def _blocks_after(queue: "FreeKVCacheBlockQueue", block: "KVCacheBlock | None" = None) -> "Iterator[KVCacheBlock]":
    """Yield the blocks of ``queue`` that follow ``block``, in their order; all of them if it is None."""
    following = (queue.fake_free_list_head if block is None else block).next_free_block
    while following is not None and following is not queue.fake_free_list_tail:
        yield following
        following = following.next_free_block
