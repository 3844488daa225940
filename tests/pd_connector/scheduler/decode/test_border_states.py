"""States at borders of blocks that are pulled beside a prompt, so that a longer one finds its beginning."""

from typing import Any

import pytest

from pd_connector.orders import PullOrder, RankEnds
from pd_connector.scheduler.decode.border_states import BorderStates
from tests.support.connector.prompts_with_states import BLOCK, StateEngine
from tests.support.connector.requests import a_remote
from tests.support.releases import INSTALLED, module_needs

if INSTALLED < (0, 30):
    module_needs((0, 30), "states of recurrent layers")

TOKENS = 22  # of which 21 are pulled: the last border is after 20
LEASE = a_remote(list(range(TOKENS)))


def add(borders: BorderStates, request: Any, tables: tuple[tuple[int, ...], ...]) -> PullOrder:
    """The pull of all of a prompt but the last token, of which nobody says what is held."""
    tokens = range(request.num_prompt_tokens - 1)
    order = PullOrder(request.request_id, LEASE, tables, 0, tokens.stop, "pull")
    return borders.add(request, order, borders.choose(tokens, None))


def end(borders: BorderStates, *ends: RankEnds, request_id: str = "r") -> PullOrder:
    """End the pull of a request well, and that of its states at borders, whose order is returned, on all ranks."""
    order, goes_on = borders.go_on(request_id, is_right=True) or (None, False)
    assert order is not None
    assert goes_on
    assert borders.pull_ids == {order.request_id}
    for number, each in enumerate(ends or (RankEnds(1),), start=1):
        assert borders.settled({order.request_id: each}) == [order.request_id] * (number == max(len(ends), 1))
    assert not borders.request_ids | borders.pull_ids
    return order


@pytest.mark.parametrize("fault", ["", "lacking", "failed"])
def test_a_border_state_is_found_if_it_has_arrived_on_every_rank(fault: str) -> None:
    noted: list[Any] = []
    engine = StateEngine()
    borders = BorderStates(engine.blocks, engine.retentions, 2, lambda *state: noted.append(state))
    request, free = engine.request("r", TOKENS), engine.blocks.free
    own = engine.pull(request)
    first = add(borders, request, own)
    assert (first.local_block_ids, first.part, first.parts) == (own, 0, 2)
    engine.arrived(request)
    engine.manager.free(request)  # its end changes nothing
    lacking = frozenset({(1, 4), (2, 4)} if fault == "lacking" else ())
    second = end(borders, RankEnds(1), RankEnds(1, fault == "failed", lacking))
    assert (second.first_token, second.end_token) == (first.end_token, first.end_token)
    assert (second.part, second.parts) == (1, 2)
    assert [[entry for entry, block in enumerate(table) if block] for table in second.local_block_ids] == [[], [4], [4]]
    new = {block for table in second.local_block_ids for block in table if block}
    assert len(new) == 2
    assert not new & {block for table in own for block in table}
    assert engine.blocks.free == free
    assert [list(engine.blocks.found_states(request, group, BLOCK)) for group in (1, 2)] == [[] if fault else [4]] * 2
    assert [state[1:3] for state in noted] == ([] if fault else [(1, 4), (2, 4)])
    assert engine.found(engine.request("longer", TOKENS + 9)) == (0 if fault else 20)


def test_before_that_it_is_not_found_and_its_block_is_nobody_elses() -> None:
    engine = StateEngine()
    borders = BorderStates(engine.blocks, engine.retentions)
    request, free = engine.request("r", TOKENS), engine.blocks.free
    add(borders, request, engine.pull(request))
    engine.arrived(request)
    assert borders.go_on("r", is_right=True)
    assert not engine.blocks.found_states(request, 1, BLOCK)
    engine.manager.free(request)
    assert engine.blocks.free == free - 2


def test_it_is_not_pulled_behind_a_prompt_that_nobody_uses() -> None:
    engine = StateEngine()
    borders = BorderStates(engine.blocks, engine.retentions)
    request, free = engine.request("r", TOKENS), engine.blocks.free
    add(borders, request, engine.pull(request))
    engine.manager.free(request)
    order, goes_on = borders.go_on("r", is_right=False) or (None, True)
    assert order is not None
    assert not goes_on
    assert not borders.request_ids | borders.pull_ids
    assert engine.blocks.free == free


@pytest.mark.parametrize("lacking", [3, 4])
def test_what_the_prefill_engine_has_is_found_though_it_lacks_another(lacking: int) -> None:
    """With drafts, two borders are tried of a prompt that is not complete there."""
    engine = StateEngine(drafts=True)
    borders = BorderStates(engine.blocks, engine.retentions)
    request = engine.request("r", TOKENS)
    add(borders, request, engine.pull(request))
    engine.arrived(request)
    tables = end(borders, RankEnds(1, False, frozenset((group, lacking) for group in (1, 2)))).local_block_ids
    assert [[entry for entry, block in enumerate(table) if block] for table in tables[1:]] == [[3, 4], [3, 4]]
    assert [list(engine.blocks.found_states(request, group, BLOCK)) for group in (1, 2)] == [[7 - lacking]] * 2


def test_nothing_is_pulled_beside_if_the_prompt_ends_at_a_border() -> None:
    """Its own state is that of the border."""
    engine = StateEngine()
    borders = BorderStates(engine.blocks, engine.retentions)
    request = engine.request("r", 5 * BLOCK + 1)
    own = engine.pull(request)
    assert add(borders, request, own).parts == 1
    engine.arrived(request)
    engine.manager.free(request)
    assert engine.found(engine.request("longer", TOKENS + 9)) == 5 * BLOCK


def test_a_state_that_is_here_already_is_not_pulled() -> None:
    engine = StateEngine()
    before, request = engine.request("before", TOKENS), engine.request("r", TOKENS)
    engine.compute(before)
    engine.manager.free(before)
    tables = ((1, 2, 3, 4, 5, 6), *((0, 0, 0, 0, 0, block) for block in (7, 8)))
    assert add(BorderStates(engine.blocks, engine.retentions), request, tables).parts == 1


def test_nor_without_prefixes_nor_below_a_border_nor_without_room() -> None:
    cases = (StateEngine("none"), TOKENS), (StateEngine("ring"), TOKENS), (StateEngine(), BLOCK)
    for engine, tokens in (*cases, (StateEngine(blocks=10), TOKENS)):
        request = engine.request("r", tokens)
        own = engine.pull(request)
        assert add(BorderStates(engine.blocks, engine.retentions), request, own).parts == 1


@pytest.mark.parametrize("is_late", [False, True])
def test_what_another_model_has_computed_is_not_found(is_late: bool) -> None:
    engine = StateEngine()
    borders = BorderStates(engine.blocks, engine.retentions)
    request, free = engine.request("r", TOKENS), engine.blocks.free
    add(borders, request, engine.pull(request))
    engine.manager.free(request)
    if not is_late:
        borders.forget()
    order, goes_on = borders.go_on("r", is_right=True) or (None, False)
    assert order is not None
    assert goes_on is is_late
    if is_late:
        borders.forget()
        borders.settled({order.request_id: RankEnds(1)})
    assert not engine.blocks.found_states(request, 1, BLOCK)
    assert engine.blocks.free == free


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
        if borders.request_ids:
            end(borders)
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
