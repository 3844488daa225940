"""Norms, activations and sampling: operators of torch_npu, in torch for the CPU.

As in all of these modules, there is only what is needed, as vllm-ascend calls it: an operator or a mode that is missing
raises.
"""

import torch
from torch import Tensor
from torch.nn import functional

from tests.support.ascend.host_kernels.dispatch import atb_operator, npu_operator


def scaled_norm(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """``x`` over its root mean square, times ``gamma``, and one over that root."""
    wide = x.float()
    reciprocal = (wide.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt()
    return (wide * reciprocal * gamma.float()).to(x.dtype), reciprocal


@npu_operator
def npu_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    return scaled_norm(x, gamma, epsilon)


def npu_rms_norm_cast(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    normalised, _ = scaled_norm(x, gamma, epsilon)
    return normalised, normalised.float()


def shapes_of_rms_norm_cast(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.float32)


@npu_operator
def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    total = x1 + x2
    normalised, reciprocal = scaled_norm(total, gamma, epsilon)
    return normalised, reciprocal, total


@npu_operator
def npu_swiglu(x: Tensor, dim: int = -1) -> Tensor:
    gate, up = x.chunk(2, dim)
    return functional.silu(gate) * up


@npu_operator
def npu_clipped_swiglu(
    x: Tensor, *, group_index: Tensor | None = None, dim: int = -1, alpha: float = 1.702, limit: float = 7.0,
    bias: float = 1.0, interleaved: bool = True,
) -> Tensor:  # fmt: skip
    assert group_index is None
    assert not interleaved
    gate, up = x.chunk(2, dim)
    gate = gate.clamp(max=limit)
    return gate * (alpha * gate).sigmoid() * (up.clamp(-limit, limit) + bias)


@npu_operator
def npu_prefetch(x: Tensor, dependency: Tensor | None, max_size: int, offset: int = 0) -> None:
    """Nothing: a hint for the device's cache."""


@npu_operator
def npu_format_cast(
    x: Tensor, acl_format: int, *, customize_dtype: int | None = None, input_dtype: int | None = None
) -> Tensor:
    """A copy in the order as it is: no kernel here reads what has a format of the device's own."""
    return x.clone()


@npu_operator
def npu_top_k_top_p(logits: Tensor, p: Tensor | None = None, k: Tensor | None = None) -> Tensor:
    ordered, index = logits.sort(-1, descending=False)
    if k is not None:
        least = ordered.gather(1, (ordered.size(1) - k.long()).unsqueeze(1))
        ordered = ordered.masked_fill(ordered < least, float("-inf"))
    if p is not None:
        dropped = ordered.softmax(-1).cumsum(-1) <= 1 - p.unsqueeze(1)
        dropped[:, -1] = False
        ordered = ordered.masked_fill(dropped, float("-inf"))
    return ordered.scatter(-1, index, ordered)


@npu_operator
def npu_transpose_batchmatmul(
    x: Tensor, weight: Tensor, *, bias: Tensor | None = None, scale: Tensor | None = None,
    perm_x1: list[int] | None = None, perm_x2: list[int] | None = None, perm_y: list[int] | None = None,
    batch_split_factor: int = 1,
) -> Tensor:  # fmt: skip
    a = x.permute(perm_x1) if perm_x1 else x
    b = weight.permute(perm_x2) if perm_x2 else weight
    product = (a.float() @ b.float()).to(x.dtype)  # PyTorch's own in bfloat16 is slow on CPUs that lack it
    return (product.permute(perm_y) if perm_y else product).contiguous()


@atb_operator
def _npu_matmul_add_fp32(x: Tensor, weight: Tensor, total: Tensor) -> None:
    left = x.float().t() if total.shape[0] == x.shape[1] else x.float()
    total.add_(left @ weight.float())
