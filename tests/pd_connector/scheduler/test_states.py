"""Prompts of a model with states are pulled, by vLLM's own schedulers: in turn, or while they are computed."""

from typing import Any

import pytest

from tests.support.releases import INSTALLED, module_needs
from tests.support.simulation.state_groups import DRAFTS
from tests.support.simulation.vllm_schedulers import OUTPUT_TOKEN, ClientRequest, EngineSim, World

if INSTALLED < (0, 30):
    module_needs((0, 30), "states of recurrent layers")

TOKENS, OUTPUTS = 100, 3
BLOCK = 16
BORDER = 96  # the last one of what is pulled


def pull(
    world: World,
    mode: Any,
    *,
    at_once: bool,
    decodes_in: Any = None,
    drafts: str = "",
    tokens: int = TOKENS,
    outputs: int = OUTPUTS,
    **settings: Any,
) -> EngineSim:
    """The engine that has pulled and decoded a prompt of ``tokens``.

    ``drafts``: which of "P" and "D" do; ``settings``: of D.
    """
    prefill = EngineSim(world, "kv_producer", 40, states=mode, stated=DRAFTS if "P" in drafts else {})
    stated = DRAFTS if "D" in drafts else {}
    decode = EngineSim(world, "kv_consumer", 40, states=decodes_in or mode, stated=stated, **settings)
    prompt = list(range(tokens))
    if at_once:
        decode.ask_by_name(ClientRequest("r", prompt, outputs), prefill)
    prefill.ask(ClientRequest("r", prompt, outputs, decode, transfer_id="r" if at_once else ""))
    world.run(10.0)
    return decode


def settle(world: World, engine: EngineSim) -> None:
    """Step until nothing is under way there."""
    while engine.side.wants_step():
        world.step()


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("mode", ["none", "align"])
def test_all_but_the_last_token_is_pulled(world: World, mode: str, at_once: bool) -> None:
    decode = pull(world, mode, at_once=at_once)
    assert decode.counts["pulled"] == 1
    assert decode.computed_tokens == OUTPUTS  # the last token of the prompt, and of the output all but the last


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(
    ("mode", "tokens", "is_pulled"),
    [("none", TOKENS, False), ("align", TOKENS, False), ("align", BORDER, False), ("align", BORDER + 1, True)],
)
def test_a_prompt_that_ends_with_an_image_is_pulled_only_if_its_state_is_that_of_a_border(
    world: World, mode: Any, tokens: int, is_pulled: bool, at_once: bool
) -> None:
    """Its last token cannot be left to another engine. That its last border is held, too, misleads nobody."""
    prefill, decode = (EngineSim(world, role, 60, "fail", states=mode) for role in ("kv_producer", "kv_consumer"))
    prompt = list(range(tokens))
    prefill.ask(ClientRequest("longer", list(range(tokens + 10)), 1))
    world.run(10.0)
    client = ClientRequest("r", prompt, OUTPUTS, image=8)
    if at_once:
        decode.ask_by_name(client, prefill)
    transfer_id = "r" if at_once else ""
    prefill.ask(ClientRequest("r", prompt, OUTPUTS, decode, transfer_id=transfer_id, image=8))
    world.run(10.0)
    assert decode.counts["pulls failed"] == 0
    assert decode.counts["pulled"] == is_pulled
    assert decode.computed_tokens == OUTPUTS + (0 if is_pulled else tokens - 1)


def test_a_block_that_a_step_zeroes_may_be_pulled_into_by_the_next_one(world: World) -> None:
    """The first step gives it to a request that it then preempts for one that comes first.

    So pulls of such models wait until the device has done the steps before (``ConnectorWorker._fences``).
    """
    prefill = EngineSim(world, "kv_producer", 40, states="none")
    decode = EngineSim(world, "kv_consumer", 10, states="none", scheduling="priority")
    decode.scheduler.defer_block_free = True  # as where several steps are under way
    decode.ask(ClientRequest("last", list(range(31)), OUTPUTS, priority=2))
    decode.step()
    decode.ask(ClientRequest("first", list(range(32)), OUTPUTS))
    decode.step()
    under_way = decode.begin_step()
    assert under_way is not None
    assert list(under_way[0].num_scheduled_tokens) == ["first-d"]
    prefill.ask(ClientRequest("pulled", list(range(20)), OUTPUTS, decode, priority=1))
    prefill.step()
    following = decode.begin_step()
    assert following is not None
    (order,) = following[0].kv_connector_metadata.orders.pulls
    assert set(order.local_block_ids[0]) & set(under_way[0].new_block_ids_to_zero)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(
    ("theirs", "ours", "found"), [("none", "align", 0), ("align", "none", 0), ("align", "align", BORDER)]
)
def test_a_longer_prompt_goes_on_from_a_border_if_both_sides_keep_states_there(
    world: World, theirs: Any, ours: Any, found: int, at_once: bool
) -> None:
    """If only one does, its state is pulled all the same, and no later prompt is said to find one of a border."""
    decode = pull(world, theirs, at_once=at_once, decodes_in=ours)
    assert decode.counts["pulled"] == 1
    assert decode.computed_tokens == OUTPUTS
    decode.ask(ClientRequest("longer", list(range(TOKENS + 20)), 1))
    world.run(10.0)
    assert decode.computed_of["longer-d"] == TOKENS + 20 - found


@pytest.mark.parametrize(
    ("drafts", "tokens", "at_once", "found"),
    [
        ("PD", TOKENS, False, BORDER - BLOCK),  # vLLM leaves out the last block that D has
        ("PD", TOKENS, True, BORDER - BLOCK),
        ("PD", BORDER + 1, False, BORDER - BLOCK),
        ("PD", BORDER, False, BORDER - 2 * BLOCK),  # D would find a block more, but P has cut the prompt within it
        ("P", TOKENS, False, BORDER - BLOCK),  # the last of which P keeps the state
        ("D", BORDER, True, BORDER - BLOCK),
    ],
)
def test_with_drafts_a_longer_prompt_goes_on_from_the_last_border_that_both_sides_keep(
    world: World, drafts: str, tokens: int, at_once: bool, found: int
) -> None:
    decode = pull(world, "align", at_once=at_once, drafts=drafts, tokens=tokens)
    assert decode.counts["pulled"] == 1
    assert decode.counts["lacked states"] == 0 or at_once  # what P has is not known then: two are tried
    decode.ask(ClientRequest("longer", list(range(tokens + 2 * BLOCK)), 1))
    world.run(10.0)
    assert decode.computed_of["longer-d"] == tokens + 2 * BLOCK - found


def test_of_the_borders_that_are_tried_the_one_that_the_other_side_keeps_is_found(world: World) -> None:
    """D drafts, so it would find a block less behind a short answer, of which a P without drafts keeps no state."""
    decode = pull(world, "align", at_once=True, drafts="D", outputs=20)
    assert decode.counts["lacked states"] == 1
    decode.ask(ClientRequest("longer", [*range(TOKENS), *[OUTPUT_TOKEN] * 20, *range(20)], 1))
    world.run(10.0)
    assert decode.computed_of["longer-d"] == TOKENS + 40 - BORDER


def test_the_states_of_those_borders_land_in_host_memory_as_well(world: World) -> None:
    decode = pull(world, "align", at_once=False, drafts="PD", slots=60, host_transfers="always")
    assert decode.counts["landed"] == 1
    assert decode.scheduler.reset_prefix_cache()
    decode.ask(ClientRequest("longer", list(range(TOKENS + 2 * BLOCK)), 1))
    world.run(10.0)
    assert decode.computed_of["longer-d"] == TOKENS + 2 * BLOCK - (BORDER - BLOCK)


def test_the_state_of_a_border_that_was_pulled_to_the_device_is_stored_in_host_memory(world: World) -> None:
    decode = pull(world, "align", at_once=False, slots=60)
    settle(world, decode)
    assert decode.scheduler.reset_prefix_cache()
    decode.ask(ClientRequest("longer", list(range(TOKENS + BLOCK)), 1))
    world.run(10.0)
    assert decode.computed_of["longer-d"] == TOKENS + BLOCK - BORDER


def test_so_is_that_of_a_prompt_of_whole_blocks(world: World) -> None:
    """Its last block has the state behind all its tokens then, and is not asked for by the same prompt."""
    decode = pull(world, "align", at_once=False, tokens=BORDER, slots=60)
    settle(world, decode)
    assert decode.scheduler.reset_prefix_cache()
    decode.ask(ClientRequest("again", list(range(BORDER)), 1))
    world.run(10.0)
    assert decode.computed_of["again-d"] == BLOCK


def test_a_longer_answer_of_an_engine_that_drafts_brings_a_later_border_within_reach(world: World) -> None:
    """Of a prompt that P has computed in two steps, the second turn finds either end, by the length of the answer."""
    for outputs, found in ((OUTPUTS, 16 * BLOCK), (BLOCK, 18 * BLOCK)):
        prefill, decode = (
            EngineSim(world, "kv_producer", 80, states="align"),
            EngineSim(world, "kv_consumer", 80, states="align", stated=DRAFTS),
        )
        prompt = [1000 * outputs + number for number in range(18 * BLOCK + 4)]
        prefill.ask(ClientRequest(f"r{outputs}", prompt, outputs, decode))
        world.run(10.0)
        longer = [*prompt, *[OUTPUT_TOKEN] * outputs, *range(2 * BLOCK)]
        decode.ask(ClientRequest("longer", longer, 1))
        world.run(10.0)
        assert decode.computed_of["longer-d"] == len(longer) - found
