"""What the connector reads from vLLM's requests and the blocks they are given."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request


def adapter(request: "Request") -> str:
    """Return the name and path of a request's LoRA adapter, which tell it from others here; empty without one."""
    lora = request.lora_request
    return f"{lora.lora_name} ({lora.lora_path})" if lora else ""


def traceparent(request: "Request") -> str:
    """Return the trace context of a request, as W3C's header has it; empty if it has none, or vLLM's tracing is off."""
    return str((request.trace_headers or {}).get("traceparent", ""))


def is_placeholder(request: "Request") -> bool:
    """Return whether a request stands for one that the API server rejected, and is aborted right after its arrival."""
    return bool(getattr(request, "abort_immediately", False))


def is_later_choice(request_id: str) -> bool:
    """Return whether a request is one of several choices (``n``) of a client's request, and not the first of them.

    vLLM makes a request of each: ``0_ID``, ``1_ID`` and so on, which it adds in this order, each to any of its
    data-parallel engines. No other request's id begins with a number and an underscore.
    """
    index, underscore, _ = request_id.partition("_")
    return bool(underscore and index.isdecimal() and index.strip("0"))


def computes_whole_prompt(request: "Request") -> bool:
    """Return whether a request's answer comes of computing every token of its prompt, so that none may be brought.

    So it is with log-probabilities of the prompt and with all of its hidden states. vLLM finds nothing in its own
    prefix cache for such a request, but until 0.31 it takes what a connector offers: the answer then has memory that
    nobody has written. A streaming session's parameters change, and the mark that vLLM derives of the first stays.
    """
    asked = (getattr(request.sampling_params, name, None) for name in ("prompt_logprobs", "prompt_logprob_token_ids"))
    return bool(request.skip_reading_prefix_cache) or any(each is not None for each in asked)


def is_told_by_tokens(request: "Request") -> bool:
    """Return whether a prompt whose tokens are equal on two engines is the same there.

    Not with embeddings, nor with images and the like: a client may give two of them one name (``uuid``), and each
    engine has in its cache what came first.
    """
    return getattr(request, "prompt_embeds", None) is None and not getattr(request, "mm_features", None)


def lacks_data(feature: "MultiModalFeatureSpec") -> bool:
    """Return whether of an image or the like only its shape and hash have come: no encoder can compute it.

    vLLM's models keep on the CPU what tells shapes, and nothing that an encoder works on.
    """
    parts: Any = feature.data  # a dictionary of tensors, each with what vLLM does with it
    return parts is None or all(each.field.keep_on_cpu for each in parts.values())


def is_session(request: "Request") -> bool:
    """Return whether a client may go on with a request's prompt behind its answer (streaming input)."""
    return bool(request.resumable)


def leave_last_token(request: "Request", hash_tokens: int) -> bool:
    """Take the last token off the prompt of a request that has just come, whose answer then has one token.

    Returns False, and changes nothing, if there is no other token, if the last one is of an image or the like, or if
    more tokens may follow it.

    ``hash_tokens``: tokens of the blocks that vLLM hashes.
    """
    tokens = request.num_prompt_tokens
    if tokens < 2 or request.num_computed_tokens or ends_with_media(request) or is_session(request):
        return False
    if request.prompt_token_ids is not None:  # without a process of its own, the engine shares it with the client
        request.prompt_token_ids = request.prompt_token_ids[:-1]
    if getattr(request, "prompt_is_token_ids", None) is not None:
        request.prompt_is_token_ids = request.prompt_is_token_ids[:-1]
    if request.prompt_embeds is not None:
        request.prompt_embeds = request.prompt_embeds[:-1]
    del request._all_token_ids[-1:]
    request.num_prompt_tokens = tokens - 1
    request.max_tokens = 1
    del request.block_hashes[(tokens - 1) // hash_tokens :]
    return True


def answer_with(request: "Request", token: int) -> None:
    """Have a request that has just come sample this token only. Its sampling parameters may be a client's."""
    request.sampling_params = request.sampling_params.clone()
    request.sampling_params.allowed_token_ids = [token]
    request.sampling_params.min_tokens = 0  # it may be one that ends a text


def ends_with_media(request: "Request") -> bool:
    """Return whether the last token of a prompt is of an image or the like, so that it cannot be left to another."""
    media = (each.mm_position for each in getattr(request, "mm_features", None) or ())
    return any(each.offset + each.length >= request.num_prompt_tokens for each in media)


def prefill_is_complete(request: "Request") -> bool:
    """Return whether a finished request has sampled a token, so that its whole prompt is in the cache."""
    from vllm.v1.request import RequestStatus  # noqa: PLC0415  the doctor grants leases without vLLM

    return request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


def tokens_under_way(request: "Request") -> int | None:
    """Return how many tokens of a request steps work on whose output vLLM has not taken; None if it does not count.

    The step that is being scheduled is not counted. vLLM counts since 0.30, vllm-ascend since 0.23.
    """
    number = getattr(request, "num_in_flight_tokens", None)
    return None if number is None else int(number)


def block_ids_by_group(blocks: "KVCacheBlocks") -> tuple[tuple[int, ...], ...]:
    """Return the block table of each cache group; 0 is vLLM's null block, which holds nothing."""
    return tuple(tuple(ids) for ids in blocks.get_block_ids())


def block_ids_to_fill(blocks: "KVCacheBlocks") -> tuple[int, ...]:
    """Return the blocks of a waiting request, of all cache groups, into which tokens will arrive.

    Its other blocks are found by their contents, and perhaps other requests' as well.
    """
    return tuple(
        int(block.block_id)
        for group in blocks.blocks
        for block in group
        if block.block_hash is None and not block.is_null
    )
