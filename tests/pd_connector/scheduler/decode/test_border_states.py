"""States at borders of blocks that are pulled beside a prompt, so that a longer one finds its beginning."""

from typing import Any

import pytest

from pd_connector.scheduler.decode.border_states import BorderStates
from tests.support.connector.prompts_with_states import BLOCK, StateEngine
from tests.support.releases import INSTALLED, module_needs

if INSTALLED < (0, 30):
    module_needs((0, 30), "states of recurrent layers")

Tables = tuple[tuple[int, ...], ...]
TOKENS = 22  # of which 21 are pulled: the last border is after 20


def add(borders: BorderStates, request: Any, tables: Tables) -> Tables:
    """The tables of a request that pulls all of its prompt but the last token, of which nobody says what is held."""
    return borders.add(request, tables, borders.choose(range(request.num_prompt_tokens - 1), None))


@pytest.mark.parametrize("is_lacking", [False, True])
@pytest.mark.parametrize("has_failed", [False, True])
def test_a_border_state_is_found_if_it_has_arrived_on_every_rank(is_lacking: bool, has_failed: bool) -> None:
    engine = StateEngine()
    borders = BorderStates(engine.blocks, engine.retentions)
    request, free = engine.request("r", TOKENS), engine.blocks.free
    own = engine.pull(request)
    tables = add(borders, request, own)
    assert tables[0] == own[0]
    assert [[entry for entry, block in enumerate(table) if block] for table in tables[1:]] == [[4, 5], [4, 5]]
    new = {table[4] for table in tables[1:]}
    assert len(new) == 2
    assert not new & {block for table in own for block in table}
    borders.lack({("r", group, 4) for group in (1, 2)} if is_lacking else ())
    if not has_failed:
        engine.arrived(request)
    borders.end("r", is_right=not has_failed)
    assert not borders.request_ids
    engine.manager.free(request)
    assert engine.blocks.free == free
    is_found = not (is_lacking or has_failed)
    assert all(bool(engine.blocks.found_states(request, group, BLOCK)) is is_found for group in (1, 2))
    assert engine.found(engine.request("longer", TOKENS + 9)) == (20 if is_found else 0)


@pytest.mark.parametrize("lacking", [3, 4])
def test_what_the_prefill_engine_has_is_found_though_it_lacks_another(lacking: int) -> None:
    """With drafts, two borders are tried of a prompt that is not complete there."""
    engine = StateEngine(drafts=True)
    borders = BorderStates(engine.blocks, engine.retentions)
    request = engine.request("r", TOKENS)
    tables = add(borders, request, engine.pull(request))
    assert [[entry for entry, block in enumerate(table) if block] for table in tables[1:]] == [[3, 4, 5], [3, 4, 5]]
    borders.lack({("r", group, lacking) for group in (1, 2)})
    borders.lack({("of another", 1, 3)})
    engine.arrived(request)
    borders.end("r", is_right=True)
    assert [list(engine.blocks.found_states(request, group, BLOCK)) for group in (1, 2)] == [[7 - lacking]] * 2


def test_nothing_is_pulled_beside_if_the_prompt_ends_at_a_border() -> None:
    """Its own state is that of the border."""
    engine = StateEngine()
    borders = BorderStates(engine.blocks, engine.retentions)
    request = engine.request("r", 5 * BLOCK + 1)
    own = engine.pull(request)
    assert add(borders, request, own) == own
    engine.arrived(request)
    engine.manager.free(request)
    assert engine.found(engine.request("longer", TOKENS + 9)) == 5 * BLOCK


def test_a_state_that_is_here_already_is_not_pulled() -> None:
    engine = StateEngine()
    before, request = engine.request("before", TOKENS), engine.request("r", TOKENS)
    engine.compute(before)
    engine.manager.free(before)
    tables = ((1, 2, 3, 4, 5, 6), *((0, 0, 0, 0, 0, block) for block in (7, 8)))
    assert add(BorderStates(engine.blocks, engine.retentions), request, tables) == tables


def test_nor_without_prefixes_nor_below_a_border_nor_without_room() -> None:
    cases = (StateEngine("none"), TOKENS), (StateEngine("ring"), TOKENS), (StateEngine(), BLOCK)
    for engine, tokens in (*cases, (StateEngine(blocks=10), TOKENS)):
        request = engine.request("r", tokens)
        own = engine.pull(request)
        assert add(BorderStates(engine.blocks, engine.retentions), request, own) == own


def test_what_another_model_has_computed_is_not_found() -> None:
    engine = StateEngine()
    borders = BorderStates(engine.blocks, engine.retentions)
    request = engine.request("r", TOKENS)
    add(borders, request, engine.pull(request))
    borders.forget_model()
    borders.end("r", is_right=True)
    assert not engine.blocks.found_states(request, 1, BLOCK)


@pytest.mark.parametrize("larger", [1, 2])
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("tokens", range(2 * BLOCK + 1, 4 * BLOCK + 2))
def test_the_next_turn_finds_the_prompt_up_to_the_state_that_was_pulled(tokens: int, drafts: bool, larger: int) -> None:
    """With drafts from hidden states, vLLM leaves out the last block that it finds of keys and values.

    It finds whole blocks of keys only, which may be ``larger`` than those of states.
    """
    for answer in range(1, 2 * BLOCK):
        engine = StateEngine(drafts=drafts, larger=larger)
        borders = BorderStates(engine.blocks, engine.retentions)
        request, next_turn = (
            engine.request("r", tokens),
            engine.request("next", tokens + 3 * BLOCK, differs=(tokens, 1)),
        )
        add(borders, request, engine.pull(request))
        engine.arrived(request)
        borders.end("r", is_right=True)
        engine.answer(request, next_turn.prompt_token_ids[tokens : tokens + answer])
        engine.manager.free(request)
        unit = larger * BLOCK
        dropped = unit if drafts else 1
        assert engine.found(next_turn) >= (tokens - dropped) // unit * unit, f"after an answer of {answer} tokens"


@pytest.mark.parametrize(("first", "state"), [(20, 20), (28, 20), (16, 0)])
def test_behind_keys_the_state_of_a_border_is_pulled_that_comes_after_the_last_one_here(first: int, state: int) -> None:
    engine = StateEngine()
    engine.manager.coordinator.retention_interval = 0
    before, request = engine.request("before", TOKENS), engine.request("r", 2 * TOKENS)
    engine.compute(before)
    borders = BorderStates(engine.blocks, engine.retentions)
    tokens = borders.from_state(request, range(first, 2 * TOKENS - 1))
    assert tokens == range(state, 2 * TOKENS - 1)
    assert borders.choose(tokens, {16, 24}) == (24,)
    assert borders.choose(tokens, {16}) == (() if state else (16,))


@pytest.mark.parametrize(
    ("drafts", "held", "first", "chosen"),
    [
        (False, None, 0, (20,)),
        (True, None, 0, (16, 20)),
        (False, {8, 16, 20, 24}, 0, (20,)),  # the last one is said to be behind the prompt: after all of it
        (False, {8, 16}, 0, (16,)),
        (False, {8, 18}, 0, (8,)),
        (True, {8, 16, 20}, 0, (16, 20)),
        (True, {8, 20}, 0, (8, 20)),
        (True, {20}, 0, (20,)),
        (True, {8, 20}, 8, (20,)),
        (False, {8}, 8, ()),
        (True, set(), 0, ()),
    ],
)
def test_the_borders_that_hits_reach_are_chosen_of_those_that_are_held(
    drafts: bool, held: set[int] | None, first: int, chosen: tuple[int, ...]
) -> None:
    engine = StateEngine(drafts=drafts)
    borders = BorderStates(engine.blocks, engine.retentions)
    assert borders.choose(range(first, TOKENS - 1), held) == chosen
