"""Rotary embeddings: operators of torch_npu and ATB, in torch for the CPU."""

import importlib
import types
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from tests.support.ascend.host_kernels.dispatch import atb_operator, host, npu_operator

_FP8 = torch.float8_e4m3fn


def rotate_heads(x: Tensor, cos: Tensor, sin: Tensor, head_size: int, *, neox: bool) -> None:
    """Rotate in place; ``x`` [tokens, heads * head size], ``cos`` and ``sin`` [tokens, rotated size / 2]."""
    heads = x.view(x.shape[0], -1, head_size)
    size = cos.shape[-1] * 2
    turned, rest = heads[..., :size].float(), heads[..., size:]
    cos, sin = cos.float()[:, None, :], sin.float()[:, None, :]
    if neox:
        a, b = turned.chunk(2, -1)
        out = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    else:
        a, b = turned[..., ::2], turned[..., 1::2]
        out = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    heads.copy_(torch.cat((out.to(heads.dtype), rest), -1))


@atb_operator
def _npu_rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool
) -> None:
    cos, sin = cos_sin_cache.index_select(0, positions.flatten().long()).chunk(2, -1)
    rotate_heads(query, cos, sin, head_size, neox=is_neox)
    rotate_heads(key, cos, sin, head_size, neox=is_neox)


@npu_operator
def npu_mrope(
    positions: Tensor, query: Tensor, key: Tensor, cos_sin_cache: Tensor, head_size: int,
    *, mrope_section: list[int] | None = None, rotary_mode: str = "half", cache_mode: str = "default",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert not any(mrope_section or ()), mrope_section
    query, key = query.clone(), key.clone()
    _npu_rotary_embedding(positions, query, key, head_size, cos_sin_cache, rotary_mode == "half")
    return query, key


@npu_operator
def npu_rotary_mul(
    x: Tensor, cos: Tensor, sin: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    if rotary_mode == "half":
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin
    return turn_neighbours(x, cos, sin)


def turn_neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of pairs of neighbours, which stay where they are."""
    return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin


def inplace_partial_rotary_mul(
    x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str, partial_slice: list[int], negate_sin: bool = False
) -> None:
    """The same of a part of ``x`` [tokens, 1, heads, size] only, by cosines and sines [tokens, 1, 1, rotary size]."""
    assert rotary_mode == "interleave", rotary_mode
    part = x[..., slice(*partial_slice)]
    part.copy_(turn_neighbours(part.float(), r1.float(), -r2.float() if negate_sin else r2.float()))


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """MLA's rotary embedding: pairs of neighbours are turned, and the halves come out one after the other."""
    a, b = x[..., ::2], x[..., 1::2]
    return (torch.cat((a, b), -1) * cos + torch.cat((-b, a), -1) * sin).to(x.dtype)


@npu_operator
def npu_interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotate_pairs(x, cos, sin)


def rotate_into_fp8(
    _grid: tuple[int, ...], query: Tensor, _query_stride: int, key: Tensor, _key_stride: int, query_out: Tensor,
    _query_out_stride: int, key_out: Tensor, _key_out_stride: int, cos_sin_cache: Tensor, _cos_sin_stride: int,
    positions: Tensor, *_sizes: int, **_others: Any,
) -> None:  # fmt: skip
    """A Triton kernel: rotates halves of ``query`` and ``key`` [tokens, heads, size]; without scales."""
    pairs = [tuple(map(host.view, pair)) for pair in ((query, query_out), (key, key_out))]
    cos_sin_cache, positions = host.view(cos_sin_cache), host.view(positions)

    def rotate() -> None:
        cos, sin = cos_sin_cache.index_select(0, positions.long()).chunk(2, -1)
        largest = torch.finfo(_FP8).max
        for x, out in pairs:
            turned = x.float().clone()  # else it is ``x``, if that is in float32
            rotate_heads(turned.view(len(turned), -1), cos, sin, x.shape[-1], neox=True)
            out.copy_(turned.clamp(-largest, largest))

    host.launch(rotate)


def only_into_fp8(module: types.ModuleType) -> None:
    """Let vllm-ascend's rotary embeddings launch that kernel, as with Triton; elsewhere, operators do the same."""
    embedding = module.AscendRotaryEmbedding
    forward = embedding.forward_oot

    @wraps(forward)
    def forward_oot(*arguments: Any, **options: Any) -> Any:
        if options.get("out_dtype") is None:
            return forward(*arguments, **options)
        launch = importlib.import_module("vllm_ascend.ops.triton.rope").rope_forward_triton
        vars(module).update(HAS_TRITON=True, rope_forward_triton=launch)
        try:
            return forward(*arguments, **options)
        finally:
            vars(module)["HAS_TRITON"] = False

    embedding.forward_oot = forward_oot
