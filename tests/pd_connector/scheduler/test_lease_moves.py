"""Leases that move to host memory: with every byte that is copied, whatever readers, failures and the clock do."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pd_connector.orders import Orders, Report, StoreEnds
from pd_connector.scheduler.checksum_table import ChecksumTable
from pd_connector.scheduler.host_tier import HostTier
from pd_connector.scheduler.lease_moves import LeaseMoves
from pd_connector.scheduler.leases import LeaseTable
from pd_connector.stats import StatsRecorder, nothing
from pd_connector.vllm.block_pools import DeviceBlocks, HostBlocks, Leased
from tests.support.host_tier.setup import Setup, make_manager, make_pool, make_request
from tests.support.waiting import ManualClock
from transfer.control.messages import Place

TTL_S, TOKENS, BLOCKS = 8.0, 10, 3  # of a prompt: two full blocks, and a tail
CONTENTS = "the prompt's"
SETUP = Setup(groups=((4, 0),), device_blocks=16, slots=7, ranks=2)


class PrefillEngine:
    """The roles of a prefill engine whose leases may move, with the bytes of its device and of its host memory.

    A byte is the prompt of which it holds a block, and which.
    """

    def __init__(self, most_leased: float = 0.0, slots: int = SETUP.slots) -> None:
        self.clock, self.manager = ManualClock(), make_manager(SETUP)
        self.pool = make_pool(Setup(SETUP.groups, SETUP.device_blocks, slots), self.manager)
        self.tier = HostTier(self.pool, SETUP.ranks)
        self.blocks = DeviceBlocks()
        self.blocks.bind(self.manager)
        self.leases: LeaseTable[Leased] = LeaseTable(TTL_S, self.clock)
        self.checksums = ChecksumTable(self.leases.still_valid, enabled=False)
        self.is_short = False
        self.moves = LeaseMoves(
            self.leases, self.checksums, self.blocks, lambda: self.is_short, most_leased, self.clock
        )
        self.moves.use(self.tier, SETUP.ranks)
        self.device: dict[int, tuple[int, int]] = {}
        self.host: dict[int, tuple[int, int]] = {}
        self.tables: dict[str, tuple[int, ...]] = {}  # of device blocks, by lease
        self.prompts: dict[str, int] = {}
        self.under_way: list[int] = []  # stores

    def prefill(self, name: str, prompt: int) -> bool:
        """Compute a prompt and lease it; False if the device has no blocks for it."""
        request: Any = make_request(SETUP, name, [prompt * 100 + token for token in range(TOKENS)])
        if self.manager.allocate_slots(request, TOKENS) is None:
            return False
        held = self.blocks.hold(name)
        self.manager.free(request)
        self.tables[name] = tuple(block.block_id for block in held)
        self.prompts[name] = prompt
        for number, block_id in enumerate(self.tables[name]):
            self.device[block_id] = (prompt, number)
        self.leases.grant(name, held, CONTENTS, (self.tables[name],))
        return True

    def step(self) -> None:
        """What is ordered is copied at once, and reported later."""
        self.collect()
        orders: Orders = self.moves.step_orders({})
        for store in orders.stores:
            for block, slot in zip(store.moves.blocks.tolist(), store.moves.slots.tolist(), strict=True):
                self.host[slot] = self.device[block]
            self.under_way.append(store.store_id)
        self.check()

    def end_store(self, store_id: int, *, failed: bool = False, unsettled: bool = False) -> None:
        self.under_way.remove(store_id)
        for rank in range(SETUP.ranks):
            bad = failed and rank == 0
            ends = StoreEnds(1, failed=bad, unsettled=bad and unsettled)
            for role in (self.tier, self.moves):
                role.settled(set(), set(), Report({store_id: ends}))
        self.check()

    def read(self, name: str) -> list[tuple[int, int]] | None:
        """What a reader finds where it is told that a lease lies; None if it has ended."""
        located = self.leases.locate(name)
        if located.place == Place.HOST:
            return [self.host[slot] for slot in located.slots[0]]
        return [self.device[block] for block in self.tables[name]] if located.place == Place.DEVICE else None

    def release(self, name: str) -> None:
        """Read a lease, let the engine go on, and release it: what was read is right if that is valid."""
        if (found := self.read(name)) is not None:
            place = self.leases.locate(name).place
            answer = self.leases.release(name, 0, 1, "pull", CONTENTS, place)
            assert answer.valid, answer.reason
            assert found == [(self.prompts[name], number) for number in range(BLOCKS)], "a valid read, and wrong"

    def collect(self) -> None:
        for held in self.leases.collect():
            if isinstance(held, HostBlocks):
                self.moves.release(held)
            else:
                assert isinstance(held, tuple)
                self.blocks.release(held)

    def check(self) -> None:
        for role in (self.tier, self.moves):
            role.check_integrity()
        self.leases.check_integrity()

    @property
    def lent(self) -> int:
        """What the engine tells of its host memory, in slots."""
        stats = StatsRecorder()
        self.tier.update_stats(stats)
        return int((stats.take() or nothing())["gauges"]["host_blocks_lent"])

    def counted(self) -> Counter[str]:
        stats = StatsRecorder()
        self.moves.update_stats(stats)
        return Counter((stats.take() or {"counts": {}})["counts"])


def moved(most_leased: float = 0.0, prompts: int = 1) -> PrefillEngine:
    """An engine whose leases have been copied to host memory; their ends are still to be reported."""
    engine = PrefillEngine(most_leased)
    for number in range(prompts):
        assert engine.prefill(f"lease{number}", number)
    engine.is_short = True
    engine.step()
    return engine


def test_a_lease_that_nobody_reads_frees_the_device_and_is_found_in_host_memory() -> None:
    engine = moved()
    assert engine.blocks.leased == BLOCKS, "the device's blocks must not change while they are copied"
    (store,) = engine.under_way
    engine.end_store(store)
    assert engine.blocks.leased == 0
    assert engine.read("lease0") == [(0, number) for number in range(BLOCKS)]
    assert (engine.leases.in_host_memory, engine.counted()["lease_moves:short"]) == (1, 1)
    assert engine.lent == BLOCKS
    engine.release("lease0")
    engine.collect()
    assert engine.pool.references() == {}
    assert engine.lent == 0
    assert engine.pool.cached == 2, "its full blocks can be found by others"


def test_a_second_lease_of_the_same_prompt_is_copied_only_as_far_as_host_memory_lacks_it() -> None:
    engine = moved()
    engine.end_store(engine.under_way[0])
    engine.prefill("again", 0)
    engine.step()
    engine.end_store(engine.under_way[0])
    counts = engine.counted()
    assert (counts["lease_blocks_moved:copied"], counts["lease_blocks_moved:present"]) == (BLOCKS + 1, 2)
    for name in ("lease0", "again"):
        engine.release(name)


def test_once_a_reader_was_told_where_a_lease_lies_it_stays_there() -> None:
    engine = moved()
    assert engine.read("lease0") is not None
    engine.end_store(engine.under_way[0])
    assert (engine.blocks.leased, engine.counted()["lease_moves:read"]) == (BLOCKS, 1)
    assert engine.leases.locate("lease0").place == Place.DEVICE
    engine.step()
    assert engine.under_way == []
    assert engine.pool.references() == {}


def test_what_was_read_where_a_lease_lies_no_longer_is_not_valid() -> None:
    engine = moved()
    engine.end_store(engine.under_way[0])
    assert engine.leases.release("lease0", 0, 1, "pull", CONTENTS, Place.DEVICE).reason == "moved"
    engine.collect()
    assert engine.leases.release("lease0", 0, 1, "pull", CONTENTS, Place.DEVICE).reason == "moved"


@pytest.mark.parametrize("unsettled", [False, True])
def test_a_copy_that_fails_leaves_the_lease_on_the_device(*, unsettled: bool) -> None:
    engine = moved()
    engine.end_store(engine.under_way[0], failed=True, unsettled=unsettled)
    assert engine.read("lease0") == [(0, number) for number in range(BLOCKS)]
    assert engine.leases.locate("lease0").place == Place.DEVICE
    assert len(engine.pool.references()) == (BLOCKS if unsettled else 0), "slots that may still be written to are lost"


def test_a_lease_that_ends_while_it_is_copied_gives_everything_back() -> None:
    engine = moved()
    engine.leases.cancel(["lease0"])
    engine.step()
    engine.end_store(engine.under_way[0])
    assert engine.counted()["lease_moves:ended"] == 1
    assert (engine.blocks.leased, engine.pool.references(), engine.pool.cached) == (0, {}, 0)


def test_host_memory_that_is_full_of_leases_takes_no_more_until_one_has_ended() -> None:
    engine = moved(prompts=3)
    for store in [*engine.under_way]:
        engine.end_store(store)
    assert (engine.leases.in_host_memory, engine.blocks.leased) == (2, BLOCKS)
    assert engine.counted()["lease_moves:full"] == 1
    assert not engine.moves.is_due(), "it would be tried again and again"
    engine.release("lease0")
    engine.clock.advance(1.0)
    engine.step()
    engine.end_store(engine.under_way[0])
    assert (engine.leases.in_host_memory, engine.blocks.leased) == (2, 0)


def test_without_need_only_what_exceeds_the_share_moves_and_not_at_once() -> None:
    engine = PrefillEngine(most_leased=0.25)  # of 15 blocks
    for number in range(2):
        engine.prefill(f"lease{number}", number)
    engine.step()
    assert engine.under_way == []
    engine.clock.advance(0.3)
    engine.step()
    engine.end_store(engine.under_way[0])
    assert [engine.leases.locate(f"lease{number}").place for number in range(2)] == [Place.HOST, Place.DEVICE]
    assert engine.counted()["lease_moves:share"] == 1


ACTIONS = ("prefill", "step", "short", "end", "fail", "read", "release", "cancel", "wait", "reset")


class Course:
    """What happens to an engine, one action at a time."""

    def __init__(self) -> None:
        self.engine = PrefillEngine()

    def act(self, number: int, action: str, choice: int) -> None:
        engine = self.engine
        if action == "prefill":
            engine.prefill(f"r{number}", choice % 4)
        elif action == "step":
            engine.step()
        elif action == "short":
            engine.is_short = bool(choice % 2)
        elif action == "wait":
            engine.clock.advance((0.3, 1.0, 3.0, TTL_S)[choice % 4])
        elif action == "reset":  # as of weights that have changed
            engine.leases.cancel_all()
            engine.collect()
            engine.manager.reset_prefix_cache()
            engine.tier.reset()
        elif action in ("end", "fail"):
            if engine.under_way:
                engine.end_store(engine.under_way[choice % len(engine.under_way)], failed=action == "fail")
        elif engine.prompts:
            self.act_on(sorted(engine.prompts)[choice % len(engine.prompts)], action)

    def act_on(self, name: str, action: str) -> None:
        if action == "cancel":
            self.engine.leases.cancel([name])
        elif action == "release":
            self.engine.release(name)
        elif (found := self.engine.read(name)) is not None:
            assert [prompt for prompt, _ in found] == [self.engine.prompts[name]] * BLOCKS


@settings(max_examples=200, deadline=None, derandomize=True, database=None, suppress_health_check=[*HealthCheck])
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 11)), max_size=80))
def test_no_valid_read_is_wrong_and_no_block_is_lost_whatever_happens(actions: list[tuple[str, int]]) -> None:
    course = Course()
    engine = course.engine
    for number, (action, choice) in enumerate(actions):
        course.act(number, action, choice)
        engine.check()
    engine.leases.cancel_all()
    for store in [*engine.under_way]:
        engine.end_store(store)
    engine.collect()
    engine.check()
    assert (engine.blocks.leased, engine.pool.references()) == (0, {})
