"""What a consumer pulls where vLLM keeps part of a prompt only: sliding windows, chunks, blocks of two sizes."""

from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec

from pd_connector.scheduler.decode.consumer import Consumer
from pd_connector.vllm.cache_specs import Retention, retention
from tests.support.connector.consumers import consumer_parts, layers_of
from tests.support.connector.kept_blocks import SIZES, leased_table, table_to_pull_into
from tests.support.connector.requests import RecordingClient, a_decode_request
from tests.support.releases import INSTALLED


@pytest.mark.parametrize(("tokens", "cut"), [(159, True), (158, False), (160, False), (100, False)])
def test_a_window_that_the_prefill_engine_has_cut_short_is_computed_here(tokens: int, cut: bool) -> None:
    """Window 128, blocks of 32: the token after 159 prompt tokens does not see block 0, the last of them does.

    An engine that has gone on after the prompt has freed it.
    """
    client = RecordingClient()
    consumer = Consumer(*consumer_parts(client, retentions=[Retention(32), Retention(32, window=128)]))
    let_go = max(tokens + 1 - 128, 0) // 32
    held = range(1, -(-tokens // 32) + 1)
    windowed = tuple(0 if block <= let_go else block for block in held)
    request = a_decode_request(
        "r", tokens, lease_id="L", remote_block_ids=(tuple(held), windowed), remote_layers=layers_of(2)
    )
    consumer.add(request)
    assert consumer.missing_tokens(request, 0) == (0 if cut else tokens - 1)


@pytest.mark.parametrize(
    ("ours", "theirs", "tokens", "cut"),
    [(64, 32, 200, False), (64, 32, 190, True), (32, 64, 200, False), (32, 64, 191, True), (32, 32, 190, False)],
)
def test_where_a_window_is_cut_depends_on_the_blocks_of_both_engines(
    ours: int, theirs: int, tokens: int, cut: bool
) -> None:
    """Window 128: with blocks of 64 here, token 190 needs block 0, of which blocks of 32 there keep the end only."""
    client = RecordingClient()
    consumer = Consumer(*consumer_parts(client, retentions=[Retention(ours, window=128)]))
    let_go = (tokens + 1 - 128) // theirs
    table = tuple(block if block > let_go else 0 for block in range(1, -(-tokens // theirs) + 1))
    changes = {"remote_block_ids": (table,), "remote_block_sizes": (theirs,)}
    request = a_decode_request("r", tokens, lease_id="L", **changes)
    consumer.add(request)
    assert consumer.missing_tokens(request, 0) == (0 if cut else tokens - 1)


RETAINED: dict[str, Any] = {"extra_retained_tokens": 3} if INSTALLED >= (0, 30) else {}
ATTENTION: list[Callable[[int], Any]] = [
    lambda tokens: FullAttentionSpec(block_size=tokens, **SIZES),
    lambda tokens: SlidingWindowSpec(block_size=tokens, sliding_window=40, **SIZES),
    lambda tokens: SlidingWindowSpec(block_size=tokens, sliding_window=40, **RETAINED, **SIZES),
    lambda tokens: ChunkedLocalAttentionSpec(block_size=tokens, attention_chunk_size=64, **SIZES),
    lambda tokens: ChunkedLocalAttentionSpec(block_size=tokens, attention_chunk_size=48, **SIZES),
]


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize(("ours", "theirs"), [(16, 16), (32, 16), (16, 32)])
def test_a_prompt_is_pulled_if_and_only_if_vllm_has_kept_all_that_is_needed_here(
    attention: Callable[[int], Any], ours: int, theirs: int
) -> None:
    """What the prefill engine leases of the prompt against what vLLM gives the decode engine blocks for.

    With blocks that are no larger here, all that is needed is there.
    """
    pulled = 0
    for tokens in range(2, 200):
        held, given = leased_table(attention(theirs), tokens), table_to_pull_into(attention(ours), tokens - 1)
        is_held = all(held[token // theirs] for token in range(tokens - 1) if given[token // ours])
        client = RecordingClient()
        consumer = Consumer(*consumer_parts(client, retentions=[retention(attention(ours))]))
        changes = {"remote_block_ids": (held,), "remote_block_sizes": (theirs,)}
        request = a_decode_request("r", tokens, lease_id="L", **changes)
        consumer.add(request)
        assert consumer.missing_tokens(request, 0) == (tokens - 1 if is_held else 0), tokens
        assert is_held or ours > theirs, tokens
        pulled += is_held
    assert pulled > 50
