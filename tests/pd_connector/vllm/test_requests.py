"""What is read of vLLM's requests: which of them are computed, and which only stand for one."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.request import Request, RequestStatus

from pd_connector.vllm.requests import (
    block_ids_by_group,
    computes_whole_prompt,
    is_later_choice,
    is_placeholder,
    prefill_is_complete,
)

PROMPT = [5, 6, 7]


def a_request(**options: Any) -> Request:
    return Request("r", PROMPT, SamplingParams(max_tokens=1), None, **options)


@pytest.mark.parametrize("status", list(RequestStatus))
def test_a_prefill_is_complete_when_its_answer_is(status: RequestStatus) -> None:
    request = a_request()
    request.status = status
    complete = {RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED}
    assert prefill_is_complete(request) == (status in complete)


@pytest.mark.parametrize(
    ("sampling", "pooling", "whole"),
    [
        (SamplingParams(), None, False),
        (SamplingParams(logprobs=5), None, False),
        (SamplingParams(prompt_logprobs=0), None, True),
        (SamplingParams(prompt_logprobs=0, skip_reading_prefix_cache=False), None, True),
        (SamplingParams(skip_reading_prefix_cache=True), None, True),
        (None, PoolingParams(task="embed", skip_reading_prefix_cache=False), False),
        (None, PoolingParams(task="token_embed", skip_reading_prefix_cache=True), True),
    ],
)
def test_what_comes_of_computing_the_whole_prompt(
    sampling: SamplingParams | None, pooling: PoolingParams | None, whole: bool
) -> None:
    assert computes_whole_prompt(Request("r", PROMPT, sampling, pooling)) is whole


def test_a_streaming_session_may_ask_for_its_prompts_computation_later() -> None:
    session = a_request(resumable=True)
    assert not computes_whole_prompt(session)
    session.sampling_params = SamplingParams(prompt_logprobs=1)  # as vLLM's scheduler takes the next chunk
    assert computes_whole_prompt(session)


def test_a_request_that_the_api_server_has_rejected_is_a_placeholder() -> None:
    assert is_placeholder(a_request(abort_immediately=True))
    assert not is_placeholder(a_request())


def test_the_choices_of_a_request_are_told_apart() -> None:
    """As vLLM names the requests that it makes of them."""
    params = SamplingParams(n=12)
    asked: Any = SimpleNamespace(
        request_id="cmpl-1_2-0-9f", external_req_id="cmpl-1_2-0", params=params, sampling_params=params
    )
    parent = ParentRequest(asked)
    choices = [parent.get_child_info(index)[0] for index in range(params.n)]
    assert [is_later_choice(choice) for choice in choices] == [False] + [True] * 11
    assert not any(map(is_later_choice, (asked.request_id, "chatcmpl-7", "0", "00_a", "_1", "", "1")))


def test_block_tables_are_those_of_all_groups_the_null_block_too() -> None:
    blocks: Any = SimpleNamespace(get_block_ids=lambda: ([3, 1], [0, 0, 8], []))
    assert block_ids_by_group(blocks) == ((3, 1), (0, 0, 8), ())
