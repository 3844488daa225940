"""Of a prompt that is pulled, vLLM finds keys behind the last state that is here: a pull brings the one it needs."""

from types import SimpleNamespace
from typing import Any

import pytest

from pd_connector.orders import CanaryRoom
from tests.support.releases import INSTALLED, module_needs
from tests.support.simulation.state_groups import StateMode
from tests.support.simulation.vllm_schedulers import OUTPUT_TOKEN, ClientRequest, EngineSim, World

if INSTALLED < (0, 30):
    module_needs((0, 30), "states of recurrent layers")

BLOCK = 16
TOKENS, ANSWER = 100, 3 * BLOCK
BORDER = 96  # of the only state that the decode engine keeps of the first turn
TURN = [*range(TOKENS), *[OUTPUT_TOKEN] * ANSWER]
KNOWN = 144  # tokens whose keys it has then
SHORT, LONG = [*TURN, *range(5)], [*TURN, *range(20)]  # the next turn, which ends in the same block, or in a later one


def start(world: World, role: str, states: StateMode = "align", **settings: Any) -> EngineSim:
    """An engine that, as by default, keeps states of prompts only, and only the last one."""
    engine = EngineSim(world, role, 60, states=states, **settings)
    engine.scheduler.kv_cache_manager.coordinator.retention_interval = 0
    return engine


class Chat:
    """A conversation, of which the first turn is over."""

    def __init__(self, world: World, prefills_in: StateMode = "align") -> None:
        """``prefills_in``: how the engine that prefills keeps states."""
        self.world = world
        self.prefill, self.decode = start(world, "kv_producer", prefills_in), start(world, "kv_consumer")
        self.take("first", TURN[:TOKENS], ANSWER)

    def take(self, name: str, prompt: list[int], outputs: int = 1, *, at_once: bool = False, image: int = 0) -> int:
        """Return how many tokens of a turn were pulled. ``image``: the last tokens of its prompt are one's."""
        before = self.decode.pulled_tokens
        if at_once:
            self.decode.ask_by_name(ClientRequest(name, prompt, outputs, image=image), self.prefill)
        transfer_id = name if at_once else ""
        self.prefill.ask(ClientRequest(name, prompt, outputs, self.decode, transfer_id=transfer_id, image=image))
        self.world.run(100.0)
        return self.decode.pulled_tokens - before

    def found_alone(self, prompt: list[int]) -> int:
        """Return how many tokens of a prompt a request that pulls nothing finds here."""
        self.decode.ask(ClientRequest("alone", prompt, 1))
        self.world.run(10.0)
        return len(prompt) - self.decode.computed_of["alone-d"]


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("turn", [SHORT, LONG], ids=["in the same block", "in a later block"])
def test_the_next_turn_pulls_no_keys_that_were_decoded(world: World, turn: list[int], at_once: bool) -> None:
    """And the state of its last border, also where that is the end of these keys."""
    chat = Chat(world)
    assert chat.take("next", turn, at_once=at_once) == len(turn) - 1 - KNOWN
    assert chat.decode.computed_of["next-d"] == 1
    assert chat.found_alone([*turn, *range(30)]) == (len(turn) - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("at_once", [False, True])
def test_without_common_borders_it_pulls_no_keys_of_the_first_turn(world: World, at_once: bool) -> None:
    chat = Chat(world, prefills_in="none")
    assert chat.take("next", LONG, at_once=at_once) == len(LONG) - 1 - KNOWN
    assert chat.found_alone([*LONG, *range(30)]) == 0


def test_what_is_not_pulled_goes_on_from_a_state(world: World) -> None:
    assert Chat(world).found_alone(LONG) == BORDER


def test_of_a_prompt_of_which_all_keys_are_here_what_lies_behind_the_last_state_is_pulled(world: World) -> None:
    """vLLM would ask for nothing then, and compute that."""
    chat = Chat(world)
    assert chat.take("next", TURN[: KNOWN + 1]) == KNOWN - BORDER
    assert chat.decode.computed_of["next-d"] == 1


def test_a_pull_that_fails_leaves_no_keys_without_a_state(world: World) -> None:
    chat = Chat(world)
    chat.prefill.ask(ClientRequest("next", LONG, 1, chat.decode))
    while not chat.decode.pulling:
        world.step()
    chat.prefill.is_cut = True
    world.run(100.0)
    assert chat.decode.counts["pulls failed"] == 1
    assert chat.decode.computed_of["next-d"] == len(LONG) - BORDER


@pytest.mark.parametrize("at_once", [False, True])
def test_what_cannot_be_pulled_after_all_goes_on_from_a_state_and_is_counted(world: World, at_once: bool) -> None:
    chat = Chat(world)
    assert chat.take("next", LONG, at_once=at_once, image=8) == 0
    assert chat.decode.computed_of["next-d"] == len(LONG) - BORDER
    assert chat.decode.computed == {"window": 1}


@pytest.mark.parametrize("at_once", [False, True])
def test_a_short_turn_proves_a_prefill_engine_from_the_last_state_on(world: World, at_once: bool) -> None:
    """Behind the keys that are here, it has no whole block to compare."""
    chat = Chat(world)
    canaries = chat.decode.side._canaries
    canaries.set_workers([SimpleNamespace(canary=CanaryRoom(512, 2, BLOCK, BLOCK))])  # type: ignore[list-item]
    canaries.tries = True
    assert chat.take("next", SHORT, at_once=at_once) == 0
    (order,) = canaries._orders
    assert (order.first_token, order.end_token) == (BORDER, len(SHORT) - 1)
    assert chat.decode.computed_of["next-d"] == len(SHORT) - BORDER


@pytest.mark.parametrize(
    ("role", "settings", "longer"),
    [
        ("kv_consumer", {}, True),
        ("kv_both", {}, True),
        ("kv_producer", {}, False),
        ("kv_consumer", {"slots": 60}, False),
        ("kv_consumer", {"peers": ["127.0.0.1:1"]}, False),
    ],
)
def test_nothing_but_a_pull_goes_on_from_keys_alone(
    world: World, role: str, settings: dict[str, Any], longer: bool
) -> None:
    """Even if vLLM's scheduler has not asked whether it may look for them, as vllm-ascend's load balancing does."""
    engine = start(world, role, **settings)
    assert engine.scheduler.connector.supports_divergent_local_hybrid_hits is longer
    engine.ask(ClientRequest("first", TURN[:TOKENS], ANSWER))
    world.run(10.0)
    engine.ask(ClientRequest("next", LONG, 1))
    _, request = engine.requests["next-d"]
    *_, tokens, _, lacks_state = engine.scheduler.kv_cache_manager.get_computed_blocks_for_connector(request)
    assert (tokens, lacks_state) == (BORDER, False)
