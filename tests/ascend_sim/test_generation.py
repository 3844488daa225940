"""vllm-ascend's answers on simulated NPUs are those of Transformers on the CPU: the simulation computes.

DeepSeek-V2 is left out: vllm-ascend converts MLA's prefill to bfloat16, whatever the model's type.
"""

import pytest

from tests.support.ascend.paths import ascend_release
from tests.support.ascend.reference import transformers_answers
from tests.support.ascend.servers import NPU_INDEXER, NPU_SLIDING_WINDOW, ONE_RANK, SEVERAL_RANKS
from tests.support.e2e.architectures import SELECTED
from tests.support.e2e.cluster import Server
from tests.support.e2e.deployments import on
from tests.support.e2e.pair import make_prompt


def assert_answers_right(server: Server, *lengths: int) -> None:
    prompts = [make_prompt(tokens, ("generation", tokens)) for tokens in lengths or (35, 200, 700)]
    said = [list(server.client.compute(prompt, 12).tokens) for prompt in prompts]
    assert said == transformers_answers(server.model, prompts, 12)


@pytest.mark.ascend_short
@on(ONE_RANK)
@pytest.mark.parametrize("server", ["P"], indirect=True)
def test_one_rank(server: Server) -> None:
    assert_answers_right(server)


@on(SEVERAL_RANKS)
@pytest.mark.parametrize("server", ["TP2"], indirect=True)
def test_two_ranks(server: Server) -> None:
    assert_answers_right(server)


@on(NPU_SLIDING_WINDOW)
@pytest.mark.parametrize("server", ["TP1"], indirect=True)
def test_sliding_windows(server: Server) -> None:
    assert_answers_right(server)


@pytest.mark.skipif(ascend_release() == "0.23", reason="vllm-ascend 0.23 calls other operators for it")
@on(NPU_INDEXER)
@pytest.mark.parametrize("server", ["TP2"], indirect=True)
def test_sparse_attention(server: Server) -> None:
    """Of a prompt that its indexer selects from, and of one that it takes whole."""
    assert_answers_right(server, 35, SELECTED + 400)
