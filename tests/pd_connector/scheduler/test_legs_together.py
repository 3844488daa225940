"""Both legs of a request at once, through both engines' scheduler sides and vLLM's own schedulers.

Every token that the model attends to is checked by the simulated workers: a wrong block ends the test.
"""

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest

from pd_connector.scheduler.decode.consumer import Consumer
from tests.support.simulation.vllm_schedulers import ClientRequest, EngineSim, World

QUEUE_TIMEOUT_S = 12.0
SETTINGS: dict[str, Any] = {"lease_ttl_s": 3.0, "queue_timeout_s": QUEUE_TIMEOUT_S}


def a_pair(world: World, prefill_blocks: int = 200, decode_blocks: int = 200, **settings: Any) -> list[EngineSim]:
    """A prefill and a decode engine."""
    prefill = EngineSim(world, "kv_producer", prefill_blocks, **SETTINGS)
    return [prefill, EngineSim(world, "kv_consumer", decode_blocks, **{**SETTINGS, **settings})]


def legs(number: int, tokens: int, decode: EngineSim, outputs: int = 5) -> tuple[ClientRequest, ClientRequest]:
    """The two legs of a request."""
    prompt = [(number * 31 + position) % 500 for position in range(tokens)]
    name = f"r{number}"
    return ClientRequest(name, prompt, 1, decode, transfer_id=name), ClientRequest(name, prompt, outputs)


def send(number: int, tokens: int, prefill: EngineSim, decode: EngineSim) -> ClientRequest:
    """Both legs arrive at the same time."""
    theirs, ours = legs(number, tokens, decode)
    prefill.ask(theirs)
    decode.ask_by_name(ours, prefill)
    return ours


def ends(all_asked: list[ClientRequest]) -> Counter[str]:
    return Counter(asked.ended for asked in all_asked)


def assert_at_rest(world: World, *engines: EngineSim) -> None:
    """All blocks are free within twice a lease's time to live."""
    for _ in range(int(2 * SETTINGS["lease_ttl_s"] / 0.05)):
        world.step()
    assert [engine.blocks_in_use for engine in engines] == [0] * len(engines)


def test_prompts_are_pulled_while_they_are_computed(world: World) -> None:
    prefill, decode = a_pair(world)
    asked = [send(number, 500, prefill, decode) for number in range(5)]
    world.run(within_s=20)
    assert ends(asked) == {"finished": 5}
    assert decode.counts == {"pulled": 5, "pulled ahead": 5}
    assert decode.computed == {}
    assert_at_rest(world, prefill, decode)


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 10, 40])
@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_the_legs_may_come_in_any_order(world: World, first: str, steps: int) -> None:
    prefill, decode = a_pair(world)
    theirs, ours = legs(0, 400, decode)
    if first == "prefill":
        prefill.ask(theirs)
    else:
        decode.ask_by_name(ours, prefill)
    for _ in range(steps):
        world.step()
    if first == "prefill":
        decode.ask_by_name(ours, prefill)
    else:
        prefill.ask(theirs)
    world.run(within_s=20)
    expected = "finished"
    assert (ours.ended, decode.computed) == (expected, {})
    assert decode.counts["pulled"] == 1
    assert_at_rest(world, prefill, decode)


@pytest.mark.thorough
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_transfer_that_nobody_sends_to_the_prefill_engine_ends_in_time(world: World, policy: str) -> None:
    prefill = EngineSim(world, "kv_producer", 100, **SETTINGS)
    decode = EngineSim(world, "kv_consumer", 100, policy, **SETTINGS)
    _, ours = legs(0, 400, decode)
    decode.ask_by_name(ours, prefill)
    world.run(within_s=QUEUE_TIMEOUT_S + 1)
    assert ours.ended == ("finished" if policy == "recompute" else "failed")
    assert decode.computed == ({"transfer": 1} if policy == "recompute" else {})
    assert_at_rest(world, prefill, decode)


def test_a_prefill_leg_that_comes_after_its_decode_leg_has_given_up_holds_nothing(world: World) -> None:
    prefill, decode = a_pair(world)
    theirs, ours = legs(0, 400, decode)
    decode.ask_by_name(ours, prefill)
    world.run(within_s=QUEUE_TIMEOUT_S + 1)
    prefill.ask(theirs)
    world.run(within_s=5)
    for _ in range(3):
        world.step()
    assert prefill.blocks_in_use == 0


@pytest.mark.thorough
def test_prompts_that_are_preempted_are_pulled_again(world: World) -> None:
    """Two prompts that decode on the prefill engine take the last block that the first named one needs."""
    prefill, decode = a_pair(world, prefill_blocks=56)
    plain = [ClientRequest(f"plain{number}", [number] * 200, 200) for number in range(2)]
    for each in plain:
        prefill.ask(each)
    for _ in range(3):
        world.step()
    asked = [send(number, 450, prefill, decode) for number in range(3)]
    world.run(within_s=60)
    assert ends(asked + plain) == {"finished": 5}
    assert decode.counts["pulled"] == 3
    assert decode.counts["restarted"] > 0
    assert_at_rest(world, prefill, decode)


@pytest.mark.thorough
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_a_prompt_that_is_aborted_on_the_prefill_engine_does_not_hold_up_the_decode_engine(
    world: World, steps: int
) -> None:
    prefill, decode = a_pair(world)
    asked = [send(number, 500, prefill, decode) for number in range(6)]
    for _ in range(steps):
        world.step()
    prefill.abort("r5-p")
    world.run(within_s=2.0)
    assert ends(asked) == {"finished": 6}
    assert decode.counts["pulled"] == 5
    assert sum(decode.computed.values()) == 1
    assert_at_rest(world, prefill, decode)


@pytest.mark.thorough
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 6])
def test_a_client_that_leaves_the_decode_engine_frees_both(world: World, steps: int) -> None:
    prefill, decode = a_pair(world)
    asked = [send(number, 500, prefill, decode) for number in range(6)]
    for _ in range(steps):
        world.step()
    if not asked[5].ended:
        decode.abort("r5-d")
    world.run(within_s=5.0)
    for _ in range(4):  # less than a lease's time to live
        world.step()
    assert [engine.blocks_in_use for engine in (prefill, decode)] == [0, 0]
    assert ends(asked[:5]) == {"finished": 5}


def test_several_choices_of_a_request_are_pulled_once(world: World) -> None:
    prefill, decode = a_pair(world)
    theirs, ours = legs(0, 500, decode)
    others = [ClientRequest(ours.name, ours.tokens, 5, choice=str(number)) for number in range(1, 3)]
    for each in (ours, *others):
        decode.ask_by_name(each, prefill)
    prefill.ask(theirs)
    world.run(within_s=10)
    assert ends([ours, *others]) == {"finished": 3}
    assert decode.counts == {"pulled": 1, "pulled ahead": 1}
    assert decode.computed == {}


def test_no_more_prompts_are_pulled_ahead_than_the_limit_says(world: World) -> None:
    prefill, decode = a_pair(world, max_pulls_ahead=1)
    asked = [send(number, 300, prefill, decode) for number in range(6)]
    while any(each.ended == "" for each in asked):
        world.step()
        assert len(decode.role_of(Consumer)._ahead) <= 1
    assert ends(asked) == {"finished": 6}
    assert decode.counts["pulled"] == 6
    assert decode.computed == {}


def test_a_prompt_larger_than_its_share_is_pulled_when_it_is_complete(world: World) -> None:
    prefill, decode = a_pair(world, decode_blocks=40, max_ahead_fraction=0.1)
    asked = [send(number, 450, prefill, decode) for number in range(3)]
    world.run(within_s=20)
    assert ends(asked) == {"finished": 3}
    assert decode.counts == {"pulled": 3}
    assert decode.computed == {}


def test_a_request_that_can_run_is_not_held_up_by_prompts_that_are_being_computed(world: World) -> None:
    """The prefill engine stands still in the middle of its prompts."""
    prefill, decode = a_pair(world, decode_blocks=64)
    asked = [send(number, 500, prefill, decode) for number in range(4)]
    for _ in range(2):
        world.step()
    prefill.is_cut = True
    plain = [ClientRequest(f"plain{number}", [number] * 300, 5) for number in range(4)]
    for each in plain:
        decode.ask(each)
    for _ in range(40):
        world.step()
    assert ends(plain) == {"finished": 4}
    prefill.is_cut = False
    world.run(within_s=30)
    assert ends(asked) == {"finished": 4}


def test_a_decode_engine_that_is_full_keeps_the_leases_of_complete_prompts(world: World) -> None:
    prefill, decode = a_pair(world, decode_blocks=40)
    long = ClientRequest("long", [7] * 300, 150)
    decode.ask(long)
    asked = [send(number, 400, prefill, decode) for number in range(2)]
    world.run(within_s=20)
    assert ends([long, *asked]) == {"finished": 3}
    assert decode.counts["pulled"] == 2
    assert decode.computed == {}


def test_an_engine_may_be_both_ends_of_a_transfer(world: World) -> None:
    engine = EngineSim(world, "kv_both", 100, **SETTINGS)
    asked = []
    for number in range(3):
        theirs, ours = legs(number, 300, engine)
        engine.ask_by_name(ours, engine)
        engine.ask(theirs)
        asked.append(ours)
    world.run(within_s=20)
    assert ends(asked) == {"finished": 3}


@pytest.mark.thorough
def test_two_engines_with_both_roles_that_serve_each_other_do_not_lock(world: World) -> None:
    a, b = (EngineSim(world, "kv_both", 64, **SETTINGS) for _ in range(2))
    asked = [send(number, 100 + 40 * (number % 8), *((a, b) if number % 2 else (b, a))) for number in range(30)]
    world.run(within_s=120)
    assert ends(asked) == {"finished": 30}
    assert a.counts["pulled"] + b.counts["pulled"] > 15
    assert_at_rest(world, a, b)


def test_nothing_is_looked_up_for_prompts_with_which_the_prefill_engine_has_yet_to_begin(world: World) -> None:
    """A thousand may wait so, and each step of the decode engine would look up the whole prefix of each."""
    prefill, decode = a_pair(world)
    pairs = [legs(number, 200, decode) for number in range(5)]
    for _, ours in pairs:
        decode.ask_by_name(ours, prefill)
    coordinator = decode.scheduler.kv_cache_manager.coordinator
    with patch.object(coordinator, "find_longest_cache_hit", wraps=coordinator.find_longest_cache_hit) as looked_up:
        for _ in range(5):
            world.step()
        assert looked_up.call_count == 0
        for theirs, _ in pairs:
            prefill.ask(theirs)
        world.run(within_s=20)
        assert looked_up.call_count >= 5
    assert ends([ours for _, ours in pairs]) == {"finished": 5}
    assert decode.counts["pulled"] == 5


def test_beside_other_connectors_everything_is_looked_up(world: World) -> None:
    """They are asked about the request as well, and would look for what the device has."""

    class MultiConnector:
        def start(self) -> list[EngineSim]:
            return a_pair(world)

    prefill, decode = MultiConnector().start()
    decode.ask_by_name(legs(0, 200, decode)[1], prefill)
    coordinator = decode.scheduler.kv_cache_manager.coordinator
    with patch.object(coordinator, "find_longest_cache_hit", wraps=coordinator.find_longest_cache_hit) as looked_up:
        world.step()
    assert looked_up.call_count == 1


def test_a_request_of_which_nothing_was_looked_up_waits_once(world: World) -> None:
    """Some schedulers look blocks up in ways of their own, so that the note of the last time would stay."""
    _, decode = a_pair(world)
    decode.ask(ClientRequest("r", [1] * 100, 5))
    (request,) = decode.scheduler.requests.values()
    decode.side._passed_over._request_id = request.request_id
    assert [decode.side.missing_tokens(request, 0) for _ in range(2)] == [None, 0]
    world.run(within_s=20)
