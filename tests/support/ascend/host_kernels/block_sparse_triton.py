"""MiniMax-M3's Triton kernels, in torch for the CPU: of queries, of what is cached, and of the choice of blocks.

Scores [heads, tokens, blocks] are made ready for a top-k, and what it gives, [heads, tokens, selected], is rid of
blocks that follow a token: its own is the last that it sees. On devices that know fp8, the scores of tokens that follow
alone come from a kernel, too; others come from an operator.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.support.ascend.host_kernels.block_sparse_attention import npu_msa_index_score
from tests.support.ascend.host_kernels.dispatch import host
from tests.support.ascend.host_kernels.norms import scaled_norm
from tests.support.ascend.host_kernels.paged_cache import write_slots
from tests.support.ascend.host_kernels.rotary import rotate_heads


@dataclass(frozen=True)
class _BlocksBefore:
    """How many blocks each token of some prompts sees; CPU tensors over device memory."""

    query_start: Tensor  # [requests + 1]
    before: Tensor  # [requests], tokens in front of those that are new
    block_tokens: int

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Each token and the number of its blocks."""
        starts = self.query_start.tolist()
        for request, before in enumerate(self.before.tolist()):
            for position, token in enumerate(range(starts[request], starts[request + 1]), before):
                yield token, position // self.block_tokens + 1

    def prefer(self, scores: Tensor, first: int, last: int) -> None:
        """Give the first and the last of them scores that others do not have."""
        for token, count in self:
            scores[:, token, : min(first, count)] = 1e30
            scores[:, token, max(count - last, 0) : count] = 1e29

    def drop_others(self, selected: Tensor) -> None:
        """Put nothing, -1, in the place of others."""
        for token, count in self:
            row = selected[:, token]
            row[row >= count] = -1
            row[:, count:] = -1


def _alone(lengths: Tensor, new: int, block_tokens: int) -> _BlocksBefore:
    """Of requests of ``lengths`` tokens, of which the last ``new`` are to be computed."""
    return _BlocksBefore(torch.arange(len(lengths) + 1) * new, lengths - new, block_tokens)


def prefer_blocks(
    _grid: tuple[int, ...], scores: Tensor, query_start: Tensor, before: Tensor, _heads: int, first: int, last: int,
    *_strides: int, sparse_block_size: int, **_others: Any,
) -> None:  # fmt: skip
    """For a top-k over the blocks of prompts."""
    blocks, scores = _BlocksBefore(host.view(query_start), host.view(before), sparse_block_size), host.view(scores)
    host.launch(lambda: blocks.prefer(scores, first, last))


def drop_unseen_blocks(
    _grid: tuple[int, ...], selected: Tensor, query_start: Tensor, before: Tensor, _heads: int, block_tokens: int,
    *_others: int, **_more: Any,
) -> None:  # fmt: skip
    """Of what it gives."""
    blocks, selected = _BlocksBefore(host.view(query_start), host.view(before), block_tokens), host.view(selected)
    host.launch(lambda: blocks.drop_others(selected))


def prefer_seen_blocks(
    grid: tuple[int, ...], scores: Tensor, query_start: Tensor, before: Tensor, first: int, last: int, *_others: int,
    block_size: int, **_more: Any,
) -> None:  # fmt: skip
    """``prefer_blocks`` on devices that know fp8, where others' scores must not count either."""
    blocks, every = _BlocksBefore(host.view(query_start), host.view(before), block_size), host.view(scores)

    def hide() -> None:
        for token, count in blocks:
            every[:, token, count:] = float("-inf")

    host.launch(hide)
    prefer_blocks(grid, scores, query_start, before, 0, first, last, sparse_block_size=block_size)


def keep_seen_blocks(
    grid: tuple[int, ...], selected: Tensor, query_start: Tensor, before: Tensor, block_tokens: int, *_others: int
) -> None:
    """``drop_unseen_blocks`` there."""
    drop_unseen_blocks(grid, selected, query_start, before, 0, block_tokens)


def score_blocks(
    _grid: tuple[int, ...], query: Tensor, cache: Tensor, scores: Tensor, table: Tensor, lengths: Tensor, _heads: int,
    _size: int, new: int, first: int, last: int, *_strides: int, BLOCK_SIZE_K: int, **_others: Any,  # noqa: N803
) -> None:  # fmt: skip
    """``npu_msa_index_score`` and ``prefer_blocks`` for requests with the last ``new`` tokens each.

    ``query`` [tokens, heads, size], ``cache`` [blocks, tokens of a block, size]. ``scores`` of what nobody sees stay.
    """
    query, cache, scores, table, lengths = map(host.view, (query, cache, scores, table, lengths))

    def score() -> None:
        blocks = _alone(lengths, new, BLOCK_SIZE_K)
        ends = blocks.query_start
        found = npu_msa_index_score(
            query, cache.unsqueeze(2), table, ends, actual_seq_qlen=ends, actual_seq_klen=lengths
        )
        for token, count in blocks:
            scores[:, token, :count] = found[:, token, :count]
        blocks.prefer(scores, first, last)

    host.launch(score)


def keep_and_count_seen_blocks(
    _grid: tuple[int, ...], selected: Tensor, kept: Tensor, counts: Tensor, lengths: Tensor, block_tokens: int,
    _selected: int, new: int, *_strides: int,
) -> None:  # fmt: skip
    """``keep_seen_blocks`` for the same requests, into another tensor, and how many each token has, [heads, tokens]."""
    selected, kept, counts, lengths = map(host.view, (selected, kept, counts, lengths))

    def keep() -> None:
        kept.copy_(selected)
        _alone(lengths, new, block_tokens).drop_others(kept)
        counts.copy_((kept >= 0).sum(-1))

    host.launch(keep)


def prepare_and_write(
    _grid: tuple[int, ...], packed: Tensor, packed_index: Tensor, cos_sin_cache: Tensor, positions: Tensor,
    q_weight: Tensor, k_weight: Tensor, index_q_weight: Tensor, index_k_weight: Tensor, query: Tensor,
    index_query: Tensor, key_cache: Tensor, value_cache: Tensor, index_cache: Tensor, slots: Tensor,
    index_slots: Tensor, written: int, q_heads: int, kv_heads: int, index_heads: int, size: int, _rotated: int,
    _stride: int, _index_stride: int, index_offset: int, _position_stride: int, _cos_sin_stride: int, epsilon: float,
    *_others: int, **_more: Any,
) -> None:  # fmt: skip
    """Norms and rotary embeddings of a projection, of which keys and values go straight into the caches.

    ``packed`` [tokens, (queries, keys, values) * size]; from ``index_offset`` on, ``packed_index`` has the indexer's
    queries and its key. Of the tokens, the first ``written`` are cached. In fp8, there are no scales.
    """
    packed, packed_index, cos_sin_cache, positions = map(host.view, (packed, packed_index, cos_sin_cache, positions))
    weights = [host.view(weight) for weight in (q_weight, k_weight, index_q_weight, index_k_weight)]
    query, index_query, slots, index_slots = map(host.view, (query, index_query, slots, index_slots))
    key_cache, value_cache, index_cache = map(host.view, (key_cache, value_cache, index_cache))

    def prepare() -> None:
        cos, sin = cos_sin_cache.index_select(0, positions.long()).chunk(2, -1)
        main = packed[:, : (q_heads + 2 * kv_heads) * size].unflatten(-1, (-1, size))
        index = packed_index[:, index_offset : index_offset + (index_heads + 1) * size].unflatten(-1, (-1, size))
        q, k, v = main.split((q_heads, kv_heads, kv_heads), 1)
        turned = []
        for heads, weight in zip((q, k, *index.split((index_heads, 1), 1)), weights, strict=True):
            wide = scaled_norm(heads, 1 + weight.float(), epsilon)[0].float().contiguous()
            rotate_heads(wide.flatten(1), cos, sin, size, neox=True)
            turned.append(wide)
        query.copy_(turned[0].flatten(1))
        index_query.copy_(_within(index_query, turned[2]).flatten(1))
        pairs = ((turned[1].to(packed.dtype), key_cache), (v, value_cache))
        write_slots(slots[:written], tuple((_within(cache, new), cache) for new, cache in pairs))
        write_slots(index_slots[:written], ((_within(index_cache, turned[3]), index_cache.unsqueeze(2)),))

    host.launch(prepare)


def _within(place: Tensor, x: Tensor) -> Tensor:
    """``x`` in float32, up to the largest number that there is in ``place``."""
    largest = torch.finfo(place.dtype).max
    return x.float().clamp(-largest, largest)
