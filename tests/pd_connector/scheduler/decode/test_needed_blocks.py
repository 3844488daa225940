"""Whether a prefill engine holds what is needed of a prompt, layer by layer, whatever groups either side has."""

from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_connector.params import RemotePrefill
from pd_connector.scheduler.decode import needed_blocks
from pd_connector.scheduler.decode.needed_blocks import NeededBlocks
from pd_connector.vllm.cache_specs import Retention
from tests.support.connector.requests import a_prompt, a_remote

LAYERS = tuple(f"layers.{number}" for number in range(5))
DRAFT = "draft.layers.0"


@dataclass(frozen=True)
class Group:
    """A cache group of an engine: what is kept of a request, and of which layers."""

    kept: Retention
    layers: tuple[str, ...]


def held_by(groups: list[Group], tokens: int) -> RemotePrefill:
    """A prompt as a prefill engine with these groups leases it: it holds what the last token needs."""
    tables = tuple(
        tuple(
            0 if block < group.kept.first_needed(tokens) // group.kept.block_tokens else block + 1
            for block in range(-(-tokens // group.kept.block_tokens))
        )
        for group in groups
    )
    return a_remote(
        a_prompt(tokens),
        remote_block_ids=tables,
        remote_block_sizes=tuple(group.kept.block_tokens for group in groups),
        remote_layers=() if [group.kept.first_needed(10**6) for group in groups] == [0] else names_of(groups),
    )


def names_of(groups: list[Group]) -> tuple[tuple[str, ...], ...]:
    return tuple(group.layers for group in groups)


def needed_by(groups: list[Group]) -> NeededBlocks:
    return NeededBlocks([group.kept for group in groups], [group.layers for group in groups])


@st.composite
def engines(draw: st.DrawFn, layers: tuple[str, ...]) -> list[Group]:
    """Each layer in one of up to four groups, which keep all, windows or chunks."""
    number = draw(st.integers(1, 4))
    places = [draw(st.integers(0, number - 1)) for _ in layers]
    groups = []
    for place in range(number):
        size = draw(st.sampled_from([16, 32, 48]))
        kept = draw(st.sampled_from([Retention(size), Retention(size, window=40), Retention(size, chunk=48)]))
        groups.append(Group(kept, tuple(name for name, at in zip(layers, places, strict=True) if at == place)))
    return groups


def is_held(ours: list[Group], remote: RemotePrefill, theirs: list[Group], computed: int) -> bool:
    """Token by token: all that is to be pulled of every layer lies in a block there."""
    for group in ours:
        for layer in group.layers:
            for there, table in zip(theirs, remote.remote_block_ids, strict=True):
                first = max(group.kept.first_needed(remote.remote_num_tokens), computed)
                wanted = range(first, remote.remote_num_tokens - 1)
                if layer in there.layers and not all(table[token // there.kept.block_tokens] for token in wanted):
                    return False
    return True


@given(
    engines((*LAYERS, DRAFT)),
    engines(LAYERS),
    st.integers(2, 200),
    st.integers(0, 4).map(lambda blocks: blocks * 48),
)
def test_a_prompt_can_be_pulled_if_and_only_if_every_layer_is_held(
    ours: list[Group], theirs: list[Group], tokens: int, computed: int
) -> None:
    """The draft is nowhere there, and needs nothing."""
    remote = held_by(theirs, tokens)
    lacks = needed_by(ours).lacking(remote, computed)
    if computed < tokens - 1:
        assert (lacks is None) == is_held(ours, remote, theirs, computed)


@given(engines((*LAYERS, DRAFT)), engines(LAYERS), st.integers(2, 200))
def test_what_will_be_lacking_is_known_before(ours: list[Group], theirs: list[Group], tokens: int) -> None:
    remote = held_by(theirs, tokens)
    first_tokens = [group.kept.first_needed(tokens) for group in theirs]
    needed = needed_by(ours)
    if needed.lacking(remote) is not None:
        assert needed.will_lack(remote, first_tokens)
    assert not needed.will_lack(remote, (), is_cut=False)


FULL, WINDOWED = Retention(16), Retention(16, window=40)


def test_groups_are_not_matched_by_their_number() -> None:
    """A draft here makes two groups of three: the group of full attention here is second, and third there."""
    theirs = [Group(WINDOWED, LAYERS[:1]), Group(WINDOWED, LAYERS[1:2]), Group(FULL, LAYERS[2:])]
    ours = [Group(WINDOWED, LAYERS[:2]), Group(FULL, (*LAYERS[2:], DRAFT))]
    assert needed_by(ours).lacking(held_by(theirs, 200)) is None


def test_a_draft_that_sees_all_needs_nothing_of_a_model_of_windows() -> None:
    """There, a single group holds all layers; here, the draft has one of its own."""
    ours = [Group(WINDOWED, LAYERS), Group(FULL, (DRAFT,))]
    assert needed_by(ours).lacking(held_by([Group(WINDOWED, LAYERS)], 200)) is None


def test_an_engine_that_keeps_all_says_what_keeps_it_from_pulling_windows() -> None:
    theirs = [Group(FULL, LAYERS[:2]), Group(WINDOWED, LAYERS[2:])]
    without_hybrid_manager = needed_by([Group(FULL, LAYERS)])
    assert without_hybrid_manager.lacking(held_by(theirs, 40)) is None
    lacks = without_hybrid_manager.lacking(held_by(theirs, 100))
    assert lacks is not None
    assert lacks.is_by_setting
    assert "before token 48 of layer 'layers.2', of which this engine keeps all" in lacks.reason
    assert "--disable-hybrid-kv-cache-manager" in lacks.reason


def test_what_is_here_already_need_not_be_there() -> None:
    """A second turn, of which only the end is missing here."""
    theirs = [Group(FULL, LAYERS[:2]), Group(WINDOWED, LAYERS[2:])]
    needed, remote = needed_by([Group(FULL, LAYERS)]), held_by(theirs, 100)
    assert needed.lacking(remote, 32) is not None
    assert needed.lacking(remote, 48) is None


def test_larger_blocks_here_may_need_more_than_the_window_and_the_reason_says_so() -> None:
    lacks = needed_by([Group(Retention(32, window=40), LAYERS)]).lacking(held_by([Group(WINDOWED, LAYERS)], 100))
    assert lacks is not None
    assert not lacks.is_by_setting
    assert "no longer holds what comes before token 48" in lacks.reason
    assert "from token 32 on: blocks are of 32 tokens here and of 16 there" in lacks.reason


def test_layers_of_later_pipeline_stages_count_once_they_are_known() -> None:
    theirs = [Group(FULL, LAYERS[:1]), Group(WINDOWED, LAYERS[1:])]
    needed = NeededBlocks([FULL], [LAYERS[:1]])
    remote = held_by(theirs, 100)
    assert needed.lacking(remote) is None
    needed.set_layers([LAYERS])
    assert needed.lacking(remote) is not None


def test_layers_that_clients_invent_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needed_blocks, "_MAX_KNOWN", 4)
    needed = needed_by([Group(FULL, LAYERS)])
    for number in range(10):
        needed.lacking(held_by([Group(FULL, (f"x{number}",)), Group(FULL, ("y",))], 20))
        assert len(needed._known) <= 4


@pytest.mark.parametrize("tokens", [2, 33, 34, 97, 100])
def test_of_states_the_one_before_the_last_token_is_needed_wherever_borders_are(tokens: int) -> None:
    """Blocks are of 48 tokens here, of 32 there, or of one size for all tokens."""
    ours = needed_by([Group(Retention(48, states=True), LAYERS)])
    for size in (32, 4096):
        theirs = [Group(Retention(size, states=True), LAYERS)]
        remote = held_by(theirs, tokens)
        table = (*[0] * ((tokens - 2) // size), 7)
        held = msgspec.structs.replace(remote, remote_block_ids=(table,), remote_layers=(LAYERS,))
        assert ours.lacking(held) is None
        assert not ours.will_lack(held, [theirs[0].kept.first_needed(tokens)])
        assert ours.will_lack(held, (), is_cut=False)
        lacks = ours.lacking(msgspec.structs.replace(held, remote_block_ids=((*table[:-1], 0),)))
        assert lacks is not None
        assert f"no state of layer 'layers.0' after {tokens - 1} of {tokens} tokens" in lacks.reason


def test_of_a_prompt_of_one_token_no_state_is_needed() -> None:
    remote = msgspec.structs.replace(held_by([Group(FULL, LAYERS)], 1), remote_block_ids=((0,),))
    assert needed_by([Group(Retention(16, states=True), LAYERS)]).lacking(remote) is None


def test_states_are_held_where_every_group_that_has_some_of_these_layers_holds_one() -> None:
    """In blocks of any size; a ring, and an engine that keeps one state of a request, have no borders."""
    ours = [
        Group(Retention(16), LAYERS[:1]),
        Group(Retention(32, states=True), LAYERS[1:4]),
        Group(Retention(2**20, states=True), LAYERS[4:]),
    ]
    remote = msgspec.structs.replace(
        held_by([Group(Retention(16), LAYERS[:1])], 100),
        remote_block_ids=(tuple(range(1, 8)), (0, 1, 0, 2, 3, 4, 5), (6, 0, 7, 8), (9,)),
        remote_block_sizes=(16, 16, 32, 2**20),
        remote_layers=(LAYERS[:1], LAYERS[1:3], LAYERS[3:4], LAYERS[4:]),
    )
    assert needed_by(ours).held_states(remote) == {32, 96}
    assert needed_by(ours[:1]).held_states(remote) == set()
    assert needed_by([ours[0], ours[2]]).held_states(remote) == set()
