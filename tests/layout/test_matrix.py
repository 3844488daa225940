"""Any geometry to any geometry: every byte of every rank, over pairs of engines.

Each case builds both engines in memory, plans, copies and compares all of the memory (see ``oracle``). What is cheap
is run exhaustively; the combinations of everything are generated.
"""

import random
from collections import Counter
from collections.abc import Iterator
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layout.compatibility import IncompatibleCachesError
from tests.support.layout.layout_pairs import layout_pairs
from tests.support.layout.oracle import LAYOUTS, WHOLE_HEADS, Engine, Model
from tests.support.layout.pulls import plain, pull
from tests.support.layout.strategies import (
    BLOCK_SIZES,
    FORMS,
    INDEXER,
    KV_HEADS,
    PP_SIZES,
    SCALE,
    TABLES,
    engines,
    models,
    requests,
    thorough,
    tp_sizes,
)

LAYOUT_PAIRS = (*product(LAYOUTS, LAYOUTS),)
LAYOUT_PAIR = st.sampled_from(LAYOUT_PAIRS)
every_layout_pair = pytest.mark.parametrize("layouts", LAYOUT_PAIRS, ids="-".join)
#: Each example has layouts of its own, and engines: those of a parametrized test are the same for every pair.
any_layouts = settings(thorough, max_examples=24)


# Exhaustive: who holds what, and in blocks of what size.


def tensor_parallel_sizes() -> Iterator[tuple[int, int, int]]:
    for kv_heads in KV_HEADS:
        for local_tp, remote_tp in product(tp_sizes(kv_heads), repeat=2):
            yield kv_heads, local_tp, remote_tp


every_tensor_parallel_pair = pytest.mark.parametrize(("kv_heads", "local_tp", "remote_tp"), [*tensor_parallel_sizes()])


@pytest.mark.thorough
@every_tensor_parallel_pair
def test_every_pair_of_tensor_parallel_sizes(kv_heads: int, local_tp: int, remote_tp: int, cases: Counter[str]) -> None:
    """The pipeline parallel sizes take turns, two of the nine pairs at a time."""
    first = 2 * (local_tp + remote_tp)
    _pull_between_sizes(kv_heads, local_tp, remote_tp, {first % 9, (first + 4) % 9}, cases)


@pytest.mark.slow
@every_tensor_parallel_pair
def test_every_pair_of_tensor_and_pipeline_sizes(
    kv_heads: int, local_tp: int, remote_tp: int, cases: Counter[str]
) -> None:
    _pull_between_sizes(kv_heads, local_tp, remote_tp, {*range(9)}, cases)


def _pull_between_sizes(kv_heads: int, local_tp: int, remote_tp: int, pipelines: set[int], cases: Counter[str]) -> None:
    """Two tokens of four layers; the layouts take turns, so that each meets many pairs of sizes."""
    model = Model(kv_heads, (1, 1), 1, ((0, 1, 2, 3),), (0,))
    for number, (local_pp, remote_pp) in enumerate(product(PP_SIZES, repeat=2)):
        if number not in pipelines:
            continue
        layouts = LAYOUT_PAIRS[(kv_heads * 5 + local_tp * 11 + remote_tp * 7 + number * 13) % len(LAYOUT_PAIRS)]
        local = Engine(layouts[0], tp=local_tp, pp=local_pp, blocks=2)
        remote = Engine(layouts[1], tp=remote_tp, pp=remote_pp, blocks=2)
        pull(model, local, remote, plain(2, local, remote, "descending"))
        cases["parallel sizes"] += 1


@pytest.mark.parametrize(("local_layout", "remote_layout"), layout_pairs())
def test_every_pair_of_block_sizes_in_every_pair_of_layouts(
    local_layout: str, remote_layout: str, cases: Counter[str]
) -> None:
    """130 tokens fill no number of blocks of any size, so the last block is partly filled."""
    model = Model(2, (2, 1), 2, ((0, 1),), (0,))
    for number, (local_tokens, remote_tokens) in enumerate(product(BLOCK_SIZES, repeat=2)):
        local = Engine(local_layout, block_tokens=local_tokens, blocks=-(-130 // local_tokens) + 1)
        remote = Engine(remote_layout, tp=2, block_tokens=remote_tokens, blocks=-(-130 // remote_tokens) + 1)
        pull(model, local, remote, plain(130, local, remote, TABLES[number % 3]))
        cases["block sizes"] += 1


@pytest.mark.parametrize(("local_layout", "remote_layout"), layout_pairs())
def test_every_pair_of_layouts_between_sizes_of_which_neither_divides_the_other(
    local_layout: str, remote_layout: str, cases: Counter[str]
) -> None:
    model = Model(12, (2, 1), 1, ((0, 1),), (0,))
    for local_tp, remote_tp in ((2, 3), (3, 2), (4, 6), (6, 4), (3, 4), (4, 3)):
        local, remote = Engine(local_layout, tp=local_tp, blocks=3), Engine(remote_layout, tp=remote_tp, blocks=3)
        pull(model, local, remote, plain(20, local, remote, "descending"))
        cases["indivisible sizes"] += 1


@pytest.mark.parametrize(("local_layout", "remote_layout"), [*product(WHOLE_HEADS, WHOLE_HEADS)])
def test_packed_heads_between_every_pair_of_block_sizes(
    local_layout: str, remote_layout: str, cases: Counter[str]
) -> None:
    """Equal kernel blocks arrive whole; unequal ones are refused with both sizes."""
    model = Model(2, (2, 2), 2, ((0, 1),), (0,))
    for local_tokens, remote_tokens, tp in product(BLOCK_SIZES, BLOCK_SIZES, (1, 2)):
        local = Engine(local_layout, "packed", tp=tp, block_tokens=local_tokens, blocks=3)
        remote = Engine(remote_layout, "packed", tp=3 - tp, block_tokens=remote_tokens, blocks=3)
        request = plain(min(local_tokens, remote_tokens) + 3, local, remote)
        if local_tokens == remote_tokens:
            pull(model, local, remote, request)
        else:
            message = f"block size is {local_tokens} tokens here and {remote_tokens} on the remote engine"
            with pytest.raises(IncompatibleCachesError, match=message):
                pull(model, local, remote, request)
        cases["packed sizes"] += 1


# Generated: everything at once.


def _one_case(
    data: st.DataObject, model: Model, layouts: tuple[str, str], forms: tuple[str, str], kernel_tokens: int = 0
) -> None:
    local = data.draw(engines(model, layouts[0], forms[0], kernel_tokens), "local")
    remote = data.draw(engines(model, layouts[1], forms[1], kernel_tokens), "remote")
    request = data.draw(requests(model, local, remote), "request")
    pull(model, local, remote, request)
    pull(model, local, remote, request, cuts=random.Random(data.draw(st.integers(0, 99), "cuts")))


def _strided(data: st.DataObject, layouts: tuple[str, str], cases: Counter[str]) -> None:
    forms = data.draw(st.sampled_from(FORMS))
    _one_case(data, data.draw(models()), layouts, forms)
    cases["strided"] += 1


@pytest.mark.thorough
@any_layouts
@given(layouts=LAYOUT_PAIR, data=st.data())
def test_every_byte_arrives_between_any_two_layouts(
    layouts: tuple[str, str], data: st.DataObject, cases: Counter[str]
) -> None:
    _strided(data, layouts, cases)


@pytest.mark.slow
@every_layout_pair
@thorough
@given(data=st.data())
def test_every_byte_arrives_between_every_two_layouts(
    layouts: tuple[str, str], data: st.DataObject, cases: Counter[str]
) -> None:
    _strided(data, layouts, cases)


def _packed(data: st.DataObject, layouts: tuple[str, str], cases: Counter[str]) -> None:
    kernel_tokens = data.draw(st.sampled_from([16, 32]))
    _one_case(data, data.draw(models()), layouts, ("packed", "packed"), kernel_tokens)
    cases["packed"] += 1


@pytest.mark.thorough
@any_layouts
@given(layouts=st.tuples(*2 * [st.sampled_from(WHOLE_HEADS)]), data=st.data())
def test_heads_packed_by_the_kernel_arrive_whole(
    layouts: tuple[str, str], data: st.DataObject, cases: Counter[str]
) -> None:
    _packed(data, layouts, cases)


@pytest.mark.slow
@pytest.mark.parametrize("layouts", [*product(WHOLE_HEADS, WHOLE_HEADS)], ids="-".join)
@thorough
@given(data=st.data())
def test_heads_packed_by_the_kernel_arrive_whole_in_every_two_layouts(
    layouts: tuple[str, str], data: st.DataObject, cases: Counter[str]
) -> None:
    _packed(data, layouts, cases)


def _mla(data: st.DataObject, layouts: tuple[str, str], cases: Counter[str]) -> None:
    extras = data.draw(st.sampled_from([(), (INDEXER,), (INDEXER, SCALE)]))
    _one_case(data, Model(1, (8, 1), 2, ((0, 1, 2),), (0,), extras), layouts, ("apart", "apart"))
    cases["mla"] += 1


@pytest.mark.thorough
@settings(any_layouts, max_examples=12)
@given(layouts=LAYOUT_PAIR, data=st.data())
def test_the_unequal_parts_of_mla_arrive_from_one_of_the_replicas(
    layouts: tuple[str, str], data: st.DataObject, cases: Counter[str]
) -> None:
    _mla(data, layouts, cases)


@pytest.mark.slow
@every_layout_pair
@thorough
@given(data=st.data())
def test_the_unequal_parts_of_mla_arrive_between_every_two_layouts(
    layouts: tuple[str, str], data: st.DataObject, cases: Counter[str]
) -> None:
    _mla(data, layouts, cases)


def _unequal_heads(data: st.DataObject, layouts: tuple[str, str], cases: Counter[str]) -> None:
    """Layers 2 and 3 draft. Either side may have both, the first, or none of them."""
    other_heads = tuple(enumerate(data.draw(st.permutations([8, 4, 4, 2]), "heads")))
    ours, theirs = (
        Model(8, (2, 1), 2, (tuple(range(layers)),), (0,), other_heads=other_heads, drafts=(2, 3))
        for layers in data.draw(st.tuples(*2 * [st.sampled_from([2, 3, 4])]), "layers")
    )
    forms = data.draw(st.sampled_from(FORMS))
    here = data.draw(engines(ours, layouts[0], forms[0]), "local")
    there = data.draw(engines(theirs, layouts[1], forms[1]), "remote")
    pull(ours, here, there, data.draw(requests(ours, here, there), "request"), theirs)
    cases["unequal heads and drafts"] += 1


@pytest.mark.thorough
@any_layouts
@given(layouts=LAYOUT_PAIR, data=st.data())
def test_layers_with_unequal_heads_arrive_and_those_of_a_draft_as_far_as_they_are_there(
    layouts: tuple[str, str], data: st.DataObject, cases: Counter[str]
) -> None:
    _unequal_heads(data, layouts, cases)


@pytest.mark.slow
@every_layout_pair
@thorough
@given(data=st.data())
def test_layers_with_unequal_heads_arrive_between_every_two_layouts(
    layouts: tuple[str, str], data: st.DataObject, cases: Counter[str]
) -> None:
    _unequal_heads(data, layouts, cases)
