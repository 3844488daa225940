"""The front of the queue of free blocks of vLLM's own pool: all is looked at once, and stays in its order."""

from itertools import islice, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, make_block_hash_with_group_id

from pd_connector.vllm.releases import installed
from tests.support.releases import INSTALLED

#: Whether vLLM also puts blocks that hold nothing at the end of the queue, not only in front.
APPENDS_EMPTY = INSTALLED < (0, 30)


class Bench:
    """A pool of blocks numbered from 1, of which all hold something, the first to be evicted being 1."""

    def __init__(self, blocks: int, depth: int) -> None:
        self.pool = BlockPool(blocks + 1, True, 16)
        self.front = installed.current().free_queue_cursor(self.pool, depth)
        self.contents = 0
        self.give_back(self.take(blocks))

    def take(self, number: int) -> list[KVCacheBlock]:
        """As vLLM does for new tokens."""
        taken: list[KVCacheBlock] = self.pool.get_new_blocks(number)
        self.front.remove(taken)
        return taken

    def give_back(self, blocks: list[KVCacheBlock], *, empty: bool = False, behind: bool = False) -> None:
        """``behind``: what holds nothing comes last, as vLLM 0.23 does it for full attention."""
        for block in blocks:
            if block.block_hash is None and not empty:
                self.contents += 1
                key = make_block_hash_with_group_id(BlockHash(self.contents.to_bytes(8, "big")), 0)
                block._block_hash = key
                self.pool.cached_block_hash_to_block.insert(key, block)
        if APPENDS_EMPTY and not behind:
            self.pool.free_blocks([block for block in blocks if block.block_hash is not None])
            self.pool.free_blocks([block for block in blocks if block.block_hash is None], prepend=True)
        else:
            self.pool.free_blocks(blocks)

    def look(self, number: int | None = None) -> list[int]:
        return [block.block_id for block in islice(self.front.advance(), number)]

    def begin(self, *ids: int) -> list[KVCacheBlock]:
        """To store blocks."""
        blocks = [self.pool.blocks[number] for number in ids]
        self.pool.touch(blocks)
        self.front.remove(blocks)
        return blocks

    def order(self) -> list[int]:
        blocks = self.pool.free_block_queue.get_all_free_blocks()
        assert len(blocks) == self.pool.get_num_free_blocks()
        for block, following in pairwise([*blocks, self.pool.free_block_queue.fake_free_list_tail]):
            assert block.next_free_block is following
            assert following.prev_free_block is block
        return [block.block_id for block in blocks]


def test_blocks_are_looked_at_once() -> None:
    bench = Bench(8, depth=5)
    assert bench.look() == [1, 2, 3, 4, 5]
    assert bench.look() == []


def test_as_many_more_are_looked_at_as_have_been_taken() -> None:
    bench = Bench(8, depth=5)
    bench.look()
    bench.take(2)
    assert bench.look() == [6, 7]
    bench.take(1)
    assert bench.look() == [8]
    bench.take(1)
    assert bench.look() == []


def test_taken_blocks_are_noticed_without_being_told() -> None:
    """Running requests take new ones in every step."""
    bench = Bench(8, depth=5)
    bench.look()
    bench.pool.get_new_blocks(3)
    assert bench.look() == [6, 7, 8]


def test_one_that_is_not_dealt_with_comes_again() -> None:
    bench = Bench(8, depth=5)
    assert bench.look(3) == [1, 2, 3]
    assert bench.look() == [3, 4, 5]


def test_what_is_used_in_between_and_given_back_is_looked_at_again_when_its_turn_comes() -> None:
    bench = Bench(5, depth=3)
    assert bench.look() == [1, 2, 3]
    hit = bench.begin(2)
    assert bench.look() == [4]
    bench.pool.free_blocks(hit)
    bench.take(2)
    assert bench.look() == [5, 2]


@pytest.mark.parametrize("depth", [3, 5])
def test_the_last_one_looked_at_may_be_used(depth: int) -> None:
    bench = Bench(6, depth=depth)
    bench.look()
    bench.pool.free_blocks(bench.begin(depth))
    assert bench.order()[-1] == depth
    assert bench.look() == [depth + 1]


def test_one_that_has_moved_unnoticed_does_not_hide_the_others_for_ever() -> None:
    bench = Bench(6, depth=3)
    bench.look()
    moved = [bench.pool.blocks[3]]
    bench.pool.touch(moved)
    bench.pool.free_blocks(moved)
    assert bench.order() == [1, 2, 4, 5, 6, 3]
    bench.take(1)
    assert bench.look() == [2, 4, 5]


def test_the_first_one_may_have_moved_unnoticed() -> None:
    """As when a request gets blocks and is preempted by the same call of the scheduler."""
    bench = Bench(9, depth=3)
    assert bench.look() == [1, 2, 3]
    moved = [bench.pool.blocks[1]]
    bench.pool.touch(moved)
    bench.pool.free_blocks(moved)
    assert bench.order() == [2, 3, 4, 5, 6, 7, 8, 9, 1]
    bench.pool.get_new_blocks(1)
    assert bench.look() == [4, 5]


def test_all_can_be_looked_at_again() -> None:
    bench = Bench(6, depth=3)
    bench.look()
    bench.front.reset()
    assert bench.look() == [1, 2, 3]


def test_what_holds_nothing_comes_to_the_front_and_nothing_is_looked_at_again() -> None:
    bench = Bench(3, depth=9)
    bench.look()
    bench.give_back(bench.take(1), empty=True)
    assert bench.order() == [1, 2, 3]
    assert bench.look() == []


def test_stored_blocks_are_put_back_behind_all_that_were_looked_at() -> None:
    bench = Bench(8, depth=4)
    bench.look()
    first = bench.begin(3, 4)
    assert bench.look() == [5, 6]
    bench.front.restore(first, visited=True)
    assert bench.order() == [1, 2, 5, 6, 3, 4, 7, 8]
    assert bench.look() == []


def test_blocks_put_back_keep_their_order_if_stores_end_in_theirs() -> None:
    bench = Bench(8, depth=4)
    bench.look()
    first = bench.begin(1, 2, 3, 4)
    bench.look()
    second = bench.begin(5, 6, 7, 8)
    for blocks in (first, second):
        bench.front.restore(blocks, visited=True)
    assert bench.order() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_what_could_not_be_stored_is_looked_at_again_at_once() -> None:
    bench = Bench(8, depth=4)
    bench.look()
    bench.front.restore(bench.begin(3, 4), visited=False)
    assert bench.order() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert bench.look() == [3, 4]


def test_blocks_are_put_back_behind_those_that_hold_nothing() -> None:
    bench = Bench(4, depth=4)
    bench.look()
    stored = bench.begin(1, 2, 3)
    bench.give_back(bench.take(1), empty=True)
    bench.front.restore(stored, visited=True)
    assert bench.order() == [4, 1, 2, 3]


def test_a_block_in_use_elsewhere_is_not_put_back() -> None:
    bench = Bench(4, depth=4)
    bench.look()
    stored = bench.begin(2, 3)
    bench.pool.touch(stored[:1])
    bench.front.restore(stored, visited=True)
    assert bench.order() == [1, 4, 3]
    assert stored[0].ref_cnt == 1


def test_all_may_be_in_use() -> None:
    bench = Bench(2, depth=2)
    bench.look()
    taken = bench.take(2)
    assert bench.look() == []
    bench.front.restore(taken, visited=True)
    assert bench.order() == [1, 2]


ACTIONS = st.tuples(
    st.sampled_from(
        ["take", "give back", "give back empty", "give back empty behind", "hit", "look", "begin", "put back", "fail"]
    ),
    st.integers(0, 9),
)


@settings(max_examples=200, deadline=None)
@given(blocks=st.integers(1, 12), depth=st.integers(1, 14), actions=st.lists(ACTIONS, max_size=60))
def test_what_vllm_evicts_next_has_been_looked_at_whatever_happened(
    blocks: int, depth: int, actions: list[tuple[str, int]]
) -> None:
    bench = Bench(blocks, depth)
    used: list[KVCacheBlock] = []
    stores: list[list[KVCacheBlock]] = []
    looked_at: dict[int, object] = {}  # and what was in it
    for action, number in [*actions, ("look", 0)]:
        free = bench.order()
        if action == "take":
            used += bench.pool.get_new_blocks(min(number, len(free)))
            bench.look(1)  # as in every step that takes blocks
        elif action.startswith("give back"):
            given, used = used[:number], used[number:]
            bench.give_back(given, empty="empty" in action, behind="behind" in action)
        elif action == "hit" and free:
            used += bench.begin(free[number % len(free)])
        elif action == "begin" and free:
            stores.append(bench.begin(*free[: number + 1]))
        elif action in {"put back", "fail"} and stores:
            ended = stores.pop(number % len(stores))
            bench.front.restore(ended, visited=action == "put back")
            looked_at |= {block.block_id: block.block_hash if action == "put back" else None for block in ended}
        elif action == "look":
            looked_at |= {block: bench.pool.blocks[block].block_hash for block in bench.look()}
            next_to_be_evicted = [bench.pool.blocks[block] for block in bench.order()[:depth]]
            missed = [b for b in next_to_be_evicted if b.block_hash and looked_at.get(b.block_id) != b.block_hash]
            assert not missed
            assert bench.look() == []
    bench.order()
