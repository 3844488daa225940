"""GLM-5.3's pooled indexer: the Triton kernels of vllm-ascend for it, in torch for the CPU.

A pool is some tokens that follow each other, 4 in the models. Its key is a sum of theirs, weighted by a gate for each
item; it is written when the last of them is computed. Until then, keys and gates are in the request's ring, [2, rows,
size], in which a token's row is its position modulo the number of rows. Caches are in pages.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.support.ascend.host_kernels.attention import gather
from tests.support.ascend.host_kernels.dispatch import host


def _requests(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """Each request that has new tokens: its number, and where they are."""
    for request, (start, end) in enumerate(pairwise([0, *ends.tolist()])):
        if end > start:
            yield request, slice(start, end)


def compress_pools(
    _grid: tuple[int, ...], rings: Tensor, pools: Tensor, keys: Tensor, gates: Tensor, bias: Tensor,
    positions: Tensor, ends: Tensor, lengths: Tensor, tables: Tensor, slots: Tensor, *_sizes: int,
) -> None:  # fmt: skip
    """Write the keys of the pools that end with a new token into ``pools`` [blocks, rows, 1, size], at ``slots``.

    ``keys``, ``gates`` [new tokens, size], ``bias`` [tokens of a pool, size]; ``tables``: each request's ring.
    """
    rings, pools, keys, gates, bias = map(host.view, (rings, pools, keys, gates, bias))
    positions, ends, lengths, tables, slots = map(host.view, (positions, ends, lengths, tables, slots))

    def compress() -> None:
        size, page = len(bias), pools.shape[1]
        for request, rows in _requests(ends):
            first = int(lengths[request]) - (rows.stop - rows.start)  # the position of its first new token
            before = torch.arange(first - size + 1, first) % rings.shape[2]
            ring = rings[int(tables[request, 0])]
            own_keys, own_gates = (
                torch.cat((old[before], new[rows])) for old, new in zip(ring, (keys, gates), strict=True)
            )
            own = slots[rows].long()
            last = ((own >= 0) & ((positions[rows] + 1) % size == 0)).nonzero()  # [pools, 1]
            members = last + torch.arange(size)  # a new token's place among its own keys is behind those before
            weights = (own_gates[members] + bias).softmax(1)
            own = own[last[:, 0]]
            pools[own // page, own % page, 0] = (weights * own_keys[members]).sum(1).to(pools.dtype)

    host.launch(compress)


def store_tail(
    _grid: tuple[int, ...], rings: Tensor, keys: Tensor, gates: Tensor, ends: Tensor, slots: Tensor,
    _positions: Tensor, *_sizes: int,
) -> None:  # fmt: skip
    """Write keys and gates of each request's last new tokens into its ring, at ``slots``."""
    rings, keys, gates, ends, slots = map(host.view, (rings, keys, gates, ends, slots))

    def store() -> None:
        capacity = rings.shape[2]
        for _, rows in _requests(ends):
            last = slice(max(rows.start, rows.stop - capacity), rows.stop)
            own = slots[last].long()
            valid = own >= 0
            block, row = own[valid] // capacity, own[valid] % capacity
            rings[block, 0, row], rings[block, 1, row] = keys[last][valid], gates[last][valid]

    host.launch(store)


def gather_pools(
    _grid: tuple[int, ...], pools: Tensor, tables: Tensor, lengths: Tensor, packed: Tensor, *_sizes: int
) -> None:
    """Requests' pools out of their pages, [requests, pools, 1, size], with zeros behind."""
    pools, tables, lengths, packed = map(host.view, (pools, tables, lengths, packed))

    def copy() -> None:
        packed.zero_()
        for request, length in enumerate(lengths.tolist()):
            if length:
                packed[request, :length] = gather(pools, tables[request], length, 1)

    host.launch(copy)


def score_pools(
    _grid: tuple[int, ...], queries: Tensor, pools: Tensor, ends: Tensor, lengths: Tensor, tables: Tensor,
    positions: Tensor, scores: Tensor, first: int, *sizes: Any,
) -> None:  # fmt: skip
    """Products of ``queries`` [rows, size] and the pools that end before their own tokens, [rows, pools].

    The first row is that of token ``first``. Other pools get the lowest score. ``pools`` are packed, or in pages.
    """
    *_, size, _, lowest, _, _, is_packed = sizes
    queries, pools, ends, lengths = map(host.view, (queries, pools, ends, lengths))
    tables, positions, scores = map(host.view, (tables, positions, scores))

    def score() -> None:
        scores.fill_(lowest)
        for request, tokens in _requests(ends):
            rows = slice(max(tokens.start - first, 0), min(tokens.stop - first, len(queries)))
            length = int(lengths[request])
            if rows.stop <= rows.start or not length:
                continue
            own = pools[request, :length] if is_packed else gather(pools, tables[request], length, 1)
            products = queries[rows] @ own[:, 0].float().t()
            ended = (positions[rows.start + first : rows.stop + first] + 1) // size
            hidden = torch.arange(length)[None] >= ended[:, None]
            scores[rows, :length] = products.masked_fill(hidden, lowest)

    host.launch(score)


def expand_pools(
    _grid: tuple[int, ...], pool_ids: Tensor | None, scores: Tensor | None, positions: Tensor, ends: Tensor,
    out: Tensor, rows: int, first: int, last: int, _selected: int, _has_pools: bool, count: int, size: int,
    width: int, _stride: int, is_behind: bool, lowest: float, _block: int,
) -> None:  # fmt: skip
    """The tokens of each row's selected pools, at most ``count``, and behind them those of the pool that is open.

    ``pool_ids``, ``scores`` [rows, pools]; ``out`` [tokens, ``width``], in which -1 is none.
    """
    assert is_behind
    positions, ends, out = map(host.view, (positions, ends, out))
    chosen = None if pool_ids is None or scores is None else (host.view(pool_ids), host.view(scores))

    def expand() -> None:
        own = slice(first, first + rows)
        tokens = torch.full((rows, width), -1)
        if chosen is not None:
            members = chosen[0].long().unsqueeze(-1) * size + torch.arange(size)
            found = members.masked_fill((chosen[1] <= lowest).unsqueeze(-1), -1).flatten(1)[:, :count]
            tokens[:, : found.shape[1]] = found
        ended = (positions[own].long() + 1) // size * size
        of_open = torch.arange(size - 1)[None]
        open_pool = (ended[:, None] + of_open).masked_fill(of_open >= (positions[own].long() + 1 - ended)[:, None], -1)
        tokens.scatter_(1, ended.clamp(max=count)[:, None] + of_open, open_pool)
        tokens[torch.arange(first, first + rows) >= int(ends[last])] = -1
        out[own, :width] = tokens.int()

    host.launch(expand)
