"""States at borders of blocks that are pulled beside a prompt, so that a longer one finds its beginning."""

import pytest

from pd_connector.scheduler.decode.border_states import BorderStates
from tests.support.connector.prompts_with_states import BLOCK, StateEngine
from tests.support.releases import INSTALLED, module_needs

if INSTALLED < (0, 30):
    module_needs((0, 30), "states of recurrent layers")

TOKENS = 22  # of which 21 are pulled: the last border is after 20


@pytest.mark.parametrize("is_lacking", [False, True])
@pytest.mark.parametrize("has_failed", [False, True])
def test_a_border_state_is_found_if_it_has_arrived_on_every_rank(is_lacking: bool, has_failed: bool) -> None:
    engine = StateEngine()
    borders = BorderStates(engine.blocks, engine.retentions)
    request, free = engine.request("r", TOKENS), engine.blocks.free
    own = engine.pull(request)
    tables = borders.add(request, own, range(TOKENS - 1))
    assert tables[0] == own[0]
    assert [[entry for entry, block in enumerate(table) if block] for table in tables[1:]] == [[4, 5], [4, 5]]
    new = {table[4] for table in tables[1:]}
    assert len(new) == 2
    assert not new & {block for table in own for block in table}
    borders.lack({"r"} if is_lacking else ())
    if not has_failed:
        engine.arrived(request)
    borders.end("r", is_right=not has_failed)
    assert not borders.request_ids
    engine.manager.free(request)
    assert engine.blocks.free == free
    is_found = not (is_lacking or has_failed)
    assert all(bool(engine.blocks.found_states(request, group, BLOCK)) is is_found for group in (1, 2))
    assert engine.found(engine.request("longer", TOKENS + 9)) == (20 if is_found else 0)


def test_nothing_is_pulled_beside_if_the_prompt_ends_at_a_border() -> None:
    """Its own state is that of the border."""
    engine = StateEngine()
    borders = BorderStates(engine.blocks, engine.retentions)
    request = engine.request("r", 5 * BLOCK + 1)
    own = engine.pull(request)
    assert borders.add(request, own, range(5 * BLOCK)) == own
    engine.arrived(request)
    engine.manager.free(request)
    assert engine.found(engine.request("longer", TOKENS + 9)) == 5 * BLOCK


def test_a_state_that_is_here_already_is_not_pulled() -> None:
    engine = StateEngine()
    before, request = engine.request("before", TOKENS), engine.request("r", TOKENS)
    engine.compute(before)
    engine.manager.free(before)
    tables = ((1, 2, 3, 4, 5, 6), *((0, 0, 0, 0, 0, block) for block in (7, 8)))
    assert BorderStates(engine.blocks, engine.retentions).add(request, tables, range(TOKENS - 1)) == tables


def test_nor_without_prefixes_nor_below_a_border_nor_without_room() -> None:
    cases = (StateEngine("none"), TOKENS), (StateEngine("ring"), TOKENS), (StateEngine(), BLOCK)
    for engine, tokens in (*cases, (StateEngine(blocks=10), TOKENS)):
        request = engine.request("r", tokens)
        own = engine.pull(request)
        assert BorderStates(engine.blocks, engine.retentions).add(request, own, range(tokens - 1)) == own


def test_what_another_model_has_computed_is_not_found() -> None:
    engine = StateEngine()
    borders = BorderStates(engine.blocks, engine.retentions)
    request = engine.request("r", TOKENS)
    borders.add(request, engine.pull(request), range(TOKENS - 1))
    borders.forget_model()
    borders.end("r", is_right=True)
    assert not engine.blocks.found_states(request, 1, BLOCK)
