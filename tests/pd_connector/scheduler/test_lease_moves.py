"""Leases that move to host memory: with every byte that is copied, whatever readers, failures and the clock do."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pd_connector.orders import StoreEnds
from tests.support.host_tier.leasing import BLOCKS, CONTENTS, SETUP, TTL_S, LeasingEngine
from transfer.control.messages import Place


def moved(most_leased: float = 0.0, prompts: int = 1) -> LeasingEngine:
    """An engine whose leases have been copied to host memory; their ends are still to be reported."""
    engine = LeasingEngine(most_leased)
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


@pytest.mark.parametrize("failing", [0, 1, None])
def test_a_lease_moves_when_the_last_rank_has_copied_it_and_stays_if_any_fails(failing: int | None) -> None:
    engine = moved()
    (store_id,) = engine.under_way
    for rank in range(SETUP.ranks):
        assert engine.blocks.leased == BLOCKS, "a rank still copies from the device"
        engine.end_on_a_rank(store_id, StoreEnds(1, failed=rank == failing))
    assert engine.blocks.leased == (0 if failing is None else BLOCKS)
    assert engine.leases.in_host_memory == (failing is None)


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
    engine = LeasingEngine(most_leased=0.25)  # of 15 blocks
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
        self.engine = LeasingEngine()

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
