"""DeepSeek-V4.1's compressor and what its indexer launches: Triton kernels of vllm-ascend, in torch for the CPU.

A row of a compressed cache stands for 2 tokens and is made when the second is computed. What is kept of a token until
then is a row of its request's ring: a value and a score in float32, side by side. Its place there is its position
modulo the number of rows. A ring is a block, and block 0 is none.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.support.ascend.host_kernels.dispatch import host

_NOTHING = -1


@dataclass(frozen=True)
class _Run:
    """The new tokens of a request: their positions, where they lie among all, and the request's ring [rows, ...]."""

    start: int
    own: slice
    ring: Tensor

    def rows_at(self, positions: Tensor) -> Tensor:
        """The rows of tokens in the ring."""
        return positions % self.ring.shape[0]


def _runs(rings: Tensor, controls: Tensor) -> Iterator[_Run]:
    """Each request that has new tokens and a ring, by ``controls`` [5, requests]."""
    for start, count, _, first, block in controls.t().tolist():
        if count and 0 < block < len(rings):
            yield _Run(start, slice(first, first + count), rings[block])


def pool_tokens(
    _grid: tuple[int, ...], out: Tensor, values: Tensor, scores: Tensor, rings: Tensor, _norm: Tensor,
    controls: Tensor, _blocks: Tensor, *_counts: int, RATIO: int, TOKEN_ALIGNED: bool, **_sizes: Any,  # noqa: N803
) -> None:  # fmt: skip
    """Write each row that new tokens complete to the place of the last of its tokens, ``out`` [new tokens, size]."""
    assert TOKEN_ALIGNED
    out, values, scores, rings, controls = map(host.view, (out, values, scores, rings, controls))

    def pool() -> None:
        for run in _runs(rings, controls):
            first = run.start // RATIO * RATIO
            before = run.ring[run.rows_at(torch.arange(first, run.start))]
            states = torch.cat((before, torch.cat((values[run.own], scores[run.own]), -1)))
            count = len(states) // RATIO
            value, score = states[: count * RATIO].unflatten(0, (count, RATIO)).chunk(2, -1)
            last = torch.arange(1, count + 1) * RATIO - 1 - (run.start - first)
            out[run.own.start + last] = (value * score.softmax(1)).sum(1).to(out.dtype)

    host.launch(pool)


def keep_states(
    _grid: tuple[int, ...], values: Tensor, scores: Tensor, rings: Tensor, controls: Tensor, _blocks: Tensor,
    *_counts: int, PROTECT_NULL: bool, **_sizes: Any,  # noqa: N803
) -> None:  # fmt: skip
    """Write the last new tokens of each request, as many as it has rows, into its ring."""
    assert PROTECT_NULL
    values, scores, rings, controls = map(host.view, (values, scores, rings, controls))

    def keep() -> None:
        for run in _runs(rings, controls):
            own = slice(max(run.own.start, run.own.stop - len(run.ring)), run.own.stop)
            position = torch.arange(own.start, own.stop) - run.own.start + run.start
            run.ring[run.rows_at(position)] = torch.cat((values[own], scores[own]), -1)

    host.launch(keep)


def quantise_queries(
    _grid: tuple[int, ...], queries: Tensor, quantised: Tensor, scales: Tensor, _rows: int,
    *, QUANT_MAX: float, MIN_SCALE: float, **_sizes: Any,  # noqa: N803
) -> None:  # fmt: skip
    """``queries`` [tokens, heads, size] in int8, by the scales [tokens, heads] as they are once they are in float16."""
    queries, quantised, scales = map(host.view, (queries, quantised, scales))

    def quantise() -> None:
        wide = queries.float()
        scales.copy_((wide.abs().amax(-1) / QUANT_MAX).clamp_min(MIN_SCALE))
        scaled = wide / scales.float().unsqueeze(-1)
        quantised.copy_(scaled.round().clamp(-QUANT_MAX, QUANT_MAX))

    host.launch(quantise)


def order_rows(
    _grid: tuple[int, ...], selected: Tensor, positions: Tensor, out: Tensor, counts: Tensor, _rows: int,
    *, COMPRESS_RATIO: int, WRITE_LENGTHS: bool, **_sizes: Any,  # noqa: N803
) -> None:  # fmt: skip
    """The rows that were selected for each token and that it sees, in their order, with -1 behind; ``counts``: of them.

    ``selected`` and ``out`` [tokens, rows].
    """
    selected, positions, out, counts = map(host.view, (selected, positions, out, counts))

    def order() -> None:
        seen = (selected >= 0) & (selected < ((positions + 1) // COMPRESS_RATIO).unsqueeze(-1))
        behind = torch.iinfo(torch.int32).max
        ordered = selected.masked_fill(~seen, behind).sort(-1).values
        out.copy_(ordered.masked_fill(ordered == behind, _NOTHING))
        if WRITE_LENGTHS:
            counts.copy_(seen.sum(-1, keepdim=True))

    host.launch(order)
