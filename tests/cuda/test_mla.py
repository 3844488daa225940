"""One latent vector a token for all heads (MLA)."""

import pytest

from tests.support.e2e.cuda_deployments import CUDA_MLA, UNIT
from tests.support.e2e.deployments import on
from tests.support.e2e.exact import assert_pull_at_once_exactly, assert_pulls_exactly, exact_prompt
from tests.support.e2e.pair import Pair

pytestmark = [on(CUDA_MLA), pytest.mark.parametrize("pair", [("P", "D")], indirect=True, ids="-".join)]


@pytest.mark.parametrize("units", [1, 2, 3, 20])
def test_a_pulled_prompt_has_the_bits_that_d_computes_alone(pair: Pair, units: int) -> None:
    assert_pulls_exactly(pair, exact_prompt(units, UNIT, ("one", units)))


def test_prompts_at_once_have_the_bits_that_d_computes_alone(pair: Pair) -> None:
    assert_pull_at_once_exactly(pair, [exact_prompt(1 + 2 * number, UNIT, ("at once", number)) for number in range(6)])
