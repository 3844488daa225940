"""Checks that paged attention kernels work on KV caches of another physical layout.

The kernels run on a plain LBHNC cache and, with the same inputs, on views into one allocation of several layers in the
layout under test. Outputs and cache contents must agree bit for bit after every step. That includes bytes that the step
must not touch, because every byte of the allocation belongs to some layer and block.

This module uses arithmetic and torch only. ``kernels`` calls a backend's kernels, ``layouts`` handles failures.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from pd_connector.vllm.paged_batches import BLOCKS, Batch, batches, same_bits, varied

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


class Kernels(Protocol):
    """The two kernels of a paged attention layer. ``cache`` is a view [B, H, N, C] of one layer, C = K and V."""

    def write(self, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, batch: Batch) -> None:
        """Store the new tokens' keys and values, each [tokens, kv_heads, head_size]."""

    def attend(self, query: torch.Tensor, cache: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the attention output of the new tokens' queries, both [tokens, heads, head_size]."""


def difference(kernels: Kernels, shape: CacheShape, order: tuple[int, ...]) -> str:
    """Return how the kernels behave differently in the layout ``order``; empty if they do not.

    ``order`` is the physical order of the logical axes [L, B, H, N, C]. An exception in this layout alone is a
    difference; one in the plain layout propagates.
    """
    with torch.no_grad():
        return _difference(kernels, shape, order)


def _difference(kernels: Kernels, shape: CacheShape, order: tuple[int, ...]) -> str:
    plain, tested = _allocation(shape, PLAIN), _allocation(shape, order)
    for step, batch in enumerate(batches(shape.block_tokens)):
        inputs = [_inputs(shape, batch, seed=step * LAYERS + layer) for layer in range(LAYERS)]
        # All layers write before any attends, so that a layer that overwrites another one's bytes shows in both.
        for layer, (_, key, value) in enumerate(inputs):
            kernels.write(key, value, plain[layer], batch)
            try:
                kernels.write(key, value, tested[layer], batch)
            except Exception as error:
                return f"writing raises {type(error).__name__}: {error}"
        if not same_bits(plain, tested):
            return f"after writing in step {step} the cache holds other bytes than in LBHNC"
        for layer, (query, _, _) in enumerate(inputs):
            expected = kernels.attend(query, plain[layer], batch)
            try:
                output = kernels.attend(query, tested[layer], batch)
            except Exception as error:
                return f"attention raises {type(error).__name__}: {error}"
            if not same_bits(expected, output):
                return f"the attention output of layer {layer} in step {step} differs from LBHNC"
    return "" if same_bits(plain, tested) else "attention changed the cache"


def _allocation(shape: CacheShape, order: tuple[int, ...]) -> torch.Tensor:
    """Return a cache [L, B, H, N, C] with its memory in ``order``, filled with finite values that vary by place."""
    sizes = (LAYERS, BLOCKS, shape.kv_heads, shape.block_tokens, 2 * shape.head_size)
    memory = torch.empty([sizes[axis] for axis in order], dtype=shape.cache_dtype, device="cpu")
    cache = memory.permute([order.index(axis) for axis in range(len(order))])
    cache.copy_(varied(sizes, shape.cache_dtype))
    return cache


def _inputs(shape: CacheShape, batch: Batch, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return query, key and value of a layer's step, without using the global generator, which is the model's."""
    random = torch.Generator(device="cpu").manual_seed(seed)

    def normal(heads: int) -> torch.Tensor:
        size = (batch.tokens, heads, shape.head_size)
        return torch.randn(size, generator=random, dtype=torch.float32, device="cpu").to(shape.dtype)

    return normal(shape.heads), normal(shape.kv_heads), normal(shape.kv_heads)
