"""Checks that a backend's operators work on caches that keep all layers of a block together, without copying them.

The operators run on caches of one layer each, dense, and, with the same inputs, on views into one tensor over all
layers, whose blocks lie as many pages apart as there are layers. Outputs and contents must agree bit for bit after
every step. That includes bytes that a step must not touch, because every byte belongs to some layer and block.

Operators may also take such a view and make a dense copy of the whole cache at every call. Their outputs are right, and
they are slow. So they run on large views too, and what memory they take from the device must not grow by those.

Operators may count offsets in 32 bits, which the caches that serve exceed. So they run on the last blocks of these too.

This module uses torch only. ``operators`` calls a backend's operators, ``allocation`` handles failures.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pd_connector.vllm.paged_batches import BLOCKS, CacheOperators, Parts, batches, other_bits, same_bits, varied

LAYERS = 3

#: Bytes of the smallest view that is watched for copies: far above what an operator takes for so few tokens.
_WATCHED_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class PartShape:
    """One part of every layer's cache: K, V, or one of MLA's."""

    block: tuple[int, int, int]  # [tokens, heads, items], or [heads, tokens, items]
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return int(torch.Size(self.block).numel()) * int(self.dtype.itemsize)


class MemoryWatch(Protocol):
    """Tells how much device memory a call takes."""

    def taken_by(self, call: Callable[[], object]) -> int:
        """Make the call, wait for its end, and return the most bytes that the device had less of meanwhile."""


def difference(
    operators: CacheOperators, parts: Sequence[PartShape], block_tokens: int, device: torch.device, watch: MemoryWatch
) -> str:
    """Return how the operators behave differently on caches of all layers together; empty if they do not.

    An exception on these caches alone is a difference; one on dense caches propagates.
    """
    with torch.no_grad():
        found = _other_bits_in_small(operators, parts, block_tokens, device)
        return found or _copies(operators, parts, block_tokens, device, watch)


def difference_at_end(operators: CacheOperators, layers: Sequence[Parts], block_tokens: int) -> str:
    """Return how the operators fail on the last blocks of caches; empty if they do not, or the blocks are too few.

    Args:
        operators: which have shown no ``difference``.
        layers: at least two, all in one tensor [blocks, layers, *shape of a block] for each part, of zeros. They hold
            zeros again if nothing is returned.
        block_tokens: tokens in a block.

    Exceptions: as in ``difference``.
    """
    start = len(layers[0][0]) - BLOCKS
    if start < 0:
        return ""
    ends = (layers[0], layers[-1])
    last = [_last_blocks(part, len(layers)) for part in layers[0]]
    plain = [part.new_zeros((len(ends), BLOCKS, *part.shape[1:])) for part in layers[0]]

    def same_contents() -> bool:
        found = [part.cpu() for part in last]
        untouched = not any(part[:, 1:-1].any() for part in found)
        return untouched and _same_contents(plain, [part[:, [0, -1]] for part in found])

    with torch.no_grad():
        failure = other_bits(operators, plain, ends, block_tokens, same_contents, start)
        for part in last:
            part.zero_()
    return failure


def _last_blocks(part: torch.Tensor, layers: int) -> torch.Tensor:
    """Return a dense view of the last blocks, by the first layer's part. Shape [BLOCKS, layers, *shape of a block]."""
    block = part[0]
    shape, strides = (BLOCKS, layers, *block.shape), (part.stride(0), block.numel(), *block.stride())
    return part[-BLOCKS:].as_strided(shape, strides)


def _other_bits_in_small(
    operators: CacheOperators, parts: Sequence[PartShape], block_tokens: int, device: torch.device
) -> str:
    contents = [varied((LAYERS, BLOCKS, *part.block), part.dtype) for part in parts]
    plain = [content.to(device) for content in contents]
    joined = [content.transpose(0, 1).contiguous().to(device) for content in contents]
    views = [[part[:, layer] for part in joined] for layer in range(LAYERS)]
    return other_bits(operators, plain, views, block_tokens, lambda: _same_contents(plain, joined))


def _same_contents(plain: Parts, joined: Parts) -> bool:
    # Whole allocations are fetched: to copy a view, the device would use strides of its own.
    return all(
        same_bits(one.cpu(), other.cpu().transpose(0, 1).contiguous()) for one, other in zip(plain, joined, strict=True)
    )


def _copies(
    operators: CacheOperators, parts: Sequence[PartShape], block_tokens: int, device: torch.device, watch: MemoryWatch
) -> str:
    smallest = min(part.block_bytes for part in parts)
    blocks = max(BLOCKS, -(-_WATCHED_BYTES // smallest))
    memory = [torch.zeros((2 * blocks, *part.block), dtype=part.dtype, device=device) for part in parts]
    plain = [part[:blocks] for part in memory]
    joined = [part.view(blocks, 2, *part.shape[1:])[:, 1] for part in memory]  # two layers show as well as many
    for step, batch in enumerate(batches(block_tokens)):
        for name, call in (("writing", operators.write), ("attention", operators.attend)):
            call(plain, batch, step)  # what operators take once, such as workspace, they have taken after this
            usual = watch.taken_by(lambda call=call, batch=batch, step=step: call(plain, batch, step))  # type: ignore[misc]
            taken = watch.taken_by(lambda call=call, batch=batch, step=step: call(joined, batch, step))  # type: ignore[misc]
            if taken - usual >= smallest * blocks // 2:
                return (
                    f"{name} in step {step} takes {taken - usual} bytes more, as if it copied the cache of "
                    f"{smallest * blocks} bytes a part"
                )
    return ""
