"""DeepSeek-V4's attention, and V4.1's, in torch for the CPU: compressors, indexers over their rows, attention to both.

As vllm-ascend's sources of its operators compute, and its tests. A row of a compressed cache stands for 4 or 128
tokens, its ratio (V4.1: 2 or 1), and is there when the last of them is. What V4's compressors keep of each token until
then is a row of a paged cache: values and scores in float32, side by side. With a ratio of 4, a row is made of its own
tokens and of those of the row before, for which values and scores have a half each. Queries of all requests follow each
other (TND); totals begin with 0.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from tests.support.ascend.host_kernels.dispatch import Operator
from tests.support.ascend.host_kernels.norms import scaled_norm
from tests.support.ascend.host_kernels.quantised_attention import index_scores
from tests.support.ascend.host_kernels.rotary import turn_neighbours
from tests.support.ascend.host_kernels.sparse_attention import CAUSAL, NOTHING, best_of, pad_together, requests_of

_INTERLEAVED = 2
#: Of the formats of slots: a block, and a row in it.
_BLOCK_AND_ROW = 2
#: The mode of a window that ends with the query's own token.
_WINDOW = 4
_INT8 = 2
#: What an indexer does with candidates, blocks of rows: it finds them, it prefers their rows, or it knows none.
_FINDS, _PREFERS, _WITHOUT = 1, 2, 3
#: The score of rows that are no candidates: taken where there are no others.
_LEAST = -1e30
#: Integers that operators hand each other about how to share out their work; these do not.
_PLAN_SIZE = 1024


def _rows(cache: Tensor, table: Tensor, start: int, end: int) -> Tensor:
    """The rows of a request from ``start`` to ``end`` of a paged cache [blocks, rows of a block, ...]."""
    place = torch.arange(start, end)
    return cache[table.long()[place // cache.shape[1]], place % cache.shape[1]]


def _write_states(cache: Tensor, table: Tensor, start: int, new: Tensor) -> None:
    """Keep the states of tokens from ``start`` on; block 0 is none."""
    place = torch.arange(start, start + new.shape[0])
    block = table.long()[place // cache.shape[1]]
    kept = block != 0
    cache[block[kept], place[kept] % cache.shape[1]] = new[kept]


def _compress(cache: Tensor, table: Tensor, start: int, new: Tensor, ratio: int, halves: int) -> Tensor:
    """The rows [rows, size] that a request's tokens from ``start`` on complete.

    ``new``: the tokens' states [tokens, 2 * halves * size]. Those of earlier ones are in ``cache``.
    """
    first, count = start // ratio, (start + new.shape[0]) // ratio - start // ratio
    begin = (first - halves + 1) * ratio
    before = _rows(cache, table, max(begin, 0), start)
    states = torch.cat((before, new)).unflatten(-1, (2, halves, -1))
    values, scores = pad(states, (0, 0, 0, 0, 0, 0, -min(begin, 0), 0)).unbind(1)
    scores[: -min(begin, 0)] = float("-inf")
    parts = [
        [part[half * ratio : (half + count) * ratio, half].unflatten(0, (count, ratio)) for half in range(halves)]
        for part in (values, scores)
    ]
    values, scores = (torch.cat(part, 1) for part in parts)
    return (values * scores.softmax(1)).sum(1)


def compressor(
    x: Tensor, wkv: Tensor, wgate: Tensor, state_cache: Tensor, ape: Tensor, norm_weight: Tensor, rope_sin: Tensor,
    rope_cos: Tensor, state_block_table: Tensor, cu_seqlens: Tensor, seqused: Tensor | None, start_pos: Tensor,
    rope_head_dim: int, cmp_ratio: int, coff: int, norm_eps: float, rotary_mode: int, cache_mode: int,
) -> Tensor:  # fmt: skip
    """Keep the states of ``x`` [tokens, hidden], and return the rows that they complete, of all requests, in order.

    Args:
        state_cache: [blocks, rows of a block, 2 * coff * size], whose blocks may lie apart.
        ape: what is added to the scores of a row's tokens, [ratio, coff * size].
        rope_sin: [rows, rotary size], as many as can be completed; what is returned has as many rows.
        start_pos: the tokens before those of ``x``, of each request.
    """
    assert (seqused, rotary_mode, cache_mode) == (None, _INTERLEAVED, 1)
    assert ape.shape == (cmp_ratio, wkv.shape[0])
    assert wkv.shape[0] == coff * norm_weight.shape[0]
    out = torch.zeros(rope_sin.shape[0], norm_weight.shape[0])
    values, scores = (x.float() @ weight.float().t() for weight in (wkv, wgate))
    ends, at = cu_seqlens.tolist(), 0
    for request, start in enumerate(start_pos.tolist()):
        own = slice(ends[request], ends[request + 1])
        biases = ape[torch.arange(start, start + own.stop - own.start) % cmp_ratio]
        new = torch.cat((values[own], scores[own] + biases), -1)
        _write_states(state_cache, state_block_table[request], start, new)
        rows = _compress(state_cache, state_block_table[request], start, new, cmp_ratio, coff)
        out[at : at + rows.shape[0]] = rows
        at += rows.shape[0]
    out, _ = scaled_norm(out, norm_weight, norm_eps)
    turned = out[:, -rope_head_dim:]
    turned.copy_(turn_neighbours(turned, rope_cos.float(), rope_sin.float()))
    return out.to(x.dtype)


def _shape_of_compressor(
    x: Tensor, wkv: Tensor, wgate: Tensor, state: Tensor, ape: Tensor, norm: Tensor, rope: Tensor, *_others: object
) -> Tensor:
    return x.new_empty(rope.shape[0], norm.shape[0])


def compressor_metadata(
    rope_cos: Tensor, rope_sin: Tensor, cu_seqlens: Tensor, start_pos: Tensor, kv_block_table: Tensor,
    kv_block_size: int, slot_mapping_format: int, compress_ratio: int, num_compressed_tokens: int, num_reqs_actual: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Cosines and sines [rows, 1, 1, size] of the rows that are completed, and their slots [rows, 2]; then nothing.

    A row is at the position of its first token. Nothing is turned by no angle, and its block is -1.
    """
    assert slot_mapping_format == _BLOCK_AND_ROW
    cos = torch.ones(num_compressed_tokens, 1, 1, rope_cos.shape[1], dtype=rope_cos.dtype)
    sin = torch.zeros_like(cos)
    slots = torch.tensor([[-1, kv_block_size - 1]], dtype=torch.int32).repeat(num_compressed_tokens, 1)
    ends, at = cu_seqlens.tolist(), 0
    for request, start in enumerate(start_pos[:num_reqs_actual].tolist()):
        end = start + ends[request + 1] - ends[request]
        place = torch.arange(start // compress_ratio, end // compress_ratio)
        rows = slice(at, at + place.numel())
        cos[rows, 0, 0], sin[rows, 0, 0] = rope_cos[place * compress_ratio], rope_sin[place * compress_ratio]
        slots[rows, 0] = kv_block_table[request][place // kv_block_size]
        slots[rows, 1] = (place % kv_block_size).int()
        at = rows.stop
    return cos, sin, slots


def _shapes_of_compressor_metadata(
    rope_cos: Tensor, rope_sin: Tensor, cu_seqlens: Tensor, start_pos: Tensor, kv_block_table: Tensor,
    kv_block_size: int, slot_mapping_format: int, compress_ratio: int, num_compressed_tokens: int, num_reqs_actual: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    shape = (num_compressed_tokens, 1, 1, rope_cos.shape[1])
    slots = rope_cos.new_empty((num_compressed_tokens, 2), dtype=torch.int32)
    return rope_cos.new_empty(shape), rope_sin.new_empty(shape), slots


def compressor_metadata_out(
    rope_cos: Tensor, rope_sin: Tensor, cu_seqlens: Tensor, start_pos: Tensor, kv_block_table: Tensor,
    kv_block_size: int, slot_mapping_format: int, compress_ratio: int, num_reqs_actual: int, compress_cos: Tensor,
    compress_sin: Tensor, slot_mapping: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The same, into tensors of as many rows."""
    outs = compress_cos, compress_sin, slot_mapping
    found = compressor_metadata(
        rope_cos, rope_sin, cu_seqlens, start_pos, kv_block_table, kv_block_size, slot_mapping_format, compress_ratio,
        slot_mapping.shape[0], num_reqs_actual,
    )  # fmt: skip
    for out, each in zip(outs, found, strict=True):
        out.copy_(each)
    return outs


def _completed(position: Tensor, ratio: int, rows: int) -> Tensor:
    """Which of a request's ``rows`` are there when tokens at ``position`` have been computed, [tokens, rows]."""
    return torch.arange(rows)[None] < (position[:, None] + 1) // ratio


def npu_quant_lightning_indexer_v2(
    query: Tensor, key: Tensor, weights: Tensor, query_dequant_scale: Tensor, key_dequant_scale: Tensor, topk: int,
    quant_mode: int,
    *, cu_seqlens_q: Tensor, seqused_k: Tensor, cmp_residual_k: Tensor, block_table: Tensor,
    metadata: Tensor | None = None, layout_q: str = "TND", layout_k: str = "PA_BBND", mask_mode: int = CAUSAL,
    cmp_ratio: int = 4, return_value: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The best rows of each query, [tokens, 1, topk], of those that are completed when its token is computed.

    A request has ``seqused_k`` rows, and ``cmp_residual_k`` tokens behind them. ``key`` [blocks, rows of a block, 1,
    size] in int8, ``key_dequant_scale`` [blocks, rows of a block, 1].
    """
    assert (layout_q, layout_k, mask_mode, quant_mode, return_value) == ("TND", "PA_BBND", CAUSAL, _INT8, 0)
    indices = torch.full((query.shape[0], 1, topk), NOTHING, dtype=torch.int32)
    rows = _Rows(key, key_dequant_scale, block_table, seqused_k, cmp_residual_k, cmp_ratio)
    for own, scores in rows.scored(query, query_dequant_scale, weights, cu_seqlens_q):
        indices[own, 0] = best_of(scores, topk)
    return indices, torch.zeros(0)


@dataclass(frozen=True)
class _Rows:
    """An indexer's keys of all requests; ``cache`` [blocks, rows of a block, 1, size], ``scales`` without the size."""

    cache: Tensor
    scales: Tensor
    tables: Tensor
    count: Tensor  # [requests], of rows
    residual: Tensor | None  # [requests], tokens behind them
    ratio: int

    def scored(self, query: Tensor, scales: Tensor, weights: Tensor, starts: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Each request's queries and their scores [queries, rows]; minus infinity for what follows a query's token."""
        residual = self.residual.tolist() if self.residual is not None else [0] * len(self.count)
        for request, own, count in requests_of(starts[1:], self.count):
            length = count * self.ratio + residual[request]
            keys, key_scales = (
                pad_together(_rows(cache, self.tables[request], 0, count)[:, 0].float().reshape(count, size))
                for cache, size in ((self.cache, self.cache.shape[-1]), (self.scales, 1))
            )
            scores = index_scores(query[own], scales[own], weights[own], keys) * key_scales.t()
            position = torch.arange(length - (own.stop - own.start), length)
            yield own, scores.masked_fill(~_completed(position, self.ratio, scores.shape[1]), float("-inf"))


def npu_quant_lightning_indexer_v3(
    query: Tensor, key: Tensor, weights: Tensor, query_dequant_scale: Tensor, key_dequant_scale: Tensor, topk: int,
    quant_mode: int,
    *, cu_seqlens_q: Tensor, seqused_k: Tensor, block_table: Tensor, candidate_topk_index: Tensor | None = None,
    cmp_residual_k: Tensor | None = None, metadata: Tensor | None = None, max_seqlen_q: int = -1,
    layout_q: str = "TND", layout_k: str = "PA_BBND", mask_mode: int = CAUSAL, cmp_ratio: int = 1,
    candidate_mode: int = _WITHOUT, candidate_topk_blocks: int = 2048, candidate_block_size: int = 8,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The same, of any ratio, and with candidates [tokens, 1, ``candidate_topk_blocks``]: blocks of each query's rows.

    They are those with the best rows and that of the newest row. Those that are given, another layer has found.
    """
    assert (layout_q, layout_k, mask_mode, quant_mode) == ("TND", "PA_BBND", CAUSAL, _INT8)
    indices = torch.full((query.shape[0], 1, topk), NOTHING, dtype=torch.int32)
    shape = (query.shape[0], 1, candidate_topk_blocks) if candidate_mode == _FINDS else (0,)
    found = torch.full(shape, NOTHING, dtype=torch.int32)
    rows = _Rows(key, key_dequant_scale, block_table, seqused_k, cmp_residual_k, cmp_ratio)
    for own, scores in rows.scored(query, query_dequant_scale, weights, cu_seqlens_q):
        if candidate_mode == _FINDS:
            found[own, 0] = _best_blocks(scores, candidate_block_size, candidate_topk_blocks)
        elif candidate_mode == _PREFERS:
            assert candidate_topk_index is not None
            blocks = _selected(candidate_topk_index[own, 0], -(-scores.shape[1] // candidate_block_size))
            is_candidate = blocks.repeat_interleave(candidate_block_size, 1)[:, : scores.shape[1]]
            scores = scores.masked_fill(~is_candidate & scores.isfinite(), _LEAST)  # noqa: PLW2901
        indices[own, 0] = best_of(scores, topk)
    return indices, torch.zeros(0), found


def _best_blocks(scores: Tensor, size: int, count: int) -> Tensor:
    """The numbers [queries, count] of the blocks of ``size`` rows that have the best ones, and of the last one."""
    best = pad(scores, (0, -scores.shape[1] % size), value=float("-inf")).unflatten(1, (-1, size)).amax(-1)
    seen = scores.isfinite().sum(1)
    query = seen.nonzero().flatten()
    best[query, (seen[query] - 1) // size] = float("inf")
    return best_of(best, count)


def _shapes_of_candidate_indexer(
    query: Tensor, key: Tensor, weights: Tensor, query_scale: Tensor, key_scale: Tensor, topk: int, *args: object,
    candidate_mode: int = _WITHOUT, candidate_topk_blocks: int = 2048, **others: object,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    indices, values = _shapes_of_lightning_indexer(query, key, weights, query_scale, key_scale, topk, *args, **others)
    shape = (query.shape[0], 1, candidate_topk_blocks) if candidate_mode == _FINDS else (0,)
    return indices, values, indices.new_empty(shape)


def _shapes_of_lightning_indexer(
    query: Tensor, key: Tensor, weights: Tensor, query_scale: Tensor, key_scale: Tensor, topk: int, *_args: object,
    **_others: object,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    indices = query.new_empty((query.shape[0], 1, topk), dtype=torch.int32)
    return indices, query.new_empty(0, dtype=torch.float32)


def npu_sparse_attn_sharedkv(
    q: Tensor,
    *, ori_kv: Tensor, ori_block_table: Tensor, cu_seqlens_q: Tensor, seqused_kv: Tensor, sinks: Tensor,
    softmax_scale: float, cmp_kv: Tensor | None = None, cmp_sparse_indices: Tensor | None = None,
    cmp_block_table: Tensor | None = None, cu_seqlens_ori_kv: Tensor | None = None,
    cu_seqlens_cmp_kv: Tensor | None = None, metadata: Tensor | None = None, cmp_ratio: int = 0,
    ori_mask_mode: int = _WINDOW, cmp_mask_mode: int = CAUSAL, ori_win_left: int = 128, ori_win_right: int = 0,
    layout_q: str = "BSND", layout_kv: str = "PA_ND",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention to a window of tokens, and to all rows that are completed, or to those that were selected.

    Keys are their own values. ``q`` [tokens, heads, size], ``ori_kv`` and ``cmp_kv`` paged caches of one head,
    ``cmp_sparse_indices`` [tokens, 1, selected], ``sinks`` [heads]: a logit each head has besides.
    """
    assert (layout_q, layout_kv) == ("TND", "PA_ND")
    assert (ori_mask_mode, cmp_mask_mode, ori_win_right) == (_WINDOW, CAUSAL, 0)
    out = torch.zeros_like(q)
    for request, own, length in requests_of(cu_seqlens_q[1:], seqused_kv):
        position = torch.arange(length - (own.stop - own.start), length)
        start = max(int(position[0]) - ori_win_left, 0)
        tokens = pad_together(_rows(ori_kv, ori_block_table[request], start, length)[:, 0].float())
        behind = position[:, None] - torch.arange(start, start + tokens.shape[0])[None]
        held, seen = [tokens], [(behind >= 0) & (behind <= ori_win_left)]
        if cmp_kv is not None and cmp_block_table is not None:
            held.append(pad_together(_rows(cmp_kv, cmp_block_table[request], 0, length // cmp_ratio)[:, 0].float()))
            seen.append(_completed(position, cmp_ratio, held[1].shape[0]))
            if cmp_sparse_indices is not None:
                seen[1] &= _selected(cmp_sparse_indices[own, 0], held[1].shape[0])
        out[own] = _attend(q[own], torch.cat(held), torch.cat(seen, 1), sinks, softmax_scale)
    return out, torch.zeros(0)


def npu_sparse_flash_mla(
    q: Tensor,
    *, ori_kv: Tensor, ori_block_table: Tensor, cu_seqlens_q: Tensor, seqused_ori_kv: Tensor, sinks: Tensor,
    cmp_kv: Tensor | None = None, cmp_sparse_indices: Tensor | None = None, cmp_block_table: Tensor | None = None,
    seqused_cmp_kv: Tensor | None = None, cmp_residual_kv: Tensor | None = None, metadata: Tensor | None = None,
    softmax_scale: float = 1.0, cmp_ratio: int = 0, ori_mask_mode: int = 0, cmp_mask_mode: int = 0,
    ori_win_left: int = -1, ori_win_right: int = -1, layout_q: str = "BSND", layout_kv: str = "BSND",
    topk_value_mode: int = 1, return_softmax_lse: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same attention, as V4.1 calls it. The rows and the tokens behind them are what the tokens make."""
    assert (layout_kv, topk_value_mode, return_softmax_lse) == ("PA_BBND", 1, False)
    if cmp_kv is not None:
        assert cmp_mask_mode == CAUSAL
        assert seqused_cmp_kv is not None
        residual = cmp_residual_kv if cmp_residual_kv is not None else torch.zeros_like(seqused_ori_kv)
        assert torch.equal(seqused_cmp_kv * cmp_ratio + residual, seqused_ori_kv)
    return npu_sparse_attn_sharedkv(
        q, ori_kv=ori_kv, ori_block_table=ori_block_table, cu_seqlens_q=cu_seqlens_q, seqused_kv=seqused_ori_kv,
        sinks=sinks, softmax_scale=softmax_scale, cmp_kv=cmp_kv, cmp_sparse_indices=cmp_sparse_indices,
        cmp_block_table=cmp_block_table, cmp_ratio=cmp_ratio, ori_mask_mode=ori_mask_mode, ori_win_left=ori_win_left,
        ori_win_right=ori_win_right, layout_q=layout_q,
    )  # fmt: skip


def _selected(indices: Tensor, rows: int) -> Tensor:
    """Which rows ``indices`` [queries, selected] name, [queries, rows]; a negative index is none."""
    selected = torch.zeros(indices.shape[0], rows + 1, dtype=torch.bool)
    return selected.scatter_(1, indices.long().masked_fill(indices < 0, rows), value=True)[:, :rows]


def _attend(q: Tensor, held: Tensor, seen: Tensor, sinks: Tensor, scale: float) -> Tensor:
    out = torch.empty_like(q)
    for head in range(q.shape[1]):
        scores = (q[:, head].float() @ held.t() * scale).masked_fill_(~seen, float("-inf"))
        with_sink = torch.cat((scores, sinks[head].float().expand(q.shape[0], 1)), 1)
        out[:, head] = (with_sink.softmax(-1)[:, :-1] @ held).to(out.dtype)
    return out


def _shapes_of_sparse_attention(q: Tensor, **_others: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(0, dtype=torch.float32)


def _plan(*_args: object, **_others: object) -> Tensor:
    return torch.zeros(_PLAN_SIZE, dtype=torch.int32)


def _shape_of_plan(*_args: object, **_others: object) -> Tensor:
    return torch.empty(_PLAN_SIZE, dtype=torch.int32, device="meta")


#: Operators of ``_C_ascend``.
COMPRESSED_ATTENTION = (
    Operator(compressor, _shape_of_compressor),
    Operator(compressor_metadata, _shapes_of_compressor_metadata),
    Operator(compressor_metadata_out),
    Operator(npu_quant_lightning_indexer_v2, _shapes_of_lightning_indexer),
    Operator(_plan, _shape_of_plan, name="npu_quant_lightning_indexer_v2_metadata"),
    Operator(npu_quant_lightning_indexer_v3, _shapes_of_candidate_indexer),
    Operator(npu_sparse_attn_sharedkv, _shapes_of_sparse_attention),
    Operator(npu_sparse_flash_mla, _shapes_of_sparse_attention),
    Operator(_plan, _shape_of_plan, name="npu_sparse_flash_mla_metadata"),
    Operator(_plan, _shape_of_plan, name="npu_sparse_attn_sharedkv_metadata"),
)
