"""Sides that differ where they may, and half precision."""

import pytest

from tests.e2e.deployments import MIXED
from tests.e2e.pair import Pair, make_prompt

pytestmark = [
    pytest.mark.slow,
    pytest.mark.parametrize("deployment", [MIXED], indirect=True, ids=lambda one: one.name),
]

#: bfloat16 keeps 8 bits: the same sum in another order differs in the second decimal of a logprob.
BFLOAT16_TOLERANCE = 0.25


@pytest.mark.parametrize("pair", [("P LBHNC", "D BHLNC")], indirect=True, ids="-".join)
@pytest.mark.parametrize("tokens", [31, 33, 1000])
def test_another_physical_layout_gives_the_same_output(pair: Pair, tokens: int) -> None:
    prompt = make_prompt(tokens, "layouts")
    pair.assert_right(pair.disaggregate(prompt), prompt)


@pytest.mark.parametrize("pair", [("P bfloat16", "D bfloat16")], indirect=True, ids="-".join)
@pytest.mark.parametrize("tokens", [31, 33, 1000])
def test_half_precision_is_right_but_for_rounding(pair: Pair, tokens: int) -> None:
    prompt = make_prompt(tokens, ("half", tokens))
    with pair.traffic() as traffic:
        completion = pair.disaggregate(prompt)
    assert traffic.source("external_kv_transfer") == tokens - 1
    assert completion.logprob_difference(pair.decode.client.compute(prompt)) < BFLOAT16_TOLERANCE
