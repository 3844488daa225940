"""Mixtures of experts: operators of torch_npu and of vllm-ascend, in torch for the CPU."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.support.ascend.host_kernels.dispatch import Operator, npu_operator

#: Ways to make scores of logits.
_SIGMOID, _ROOT_OF_SOFTPLUS = 1, 2
_COUNTS = 1


def moe_gating_top_k_hash(
    x: Tensor, k: int, bias: Tensor | None = None, input_ids: Tensor | None = None, tid2eid: Tensor | None = None,
    k_group: int = 1, group_count: int = 1, routed_scaling_factor: float = 1.0, eps: float = 1e-20,
    group_select_mode: int = 0, renorm: int = 0, norm_type: int = 0, out_flag: bool = False,
    bias_vl: Tensor | None = None, *_others: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The weights [tokens, k] of each token's experts, and their numbers: those of its id, or the best.

    ``x`` [tokens, experts]; ``tid2eid`` [vocabulary, k]. ``bias`` counts in the choice only.
    """
    assert (k_group, group_count, renorm, norm_type, bias_vl) == (1, 1, 0, _ROOT_OF_SOFTPLUS, None)
    scores = functional.softplus(x.float()).sqrt()
    if input_ids is not None and tid2eid is not None:
        chosen = tid2eid[input_ids.long()].long()
    else:
        wanted = scores if bias is None else scores + bias.float()
        chosen = wanted.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, chosen)
    weights = routed_scaling_factor * weights / (weights.sum(-1, keepdim=True) + eps)
    return weights.to(x.dtype), chosen.int(), torch.zeros_like(x, dtype=torch.float32)


def moe_gating_top_k(
    x: Tensor, k: int, k_group: int, group_count: int, group_select_mode: int, renorm: int, norm_type: int,
    out_flag: bool, routed_scaling_factor: float, eps: float, bias_opt: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The same of each token's best experts, by the sigmoid of ``x``."""
    assert (k_group, group_count, norm_type) == (1, 1, _SIGMOID), (k_group, group_count, renorm, norm_type)
    scores = x.float().sigmoid()
    wanted = scores if bias_opt is None else scores + bias_opt.float()
    chosen = wanted.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, chosen)
    weights = routed_scaling_factor * weights / (weights.sum(-1, keepdim=True) + eps)
    return weights.to(x.dtype), chosen.int(), torch.zeros_like(x, dtype=torch.float32)


def _shapes_of_gating(x: Tensor, k: int, *_args: object, **_others: object) -> tuple[Tensor, Tensor, Tensor]:
    shape = (x.shape[0], k)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int32), torch.empty_like(x, dtype=torch.float32)


@npu_operator
def npu_moe_init_routing_v2(
    x: Tensor, expert_idx: Tensor,
    *, scale: Tensor | None = None, offset: Tensor | None = None, active_num: int = -1, expert_capacity: int = -1,
    expert_num: int = -1, expert_tokens_num_type: int = 0, expert_tokens_num_flag: bool = False, quant_mode: int = -1,
    active_expert_range: Any = (), **_others: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Tokens in the order of their experts, the place of each in it, and how many each expert has."""
    assert (scale, quant_mode, expert_tokens_num_type) == (None, -1, _COUNTS)
    assert list(active_expert_range) == [0, expert_num]
    flat = expert_idx.flatten().long()
    order = flat.argsort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel())).int()
    counts = flat.bincount(minlength=expert_num)
    return x[order // expert_idx.shape[1]], place, counts, torch.zeros(order.numel())


@npu_operator
def npu_grouped_matmul(
    x: list[Tensor], weight: list[Tensor],
    *, bias: list[Tensor] | None = None, group_list: Tensor, split_item: int = 0, group_type: int = -1,
    group_list_type: int = 0, **_others: Any,
) -> list[Tensor]:  # fmt: skip
    """Products of ``x[0]`` [rows, in] and ``weight[0]`` [experts, in, out]; ``group_list``: the rows of each expert."""
    assert (bias, split_item, group_type, group_list_type) == (None, 2, 0, _COUNTS)
    parts = x[0].split(group_list.tolist())
    products = [part.float() @ each.float() for part, each in zip(parts, weight[0], strict=True)]
    return [torch.cat(products).to(x[0].dtype)]


@npu_operator
def npu_moe_token_unpermute(
    permuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor | None = None, padded_mode: bool = False,
    restore_shape: Any = None,
) -> Tensor:  # fmt: skip
    """Sums of each token's rows, by ``probs`` [tokens, experts of a token]; ``sorted_indices``: their places."""
    assert probs is not None
    rows = permuted_tokens[sorted_indices.long().abs()].view(*probs.shape, -1)
    return (rows.float() * probs.float().unsqueeze(-1)).sum(1).to(permuted_tokens.dtype)


#: Operators of ``_C_ascend``.
EXPERTS = (Operator(moe_gating_top_k_hash, _shapes_of_gating), Operator(moe_gating_top_k, _shapes_of_gating))
