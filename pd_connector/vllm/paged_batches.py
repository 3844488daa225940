"""Steps over two sequences, by which attention kernels are run outside a model to see how they treat a paged cache.

Arithmetic and torch only. ``cpu.layout_check`` and ``npu.cache_check`` make the caches of different physical layouts in
which ``other_bits`` compares what kernels make of these steps.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

#: Blocks that the tables speak of.
BLOCKS = 7

#: Block tables of two sequences, out of order. No token lies in block 2 or 4.
_BLOCK_TABLE = ((5, 0, 3), (1, 6, 2))

#: A layer's cache as a model runner binds it: a tensor [blocks, *shape of a block] for each part.
Parts = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Batch:
    """A step over both sequences: which tokens are new, and where they go."""

    query_start: torch.Tensor  # int32 [3]: start of each sequence's new tokens, and their total
    sequence_lengths: torch.Tensor  # int32 [2]: tokens, including the new ones
    longest_query: int
    longest_sequence: int
    block_table: torch.Tensor  # int32 [2, 3]
    slots: torch.Tensor  # int64 [tokens]: block * block_tokens + offset of each new token

    @property
    def tokens(self) -> int:
        """New tokens of both sequences."""
        return int(self.query_start[-1])


class CacheOperators(Protocol):
    """The operators of an attention layer that touch its paged cache. ``seed`` decides on the values of the inputs."""

    def write(self, cache: Parts, batch: Batch, seed: int) -> None:
        """Store keys and values of the new tokens."""

    def attend(self, cache: Parts, batch: Batch, seed: int) -> list[torch.Tensor]:
        """Return what the operators that read the cache make of the new tokens' queries."""


def batches(block_tokens: int, start: int = 0) -> Iterator[Batch]:
    """Yield prefills of both sequences, a chunk of one with a decode of the other, and decodes, one to a new block.

    They are in ``BLOCKS`` blocks from block ``start``.
    """
    table = torch.tensor(_BLOCK_TABLE, dtype=torch.int32, device="cpu") + start
    for first, second in (
        ((0, block_tokens + 3), (0, block_tokens - 1)),
        ((block_tokens + 3, 2 * block_tokens + 4), (block_tokens - 1, block_tokens)),
        ((2 * block_tokens + 4, 2 * block_tokens + 5), (block_tokens, block_tokens + 1)),
    ):
        lengths = [first[1] - first[0], second[1] - second[0]]
        slots = [
            (start + blocks[token // block_tokens]) * block_tokens + token % block_tokens
            for blocks, tokens in zip(_BLOCK_TABLE, (first, second), strict=True)
            for token in range(*tokens)
        ]
        yield Batch(
            query_start=torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32, device="cpu"),
            sequence_lengths=torch.tensor([first[1], second[1]], dtype=torch.int32, device="cpu"),
            longest_query=max(lengths),
            longest_sequence=max(first[1], second[1]),
            block_table=table,
            slots=torch.tensor(slots, dtype=torch.int64, device="cpu"),
        )


def varied(sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a dense tensor on the CPU with finite values that vary by place, so that a wrong place shows."""
    # The period is a prime that divides no stride of a cache, so that a wrong place has other contents.
    period = torch.arange(509, device="cpu")
    # Quantized: no NaN in any 8-bit float format.
    values = ((period - 254) / 128 if dtype.is_floating_point else period % 61).to(dtype)
    count = int(torch.Size(sizes).numel())
    return values.repeat(count // 509 + 1)[:count].view(tuple(sizes))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one dtype and device hold the same bits."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[one.element_size()]
    return bool(torch.equal(one.view(bits), other.view(bits)))


def other_bits(
    operators: CacheOperators,
    plain: Parts,
    views: Sequence[Parts],
    block_tokens: int,
    same_contents: Callable[[], bool],
    start: int = 0,
) -> str:
    """Run steps on ``plain`` and on ``views``, and return how these differ; empty if they do not.

    An exception on the views alone is a difference; one on ``plain`` propagates.

    Args:
        plain: [layers, BLOCKS, *shape of a block] for each part.
        views: of each layer, with the same contents from block ``start`` on.
        same_contents: whether both hold the same bytes, including those that no step touches.
    """
    steps = zip(batches(block_tokens), batches(block_tokens, start), strict=True)
    for step, (batch, moved) in enumerate(steps):
        seeds = [step * len(views) + layer for layer in range(len(views))]
        # All layers write before any attends, so that a layer that overwrites another one's bytes shows in both.
        for layer, seed in enumerate(seeds):
            operators.write([part[layer] for part in plain], batch, seed)
            try:
                operators.write(views[layer], moved, seed)
            except Exception as error:
                return f"writing raises {type(error).__name__}: {error}"
        if not same_contents():
            return f"after writing in step {step} the cache holds other bytes"
        for layer, seed in enumerate(seeds):
            expected = operators.attend([part[layer] for part in plain], batch, seed)
            try:
                outputs = operators.attend(views[layer], moved, seed)
            except Exception as error:
                return f"attention raises {type(error).__name__}: {error}"
            if not all(same_bits(one.cpu(), other.cpu()) for one, other in zip(expected, outputs, strict=True)):
                return f"the attention output of layer {layer} in step {step} differs"
    return "" if same_contents() else "attention changed the cache"
