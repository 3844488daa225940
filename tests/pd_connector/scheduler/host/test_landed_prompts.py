"""Prompts in host memory whose requests have not loaded them yet: what is published and given back, and when."""

import pytest

from tests.support.host_tier.decoding import LandingEngine

BLOCKS = 5


@pytest.fixture
def engine() -> LandingEngine:
    """An engine that has just learned that a prompt has landed."""
    engine = LandingEngine(slots=12)
    engine.arrive("r", tokens=BLOCKS * 16 + 1)
    assert engine.ask("r") is None
    engine.end_landing("r")
    return engine


def test_its_blocks_can_be_found_when_it_lands_and_are_given_back_when_it_is_loaded(engine: LandingEngine) -> None:
    assert (engine.pool.cached, len(engine.pool.references())) == (BLOCKS, BLOCKS)
    engine.give_blocks("r", *(engine.ask("r") or ()))
    engine.end_load("r")
    engine.check()
    assert (engine.pool.cached, engine.pool.references()) == (BLOCKS, {})


@pytest.mark.parametrize("is_loading", [False, True])
def test_after_a_reset_nothing_of_what_had_landed_is_found(engine: LandingEngine, is_loading: bool) -> None:
    if is_loading:
        engine.give_blocks("r", *(engine.ask("r") or ()))
    for role in engine.roles:
        role.reset()
    if is_loading:
        engine.end_load("r")
    engine.check()
    assert (engine.pool.cached, engine.pool.references()) == (0, {})


@pytest.mark.parametrize(("seed", "found"), [(0, BLOCKS * 16), (1, 0)], ids=["the same", "another"])
def test_a_request_that_begins_alike_finds_it(engine: LandingEngine, seed: int, found: int) -> None:
    engine.arrive("other", seed=seed, tokens=BLOCKS * 16 + 9)
    assert engine.tier.missing_tokens(engine.requests["other"], 0) == found
    engine.check()


def test_what_has_landed_is_not_pulled_a_second_time(engine: LandingEngine) -> None:
    other = engine.arrive("other", tokens=BLOCKS * 16 + 9)
    assert engine.landings.must_wait(other, 0)
    engine.step()
    assert engine.landing("other").first_token == BLOCKS * 16
