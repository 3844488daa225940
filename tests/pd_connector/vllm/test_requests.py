"""What is read of vLLM's requests: which of them are computed, and which only stand for one."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.multimodal.cache import ShmObjectStoreSenderCache
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.request import Request, RequestStatus

from pd_connector.vllm.requests import (
    block_ids_by_group,
    computes_whole_prompt,
    is_later_choice,
    is_placeholder,
    lacks_data,
    leave_last_token,
    prefill_is_complete,
)
from tests.support.releases import since

PROMPT = [5, 6, 7]
#: vLLM hashes every two tokens in these tests.
HASHED = 2

init_none_hash(sha256_cbor)


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


def a_hashed_request(tokens: int, max_tokens: int = 9, **options: Any) -> Request:
    hasher = get_request_block_hasher(HASHED, sha256_cbor)
    return Request(
        "r", list(range(tokens)), SamplingParams(max_tokens=max_tokens), None, block_hasher=hasher, **options
    )


@pytest.mark.parametrize("tokens", [2, 3, 8, 9])
def test_a_prompt_without_its_last_token_is_what_a_shorter_one_is(tokens: int) -> None:
    request, shorter = a_hashed_request(tokens), a_hashed_request(tokens - 1, 1)
    assert leave_last_token(request, HASHED)
    names = ("num_prompt_tokens", "num_tokens", "max_tokens", "prompt_token_ids", "block_hashes")
    assert [getattr(request, name) for name in names] == [getattr(shorter, name) for name in names]
    for each in (request, shorter):
        each.append_output_token_ids(77)
    assert list(request.all_token_ids) == list(shorter.all_token_ids)
    assert request.block_hashes == shorter.block_hashes


def test_choices_that_share_a_prompt_with_their_client_are_cut_alike() -> None:
    """As in an engine without a process of its own: vLLM's request keeps the list that it is given."""
    prompt = [1, 2, 3, 4]
    for _ in range(2):
        request = Request("r", prompt, SamplingParams(max_tokens=1), None)
        assert leave_last_token(request, HASHED)
        assert request.prompt_token_ids == [1, 2, 3]
    assert prompt == [1, 2, 3, 4]


def test_embeddings_of_a_prompt_are_cut_as_well() -> None:
    embedded = torch.arange(12.0).view(4, 3)
    request = Request("r", None, SamplingParams(max_tokens=1), None, prompt_embeds=embedded)
    assert leave_last_token(request, HASHED)
    assert (request.num_prompt_tokens, request.num_tokens) == (3, 3)
    assert torch.equal(request.prompt_embeds, embedded[:3])


def test_a_prompt_that_cannot_do_without_its_last_token_stays_whole() -> None:
    image = SimpleNamespace(mm_position=SimpleNamespace(offset=2, length=3))
    computed = a_hashed_request(5)
    computed.num_computed_tokens = 1
    with_image = a_hashed_request(5)
    with_image.mm_features = [image]
    for request in (a_hashed_request(1), with_image, computed, a_hashed_request(5, resumable=True)):
        before = request.num_prompt_tokens
        assert not leave_last_token(request, HASHED)
        assert (request.num_prompt_tokens, request.num_tokens, request.max_tokens) == (before, before, 9)
    behind = a_hashed_request(6)
    behind.mm_features = [image]
    assert leave_last_token(behind, HASHED)


@since((0, 30), "images without data on decode engines")
@pytest.mark.parametrize(("sent", "lacks"), [("image_grid_thw", True), ("image_grid_thw image_embeds", False)])
def test_images_of_which_only_the_shape_was_sent_lack_data(sent: str, lacks: bool) -> None:
    """As vLLM reads them for one of its models."""
    from vllm.model_executor.models.keye import KeyeMultiModalDataParser  # noqa: PLC0415  some seconds

    parts = {"image_grid_thw": torch.tensor([[1, 2, 2]]), "image_embeds": torch.ones(4, 8)}
    parser = KeyeMultiModalDataParser(allow_missing_mm_embeddings=True)
    (image,) = parser.parse_mm_data({"image": {name: parts[name] for name in sent.split()}})["image"]._kwargs["image"]
    place = PlaceholderRange(offset=0, length=4)
    assert lacks_data(MultiModalFeatureSpec(image, "image", "a picture", place)) is lacks
    assert lacks_data(MultiModalFeatureSpec(None, "image", "a picture", place))


@since((0, 32), "signatures of images in shared memory")
def test_images_that_workers_find_in_shared_memory_do_not_lack_data() -> None:
    cache: Any = SimpleNamespace()
    image = ShmObjectStoreSenderCache.address_as_item(cache, address=4096, monotonic_id=7, signature=[1])
    place = PlaceholderRange(offset=0, length=4)
    assert not lacks_data(MultiModalFeatureSpec(image, "image", "a picture", place))
