"""The test model's output depends on every block of the prompt: without this, equal tokens would prove nothing."""

import pytest

from tests.e2e.client import LOGPROB_TOLERANCE
from tests.e2e.cluster import BLOCK_SIZE
from tests.e2e.deployments import BHLNC
from tests.e2e.models import VOCABULARY
from tests.e2e.pair import Pair, make_prompt

pytestmark = [
    pytest.mark.parametrize("deployment", [BHLNC], indirect=True, ids=lambda one: one.name),
    pytest.mark.parametrize("pair", [("P1", "D1")], indirect=True, ids="-".join),
]


def test_one_changed_token_in_any_block_changes_the_output(pair: Pair) -> None:
    prompt = make_prompt(1000, "sensitive")
    expected = pair.decode.client.compute(prompt)
    differences, changed_tokens = [], 0
    for position in range(BLOCK_SIZE // 2, len(prompt), BLOCK_SIZE):
        other = list(prompt)
        other[position] = (other[position] + 1) % VOCABULARY
        completion = pair.decode.client.compute(other)
        differences.append(completion.logprob_difference(expected))
        changed_tokens += completion.tokens != expected.tokens
    assert min(differences) > 5 * LOGPROB_TOLERANCE, differences
    assert changed_tokens > len(differences) / 2


def test_the_output_does_not_fall_into_repetition(pair: Pair) -> None:
    completion = pair.decode.client.compute(make_prompt(33, "varied"), max_tokens=200)
    assert len(set(completion.tokens)) > 100


def test_the_reference_repeats_exactly(pair: Pair) -> None:
    prompt = make_prompt(1000, "repeatable")
    first, second = pair.decode.client.compute(prompt), pair.decode.client.compute(prompt)
    assert (first.tokens, first.logprobs) == (second.tokens, second.logprobs)
