"""Which beginning of a prompt a pool seems to hold. More in ``test_shared_pool``."""

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
