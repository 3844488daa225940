"""Loads that vLLM defers until the steps under way have ended: since 0.33, ``Scheduler.defer_async_loads``.

The connector says what it brings, vLLM gives the request its blocks, goes on with others, and tells the connector of
the blocks when a later step has ended, or never, if the request has left before. vLLM itself defers them with HiSparse
only, which is not served; its schedulers are told to here.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.releases import since
from tests.support.simulation.vllm_schedulers import ClientRequest, EngineSim, World

pytestmark = since((0, 33), "loads that it defers")

TOKENS, OUTPUTS = 100, 3
SETTINGS: dict[str, Any] = {"lease_ttl_s": 3.0, "queue_timeout_s": 12.0}


class DeferringEngine(EngineSim):
    """An engine that schedules a step while two before it are under way, as with stages of pipeline parallelism."""

    def __init__(self, world: World, slots: int = 0, **settings: Any) -> None:
        super().__init__(world, "kv_consumer", 200, slots=slots, **SETTINGS, **settings)
        self.scheduler.defer_block_free = self.scheduler.defer_async_loads = True
        self._begun: list[Any] = []
        self.deferred: set[str] = set()  # requests whose loads ever were
        self.most_deferred = 0  # at a time

    def step(self) -> None:
        begun = self.begin_step()
        self.deferred |= self.scheduler.deferred_loads.keys()
        self.most_deferred = max(self.most_deferred, len(self.scheduler.deferred_loads))
        self._begun += [begun] if begun is not None else []
        if self._begun and (begun is None or len(self._begun) > 2):
            self.end_step(*self._begun.pop(0))


class SlowEngine(EngineSim):
    """An engine whose steps take as long as eight of others."""

    calls = 0

    def step(self) -> None:
        self.calls += 1
        if self.calls % 8 == 0:
            super().step()


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


def a_prompt(number: int, tokens: int = TOKENS) -> list[int]:
    return [(number * 31 + position) % 500 for position in range(tokens)]


def a_busy_engine(world: World, **settings: Any) -> DeferringEngine:
    """A decode engine with requests that run for long, one in each step, so that steps are always under way."""
    decode = DeferringEngine(world, **settings)
    for number in range(3):
        decode.ask(ClientRequest(f"busy{number}", a_prompt(90 + number, 20), 300))
        world.step()
    return decode


def run_all(world: World, decode: EngineSim, asked: list[ClientRequest]) -> None:
    for _ in range(200):
        if all(each.ended for each in asked):
            break
        world.step()
    assert [each.ended for each in asked] == ["finished"] * len(asked)
    for number in range(3):
        decode.abort(f"busy{number}-d")
    for _ in range(int(2 * SETTINGS["lease_ttl_s"] / 0.05)):
        world.step()
    assert [(engine.blocks_in_use, engine.slots_in_use) for engine in world.engines.values()] == [(0, 0)] * len(
        world.engines
    )


def fill_host_memory(world: World, decode: EngineSim, prompts: list[list[int]]) -> None:
    """The prompts are in the engine's host memory, and not on its device."""
    before = [ClientRequest(f"before{number}", prompt, 1) for number, prompt in enumerate(prompts)]
    for each in before:
        decode.ask(each)
    for _ in range(10):
        world.step()
    assert all(each.ended for each in before)
    blocks = decode.scheduler.kv_cache_manager.block_pool
    blocks.evict_blocks({block.block_id for block in blocks.blocks if not block.is_null and not block.ref_cnt})


@pytest.mark.parametrize("at_once", [False, True], ids=["in turn", "at once"])
def test_prompts_are_pulled_into_the_blocks_of_a_later_step(world: World, at_once: bool) -> None:
    prefill, decode = EngineSim(world, "kv_producer", 200, **SETTINGS), a_busy_engine(world)
    asked = [ClientRequest(f"r{number}", a_prompt(number), OUTPUTS) for number in range(5)]
    for each in asked:
        if at_once:
            prefill.ask(ClientRequest(each.name, each.tokens, 1, decode, transfer_id=each.name))
            decode.ask_by_name(each, prefill)
        else:
            each.decodes_on = decode
            prefill.ask(each)
    run_all(world, decode, asked)
    assert decode.deferred == {f"r{number}-d" for number in range(5)}
    assert (decode.counts["pulled"], decode.computed) == (5, {})


def test_no_more_prompts_are_pulled_ahead_than_may_be(world: World) -> None:
    """Several prefill engines begin at the same moment; the books are checked after every step."""
    decode = a_busy_engine(world, max_pulls_ahead=1)
    asked = [ClientRequest(f"r{number}", a_prompt(number, 500), OUTPUTS) for number in range(4)]
    for each in asked:
        prefill = SlowEngine(world, "kv_producer", 200, **SETTINGS)
        prefill.ask(ClientRequest(each.name, each.tokens, 1, decode, transfer_id=each.name))
        decode.ask_by_name(each, prefill)
    run_all(world, decode, asked)
    assert decode.counts["pulled"] == 4
    assert decode.counts["pulled ahead"]


@pytest.mark.parametrize("pulls", [False, True], ids=["loaded", "the rest pulled"])
def test_what_host_memory_holds_is_kept_until_each_request_loads_it(world: World, pulls: bool) -> None:
    """Requests that share no block, so that none keeps what another one is to load."""
    prefill, decode = EngineSim(world, "kv_producer", 200, **SETTINGS), a_busy_engine(world, slots=60)
    held = [a_prompt(number) for number in range(3)]
    fill_host_memory(world, decode, held)
    asked = [
        ClientRequest(f"r{number}", [*prompt, *a_prompt(number, 40)], OUTPUTS) for number, prompt in enumerate(held)
    ]
    if pulls:
        for each in asked:
            each.decodes_on = decode
            prefill.ask(each)
    else:
        for each in asked:
            decode.ask(each)
    run_all(world, decode, asked)
    assert decode.deferred == {f"r{number}-d" for number in range(3)}
    assert decode.most_deferred > 1, "the requests had their turns one by one, and nothing is shown"
    assert decode.counts["pulled"] == (3 if pulls else 0)
    assert sum(decode.computed_of[f"r{number}-d"] for number in range(3)) <= 3 * (1 if pulls else 56) + 3 * OUTPUTS


@pytest.mark.parametrize("kind", ["pulled", "loaded", "landed"])
def test_a_request_that_leaves_before_its_load_begins_holds_nothing(world: World, kind: str) -> None:
    settings = {"slots": 60, **({"host_transfers": "always"} if kind == "landed" else {})} if kind != "pulled" else {}
    prefill, decode = EngineSim(world, "kv_producer", 200, **SETTINGS), a_busy_engine(world, **settings)
    asked = ClientRequest("r", a_prompt(0), OUTPUTS, decode)
    if kind == "loaded":
        fill_host_memory(world, decode, [asked.tokens])
        asked.decodes_on = None
        decode.ask(asked)
    else:
        prefill.ask(asked)
    for _ in range(200):
        if decode.scheduler.deferred_loads:
            break
        world.step()
    assert decode.deferred == {"r-d"}
    decode.abort("r-d")
    assert not decode.scheduler.deferred_loads
    assert not decode.worker.is_busy
    run_all(world, decode, [])


@pytest.mark.parametrize("kind", ["loaded", "landed"])
def test_a_reset_fails_while_a_load_is_deferred_and_the_load_goes_on(world: World, kind: str) -> None:
    decode = a_busy_engine(world, slots=60, **({"host_transfers": "always"} if kind == "landed" else {}))
    asked = ClientRequest("r", a_prompt(0), OUTPUTS)
    if kind == "loaded":
        fill_host_memory(world, decode, [asked.tokens])
        decode.ask(asked)
    else:
        asked.decodes_on = decode
        EngineSim(world, "kv_producer", 200, **SETTINGS).ask(asked)
    for _ in range(200):
        if decode.scheduler.deferred_loads:
            break
        world.step()
    assert decode.deferred == {"r-d"}
    assert not decode.side.reset()
    decode.side.check_integrity()
    run_all(world, decode, [asked])
