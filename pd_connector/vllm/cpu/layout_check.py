"""Checks that paged attention kernels work on KV caches of another physical layout.

The kernels run on a plain LBHNC cache and, with the same inputs, on views into one allocation of several layers in the
layout under test. Outputs and cache contents must agree bit for bit after every step. That includes bytes that the step
must not touch, because every byte of the allocation belongs to some layer and block.

This module uses arithmetic and torch only. ``kernels`` calls a backend's kernels, ``cpu_layouts`` handles failures.
"""

from dataclasses import dataclass

import torch

from pd_connector.vllm.paged_batches import BLOCKS, CacheOperators, other_bits, same_bits, varied

LAYERS = 3

#: Physical order of the logical axes [L, B, H, N, C] in the reference layout, LBHNC.
PLAIN = (0, 1, 2, 3, 4)


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The shape of what a layer's kernels read and write on one worker."""

    heads: int  # query heads
    kv_heads: int
    head_size: int  # items
    block_tokens: int
    dtype: torch.dtype  # of queries, keys, values
    cache_dtype: torch.dtype

    def __str__(self) -> str:
        return (
            f"{self.heads} heads, {self.kv_heads} KV heads, head size {self.head_size}, block size "
            f"{self.block_tokens}, {self.dtype}, cache {self.cache_dtype}"
        )


def difference(kernels: CacheOperators, shape: CacheShape, order: tuple[int, ...]) -> str:
    """Return how the kernels behave differently in the layout ``order``; empty if they do not.

    ``order`` is the physical order of the logical axes [L, B, H, N, C]. An exception in this layout alone is a
    difference; one in the plain layout propagates. A layer's cache is one part, a view [B, H, N, C], C = K and V.
    """
    plain, tested = _allocation(shape, PLAIN), _allocation(shape, order)
    views = [[layer] for layer in tested]
    with torch.no_grad():
        return other_bits(kernels, [plain], views, shape.block_tokens, lambda: same_bits(plain, tested))


def _allocation(shape: CacheShape, order: tuple[int, ...]) -> torch.Tensor:
    """Return a cache [L, B, H, N, C] with its memory in ``order``, filled with finite values that vary by place."""
    sizes = (LAYERS, BLOCKS, shape.kv_heads, shape.block_tokens, 2 * shape.head_size)
    memory = torch.empty([sizes[axis] for axis in order], dtype=shape.cache_dtype, device="cpu")
    cache = memory.permute([order.index(axis) for axis in range(len(order))])
    cache.copy_(varied(sizes, shape.cache_dtype))
    return cache
