"""The front of vLLM's queue of free blocks: what is evicted next, looked at once and not in every step.

Reaches into vLLM's objects. Tested with vLLM 0.32, whose ``BlockPool`` takes blocks from the front of its queue, takes
those out of the middle that a prefix hit is on, puts back at the end what has contents, and at the front what has none.
All methods belong to the scheduler's thread.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class FreeQueueCursor:
    """The first ``depth`` blocks of the queue; knows which of them have been looked at.

    A step costs as much as blocks have come and gone, whatever the depth. A block that vLLM has moved in a way that is
    not known here is noticed when it should be the first or the last; until then fewer are looked at, and some that
    could have been stored in time may be lost. It never costs a wrong byte.
    """

    def __init__(self, pool: "BlockPool", depth: int) -> None:
        """The front of ``pool``'s queue, of which nothing has been looked at."""
        self._queue = pool.free_block_queue
        self._depth = depth
        self._seen: OrderedDict[int, KVCacheBlock] = OrderedDict()  # by block id, in the order of the queue

    def look(self) -> "Iterator[KVCacheBlock]":
        """The blocks that have come among the first ``depth`` since the last look.

        One is looked at when the next is asked for: what ends this iteration early comes again.
        """
        self._drop_taken()
        if len(self._seen) >= self._depth:
            return
        last = self._last()
        if last is not None and self._is_at_the_end(last) and self._has_missed_some():
            self._seen.clear()  # the last one was used and given back, which was not noticed
            last = None
        for block in islice(self._queue.iter_blocks_after(last), self._depth - len(self._seen)):
            yield block
            self._seen[block.block_id] = block

    def forget(self) -> None:
        """Look at everything again."""
        self._seen.clear()

    def take_out(self, blocks: "Iterable[KVCacheBlock]") -> None:
        """These are in use from now on."""
        for block in blocks:
            self._seen.pop(block.block_id, None)

    def put_back(self, blocks: "Sequence[KVCacheBlock]", *, looked_at: bool) -> None:
        """Give back references to blocks that were taken out: the next to be evicted behind all that were looked at.

        In the middle of the queue, as the least recently used go first: at the front they would go before those that
        were stored before them, at the end after those that were used later.
        """
        for block in blocks:
            block.ref_cnt -= 1
        free = [block for block in blocks if block.ref_cnt == 0]
        self._insert(self._last() or self._last_without_contents(), free)
        if looked_at:
            self._seen.update((block.block_id, block) for block in free)

    def _drop_taken(self) -> None:
        """Forget what vLLM has taken from the front, or out of the middle up to there."""
        while self._seen and self._is_gone(next(iter(self._seen.values()))):
            self._seen.popitem(last=False)

    def _is_gone(self, first: "KVCacheBlock") -> bool:
        """Whether the first that was looked at is in use, or was and lies behind others that hold something now."""
        before = first.prev_free_block
        return before is None or before.block_hash is not None

    def _has_missed_some(self) -> bool:
        """Whether blocks lie among those that were looked at; what holds nothing may have come before them."""
        before = takewhile(lambda block: block.block_id not in self._seen, self._queue.iter_blocks_after(None))
        return sum(1 for _ in before) + len(self._seen) < int(self._queue.num_free_blocks)

    def _last(self) -> "KVCacheBlock | None":
        """The last block of the queue that was looked at."""
        while self._seen and next(reversed(self._seen.values())).ref_cnt:
            self._seen.popitem()
        return next(reversed(self._seen.values()), None)

    def _last_without_contents(self) -> "KVCacheBlock | None":
        """Of the blocks at the front that hold nothing."""
        empty = takewhile(lambda block: block.block_hash is None, self._queue.iter_blocks_after(None))
        return next(iter(deque(empty, maxlen=1)), None)

    def _is_at_the_end(self, block: "KVCacheBlock") -> bool:
        return block.next_free_block is self._queue.fake_free_list_tail

    def _insert(self, after: "KVCacheBlock | None", blocks: "list[KVCacheBlock]") -> None:
        if after is None:
            self._queue.prepend_n(blocks)
        elif self._is_at_the_end(after):
            self._queue.append_n(blocks)
        else:
            following = after.next_free_block
            for block in blocks:
                after.next_free_block, block.prev_free_block = block, after
                after = block
            after.next_free_block, following.prev_free_block = following, after
            self._queue.num_free_blocks += len(blocks)
