"""The test models' output depends on every block of the prompt: without this, equal tokens would prove nothing."""

import pytest

from tests.support.e2e.architectures import VOCABULARY
from tests.support.e2e.client import LOGPROB_TOLERANCE
from tests.support.e2e.cluster import BLOCK_SIZE, Server
from tests.support.e2e.deployments import MIXED, MLA, ONE_KV_HEAD, SLIDING_WINDOW, on
from tests.support.e2e.pair import make_prompt

pytestmark = [pytest.mark.equality, on(MIXED, SLIDING_WINDOW, MLA, ONE_KV_HEAD)]

#: Of so many blocks one is changed, the first included. Prompts of other architectures take longer to compute.
STEP = {"qwen3": 4, "gemma3": 8, "deepseek_v2": 8}


@pytest.fixture
def server(servers: dict[str, Server]) -> Server:
    """One that has one worker."""
    return next(server for server in servers.values() if server.spec.tensor_parallel == 1)


def test_one_changed_token_in_any_block_changes_the_output(server: Server) -> None:
    step = STEP[server.spec.model.architecture] * BLOCK_SIZE
    prompt = make_prompt(1000, "sensitive")
    expected = server.client.compute(prompt)
    differences, changed_tokens = [], 0
    for position in range(BLOCK_SIZE // 2, len(prompt), step):
        other = list(prompt)
        other[position] = (other[position] + 1) % VOCABULARY
        completion = server.client.compute(other)
        differences.append(completion.logprob_difference(expected))
        changed_tokens += completion.tokens != expected.tokens
    assert min(differences) > 5 * LOGPROB_TOLERANCE, differences
    assert changed_tokens > len(differences) / 2


def test_the_output_does_not_fall_into_repetition(server: Server) -> None:
    completion = server.client.compute(make_prompt(33, "varied"), max_tokens=80)
    assert len(set(completion.tokens)) > 40


def test_the_reference_repeats_exactly(server: Server) -> None:
    prompt = make_prompt(1000, "repeatable")
    first, second = server.client.compute(prompt), server.client.compute(prompt)
    assert (first.tokens, first.logprobs) == (second.tokens, second.logprobs)
