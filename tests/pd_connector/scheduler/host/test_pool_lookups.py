"""Which beginning of a prompt a pool seems to hold. More in ``test_shared_pool``."""

import pytest
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from layout.block_objects import object_forms
from layout.geometry import CacheGroup, Plane, WorkerGeometry
from pd_connector.scheduler.host.pool_lookups import longest_prefix
from tests.support.store.in_memory import InMemoryStore, SharedObjects

BLOCK = 16
KEYS = tuple(make_block_hash_with_group_id(BlockHash(bytes([number] * 32)), 0) for number in range(4))


def test_where_drafts_are_kept_a_block_is_there_only_with_theirs() -> None:
    """Those that lack them would be fetched in vain."""
    planes = tuple(
        Plane("kv", (layer,), 0, 1, BLOCK, 8, 2, 4, 0, 256, 256, 256, 16, 2, optional=layer == "draft", total_heads=1)
        for layer in ("a", "draft")
    )
    forms = object_forms(WorkerGeometry(0, 1, 0, 1, "", (CacheGroup(BLOCK, 0, planes),), ()))
    assert [len(of_group) for of_group in forms] == [2]
    shared = SharedObjects()

    def found() -> int:
        ends = range(4 * BLOCK, 0, -BLOCK)
        return longest_prefix(forms, "pd", {0: KEYS}, [BLOCK], ends, 0, [0], InMemoryStore(shared, 1))

    for form, tokens in zip(forms[0], (0, 4 * BLOCK), strict=True):
        shared.objects |= {form.key("pd", 0, bytes([number] * 32)): b"" for number in range(4)}
        assert found() == tokens


def test_a_prompt_of_which_nothing_is_there_costs_one_call() -> None:
    plane = Plane("kv", ("a",), 0, 1, BLOCK, 8, 2, 4, 0, 256, 256, 256, 16, 2, total_heads=1)
    forms = object_forms(WorkerGeometry(0, 1, 0, 1, "", (CacheGroup(BLOCK, 0, (plane,)),), ()))
    keys = tuple(make_block_hash_with_group_id(BlockHash(number.to_bytes(32, "big")), 0) for number in range(2048))
    shared = SharedObjects()
    ends = range(2048 * BLOCK, 8 * BLOCK, -BLOCK)
    assert longest_prefix(forms, "pd", {0: keys}, [BLOCK], ends, 8 * BLOCK, [0], InMemoryStore(shared, 1)) == 0
    assert shared.calls == [("exist", 1)]


@pytest.mark.parametrize("number", [0, 1, 31, 32, 33, 5000, 65_503, 65_504, 65_535, 65_536])
def test_a_long_prompt_of_which_the_beginning_is_there_costs_few_calls(number: int) -> None:
    """Calls one after the other keep all other look-ups waiting, until they count as late and the pool as failed."""
    plane = Plane("kv", ("a",), 0, 1, BLOCK, 8, 2, 4, 0, 256, 256, 256, 16, 2, total_heads=1)
    forms = object_forms(WorkerGeometry(0, 1, 0, 1, "", (CacheGroup(BLOCK, 0, (plane,)),), ()))
    hashes = [each.to_bytes(32, "big") for each in range(1 << 16)]
    keys = tuple(make_block_hash_with_group_id(BlockHash(each), 0) for each in hashes)
    shared = SharedObjects()
    shared.objects = {forms[0][0].key("pd", 0, each): b"" for each in hashes[:number]}
    ends = range(len(hashes) * BLOCK, 0, -BLOCK)
    assert longest_prefix(forms, "pd", {0: keys}, [BLOCK], ends, 0, [0], InMemoryStore(shared, 1)) == number * BLOCK
    assert len(shared.calls) <= 20


def test_blocks_that_windows_lack_are_not_looked_for_without_end() -> None:
    """What no window holds, nothing tells from what it may hold further on."""
    groups = tuple(
        CacheGroup(
            BLOCK, window, (Plane("kv", (layer,), 0, 1, BLOCK, 8, 2, 4, 0, 256, 256, 256, 16, 2, total_heads=1),)
        )
        for layer, window in (("a", 0), ("b", 64))
    )
    forms = object_forms(WorkerGeometry(0, 1, 0, 1, "", groups, ()))
    hashes = [each.to_bytes(32, "big") for each in range(1 << 13)]
    keys = {group: tuple(make_block_hash_with_group_id(BlockHash(each), group) for each in hashes) for group in (0, 1)}
    shared = SharedObjects()
    shared.objects = {forms[0][0].key("pd", 0, each): b"" for each in hashes}
    ends = range(len(hashes) * BLOCK, 0, -BLOCK)

    def found() -> int:
        return longest_prefix(forms, "pd", keys, [BLOCK, BLOCK], ends, 0, [0], InMemoryStore(shared, 1))

    assert found() == 0
    assert len(shared.calls) <= 300
    shared.objects[forms[1][0].key("pd", 0, hashes[7000])] = b""
    assert found() == 7001 * BLOCK
