"""What the connector reads from vLLM's requests and the blocks they are given."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request


def traceparent(request: "Request") -> str:
    """Return the trace context of a request, as W3C's header has it; empty if it has none, or vLLM's tracing is off."""
    return str((request.trace_headers or {}).get("traceparent", ""))


def is_placeholder(request: "Request") -> bool:
    """Return whether a request stands for one that the API server rejected, and is aborted right after its arrival."""
    return bool(getattr(request, "abort_immediately", False))


def prefill_is_complete(request: "Request") -> bool:
    """Return whether a finished request has sampled a token, so that its whole prompt is in the cache."""
    from vllm.v1.request import RequestStatus  # noqa: PLC0415  the doctor grants leases without vLLM

    return request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


def tokens_under_way(request: "Request") -> int | None:
    """Return how many tokens of a request steps work on whose output vLLM has not taken; None if it does not count.

    The step that is being scheduled is not counted. vLLM counts since 0.30.
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
