"""Sparse attention over quantised caches, in torch for the CPU: quantisation, writing, the indexer, attention.

As CANN documents DynamicQuant, DynamicBlockQuant and LightningIndexerQuant, and as the sources of vllm-ascend's own
operators compute: everything else is as in ``sparse_attention``.
"""

from typing import Any

import torch
from torch import Tensor

from tests.support.ascend.host_kernels.attention import gather
from tests.support.ascend.host_kernels.dispatch import NPU, npu_operator
from tests.support.ascend.host_kernels.sparse_attention import (
    CAUSAL,
    NOTHING,
    Attended,
    requests_of,
    seen_tokens,
    select_tokens,
    shapes_of_attended,
)

#: By PyTorch's numbers of types: int8, which it is if none is named, and fp8.
_TYPES = {None: torch.int8, 1: torch.int8, 24: torch.float8_e4m3fn}
#: What the largest item of a row becomes.
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
#: The mode of quantisation in which each tile of a row has its scale.
_PER_TILE = 2


def _quantised(x: Tensor, type_number: int | None) -> tuple[Tensor, Tensor]:
    """``x`` [..., size] in that type, and the scales [..., 1] by which it is to be multiplied; zeros stay zeros."""
    dtype = _TYPES[type_number]
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True) / _LARGEST[dtype]
    scaled = wide / scale.clamp_min(torch.finfo(torch.float32).tiny)
    return (scaled if dtype.is_floating_point else scaled.round()).to(dtype), scale


@npu_operator
def npu_dynamic_quant(
    x: Tensor, *, smooth_scales: Tensor | None = None, group_index: Tensor | None = None, dst_type: int | None = None,
    quant_mode: str = "pertoken", dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A scale for each row: [..., size] and [...]."""
    assert (smooth_scales, group_index, quant_mode) == (None, None, "pertoken")
    values, scales = _quantised(x, dst_type)
    return values, scales.squeeze(-1)


@npu_operator
def npu_dynamic_block_quant(
    x: Tensor, *, min_scale: float = 0.0, round_mode: str = "rint", dst_type: int = 1, row_block_size: int = 1,
    col_block_size: int = 128, dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A scale for each ``col_block_size`` items of a row: [..., size] and [..., tiles]."""
    assert (min_scale, round_mode, row_block_size) == (0.0, "rint", 1)
    values, scales = _quantised(x.unflatten(-1, (-1, col_block_size)), dst_type)
    return values.flatten(-2), scales.squeeze(-1)


def store_kv_block_metadata(
    slots: Tensor, group_len: Tensor, group_key_idx: Tensor, group_key_cache_idx: Tensor, block_size: int = 0
) -> None:
    """Write the runs of slots that follow each other in one block: lengths, first tokens, first slots; then zeros.

    A negative slot is none.
    """
    runs: list[list[int]] = []
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        if runs and runs[-1][1] + runs[-1][0] == token and runs[-1][2] + runs[-1][0] == slot and slot % block_size:
            runs[-1][0] += 1
        else:
            runs.append([1, token, slot])
    columns = torch.zeros(len(group_len), 3, dtype=group_len.dtype)
    columns[: len(runs)] = torch.tensor(runs, dtype=group_len.dtype).view(-1, 3)
    for out, column in zip((group_len, group_key_idx, group_key_cache_idx), columns.unbind(1), strict=True):
        out.copy_(column)


def store_kv_block(
    key: Tensor, cache: Tensor, group_len: Tensor, group_key_idx: Tensor, group_key_cache_idx: Tensor,
    block_size: int = 0,
) -> None:  # fmt: skip
    """Write the runs of ``key`` [tokens, ...] into a paged cache [blocks, tokens of a block, ...]."""
    rows = cache.view(-1, key[0].numel())
    groups = zip(group_len.tolist(), group_key_idx.tolist(), group_key_cache_idx.tolist(), strict=True)
    for length, token, slot in groups:
        if length > 0:
            rows[slot : slot + length] = key[token : token + length].flatten(1)


def npu_lightning_indexer_quant(
    query: Tensor, key: Tensor, weights: Tensor, query_dequant_scale: Tensor, key_dequant_scale: Tensor,
    query_quant_mode: int = 0, key_quant_mode: int = 0,
    *, actual_seq_lengths_query: Tensor, actual_seq_lengths_key: Tensor, block_table: Tensor,
    layout_query: str = "BSND", layout_key: str = "BSND", sparse_count: int = 2048, sparse_mode: int = CAUSAL,
    query_dtype: int | None = None, key_dtype: int | None = None, **_others: int,
) -> Tensor:  # fmt: skip
    """The indices that ``npu_lightning_indexer`` gives, of quantised queries and keys.

    ``query_dequant_scale`` [tokens, heads], ``key_dequant_scale`` [blocks, tokens of a block, 1].
    """
    assert (layout_query, layout_key, sparse_mode) == ("TND", "PA_BSND", CAUSAL)
    assert (query_quant_mode, key_quant_mode, query_dtype, key_dtype) == (0, 0, None, None)
    indices = torch.full((query.shape[0], 1, sparse_count), NOTHING, dtype=torch.int32)
    for request, rows, length in requests_of(actual_seq_lengths_query, actual_seq_lengths_key):
        keys, scales = (gather(c, block_table[request], length, 1)[:, 0].float() for c in (key, key_dequant_scale))
        scores = index_scores(query[rows], query_dequant_scale[rows], weights[rows], keys)
        indices[rows, 0] = select_tokens(scores * scales.t(), sparse_count)
    return indices


def index_scores(query: Tensor, query_scales: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """How much each query wants each of ``keys`` [keys, size], but for the scales of these, [queries, keys].

    ``query`` [queries, heads, size], ``query_scales`` and ``weights`` [queries, heads].
    """
    scores = torch.zeros(query.shape[0], keys.shape[0])
    for head in range(query.shape[1]):
        products = (query[:, head].float() @ keys.t()).relu_() * query_scales[:, head, None].float()
        scores += products * weights[:, head, None].float()
    return scores


# What vllm-ascend calls for it on devices that know fp8.
NPU.define(npu_lightning_indexer_quant, name="npu_quant_lightning_indexer")


def shapes_of_lightning_indexer_quant(
    query: Tensor, *_args: object, sparse_count: int = 2048, **_others: object
) -> Tensor:
    return query.new_empty((query.shape[0], 1, sparse_count), dtype=torch.int32)


def npu_kv_quant_sparse_flash_attention_vllm(
    query: Tensor, key: Tensor, value: Tensor, sparse_indices: Tensor, scale_value: float,
    *, actual_seq_lengths_query: Tensor, actual_seq_lengths_kv: Tensor, block_table: Tensor, key_quant_mode: int = 1,
    value_quant_mode: int = 1, key_dequant_scale: Tensor | None = None, value_dequant_scale: Tensor | None = None,
    sparse_block_size: int = 1, layout_query: str = "BSND", layout_kv: str = "BSND", sparse_mode: int = CAUSAL,
    pre_tokens: int = 0, next_tokens: int = 0, attention_mode: int = 2, quant_scale_repo_mode: int = 1,
    tile_size: int = 128, rope_head_dim: int = 64, return_softmax_lse: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``npu_sparse_flash_attention`` over rows of bytes, each of which holds its scales.

    ``query`` [tokens, heads, latent + rotary size], ``key`` a paged cache of the rows that ``_unpack`` reads.
    """
    assert (layout_query, layout_kv, sparse_block_size, attention_mode) == ("TND", "PA_BSND", 1, 2)
    assert (key_quant_mode, value_quant_mode, quant_scale_repo_mode) == (_PER_TILE, _PER_TILE, 1)
    latent = query.shape[-1] - rope_head_dim
    attended = Attended(query[..., :latent])
    for request, rows, length in requests_of(actual_seq_lengths_query, actual_seq_lengths_kv):
        held = gather(key, block_table[request], length, 1)[:, 0]
        latents, turned = _unpack(held, latent, rope_head_dim, tile_size, query.dtype)
        seen = seen_tokens(sparse_indices[rows, 0], length, sparse_mode)
        q, q_rope = query[rows].split([latent, rope_head_dim], -1)
        attended.attend(rows, q, q_rope, latents, turned, seen, scale_value)
    return attended.results(with_sums=return_softmax_lse)


@npu_operator
def npu_kv_quant_sparse_flash_attention(
    query: Tensor, key: Tensor, value: Tensor, sparse_indices: Tensor, scale_value: float, key_quant_mode: int,
    value_quant_mode: int, *, key_dtype: int | None = None, value_dtype: int | None = None, **others: Any,
) -> Tensor:  # fmt: skip
    """The same on devices that know fp8, without sums."""
    assert (key_dtype, value_dtype) == (None, None)
    others |= {"key_quant_mode": key_quant_mode, "value_quant_mode": value_quant_mode}
    return npu_kv_quant_sparse_flash_attention_vllm(query, key, value, sparse_indices, scale_value, **others)[0]


def _unpack(rows: Tensor, latent: int, rotary: int, tile: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What rows hold: latent vectors in a byte an item, rotary keys in ``dtype``, scales in float32, in this order.

    The latent vectors become numbers of ``dtype``, as on the device. Both are returned in float32.
    """
    end = latent + rotary * dtype.itemsize
    values, turned, scales = (part.contiguous() for part in rows.tensor_split((latent, end), -1))
    wide = values.float().unflatten(-1, (-1, tile)) * scales.view(torch.float32).unsqueeze(-1)
    return wide.flatten(-2).to(dtype).float(), turned.view(dtype).float()


def shapes_of_kv_quant_sparse_flash_attention(
    query: Tensor, *_args: object, rope_head_dim: int = 64, return_softmax_lse: bool = False, **_others: object
) -> tuple[Tensor, Tensor, Tensor]:
    out = query.new_empty((*query.shape[:2], query.shape[-1] - rope_head_dim))
    return shapes_of_attended(out, with_sums=return_softmax_lse)
