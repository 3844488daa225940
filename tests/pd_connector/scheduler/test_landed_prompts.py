"""Prompts in host memory whose requests have not loaded them yet: what is published and given back, and when."""

import pytest

from pd_connector.scheduler import step_share
from tests.support.host_tier.decoding import LandingEngine

BLOCKS = 5


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> LandingEngine:
    """An engine that has just learned that a prompt has landed. Its steps deal with two blocks each."""
    engine = LandingEngine(slots=12)
    engine.arrive("r", tokens=BLOCKS * 16 + 1)
    assert engine.ask("r") is None
    monkeypatch.setattr(step_share, "LEAST_BLOCKS", 2)
    engine.tier.step_orders({"r": 1})
    engine.end_landing("r")
    return engine


def test_a_step_publishes_so_many_blocks_and_then_gives_back_as_many(engine: LandingEngine) -> None:
    assert engine.pool.cached == 2
    engine.give_blocks("r", *(engine.ask("r") or ()))
    engine.end_load("r")
    seen: list[tuple[int, int]] = []
    while engine.tier.wants_step and len(seen) < 9:
        engine.tier.step_orders({"r": 1})
        engine.check()
        seen.append((engine.pool.cached, len(engine.pool.references())))
    assert seen == [(4, 5), (5, 4), (5, 2), (5, 0)]


def test_after_a_reset_nothing_is_published_of_what_had_landed(engine: LandingEngine) -> None:
    for role in engine.roles:
        role.reset()
    for _ in range(4):
        engine.tier.step_orders({"r": 1})
    engine.check()
    assert (engine.pool.cached, engine.pool.references()) == (0, {})


def test_after_a_reset_what_is_being_loaded_is_not_published_either(engine: LandingEngine) -> None:
    engine.give_blocks("r", *(engine.ask("r") or ()))
    for role in engine.roles:
        role.reset()
    engine.end_load("r")
    for _ in range(4):
        engine.tier.step_orders({"r": 1})
    engine.check()
    assert (engine.pool.cached, engine.pool.references()) == (0, {})


@pytest.mark.parametrize(("seed", "found"), [(0, BLOCKS * 16), (1, 0)], ids=["the same", "another"])
def test_a_request_that_begins_alike_need_not_wait_for_what_is_not_published_yet(
    engine: LandingEngine, seed: int, found: int
) -> None:
    assert engine.pool.cached == 2
    engine.arrive("other", seed=seed, tokens=BLOCKS * 16 + 9)
    assert engine.tier.missing_tokens(engine.requests["other"], 0) == found
    assert engine.pool.cached == (BLOCKS if found else 2)
    engine.check()


def test_what_is_not_published_yet_is_not_pulled_a_second_time(engine: LandingEngine) -> None:
    other = engine.arrive("other", tokens=BLOCKS * 16 + 9)
    assert engine.landings.must_land(other, 0)
    while "other" not in engine.under_way:
        engine.step(1)
    assert engine.landing("other").first_token == BLOCKS * 16
