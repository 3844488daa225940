"""Layers that keep states (GDN), which move at the end of a prompt and at borders of blocks."""

import pytest

from tests.support.e2e.cuda_deployments import CUDA_STATES, STATES_UNIT
from tests.support.e2e.deployments import on
from tests.support.e2e.exact import assert_pull_at_once_exactly, assert_pulls_exactly, exact_prompt
from tests.support.e2e.pair import Pair, make_prompt

pytestmark = [on(CUDA_STATES), pytest.mark.parametrize("pair", [("P", "D")], indirect=True, ids="-".join)]


@pytest.mark.parametrize("units", [1, 2, 5])
def test_a_pulled_prompt_has_the_bits_that_d_computes_alone(pair: Pair, units: int) -> None:
    assert_pulls_exactly(pair, exact_prompt(units, STATES_UNIT, ("one", units)))


def test_prompts_of_any_length_are_pulled_whole(pair: Pair) -> None:
    for tokens in (2, STATES_UNIT - 1, STATES_UNIT, STATES_UNIT + 2, 1000):
        pair.assert_pulls_all(make_prompt(tokens, ("any", tokens)))


def test_prompts_at_once_have_the_bits_that_d_computes_alone(pair: Pair) -> None:
    assert_pull_at_once_exactly(
        pair, [exact_prompt(1 + number, STATES_UNIT, ("at once", number)) for number in range(4)]
    )
