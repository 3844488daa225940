"""References to blocks of the device: who keeps them in use, and until when."""

from collections import Counter
from unittest.mock import create_autospec

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request, RequestStatus

from pd_connector.vllm.device_blocks import DeviceBlocks, may_hold
from tests.support.host_tier.cases import said
from tests.support.host_tier.setup import Setup, make_manager, make_request
from tests.support.releases import INSTALLED


def computed(setup: Setup, manager: KVCacheManager, name: str, tokens: tuple[int, ...]) -> Request:
    """A request whose prompt is on the device."""
    request = make_request(setup, name, tokens)
    blocks, hit, *_ = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, len(tokens) - hit, num_new_computed_tokens=hit, new_computed_blocks=blocks)
    request.num_computed_tokens = len(tokens)
    return request


def free(manager: KVCacheManager) -> set[int]:
    return {block.block_id for block in manager.block_pool.free_block_queue.get_all_free_blocks()}


def test_a_holder_keeps_blocks_of_a_request_that_has_left() -> None:
    setup = Setup(groups=((4, 0), (4, 6)), device_blocks=33)
    manager = make_manager(setup)
    request = computed(setup, manager, "r", said(23))
    manager.remove_skipped_blocks("r", 23)
    held_ids = {block for table in manager.get_block_ids("r") for block in table if block}
    holder = DeviceBlocks()
    holder.bind(manager)
    held = holder.hold("r")
    manager.free(request)
    assert {block.block_id for block in held} == held_ids
    assert not held_ids & free(manager)
    holder.release(held)
    assert held_ids < free(manager)


def test_blocks_that_requests_share_are_counted_once_and_until_the_last_has_gone() -> None:
    setup = Setup(device_blocks=17)
    manager, holder = make_manager(setup), DeviceBlocks()
    holder.bind(manager)
    requests = [computed(setup, manager, name, said(tokens)) for name, tokens in (("a", 13), ("b", 13), ("c", 21))]
    held = [holder.hold(name) for name in ("a", "b", "c")]
    for request in requests:
        manager.free(request)
    references = Counter(block.block_id for blocks in held for block in blocks)
    assert max(references.values()) == 3, "no block is shared, so the test shows nothing"
    for blocks in held:
        assert holder.references == references
        assert holder.leased == len(references)
        assert holder.are_all_in_use(holder.references)
        holder.release(blocks)
        references -= Counter(block.block_id for block in blocks)
    assert holder.leased == 0
    assert holder.free == holder.total


@pytest.mark.parametrize("end", ["free", *(["pop_blocks_for_free"] if INSTALLED >= (0, 30) else [])])
def test_what_a_step_does_not_compute_after_all_is_not_found(end: str) -> None:
    """The request is preempted in the step that was to compute it: vLLM does so by priority."""
    setup = Setup(device_blocks=33)
    manager, holder = make_manager(setup), DeviceBlocks()
    holder.bind(manager)
    request = make_request(setup, "r", said(24))
    request.status = RequestStatus.RUNNING
    assert manager.allocate_slots(request, 8)
    request.num_computed_tokens = 8
    assert manager.allocate_slots(request, 16)
    getattr(manager, end)(request)
    assert manager.get_computed_blocks(make_request(setup, "s", said(24)))[1] == 8


@pytest.mark.skipif(INSTALLED < (0, 30), reason="vLLM 0.23 names whole blocks only")
def test_what_was_computed_of_a_block_that_is_not_full_stays_found() -> None:
    setup = Setup(groups=((8, 0), (4, 8)), device_blocks=32)
    manager, holder = make_manager(setup, drafts=True, hash_tokens=4), DeviceBlocks()
    holder.bind(manager)
    request = computed(setup, manager, "r", said(21))
    request.status = RequestStatus.RUNNING
    last = manager.get_blocks("r").blocks[0][-1]
    assert last.block_hash is not None, "vLLM has named a block of 5 tokens"
    manager.free(request)
    assert last.block_hash is not None


@pytest.mark.parametrize("fault", [RuntimeError("dictionary changed size during iteration"), StopIteration()])
def test_a_look_that_meets_a_change_by_the_scheduler_finds_that_it_may_be(fault: Exception) -> None:
    """Of the same contents, in several blocks. The scheduler's thread looks again."""
    pool = create_autospec(BlockPool, instance=True, hash_block_size=16)
    pool.get_cached_block.side_effect = fault
    assert may_hold(pool, [BlockHash(b"a")] * 2, 32, {0: 16})
    assert not may_hold(pool, [BlockHash(b"a")] * 2, 33, {0: 16})


def test_nothing_is_looked_up_for_a_request_that_waits() -> None:
    setup = Setup(groups=((4, 0), (4, 6)), device_blocks=33)
    manager, holder, waiting = make_manager(setup), DeviceBlocks(), {"b"}
    holder.bind(manager, waits=lambda request: request.request_id in waiting)
    manager.free(computed(setup, manager, "a", said(23)))
    second = make_request(setup, "b", said(23))
    nothing, hit, *_ = manager.get_computed_blocks(second)
    assert (hit, nothing.get_block_ids()) == (0, ([], []))
    assert second.skip_reading_prefix_cache is False
    waiting.clear()
    assert manager.get_computed_blocks(second)[1] > 0
