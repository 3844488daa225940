"""Which states of a canary are compared: those at the last border that it passed on both sides."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from layout.scratch import STATES
from pd_connector.orders import CanaryRoom, Report
from pd_connector.scheduler.decode.canaries import Canaries
from pd_connector.scheduler.scheduler import ConnectorScheduler
from tests.support.connector.prompts_with_states import BLOCK, StateEngine
from tests.support.connector.requests import a_prompt, a_remote
from tests.support.releases import INSTALLED, module_needs
from tests.support.simulation.state_groups import CHECKPOINTS, DRAFTS
from tests.support.simulation.vllm_schedulers import ClientRequest, EngineSim, World

if INSTALLED < (0, 30):
    module_needs((0, 30), "states of recurrent layers")


@pytest.mark.parametrize(("tokens", "border"), [(22, 20), (21, 20), (9, 8)])
def test_the_state_at_the_last_border_is_pulled_and_compared(tokens: int, border: int) -> None:
    engine = StateEngine()
    canaries = Canaries(engine.blocks, engine.retentions)
    workers: Any = [SimpleNamespace(canary=CanaryRoom(64, 2, BLOCK, BLOCK))]
    canaries.set_workers(workers)
    request, free = engine.request("r", tokens), engine.blocks.free
    assert canaries.begin(request, a_remote(a_prompt(tokens)), 0, is_same_prompt=True)
    (order,) = canaries.step_orders({}).canaries
    running, entry = (tokens - 2) // BLOCK, border // BLOCK - 1
    for table in order.local_block_ids[1:]:
        assert [number for number, block in enumerate(table) if block] == sorted({entry, running})
        assert all(block <= 2 * STATES for block in table)
    engine.compute(request)
    request.append_output_token_ids(1)
    (reference,) = canaries.step_orders({}).references
    for group in (1, 2):
        state = engine.blocks.found_states(request, group, BLOCK)[entry]
        assert reference.block_ids[group] == (*[0] * entry, state.block_id)
        assert state.ref_cnt
    engine.manager.free(request)
    canaries.finish(request, ())
    canaries.release_device_blocks()
    canaries.settled(set(), set(), Report())
    assert engine.blocks.free == free


@pytest.mark.parametrize("tokens", [98, 112, 127])
@pytest.mark.parametrize("stated", [{}, DRAFTS, *([CHECKPOINTS | DRAFTS] if INSTALLED >= (0, 32) else [])])
def test_vllm_has_kept_the_state_that_is_compared(stated: Mapping[str, int], tokens: int) -> None:
    """With drafts from hidden states, its scheduler ends a step, and keeps the state, a block earlier."""
    if not stated and tokens == 112 and INSTALLED < (0, 32):
        return  # a step ends with the prompt only, of which the last token is left out
    world = World()
    engine = EngineSim(world, "kv_consumer", 60, states="align", stated=stated)
    canaries = Canaries(engine.side._blocks, engine.side._retentions)
    workers: Any = [SimpleNamespace(canary=CanaryRoom(64, 1, 16, 16))]
    canaries.set_workers(workers)
    engine.ask(ClientRequest("r", list(range(tokens)), 4))
    _, request = engine.requests["r-d"]
    assert canaries.begin(request, a_remote(a_prompt(tokens)), 0, is_same_prompt=True)
    (order,) = canaries.step_orders({}).canaries
    while not request.num_output_tokens:
        world.step()
    (reference,) = canaries.step_orders({}).references
    for pulled, here in list(zip(order.local_block_ids, reference.block_ids, strict=True))[1:]:
        assert here, "no state is compared"
        assert pulled[len(here) - 1], "that of another border is pulled"
    canaries.release_device_blocks()
    world.close()


@pytest.mark.parametrize(
    ("tokens", "computed", "held", "border"),
    [
        (22, 0, {12, 20, 22}, 20),
        (22, 0, {8, 10, 22}, 8),
        (22, 0, {8, 24}, 8),
        (22, 0, {10, 22}, 0),
        (22, 8, {8, 22}, 0),
        (21, 0, {8, 10}, 20),
    ],
)
def test_another_state_is_compared_if_the_other_engine_lacks_the_last(
    tokens: int, computed: int, held: set[int], border: int
) -> None:
    """Its blocks have another size. After 20 of 21 tokens, it has the running state."""
    engine = StateEngine()
    canaries = Canaries(engine.blocks, engine.retentions)
    workers: Any = [SimpleNamespace(canary=CanaryRoom(64, 2, BLOCK, BLOCK))]
    canaries.set_workers(workers)
    request = engine.request("r", tokens)
    remote = a_remote(a_prompt(tokens))
    assert canaries.begin(request, remote, computed, is_same_prompt=True, held_states=held)
    (order,) = canaries.step_orders({}).canaries
    engine.compute(request, until=[8])
    request.append_output_token_ids(1)
    (reference,) = canaries.step_orders({}).references
    running = (tokens - 2) // BLOCK
    for here, there in zip(reference.block_ids[1:], order.local_block_ids[1:], strict=True):
        assert len(here) == border // BLOCK
        assert {entry for entry, block in enumerate(there) if block} == {running, *([len(here) - 1] if here else [])}
    canaries.release_device_blocks()


@pytest.mark.parametrize(("tokens", "computed", "is_one"), [(22, 16, True), (22, 20, False), (24, 20, False)])
def test_a_prompt_whose_last_state_was_found_here_proves_nothing(tokens: int, computed: int, is_one: bool) -> None:
    """It may have been pulled, even from the engine that is to be proven."""
    engine = StateEngine()
    canaries = Canaries(engine.blocks, engine.retentions)
    workers: Any = [SimpleNamespace(canary=CanaryRoom(64, 2, BLOCK, 1))]
    canaries.set_workers(workers)
    request, remote = engine.request("r", tokens), a_remote(a_prompt(tokens))
    assert canaries.begin(request, remote, computed, is_same_prompt=True) == is_one


def test_without_borders_no_state_is_compared() -> None:
    engine = StateEngine("none")
    canaries = Canaries(engine.blocks, engine.retentions)
    workers: Any = [SimpleNamespace(canary=CanaryRoom(64, 1, BLOCK, BLOCK))]
    canaries.set_workers(workers)
    request = engine.request("r", 22)
    assert canaries.begin(request, a_remote(a_prompt(22)), 0, is_same_prompt=True)
    (order,) = canaries.step_orders({}).canaries
    assert order.local_block_ids[1:] == ((1,), (1,))
    engine.compute(request)
    request.append_output_token_ids(1)
    (reference,) = canaries.step_orders({}).references
    assert reference.block_ids[1:] == ((), ())


def test_an_engine_whose_layers_keep_states_only_tries_nobody(side_of: Callable[..., ConnectorScheduler]) -> None:
    """There are no keys and values to compare."""
    side = side_of("kv_consumer", canary=None)
    assert side._make_canaries().tries
    side._retentions = tuple(replace(kept, states=True) for kept in side._retentions)
    assert not side._make_canaries().tries
