"""Compressed caches, whose rows stand for several tokens: every byte, by an oracle that knows rows only."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layout.compatibility import IncompatibleCachesError, check_planes
from layout.context_parallel import TokenSplit
from tests.support.layout.oracle import LAYOUTS, Engine, Model, build
from tests.support.layout.pulls import LOCAL_BASE, plain, plans_of, pull_rows
from tests.support.layout.ranks import compressed
from tests.support.layout.strategies import FORMS, engines, models, requests, thorough


@pytest.mark.thorough
@thorough
@given(data=st.data())
def test_rows_arrive_whatever_the_layouts_and_sizes(data: st.DataObject) -> None:
    model = replace(data.draw(models()), groups=((0, 1, 2, 3),), windows=(0,))
    forms, layout = data.draw(st.sampled_from(FORMS), "forms"), st.sampled_from(LAYOUTS)
    local, remote = (data.draw(engines(model, data.draw(layout), form)) for form in forms)
    ratio = data.draw(st.sampled_from([2, 4, 128]), "tokens of a row")
    request = data.draw(requests(model, local, remote), "request")
    pull_rows(model, (local, remote), request, ratio, data.draw(st.integers(0, ratio - 1), "lacking"))


@pytest.mark.parametrize(("ratio", "unit"), [(1, 64), (4, 64), (8, 64), (16, 32), (128, 4), (512, 1), (1024, 1)])
def test_a_pull_may_begin_inside_a_block(ratio: int, unit: int) -> None:
    """Blocks of 64 rows of 128 tokens would else be 8,192 tokens that are pulled or not at all."""
    model, engine = Model(1, (4, 4), 2, ((0, 1),), (0,)), Engine("LBNHC", block_tokens=64, blocks=4)
    request = plain(150, engine, engine)
    assert pull_rows(model, (engine, engine), replace(request, first_token=unit), ratio, 0) == {unit}


def test_ranks_that_share_the_tokens_of_such_rows_are_refused() -> None:
    model, engine = Model(1, (4, 4), 2, ((0, 1),), (0,)), Engine("LBNHC", block_tokens=64, blocks=4)
    plane = compressed(build(model, engine, 1, LOCAL_BASE)[0], 4).groups[0].planes[0]
    with pytest.raises(
        IncompatibleCachesError, match=r"a row of which stands for 4 tokens: .* start both without context parallelism"
    ):
        check_planes(plane, replace(plane, tokens=TokenSplit(64, 2, 1)))


def test_other_numbers_of_tokens_in_a_row_are_refused_with_both() -> None:
    model, engine = Model(1, (4, 4), 2, ((0, 1),), (0,)), Engine("LBNHC", block_tokens=64, blocks=4)
    (rank,) = build(model, engine, 1, LOCAL_BASE)
    with pytest.raises(IncompatibleCachesError, match=r"'tokens_per_row' .* is 4 here and 128 on the remote engine"):
        plans_of(compressed(rank, 4), [compressed(rank, 128)])
