"""What is read of vLLM's requests: which of them are computed, and which only stand for one."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from pd_connector.vllm.requests import block_ids_by_group, is_placeholder, prefill_is_complete

PROMPT = [5, 6, 7]


def a_request(**options: Any) -> Request:
    return Request("r", PROMPT, SamplingParams(max_tokens=1), None, **options)


@pytest.mark.parametrize("status", list(RequestStatus))
def test_a_prefill_is_complete_when_its_answer_is(status: RequestStatus) -> None:
    request = a_request()
    request.status = status
    complete = {RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED}
    assert prefill_is_complete(request) == (status in complete)


def test_a_request_that_the_api_server_has_rejected_is_a_placeholder() -> None:
    assert is_placeholder(a_request(abort_immediately=True))
    assert not is_placeholder(a_request())


def test_block_tables_are_those_of_all_groups_the_null_block_too() -> None:
    blocks: Any = SimpleNamespace(get_block_ids=lambda: ([3, 1], [0, 0, 8], []))
    assert block_ids_by_group(blocks) == ((3, 1), (0, 0, 8), ())
