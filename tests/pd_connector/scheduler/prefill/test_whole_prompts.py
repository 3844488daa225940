"""Requests whose answer comes of computing their prompt: nothing is brought for them, and they wait for nobody.

vLLM's own schedulers, with both engines' scheduler sides. Until 0.31 they take whatever a connector offers, and rows of
log-probabilities that the model has not computed are memory that nobody has written.
"""

from typing import Any

import pytest

from tests.support.releases import since
from tests.support.simulation.vllm_schedulers import ClientRequest, EngineSim, World

TOKENS, OUTPUTS = 200, 3
PROMPT = [position % 500 for position in range(TOKENS)]
SETTINGS: dict[str, Any] = {"lease_ttl_s": 30.0, "queue_timeout_s": 5.0}

#: What asks for it. ``echo`` with ``logprobs`` sets the first; the last two are what a client may say against it.
ASKED = pytest.mark.parametrize(
    "sampling",
    [
        {"prompt_logprobs": 0},
        {"prompt_logprobs": -1},
        {"skip_reading_prefix_cache": True},
        {"prompt_logprobs": 1, "skip_reading_prefix_cache": False},
        pytest.param(
            {"prompt_logprob_token_ids": [[1]], "skip_reading_prefix_cache": False},
            marks=since((0, 31), "log-probabilities of named prompt tokens"),
        ),
    ],
    ids=lambda sampling: ", ".join(f"{name} {value}" for name, value in sampling.items()),
)


def a_pair(world: World, **settings: Any) -> tuple[EngineSim, EngineSim]:
    """A prefill and a decode engine."""
    prefill = EngineSim(world, "kv_producer", 60, **SETTINGS)
    return prefill, EngineSim(world, "kv_consumer", 60, **SETTINGS, **settings)


def ask(prefill: EngineSim, decode: EngineSim, sampling: dict[str, Any], *, at_once: bool = False) -> ClientRequest:
    """A client's request, its legs in turn or at once."""
    ours = ClientRequest("r", PROMPT, OUTPUTS, sampling=sampling)
    if at_once:
        prefill.ask(ClientRequest("r", PROMPT, 1, decode, transfer_id="r", sampling=sampling))
        decode.ask_by_name(ours, prefill)
    else:
        ours.decodes_on = decode
        prefill.ask(ours)
    return ours


def assert_computed_whole(decode: EngineSim, asked: ClientRequest) -> None:
    assert asked.ended == "finished"
    assert decode.computed_of["r-d"] == TOKENS + OUTPUTS - 1, "some of its tokens were brought"


@ASKED
@pytest.mark.parametrize("at_once", [False, True], ids=["in turn", "at once"])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_it_is_computed_on_the_decode_engine_and_counted_by_its_reason(
    world: World, sampling: dict[str, Any], at_once: bool, policy: str
) -> None:
    prefill, decode = a_pair(world, policy=policy)
    asked = ask(prefill, decode, sampling, at_once=at_once)
    world.run(within_s=2)
    assert_computed_whole(decode, asked)
    assert (decode.counts, decode.computed) == ({}, {"prompt": 1})
    for _ in range(3):
        world.step()
    assert (prefill.leases, prefill.blocks_in_use) == (0, 0), "the prefill engine holds what nobody will read"


@pytest.mark.parametrize("at_once", [False, True], ids=["in turn", "at once"])
def test_it_does_not_wait_for_its_other_leg(world: World, at_once: bool) -> None:
    """The prefill engine makes no step any more; it holds the prompt, or has yet to compute it."""
    prefill, decode = a_pair(world)
    asked = ask(prefill, decode, {"prompt_logprobs": 1}, at_once=at_once)
    while not decode.requests:
        world.step()
    prefill.is_cut = True
    for _ in range(OUTPUTS):
        decode.step()
    assert_computed_whole(decode, asked)


def test_the_lease_ends_before_the_request_has_its_turn(world: World) -> None:
    prefill, decode = a_pair(world)
    ask(prefill, decode, {"prompt_logprobs": 1})
    decode.pause(paused=True)
    while not decode.requests:
        world.step()
    for _ in range(3):
        world.step()
    assert (prefill.leases, decode.computed) == (0, {})
    decode.pause(paused=False)
    world.run(within_s=2)
    assert decode.computed == {"prompt": 1}


def test_one_that_leaves_before_its_turn_is_not_counted(world: World) -> None:
    prefill, decode = a_pair(world)
    ask(prefill, decode, {"prompt_logprobs": 1})
    decode.pause(paused=True)
    while not decode.requests:
        world.step()
    decode.abort("r-d")
    decode.pause(paused=False)
    world.run(within_s=2)
    assert decode.computed == {}


def test_one_whose_params_are_of_no_use_is_computed_too_and_counted_as_such(world: World) -> None:
    prefill, decode = a_pair(world, policy="fail")
    asked = ClientRequest("r", PROMPT, OUTPUTS, sampling={"prompt_logprobs": 1})
    decode.ask_by_name(asked, prefill, transfer_id="two words")
    world.run(within_s=2)
    assert_computed_whole(decode, asked)
    assert decode.computed == {"params": 1}


@ASKED
def test_nothing_is_loaded_from_host_memory(world: World, sampling: dict[str, Any]) -> None:
    decode = EngineSim(world, "kv_consumer", 60, slots=60, **SETTINGS)
    decode.ask(ClientRequest("before", PROMPT, OUTPUTS))
    world.run(within_s=2)
    for _ in range(3):
        world.step()
    assert decode.scheduler.reset_prefix_cache()
    again = ClientRequest("again", PROMPT, OUTPUTS)
    decode.ask(again)
    world.run(within_s=2)
    assert decode.computed_of["again-d"] < TOKENS, "host memory does not hold the prompt, and nothing is shown"
    assert decode.scheduler.reset_prefix_cache()
    asked = ClientRequest("r", PROMPT, OUTPUTS, sampling=sampling)
    decode.ask(asked)
    world.run(within_s=2)
    assert_computed_whole(decode, asked)


@pytest.mark.parametrize("host_transfers", ["always", "auto"])
def test_nothing_lands_in_host_memory(world: World, host_transfers: str) -> None:
    prefill, decode = a_pair(world, slots=60, host_transfers=host_transfers)
    asked = ask(prefill, decode, {"prompt_logprobs": 1})
    world.run(within_s=2)
    assert_computed_whole(decode, asked)
    assert (decode.counts, decode.computed) == ({}, {"prompt": 1})


def test_several_choices_all_compute_their_prompt(world: World) -> None:
    prefill, decode = a_pair(world)
    choices = [
        ClientRequest("r", PROMPT, OUTPUTS, choice=choice, sampling={"prompt_logprobs": 1}) for choice in ("", "1")
    ]
    prefill.ask(ClientRequest("r", PROMPT, 1, decode, transfer_id="r"))
    for each in choices:
        decode.ask_by_name(each, prefill)
    world.run(within_s=2)
    assert [each.ended for each in choices] == ["finished", "finished"]
    assert decode.computed_of == {"r-d": TOKENS + OUTPUTS - 1, "r-d1": TOKENS + OUTPUTS - 1}
    assert decode.computed == {"prompt": 2}
