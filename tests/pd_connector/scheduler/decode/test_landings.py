"""Pulls to host memory, on the scheduler side: when a prompt lands, what its request gets, and whose the slots are."""

from collections import Counter
from unittest.mock import patch

import pytest

from pd_connector.orders import Cause, RankEnds, Report
from tests.support.host_tier.decoding import LandingEngine

TOKENS, NEEDED = 41, 3


def test_a_prompt_lands_and_is_given_to_its_request_to_the_last_token() -> None:
    engine = LandingEngine()
    request = engine.arrive("r")
    assert engine.landings.must_wait(request, 0)
    (order,) = engine.landings.step_orders({}).landings
    engine.begin_landing(order)
    assert (order.first_token, order.end_token) == (0, TOKENS - 1)
    assert [len(ids) for ids in order.local_block_ids] == [NEEDED]
    assert 0 not in order.local_block_ids[0]
    assert engine.ask("r") is None
    assert engine.consumer.awaits_blocks(request)
    engine.end_landing("r")
    engine.check()
    assert engine.ask("r") == (TOKENS - 1, 0), "the tail, which is not a full block, is there as well"
    engine.give_blocks("r", TOKENS - 1, 0)
    (load,) = engine.tier.step_orders({}).loads
    assert load.moves.slots.tolist() == [block - 1 for block in order.local_block_ids[0]]
    assert load.moves.blocks.tolist() == [1, 2, 3]
    engine.check()
    assert engine.counted()["landings:landed"] == 1


@pytest.mark.parametrize("before", [0, 32])
def test_what_a_window_will_have_passed_does_not_land_and_the_rest_is_right(before: int) -> None:
    """Whether host memory holds the prompt's first tokens or not."""
    engine = LandingEngine(slots=14, groups=((16, 0), (16, 20)))
    if before:
        engine.arrive("before", tokens=before + 1)
        assert engine.ask("before") is None
        engine.end_landing("before")
    engine.arrive("r", tokens=61)
    assert engine.landings.must_wait(engine.requests["r"], 0)
    (order,) = engine.landings.step_orders({}).landings
    engine.begin_landing(order)
    assert order.first_token == before
    held = [[block > 0 for block in table] for table in order.local_block_ids]
    everything, in_window = [True] * 4, [False, False, True, True]  # token 60 attends to tokens 41 and up
    assert held == [everything, in_window] if not before else [in_window, in_window]
    engine.end_landing("r")
    engine.check()
    assert engine.ask("r") == (60, 0)
    engine.give_blocks("r", 60, 0)
    load = engine.take_load("r", 60)
    assert load is not None
    assert load.moves.groups.tolist() == [0, 0, 0, 0, 1, 1]
    engine.end_load("r")
    for name in [*engine.requests]:
        engine.leave(name)
    engine.check()
    assert engine.pool.references() == {}


@pytest.mark.parametrize(("groups", "found"), [(((16, 0),), 48), (((16, 0), (16, 20)), 48), (((32, 0), (16, 20)), 32)])
def test_what_has_landed_behind_what_host_memory_held_is_found_in_its_place(
    groups: tuple[tuple[int, int], ...], found: int
) -> None:
    engine = LandingEngine(slots=20, groups=groups)
    for name, tokens in (("short", 33), ("long", 61), ("other", 61)):
        engine.arrive(name, tokens=tokens)
        assert engine.ask(name) is None
        assert engine.landing(name).first_token == {"short": 0, "long": 32, "other": found}[name]
        engine.end_landing(name)
    assert engine.ask("other") == (60, 0)
    engine.give_blocks("other", 60, 0)
    assert engine.take_load("other", 60) is not None


def test_a_shorter_prompt_does_not_find_what_the_window_of_a_longer_one_has_passed() -> None:
    engine = LandingEngine(slots=14, groups=((16, 0), (16, 20)))
    for name, tokens in (("long", 61), ("short", 33)):
        engine.arrive(name, tokens=tokens)
        assert engine.ask(name) is None
        assert engine.landing(name).first_token == 0
        engine.end_landing(name)
        engine.check()


def test_slots_are_told_as_lent_until_the_prompt_that_has_landed_there_is_loaded_or_gone() -> None:
    engine = LandingEngine()
    for name in ("r", "gone"):
        engine.arrive(name, seed=len(name))
        assert engine.ask(name) is None
    assert engine.lent == 2 * NEEDED, "they land"
    for name in ("r", "gone"):
        engine.end_landing(name)
    assert engine.lent == 2 * NEEDED, "they wait for blocks"
    engine.leave("gone")
    assert engine.lent == NEEDED
    engine.give_blocks("r", *(engine.ask("r") or ()))
    assert engine.lent == NEEDED, "it is being loaded"
    engine.end_load("r")
    assert engine.lent == 0
    assert engine.pool.cached > 0, "what can be found, and evicted, is not lent"

    engine.leave("r")
    engine.arrive("again", seed=len("r"))
    assert engine.tier.missing_tokens(engine.requests["again"], 0) == TOKENS // 16 * 16
    assert engine.lent == TOKENS // 16, "a hit is kept for the request that is about to be given blocks"
    engine.leave("again")
    assert engine.lent == 0


def test_what_the_device_holds_by_then_is_not_loaded() -> None:
    engine = LandingEngine()
    engine.arrive("r")
    assert engine.ask("r") is None
    engine.end_landing("r")
    assert engine.ask("r", 16) == (TOKENS - 17, 0)
    engine.give_blocks("r", TOKENS - 17, 0, 16)
    (load,) = engine.tier.step_orders({}).loads
    assert load.moves.blocks.tolist() == [2, 3]
    engine.check()


def test_what_the_device_has_lost_by_then_is_loaded_from_host_memory_with_what_has_landed() -> None:
    engine = LandingEngine()
    engine.arrive("before")
    assert engine.ask("before") is None
    engine.end_landing("before")
    assert engine.ask("before") == (TOKENS - 1, 0)
    engine.give_blocks("before", TOKENS - 1, 0)
    engine.end_load("before")
    engine.arrive("r")
    assert engine.ask("r", 32) is None, "the device holds its full blocks, and the tail lands"
    engine.end_landing("r")
    engine.tier.step_orders({})
    assert engine.ask("r") == (TOKENS - 1, 0)
    engine.check()
    engine.give_blocks("r", TOKENS - 1, 0)
    (load,) = engine.tier.step_orders({}).loads
    assert load.moves.blocks.tolist() == [1, 2, 3]
    assert len(set(load.moves.slots.tolist())) == 3
    engine.check()
    engine.end_load("r")
    engine.check()


def test_what_nobody_holds_any_longer_is_pulled_although_the_tail_has_landed() -> None:
    engine = LandingEngine()
    engine.arrive("r")
    assert engine.ask("r", 32) is None
    engine.end_landing("r")
    assert engine.ask("r") == (0, 0), "its lease was released: the prompt is computed"
    engine.check()


def test_others_find_what_has_landed_and_pull_the_rest_only() -> None:
    engine = LandingEngine()
    engine.arrive("r")
    assert engine.ask("r") is None
    engine.end_landing("r")
    other = engine.arrive("other")
    assert engine.landings.must_wait(other, 0)
    (order,) = engine.landings.step_orders({}).landings
    assert (order.first_token, order.end_token) == (32, TOKENS - 1)
    assert order.local_block_ids[0][:2] == (0, 0)
    engine.check()


def test_nothing_is_loaded_if_the_device_holds_all_that_has_landed_by_then() -> None:
    engine = LandingEngine()
    request = engine.arrive("r", tokens=33)
    assert engine.ask("r") is None
    engine.end_landing("r")
    assert engine.ask("r", 32) == (0, 0)
    engine.give_blocks("r", 0, 0, 32)
    assert engine.tier.step_orders({}).loads == (), "vLLM does not wait for this request, and knows no such end"
    assert engine.tier.loaded_tokens(request) == 0
    assert engine.pool.references() == {}
    engine.check()


def test_what_a_request_was_offered_before_it_lands_is_let_go() -> None:
    engine = LandingEngine("auto", slots=7)
    engine.arrive("before")
    engine.device.used = engine.device.total
    assert engine.ask("before") is None
    engine.end_landing("before")
    engine.device.used = 0
    engine.arrive("r")
    assert engine.ask("r") == (32, TOKENS - 33), "the device has room, and host memory the first two blocks"
    engine.device.used = engine.device.total
    assert engine.ask("r") is None
    engine.end_landing("r")
    engine.check()
    assert engine.ask("r") == (TOKENS - 1, 0)
    engine.give_blocks("r", TOKENS - 1, 0)
    engine.end_load("r")
    engine.leave("before")
    engine.check()
    assert engine.pool.references() == {}


@pytest.mark.parametrize(("free", "lands"), [(100, False), (3, True)])
def test_auto_pulls_to_the_device_as_long_as_it_has_the_blocks(free: int, *, lands: bool) -> None:
    engine = LandingEngine("auto")
    engine.device.used = 100 - free
    engine.arrive("r")
    assert (engine.ask("r") is None) == lands
    assert lands or engine.ask("r") == (0, TOKENS - 1)


def test_nothing_lands_of_which_only_the_last_token_is_missing() -> None:
    engine = LandingEngine()
    for name in ("before", "r"):
        engine.arrive(name, tokens=33)
        assert engine.landings.must_wait(engine.requests[name], 0) is (name == "before")
        if name == "before":
            engine.step()
            engine.end_landing(name)
            engine.give_blocks(name, *(engine.ask(name) or ()))
            engine.end_load(name)
    assert engine.landings.step_orders({}).landings == ()
    assert engine.ask("r") == (32, 0)
    engine.check()


@pytest.mark.parametrize(("slots", "reason"), [(2, "too_large"), (4, "full")])
def test_without_room_in_host_memory_a_prompt_is_pulled_to_the_device(slots: int, reason: str) -> None:
    engine = LandingEngine(slots=slots)
    engine.arrive("first", seed=1)
    if reason == "full":
        assert engine.ask("first") is None
    engine.arrive("r")
    assert engine.ask("r") == (0, TOKENS - 1)
    assert engine.ask("r") == (0, TOKENS - 1)
    assert engine.counted()[f"landing_fallbacks:{reason}"] == 1
    engine.check()


def test_a_prompt_that_found_no_slots_is_looked_up_again_only_when_more_are_free() -> None:
    engine = LandingEngine(slots=4)
    engine.arrive("first", seed=1)
    assert engine.ask("first") is None
    engine.arrive("r")
    with patch.object(engine.tier.pool, "find", wraps=engine.tier.pool.find) as looked_up:
        for _ in range(3):
            assert not engine.landings.must_wait(engine.requests["r"], 0)
        assert looked_up.call_count == 1
        engine.end_landing("first", failed=True)
        assert engine.landings.must_wait(engine.requests["r"], 0)
    engine.check()


def test_an_engine_that_hangs_keeps_only_its_own_prompts_from_landing() -> None:
    engine = LandingEngine(slots=100)
    for number in range(16):
        engine.arrive(f"r{number}", seed=number, engine_id="hangs")
        assert engine.ask(f"r{number}") is None
    engine.arrive("next", seed=16, engine_id="hangs")
    engine.arrive("other", seed=17, engine_id="healthy")
    assert engine.ask("next") is engine.ask("other") is None
    assert engine.under_way == [*(f"r{number}" for number in range(16)), "other"]
    engine.end_landing("r0", failed=True)
    assert engine.ask("next") is None
    assert engine.under_way[-1] == "next"
    engine.check()


def test_what_became_of_landings_is_counted() -> None:
    engine, counted = LandingEngine(slots=NEEDED), Counter[str]()
    for number, failed in enumerate((False, True, True)):
        name = f"r{number}"
        engine.arrive(name, seed=number)
        assert engine.ask(name) is None
        assert engine.landings.under_way == 1
        engine.arrive(f"full{number}", seed=9 + number)
        assert engine.ask(f"full{number}") == (0, TOKENS - 1)
        engine.end_landing(name, failed=failed)
        engine.leave(name)
        counted.update(engine.counted())
    landed = {label: number for label, number in counted.items() if label.startswith("landing")}
    assert landed == {"landings:landed": 1, "landings:failed": 2, "landing_fallbacks:full": 3}
    assert engine.landings.under_way == 0


def test_the_request_of_a_landing_that_fails_is_refused_as_that_of_a_pull() -> None:
    engine = LandingEngine()
    engine.arrive("r")
    assert engine.ask("r") is None
    engine.end_landing("r", failed=True)
    assert engine.ask("r") == (0, TOKENS - 1)
    engine.give_blocks("r", 0, TOKENS - 1)
    (refusal,) = engine.consumer.step_orders({}).refusals
    assert refusal.cause is Cause.LANDING
    assert engine.pool.references() == {}


def test_nothing_is_refused_to_a_request_that_has_left_before_its_landing_fails() -> None:
    engine = LandingEngine()
    engine.arrive("r")
    assert engine.ask("r") is None
    engine.leave("r")
    engine.end_landing("r", failed=True)
    assert engine.consumer.waiting == 0, "nobody would ever take the refusal"
    assert engine.pool.references() == {}
    engine.check()


@pytest.mark.parametrize("failing", [0, 1, None])
def test_a_landing_ends_with_its_last_rank_and_fails_with_any(failing: int | None) -> None:
    engine = LandingEngine()
    engine.arrive("r")
    assert engine.ask("r") is None
    for rank in range(2):
        assert engine.ask("r") is None, "a rank still writes"
        assert engine.pool.references(), "its slots are somebody else's"
        report = Report(landings={"r": RankEnds(1, failed=rank == failing)})
        for role in engine.roles:
            role.settled(set(), set(), report)
        engine.check()
    event = "landings:landed" if failing is None else "landings:failed"
    assert engine.counted()[event] == 1


def test_a_reset_makes_what_lands_useless_and_the_prompt_is_computed() -> None:
    engine = LandingEngine()
    engine.arrive("r")
    assert engine.ask("r") is None
    for role in engine.roles:
        role.reset()
    engine.end_landing("r")
    assert engine.ask("r") == (0, 0)
    assert engine.pool.references() == {}
    engine.check()
    engine.give_blocks("r", 0, 0)
    assert engine.counted()["prompts_computed:landing"] == 1


@pytest.mark.parametrize(("lost", "computed"), [(False, 0), (True, 0), (True, 32)], ids=["stays", "lost", "on device"])
def test_a_prompt_that_has_landed_counts_as_computed_if_host_memory_loses_it(lost: bool, computed: int) -> None:
    """Not if the device has come to hold its full blocks: the last one is in nobody's prefix cache."""
    engine = LandingEngine()
    engine.arrive("r")
    assert engine.ask("r") is None
    engine.end_landing("r")
    assert engine.ask("r") == (40, 0)
    if lost:
        engine.tier.reset()
    found = engine.ask("r", computed)
    assert found == ((0, 0) if lost else (40, 0))
    engine.give_blocks("r", *found, computed)
    assert engine.counted().get("prompts_computed:landing", 0) == int(lost and not computed)
    engine.leave("r")
    engine.check()
