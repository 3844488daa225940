"""Engram, tables that are read by the last tokens: the Triton kernels of vLLM and vllm-ascend for it, in torch.

Of each token and the few before it, of which vLLM joins those that look alike, a hash for each number of tokens, layer
and head is a row of a table. A token before those of a step is one of the prompt's, which the runner hands over, or is
found where its slot of a sliding window would be. No n-gram goes through an image.
"""

from typing import Any

import torch
from torch import Tensor

from tests.support.ascend.host_kernels.dispatch import host


def find_requests(
    _grid: tuple[int, ...], starts: Tensor, requests: Tensor, count: int, of_requests: int, _stride: int, **_sizes: Any
) -> None:
    """The request of each token; those behind all are the last one's."""
    starts, requests = host.view(starts), host.view(requests)

    def find() -> None:
        ends = starts[1 : of_requests + 1].contiguous()
        token = torch.arange(count, dtype=ends.dtype)
        requests.copy_(torch.searchsorted(ends, token, right=True).clamp_max(of_requests - 1))

    host.launch(find)


def remember_tokens(
    _grid: tuple[int, ...], tokens: Tensor, names: Tensor, dead: Tensor, slots: Tensor, held: Tensor, count: int,
    _stride: int, _dead_stride: int, _slot_stride: int, _block: int, dead_name: int,
) -> None:  # fmt: skip
    """Write what tokens are called to their slots; a negative slot is none."""
    tokens, names, dead, slots, held = map(host.view, (tokens, names, dead, slots, held))

    def remember() -> None:
        own = slots[:count].long()
        called = names[tokens.long()].masked_fill(dead, dead_name)
        held[own[own >= 0]] = called[own >= 0]

    host.launch(remember)


def hash_ngrams(
    _grid: tuple[int, ...], tokens: Tensor, names: Tensor, dead: Tensor, positions: Tensor, tables: Tensor,
    starts: Tensor, requests: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor, held: Tensor,
    before: Tensor, dead_before: Tensor, out: Tensor, count: int, slots: int, padding: int,
    *, cache_block_size: int, lookback_depth: int, dead_id: int, MAX_NGRAM: int, **_sizes: Any,  # noqa: N803  Triton's
) -> None:  # fmt: skip
    """Write the rows of the n-grams that end with each token, ``out`` [tokens, layers, (n - 1) * heads].

    Args:
        before: the tokens in front of each request's, the nearest one first, [requests, depth]; negative: unknown.
        held: what tokens are called, by slots.
        multipliers: [layers, n]. ``primes`` and ``offsets``: of a hash for each of n - 1 numbers of tokens and head.
    """
    tokens, names, dead, positions, tables = map(host.view, (tokens, names, dead, positions, tables))
    starts, requests, multipliers, primes, offsets = map(host.view, (starts, requests, multipliers, primes, offsets))
    held, before, dead_before, out = map(host.view, (held, before, dead_before, out))

    def compute() -> None:
        of = requests.long()
        first = positions[starts[of].clamp_max(count - 1).long()].long()
        index, position = torch.arange(count), positions[:count].long()
        rolling = torch.zeros(count, multipliers.shape[0], dtype=torch.int64)
        is_over = torch.zeros(count, dtype=torch.bool)
        heads = primes.shape[-1]
        for shift in range(MAX_NGRAM):
            place = position - shift
            of_step = (index - shift).clamp_min(0)
            column = (first - 1 - place).clamp(0, lookback_depth - 1)
            given = before[of, column].long()
            block = tables[of, place.clamp(0, tables.shape[1] * cache_block_size - 1) // cache_block_size].long()
            slot = (block * cache_block_size + place.clamp_min(0) % cache_block_size).clamp(0, slots - 1)
            called_before = names[given.clamp_min(0)].masked_fill(dead_before[of, column], dead_id)
            called = torch.where(
                place >= first,
                names[tokens[of_step].long()].masked_fill(dead[of_step], dead_id),
                torch.where(given >= 0, called_before, held[slot]),
            ).long()
            is_over |= (place < 0) | (called == dead_id)
            rolling ^= called.masked_fill(is_over, padding).unsqueeze(-1) * multipliers[:, shift]
            if shift:
                own = slice((shift - 1) * heads, shift * heads)
                rows = rolling.unsqueeze(-1) % primes[:, shift - 1] + offsets[:, own]
                out[:, :, own] = rows.to(out.dtype)

    host.launch(compute)


def read_rows(
    _grid: tuple[int, ...], table: Tensor, scales: Tensor | None, rows: Tensor, out: Tensor, _count: int, start: int,
    end: int, _stride: int,
    *, GROUP: int, HEAD_START: int, LOCAL_HEADS: int, PAD_HEADS: int, MXFP8: bool, **_sizes: Any,  # noqa: N803
) -> None:  # fmt: skip
    """The rows of this rank's heads, ``out`` [tokens * heads, size] in bfloat16; zeros for those of other ranks.

    ``rows`` [tokens, heads of all ranks]; ``table`` has those from ``start`` to ``end``, ``scales`` one for ``GROUP``.
    """
    assert not MXFP8
    table, rows, out = map(host.view, (table, rows, out))
    factors = None if scales is None else host.view(scales)

    def read() -> None:
        wanted = rows[:, HEAD_START : HEAD_START + LOCAL_HEADS].long()
        is_own = (wanted >= start) & (wanted < end)
        own = (wanted - start).masked_fill(~is_own, 0)
        found = table[own].float()
        if factors is not None:
            found = (found.unflatten(-1, (-1, GROUP)) * factors[own].unsqueeze(-1)).flatten(-2)
        found[~is_own] = 0
        out.view(-1, PAD_HEADS, out.shape[-1])[: len(rows), :LOCAL_HEADS] = found.to(out.dtype)

    host.launch(read)
