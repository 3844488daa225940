"""vLLM 0.23: what is added to its classes, and what the connector does itself because vLLM does not.

What needs no vLLM of that release is tested on every one.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import RequestStatus

from pd_connector.scheduler.scheduler import ConnectorScheduler
from pd_connector.vllm import engine_config
from pd_connector.vllm.engine_config import UnsupportedError, check_supported
from pd_connector.vllm.releases import release_023
from pd_connector.vllm.releases.newest import wrap
from pd_connector.vllm.releases.release_023 import MixedQueueCursor, Release023
from pd_connector.vllm.requests import block_ids_to_fill
from tests.support.host_tier.setup import Setup, make_manager, make_pool, make_request
from tests.support.releases import INSTALLED

on_023 = pytest.mark.skipif(INSTALLED != (0, 23), reason="of vLLM 0.23's own classes")

# What is added to vLLM


class Base:
    def asked(self) -> str:
        return "asked"


class Derived(Base):
    """As vllm-ascend puts a scheduler of its own in the place of vLLM's."""


def test_a_method_is_wrapped_once_in_the_class_that_defines_it() -> None:
    try:
        for _ in range(2):
            wrap(Derived, "asked", lambda method: lambda self: f"{method(self)}, and more")
        assert Base().asked() == Derived().asked() == "asked, and more"
        assert "asked" not in vars(Derived)
        assert Base.asked.__name__ == "asked"
    finally:
        Base.asked = Base.asked.__wrapped__  # type: ignore[attr-defined,method-assign]


class Child:
    def __init__(self, *, pending: bool) -> None:
        self.has_pending_push_work = lambda: pending


@pytest.mark.parametrize(
    ("connector", "steps"),
    [
        (None, False),
        (SimpleNamespace(), False),
        (Child(pending=False), False),
        (Child(pending=True), True),
        (SimpleNamespace(_connectors=[SimpleNamespace(), Child(pending=True)]), True),
        (SimpleNamespace(_connectors=[SimpleNamespace(), Child(pending=False)]), False),
    ],
    ids=["no connector", "another", "at rest", "with work", "a child with work", "a child at rest"],
)
def test_an_engine_steps_without_requests_only_when_the_connector_must(connector: Any, steps: bool) -> None:
    asked = release_023._or_connector_wants_step(lambda scheduler: scheduler.finished)
    scheduler: Any = SimpleNamespace(connector=connector, finished=False)
    assert asked(scheduler) is steps
    scheduler.finished = True
    assert asked(scheduler) is True


def a_scheduler(tables: dict[str, tuple[list[int], ...]], groups: int) -> Any:
    return SimpleNamespace(
        kv_cache_config=SimpleNamespace(kv_cache_groups=[None] * groups),
        kv_cache_manager=SimpleNamespace(get_block_ids=tables.__getitem__),
    )


def never(*_: object) -> Any:
    raise AssertionError("vLLM's own method unpacks one group's block table")


def requests_of(*names: str) -> Any:
    return [SimpleNamespace(request_id=name, num_computed_tokens=100) for name in names]


def test_with_several_cache_groups_a_request_fails_by_a_block_of_any_of_them() -> None:
    update = release_023._for_any_number_of_groups(never)
    scheduler = a_scheduler({"a": ([1, 2], [0, 5]), "b": ([3, 4], [0, 6]), "c": ([7], [8])}, groups=2)
    requests = requests_of("a", "b", "c")
    affected, tokens, evicted = update(scheduler, iter(requests), {5, 7}, {}, evict_blocks=False)
    assert affected == {"a", "c"}
    assert tokens == 200
    assert evicted == set(), "blocks of a request that waits are not cached"
    assert [request.num_computed_tokens for request in requests] == [0, 100, 0]


def test_a_running_request_with_several_cache_groups_cannot_lose_blocks() -> None:
    """It was computed or loaded before it ran; only a connector that loads in the step itself could fail so."""
    update = release_023._for_any_number_of_groups(never)
    scheduler = a_scheduler({"a": ([1], [2])}, groups=2)
    assert update(scheduler, requests_of("a"), {9}, {}) == (set(), 0, set())
    with pytest.raises(NotImplementedError, match=r"running request a .* several KV cache groups"):
        update(scheduler, requests_of("a"), {2}, {})


def test_with_one_cache_group_vllm_is_left_to_itself() -> None:
    calls: list[Any] = []

    def theirs(*arguments: Any) -> tuple[set[str], int, set[int]]:
        calls.append(arguments)
        return {"a"}, 7, {3}

    scheduler, requests = a_scheduler({}, groups=1), requests_of("a")
    update = release_023._for_any_number_of_groups(theirs)
    assert update(scheduler, iter(requests), {3}, {"a": 1}, evict_blocks=False) == ({"a"}, 7, {3})
    assert calls == [(scheduler, requests, {3}, {"a": 1}, False)]


@on_023
def test_a_manager_is_found_by_its_pool() -> None:
    """vLLM hands over the pool alone."""
    Release023().hook()
    manager = make_manager(Setup())
    assert Release023().cache_manager_of(manager.block_pool) is manager


def test_a_pool_whose_manager_is_not_known_is_refused_with_the_way_out() -> None:
    pool = BlockPool(4, enable_caching=True, hash_block_size=4)
    with pytest.raises(
        RuntimeError, match=r"cannot find this engine's KV cache manager.* Start with vLLM's own scheduler"
    ):
        Release023().cache_manager_of(pool)


@on_023
def test_every_name_that_is_wrapped_is_one_that_vllm_calls() -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: PLC0415

    Release023().hook()
    for name in ("has_finished_requests", "_update_requests_with_invalid_blocks"):
        assert getattr(AsyncScheduler, name).wrapped_by_pd_connector, name
    assert KVCacheManager.allocate_slots.wrapped_by_pd_connector


class Loads:
    """A cache manager whose scheduler does not say how many blocks must stay free, as those of vllm-ascend 0.23."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.manager = make_manager(setup)
        self.allocate = release_023._with_room_for_what_was_loaded(KVCacheManager.allocate_slots)

    def begin(self, request: Any, blocks: int, **options: int) -> bool:
        """Whether so many blocks of a request can be loaded."""
        tokens = blocks * self.setup.sizes[0]
        given = self.allocate(
            self.manager, request, 0, num_external_computed_tokens=tokens, delay_cache_blocks=True, **options
        )
        request.num_computed_tokens = 0 if given is None else tokens
        return given is not None

    def request(self, name: str, blocks: int) -> Any:
        return make_request(self.setup, name, range(blocks * self.setup.sizes[0]))


def test_no_load_begins_into_blocks_that_a_request_lacks_whose_other_tokens_were_loaded() -> None:
    loads = Loads(Setup(device_blocks=12))
    first, second = loads.request("first", 7), loads.request("second", 7)
    assert loads.begin(first, 2)
    assert not loads.begin(second, 6), "five are free, and each of them lacks some"
    third = loads.request("third", 5)
    assert loads.begin(third, 4)
    assert loads.allocate(loads.manager, first, 20) is not None, "all that it lacks"
    assert loads.manager.block_pool.get_num_free_blocks() == 0
    loads.manager.free(third)
    assert loads.begin(loads.request("fourth", 4), 4), "nobody lacks any"


def test_no_load_begins_of_a_request_that_lacks_more_blocks_than_are_free() -> None:
    loads = Loads(Setup(device_blocks=12))
    assert not loads.begin(loads.request("long", 12), 2)
    assert loads.begin(loads.request("no longer", 11), 2)


def test_blocks_of_all_cache_groups_stay_free() -> None:
    loads = Loads(Setup(((4, 0), (4, 16)), device_blocks=17))
    assert loads.begin(loads.request("first", 7), 2)
    assert not loads.begin(loads.request("second", 3), 2), (
        "two of each group, where twelve are free and ten are lacking"
    )
    assert loads.begin(loads.request("third", 3), 1)


@pytest.mark.parametrize("how", ["aborted while it loads", "preempted"])
def test_who_goes_leaves_the_blocks_that_it_lacks_to_others(how: str) -> None:
    loads = Loads(Setup(device_blocks=12))
    first, second = loads.request("first", 7), loads.request("second", 7)
    assert loads.begin(first, 2)
    if how == "preempted":
        loads.manager.free(first)
    else:
        first.status = RequestStatus.FINISHED_ABORTED
    assert loads.begin(second, 6)


def test_a_scheduler_that_says_what_must_stay_free_is_left_to_itself() -> None:
    loads = Loads(Setup(device_blocks=12))
    assert loads.begin(loads.request("first", 7), 2)
    assert not loads.begin(loads.request("second", 7), 6, reserved_blocks=4)
    assert loads.begin(loads.request("second", 7), 6, reserved_blocks=0)


@pytest.mark.parametrize("said", [{}, {"reserved_blocks": 0}], ids=["vllm-ascend", "vLLM"])
def test_room_for_drafts_stays_free_whoever_says_what_else_must(said: dict[str, int]) -> None:
    loads = Loads(Setup(device_blocks=12))
    Release023().keep_from_loads(loads.manager, 2)
    first = loads.request("first", 7)
    assert loads.begin(first, 7, **said)
    assert not loads.begin(loads.request("second", 3), 3, **said), "four are free"
    assert loads.begin(loads.request("third", 2), 2, **said)
    assert loads.allocate(loads.manager, first, 1) is not None, "its first draft"


# What vLLM does not do


def test_no_block_that_one_group_has_found_is_given_to_another_as_a_new_one() -> None:
    """vLLM 0.23 alone gives the first group, for what a connector brings, what the second has found."""
    setup = Setup(((4, 0), (4, 16)), device_blocks=17)
    manager = make_manager(setup)
    pool = manager.block_pool
    first = make_request(setup, "first", range(14))
    manager.allocate_slots(first, 14)
    others = pool.get_new_blocks(pool.get_num_free_blocks())
    manager.free(first)
    pool.free_blocks(others)  # after those of the first request
    again = make_request(setup, "again", range(22))
    hits, local = manager.get_computed_blocks(again)[:2]
    assert local == 12
    manager.allocate_slots(
        again,
        0,
        num_new_computed_tokens=local,
        new_computed_blocks=hits,
        num_external_computed_tokens=9,
        delay_cache_blocks=True,
    )
    given = [block for group in manager.get_blocks("again").blocks for block in group if not block.is_null]
    assert len({block.block_id for block in given}) == len(given) == 6 + 5
    assert {block.ref_cnt for block in given} == {1}
    assert pool.get_num_free_blocks() == 16 - len(given)
    manager.free(again)
    assert pool.get_num_free_blocks() == 16


def block(number: int, contents: object = None, *, null: bool = False) -> Any:
    return SimpleNamespace(block_id=number, block_hash=contents, is_null=null)


def test_what_is_found_by_its_contents_is_not_filled() -> None:
    """Other requests may use it, and would fail with the one that waits."""
    blocks: Any = SimpleNamespace(
        blocks=([block(3, "held"), block(4), block(5)], [block(0, null=True), block(6, "held"), block(7)])
    )
    assert block_ids_to_fill(blocks) == (4, 5, 7)


def test_a_request_fails_here_when_its_last_rank_has_ended_though_another_failed_earlier() -> None:
    """vLLM 0.23 counts ranks that have ended, and passes on which have failed as soon as one has."""
    told: list[tuple[set[str], set[str]]] = []
    side: Any = ConnectorScheduler.__new__(ConnectorScheduler)
    side._failed = set()
    side._roles = [SimpleNamespace(settled=lambda finished, failed, report: told.append((finished, failed)))]
    side._take_handshakes = lambda handshakes: None
    report = SimpleNamespace(handshakes={}, failed=frozenset({"a"}))
    nothing = SimpleNamespace(handshakes={}, failed=frozenset())
    side.settled({"b"}, set(), report)
    side.settled({"a"}, set(), nothing)
    side.settled({"a"}, set(), nothing)  # the id of another request, later
    assert told == [({"b"}, set()), ({"a"}, {"a"}), ({"a"}, set())]


@pytest.mark.parametrize(("device", "refused"), [("cpu", False), ("npu", False), ("cuda", True)])
def test_a_device_whose_caches_are_not_known_is_refused_at_start(
    monkeypatch: pytest.MonkeyPatch, device: str, refused: bool
) -> None:
    import vllm.platforms  # noqa: PLC0415

    monkeypatch.setattr(engine_config, "current", Release023)
    monkeypatch.setattr(vllm.platforms, "current_platform", SimpleNamespace(device_type=device))
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(enable_sleep_mode=False),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        parallel_config=SimpleNamespace(distributed_executor_backend="mp", use_ray=False),
    )
    if not refused:
        check_supported(config)
        return
    with pytest.raises(UnsupportedError, match=r"device cuda: .* serves cpu and npu only.*use vLLM 0.30 or later"):
        check_supported(config)


@on_023
@pytest.mark.parametrize(("mode", "named"), [("INT8_PER_TOKEN_HEAD", "int8_per_token_head"), ("NVFP4", "nvfp4")])
def test_caches_whose_scales_lie_elsewhere_are_refused(mode: str, named: str) -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode  # noqa: PLC0415

    spec = FullAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=64, dtype=torch.int8, kv_quant_mode=KVQuantMode[mode]
    )
    assert named in Release023().hidden_scales(spec)
    assert Release023().hidden_scales(FullAttentionSpec(16, num_kv_heads=2, head_size=64, dtype=torch.int8)) == ""


# The queue of free blocks


class MixedQueue:
    """vLLM's own queue, in which blocks are put back at its end whether they hold something or not."""

    def __init__(self, blocks: int, depth: int) -> None:
        self.pool = BlockPool(blocks + 1, True, 16)
        self.queue = self.pool.free_block_queue
        self.cursor = MixedQueueCursor(self.pool, depth)
        self.contents = 0

    def take(self, number: int) -> list[KVCacheBlock]:
        blocks: list[KVCacheBlock] = self.queue.popleft_n(number)
        for taken in blocks:
            taken._block_hash = None
            taken.ref_cnt += 1
        return blocks

    def give_back(self, blocks: list[KVCacheBlock], *, empty: bool, in_front: bool) -> None:
        for each in blocks:
            if not empty:
                self.contents += 1
                each._block_hash = self.contents
            each.ref_cnt -= 1
        if in_front and empty:
            self.queue.prepend_n(blocks)
        else:
            self.queue.append_n(blocks)

    def free(self) -> list[KVCacheBlock]:
        blocks: list[KVCacheBlock] = self.queue.get_all_free_blocks()
        return blocks


def test_what_was_used_and_put_back_behind_an_empty_one_is_visited_again() -> None:
    """The last block of a prompt holds nothing that can be found, and is put back first."""
    bench = MixedQueue(8, depth=3)
    bench.give_back(bench.take(8), empty=False, in_front=False)
    assert [each.block_id for each in bench.cursor.advance()] == [1, 2, 3]
    taken = bench.take(2)
    bench.give_back(taken[1:], empty=True, in_front=False)
    bench.give_back(taken[:1], empty=False, in_front=False)
    assert [each.block_id for each in bench.free()] == [3, 4, 5, 6, 7, 8, 2, 1]
    assert [each.block_id for each in bench.cursor.advance()] == [4, 5]


ACTIONS = st.tuples(st.sampled_from(["take", "full", "empty", "empty in front", "look"]), st.integers(0, 6))


@settings(max_examples=300, deadline=None)
@given(blocks=st.integers(1, 10), depth=st.integers(1, 12), actions=st.lists(ACTIONS, max_size=50))
def test_what_is_evicted_next_has_been_visited_wherever_empty_blocks_lie(
    blocks: int, depth: int, actions: list[tuple[str, int]]
) -> None:
    bench = MixedQueue(blocks, depth)
    bench.give_back(bench.take(blocks), empty=False, in_front=False)
    used: list[KVCacheBlock] = []
    visited: dict[int, object] = {}
    for action, number in [*actions, ("look", 0)]:
        if action == "take":
            used += bench.take(min(number, len(bench.free())))
            next(bench.cursor.advance(), None)  # as in every step that takes blocks
        elif action != "look":
            given_back, used = used[:number], used[number:]
            bench.give_back(given_back, empty="empty" in action, in_front="front" in action)
        else:
            visited |= {each.block_id: each.block_hash for each in bench.cursor.advance()}
            missed = [
                each.block_id
                for each in bench.free()[:depth]
                if each.block_hash is not None and visited.get(each.block_id) != each.block_hash
            ]
            assert not missed


# vllm-ascend


def test_host_blocks_that_the_device_holds_twice_are_given_back_though_doubles_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vllm-ascend 0.23 gives a block back once that is given back twice in one call, and keeps the other reference."""
    give_back = BlockPool.free_blocks

    def without_doubles(self: BlockPool, blocks: Any, **options: Any) -> None:
        give_back(self, list({block.block_id: block for block in blocks}.values()), **options)

    monkeypatch.setattr(BlockPool, "free_blocks", without_doubles)
    setup = Setup(device_blocks=7, mode="lazy", lookahead=8)
    manager = make_manager(setup)
    pool = make_pool(setup, manager)
    requests = [make_request(setup, name, range(9)) for name in ("one", "the same")]
    for request in requests:
        assert manager.allocate_slots(request, 9)  # without a look at what is cached
        request.num_computed_tokens = 9
    for request in requests:
        manager.free(request)
    candidates = pool.eviction_candidates()
    assert len(candidates) == 4
    stores = pool.start_stores(list({candidate.key: candidate for candidate in candidates}.values()))
    pool.publish(stores)
    pool.finish_stores(stores)
    assert pool.cached == 2
    assert pool._cursor is not None
    pool._cursor.reset()
    assert pool.eviction_candidates() == []
    assert pool.references() == {}
