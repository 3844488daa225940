"""What a request takes of the device's blocks is what vLLM gives it, of a model with states, too."""

from typing import Any

import pytest

from pd_connector.scheduler.block_demand import BlockDemand
from tests.support.releases import INSTALLED, module_needs, since

if INSTALLED < (0, 30):
    module_needs((0, 30), "states of recurrent layers")

from tests.support.connector.prompts_with_states import BLOCK, StateEngine
from tests.support.simulation.state_groups import CHECKPOINTS

STATE_GROUPS = 2


def most_taken(engine: StateEngine, tokens: int, ends: tuple[int, ...]) -> tuple[int, int]:
    """How many blocks a request is said to take, and has at most, if steps compute its prompt up to these ``ends``."""
    demand = BlockDemand(engine.blocks, engine.retentions)
    request, free = engine.request("r", tokens), engine.blocks.free
    taken = 0
    for end in (*ends, tokens):
        engine.manager.new_step_starts()
        assert engine.manager.allocate_slots(request, end - request.num_computed_tokens) is not None
        request.num_computed_tokens = end
        taken = max(taken, free - engine.blocks.free)
    return demand.blocks_of(request), taken


@pytest.mark.parametrize("drafts", [0, 1, 3])
@pytest.mark.parametrize(
    ("mode", "stated", "states"),
    [
        ("none", {}, 1),
        ("align", {}, 2),
        pytest.param("align", CHECKPOINTS, 3, marks=since((0, 32), "checkpoints of Mamba2 layers")),
        ("ring", {}, 1),
    ],
)
def test_a_prompt_takes_blocks_for_states_of_borders_checkpoints_and_drafts(
    mode: str, stated: Any, states: int, drafts: int
) -> None:
    """While a step goes on, vLLM keeps the state that it begins with, and gives it a block for that of a checkpoint."""
    engine = StateEngine(mode, **stated, num_speculative_blocks=drafts)
    tokens = 7 * BLOCK + 1
    expected = 8 + STATE_GROUPS * (states + (0 if mode == "ring" else drafts))
    assert most_taken(engine, tokens, (2 * BLOCK,)) == (expected, expected)


@pytest.mark.parametrize("drafts", [0, 1])
def test_a_prompt_of_one_block_has_no_states_but_its_own(drafts: int) -> None:
    engine = StateEngine(num_speculative_blocks=drafts)
    expected = 1 + STATE_GROUPS * (1 + drafts)
    assert most_taken(engine, BLOCK, ()) == (expected, expected)
