"""Manifold-constrained hyper-connections: vllm-ascend's operators for them, in torch for the CPU.

A token has several residual streams. Before a layer, a weighted sum of them becomes its input; behind it, its output is
added to each of them, which are mixed by a matrix whose rows and columns add up to nearly one.
"""

import torch
from torch import Tensor

from tests.support.ascend.host_kernels.dispatch import Operator


def npu_hc_pre_v3(
    x: Tensor, hc_fn: Tensor, hc_scale: Tensor, hc_base: Tensor, pre_mix: Tensor | None = None,
    *, hc_mult: int = 4, hc_sinkhorn_iters: int = 20, norm_eps: float = 1e-6, hc_eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The input of a layer [..., size], how its output is shared out [..., streams], the matrix that mixes, weights.

    ``x`` [..., streams, size]; the matrix is [..., from, to]. The input is a sum by ``pre_mix`` [..., streams], which
    are the weights that were found before, or by those that are found here. All but the first are float32.
    """
    streams, outer = hc_mult, x.shape[:-2]
    wide = x.float()
    flat = wide.flatten(-2)
    mixes = (flat @ hc_fn.float().t()) * (flat.square().mean(-1, keepdim=True) + norm_eps).rsqrt()
    sizes = [streams, streams, streams**2]
    parts = zip(mixes.split(sizes, -1), hc_scale, hc_base.split(sizes), strict=True)
    pre, post, comb = (part * scale + base for part, scale, base in parts)
    weights = pre.sigmoid() + hc_eps
    matrix = comb.view(*outer, streams, streams).softmax(-1) + hc_eps
    for turn in range(2 * hc_sinkhorn_iters - 1):
        matrix = matrix / (matrix.sum(-2 if turn % 2 == 0 else -1, keepdim=True) + hc_eps)
    used = weights if pre_mix is None else pre_mix.float()
    return (used.unsqueeze(-1) * wide).sum(-2).to(x.dtype), 2 * post.sigmoid(), matrix, weights


def _shapes_of_pre_v3(x: Tensor, *_args: object, **_others: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *outer, streams, size = x.shape
    weights = x.new_empty((*outer, streams), dtype=torch.float32)
    matrix = x.new_empty((*outer, streams, streams), dtype=torch.float32)
    return x.new_empty((*outer, size)), weights, matrix, torch.empty_like(weights)


def npu_hc_pre_v2(
    x: Tensor, hc_fn: Tensor, hc_scale: Tensor, hc_base: Tensor, hc_mult: int, hc_sinkhorn_iters: int,
    norm_eps: float, hc_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The first three of these, by the weights that are found here."""
    own, post, matrix, _ = npu_hc_pre_v3(
        x, hc_fn, hc_scale, hc_base, hc_mult=hc_mult, hc_sinkhorn_iters=hc_sinkhorn_iters, norm_eps=norm_eps,
        hc_eps=hc_eps,
    )  # fmt: skip
    return own, post, matrix


def _shapes_of_pre(x: Tensor, *_args: object, **_others: object) -> tuple[Tensor, Tensor, Tensor]:
    return _shapes_of_pre_v3(x)[:3]


def npu_hc_post(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """The streams behind a layer, [..., streams, size], of its output ``x`` [..., size] and those before it."""
    mixed = comb.float().transpose(-1, -2) @ residual.float()
    return (mixed + post.float().unsqueeze(-1) * x.float().unsqueeze(-2)).to(residual.dtype)


def _shapes_of_post(_x: Tensor, residual: Tensor, *_args: object) -> Tensor:
    return residual.new_empty(residual.shape)


#: Operators of ``_C_ascend``.
HYPER_CONNECTIONS = (
    Operator(npu_hc_pre_v2, _shapes_of_pre),
    Operator(npu_hc_pre_v3, _shapes_of_pre_v3),
    Operator(npu_hc_post, _shapes_of_post),
)
