"""Manifold-constrained hyper-connections: vllm-ascend's operators for them, in torch for the CPU.

A token has several residual streams. Before a layer, a weighted sum of them becomes its input; behind it, its output is
added to each of them, which are mixed by a matrix whose rows and columns add up to nearly one.
"""

import torch
from torch import Tensor

from tests.support.ascend.host_kernels.dispatch import Operator


def npu_hc_pre_v2(
    x: Tensor, hc_fn: Tensor, hc_scale: Tensor, hc_base: Tensor, hc_mult: int, hc_sinkhorn_iters: int,
    norm_eps: float, hc_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The input of a layer [..., size], how its output is shared out [..., streams], and the matrix that mixes.

    ``x`` [..., streams, size]; the matrix is [..., from, to]. The second and third are float32.
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
    return (weights.unsqueeze(-1) * wide).sum(-2).to(x.dtype), 2 * post.sigmoid(), matrix


def _shapes_of_pre(x: Tensor, *_args: object, **_others: object) -> tuple[Tensor, Tensor, Tensor]:
    *outer, streams, size = x.shape
    return (
        x.new_empty((*outer, size)),
        x.new_empty((*outer, streams), dtype=torch.float32),
        x.new_empty((*outer, streams, streams), dtype=torch.float32),
    )


def npu_hc_post(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """The streams behind a layer, [..., streams, size], of its output ``x`` [..., size] and those before it."""
    mixed = comb.float().transpose(-1, -2) @ residual.float()
    return (mixed + post.float().unsqueeze(-1) * x.float().unsqueeze(-2)).to(residual.dtype)


def _shapes_of_post(_x: Tensor, residual: Tensor, *_args: object) -> Tensor:
    return residual.new_empty(residual.shape)


#: Operators of ``_C_ascend``.
HYPER_CONNECTIONS = (Operator(npu_hc_pre_v2, _shapes_of_pre), Operator(npu_hc_post, _shapes_of_post))
