"""Attention over paged KV caches and over plain tensors: operators of torch_npu and ATB, in torch for the CPU."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.support.ascend.host_kernels.dispatch import atb_operator, npu_operator

#: Sparse modes of the fused operator: causal ones, of which the last has a window.
_CAUSAL = (2, 3, 4)
_WINDOW = 4


def gather(cache: Tensor, table: Tensor, length: int, heads: int) -> Tensor:
    """The first ``length`` tokens of a request, [length, heads, head size]."""
    tokens = cache.shape[1]
    count = -(-length // tokens)
    size = cache[0, 0].numel() // heads
    return cache[table[:count].long()].reshape(count * tokens, heads, size)[:length]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of the last tokens, and the logarithm of the sum of exponentials, [new tokens, heads, 1].

    ``q`` [new tokens, heads, size], ``k`` and ``v`` [tokens, KV heads, size].
    """
    q, k, v = (x.transpose(0, 1).float() for x in (q, k, v))
    new, total = q.shape[1], k.shape[1]
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], 0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * scale
    if causal:
        row, column = torch.arange(new)[:, None] + (total - new), torch.arange(total)[None]
        hidden = column > row
        if window is not None:
            hidden |= column <= row - window  # as vLLM counts; whether CANN's band has one token more is not verified
        scores = scores.masked_fill(hidden, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1), scores.logsumexp(-1).transpose(0, 1).unsqueeze(-1)


@npu_operator
def npu_fused_infer_attention_score(
    query: Tensor, key: Tensor, value: Tensor,
    *, atten_mask: Tensor | None = None, actual_seq_lengths: Sequence[int] = (),
    actual_seq_lengths_kv: Sequence[int] = (), block_table: Tensor | None = None, query_rope: Tensor | None = None,
    key_rope: Tensor | None = None, num_heads: int = 1, scale: float = 1.0, pre_tokens: int = 2147483647,
    input_layout: str = "BSH", num_key_value_heads: int = 0, sparse_mode: int = 0, softmax_lse_flag: bool = False,
    **_others: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Layout TND only, [tokens of all requests, heads, size]."""
    assert input_layout == "TND", input_layout
    heads = num_key_value_heads or num_heads
    if query_rope is not None and key_rope is not None:
        assert block_table is None
        query, key = torch.cat((query, query_rope), -1), torch.cat((key, key_rope), -1)
    if key.dim() == 4:  # [blocks, heads, tokens of a block, size]; otherwise a token's heads are one axis
        key, value = (cache.transpose(1, 2).flatten(2) for cache in (key, value))
    size = value.shape[-1] // heads if block_table is not None else value.shape[-1]
    out = torch.zeros(query.shape[0], num_heads, size, dtype=query.dtype)
    sums = torch.zeros(query.shape[0], num_heads, 1)
    start = kv_start = 0
    for request, end in enumerate(map(int, actual_seq_lengths)):
        if end > start:
            if block_table is not None:
                length = int(actual_seq_lengths_kv[request])
                k, v = (gather(cache, block_table[request], length, heads) for cache in (key, value))
            else:
                kv_end = int((actual_seq_lengths_kv or actual_seq_lengths)[request])
                k, v = key[kv_start:kv_end], value[kv_start:kv_end]
                kv_start = kv_end
            window = pre_tokens if sparse_mode == _WINDOW else None
            attended, total = _attend(query[start:end], k, v, scale, causal=sparse_mode in _CAUSAL, window=window)
            out[start:end], sums[start:end] = attended.to(query.dtype), total
        start = end
    return out, sums if softmax_lse_flag else torch.zeros(0)


@npu_operator
def npu_fused_infer_attention_score_v2(
    query: Tensor, key: Tensor, value: Tensor,
    *, query_rope: Tensor, key_rope: Tensor, actual_seq_kvlen: Sequence[int], block_table: Tensor,
    actual_seq_qlen: Sequence[int] | None = None, num_query_heads: int = 1, num_key_value_heads: int = 0,
    softmax_scale: float = 1.0, input_layout: str = "BSH", sparse_mode: int = 0, return_softmax_lse: bool = False,
    **_others: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Decoding over paged MLA caches, [blocks, 1, tokens of a block, size].

    One token a request (layout BNSD_NBSD, [requests, heads, 1, size]), or drafts behind it (TND_NTD, [tokens, heads,
    size], causal, ``actual_seq_qlen`` running totals); returns the heads first.
    """
    several = input_layout == "TND_NTD"
    assert (input_layout, sparse_mode) in (("BNSD_NBSD", 0), ("TND_NTD", 3)), (input_layout, sparse_mode)
    assert num_key_value_heads == 1
    assert not return_softmax_lse
    q = torch.cat((query, query_rope), -1)
    q = q if several else q[:, :, 0]
    ends = list(map(int, actual_seq_qlen or ())) if several else range(1, q.shape[0] + 1)
    out = torch.zeros(num_query_heads, q.shape[0], value.shape[-1], dtype=query.dtype)
    start = 0
    for request, end in enumerate(ends):
        length = int(actual_seq_kvlen[request])
        if end > start and length:
            parts = (key, key_rope, value)
            k, rope, v = (gather(part.transpose(1, 2), block_table[request], length, 1) for part in parts)
            attended, _ = _attend(q[start:end], torch.cat((k, rope), -1), v, softmax_scale, causal=several)
            out[:, start:end] = attended.transpose(0, 1).to(query.dtype)
        start = end
    return out if several else out.unsqueeze(2), torch.zeros(0)


@npu_operator
def npu_attention_update(lse: Sequence[Tensor], local_out: Sequence[Tensor], update_type: int) -> tuple[Tensor, Tensor]:
    """Joins attention over parts of the context: ``lse`` [rows] and ``local_out`` [rows, size] of each part."""
    total = torch.stack(tuple(lse)).logsumexp(0)
    weighted = ((part - total).exp().unsqueeze(-1) * out for part, out in zip(lse, local_out, strict=True))
    return sum(weighted, torch.zeros(())).to(local_out[0].dtype), total


@atb_operator
def _npu_paged_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, num_kv_heads: int, num_heads: int, scale_value: float,
    block_table: Tensor, context_lens: Tensor, out: Tensor, *, workspace: Tensor | None = None,
) -> None:  # fmt: skip
    for request, length in enumerate(context_lens.tolist()):
        k, v = (gather(c.flatten(2), block_table[request], length, num_kv_heads) for c in (key_cache, value_cache))
        q = query[request : request + 1].view(1, num_heads, -1)
        rows = out.view(query.shape[0], num_heads, -1)[request : request + 1]
        rows.copy_(_attend(q, k, v, scale_value, causal=False)[0].to(out.dtype))
