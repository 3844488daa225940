"""MiniMax-M3's sparse attention, in torch for the CPU: an indexer selects the blocks that a query attends to.

As vllm-ascend calls its operators MsaIndexScore and SparseAttentionScore: queries of all requests one after the other,
caches in pages [blocks, tokens of a block, heads, size], and a causal mask that ends with each request's last token.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.support.ascend.host_kernels.attention import gather

#: Scores of a query come in multiples of so many blocks.
_ALIGNED = 16
_CAUSAL = 3


def _width(block_table: Tensor) -> int:
    return -(-int(block_table.shape[1]) // _ALIGNED) * _ALIGNED


def _positions(new: int, length: int) -> Tensor:
    """Where a request's last ``new`` tokens are, of ``length``."""
    return torch.arange(length - new, length)


def npu_msa_index_score(
    query: Tensor, key: Tensor, block_table: Tensor, start_loc: Tensor,
    *, scale: Tensor | None = None, atten_mask: Tensor | None = None, actual_seq_qlen: Tensor, actual_seq_klen: Tensor,
    layout_key: str = "BBND", sparse_mode: int = _CAUSAL, init_blocks: int = 0, local_blocks: int = 0,
) -> Tensor:  # fmt: skip
    """The best product of a query with any key of a block that it sees, [heads, tokens, blocks].

    ``query`` [tokens, heads, size], ``key`` a paged cache of one head; ``actual_seq_qlen`` are running totals that
    begin with 0. Without a mask, whoever calls has cut off what follows a query's token.
    """
    assert (layout_key, scale, init_blocks, local_blocks) == ("BBND", None, 0, 0)
    block = key.shape[1]
    scores = torch.full((query.shape[1], query.shape[0], _width(block_table) * block), float("-inf"))
    ends = actual_seq_qlen.tolist()
    for request, length in enumerate(actual_seq_klen.tolist()):
        rows = slice(ends[request], ends[request + 1])
        if length > 0 and rows.start < rows.stop:
            keys = gather(key, block_table[request], length, 1)[:, 0].float()
            found = query[rows].float().transpose(0, 1) @ keys.T
            if sparse_mode == _CAUSAL:
                hidden = torch.arange(length)[None] > _positions(rows.stop - rows.start, length)[:, None]
                found = found.masked_fill(hidden, float("-inf"))
            scores[:, rows, :length] = found
    return scores.unflatten(-1, (-1, block)).amax(-1)


def shapes_of_index_score(query: Tensor, key: Tensor, block_table: Tensor, *_args: object, **_others: object) -> Tensor:
    return query.new_empty((query.shape[1], query.shape[0], _width(block_table)), dtype=torch.float32)


def _seen(selected: Tensor, length: int, block: int) -> Tensor:
    """What queries see of a request's tokens, [queries, length], whose last ones they are: their blocks, causally."""
    new = selected.shape[0]
    blocks = torch.zeros(new, -(-length // block) + 1, dtype=torch.bool)
    blocks.scatter_(1, selected.long().masked_fill(selected < 0, blocks.shape[1] - 1), value=True)
    seen = blocks[:, :-1].repeat_interleave(block, 1)[:, :length]
    return seen & (torch.arange(length)[None] <= _positions(new, length)[:, None])


def _requests(queries: Tensor, keys: Tensor) -> Iterator[tuple[int, slice, int]]:
    """Each request that has queries: its number, where they are, and how many tokens its cache holds."""
    start = 0
    for request, (new, length) in enumerate(zip(queries.tolist(), keys.tolist(), strict=True)):
        if new:
            yield request, slice(start, start + new), length
        start += new


def npu_sparse_attention_score(
    query: Tensor, key: Tensor, value: Tensor, select_idx: Tensor, block_table: Tensor,
    *, actual_seq_lengths: Tensor, actual_seq_lengths_kv: Tensor, num_key_value_heads: int = 1,
    scale_value: float = 1.0, block_size: int = 128, q_dequant_scale: Tensor | None = None,
    k_dequant_scale: Tensor | None = None, v_dequant_scale: Tensor | None = None,
    attention_out_dtype: torch.dtype | None = None, **_others: Any,
) -> Tensor:  # fmt: skip
    """Attention to the blocks ``select_idx`` [KV heads, tokens, selected]; negative ones are none.

    All may be in fp8, each with one scale, which is 1.
    """
    for scale in (q_dequant_scale, k_dequant_scale, v_dequant_scale):
        assert scale is None or scale.flatten().tolist() == [1.0]
    assert key.shape[1:3] == (block_size, num_key_value_heads), key.shape
    shared = query.shape[1] // num_key_value_heads
    out = torch.zeros_like(query, dtype=attention_out_dtype or query.dtype)
    for request, rows, length in _requests(actual_seq_lengths, actual_seq_lengths_kv):
        k, v = (gather(cache, block_table[request], length, num_key_value_heads).float() for cache in (key, value))
        for head in range(num_key_value_heads):
            heads = slice(head * shared, (head + 1) * shared)
            logits = scale_value * query[rows, heads].float() @ k[:, head].T  # [queries, heads, tokens]
            hidden = ~_seen(select_idx[head, rows], length, block_size)
            weights = logits.masked_fill(hidden[:, None], float("-inf")).softmax(-1)
            out[rows, heads] = (weights @ v[:, head]).to(out.dtype)
    return out


def shapes_of_sparse_attention_score(
    query: Tensor, *_args: object, attention_out_dtype: torch.dtype | None = None, **_others: object
) -> Tensor:
    return torch.empty_like(query, dtype=attention_out_dtype or query.dtype)
