"""Kimi delta attention (KDA): operators of fla_npu, and the Triton kernels that vllm-ascend launches around them.

As ``gated_delta``, also with drafts, but for how a state decays: each item of a key has a rate of its own. A state of
the recurrence is [heads, value size, key size].
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.support.ascend.host_kernels.dispatch import OperatorLibrary, host
from tests.support.ascend.host_kernels.gated_delta import recur
from tests.support.ascend.host_kernels.norms import scaled_norm

_RECURRENT, _CHUNKED = (
    "recurrent_kda(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) states, *, Tensor cu_seqlens, "
    "Tensor indices, Tensor? accepted, Tensor A_log, Tensor dt_bias, float scale, float lower_bound, bool is_raw_beta) "
    "-> Tensor",
    "chunk_kda_fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor initial_state, *, int[] cu_seqlens, "
    "Tensor A_log, Tensor dt_bias, float scale, float lower_bound) -> (Tensor, Tensor)",
)
#: What a vector's squares are raised by before it gets length one.
_EPSILON = 1e-6


def _kept(gate: Tensor, a_log: Tensor, bias: Tensor, lower_bound: float) -> Tensor:
    """What each token leaves of a state's columns, [tokens, heads, 1, key size]: no less than exp(``lower_bound``)."""
    steepness = a_log.float().exp().unsqueeze(-1)
    wide = gate.float() + bias.float().view(gate.shape[1:])
    return (lower_bound * (steepness * wide).sigmoid()).exp().unsqueeze(-2)


def _of_length_one(x: Tensor) -> Tensor:
    wide = x.float()
    return wide * (wide.square().sum(-1, keepdim=True) + _EPSILON).rsqrt()


def _recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor,
    *, cu_seqlens: Tensor, indices: Tensor, accepted: Tensor | None, A_log: Tensor, dt_bias: Tensor,  # noqa: N803
    scale: float, lower_bound: float, is_raw_beta: bool,
) -> Tensor:  # fmt: skip
    q, k, v, g, beta = (x[0] for x in (q, k, v, g, beta))
    beta = beta.float().sigmoid() if is_raw_beta else beta.float()
    q, k, kept = _of_length_one(q), _of_length_one(k), _kept(g, A_log, dt_bias, lower_bound)
    out = torch.zeros_like(v, memory_format=torch.contiguous_format)
    places = indices.reshape(len(indices), -1).tolist()
    befores = [1] * len(places) if accepted is None else accepted.tolist()
    for own_places, before, (start, end) in zip(places, befores, pairwise(cu_seqlens.tolist()), strict=True):
        assert end - start <= len(own_places), "more tokens than places for states"
        own = states[own_places[before - 1]].to(torch.float32, copy=True)
        for token, place in zip(range(start, end), own_places, strict=False):
            row = slice(token, token + 1)
            out[row] = (scale * recur(q[row], k[row], v[row], kept[row], beta[row], own)).to(out.dtype)
            states[place] = own.to(states.dtype)
    return out.unsqueeze(0)


def _chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor,
    *, cu_seqlens: Sequence[int], A_log: Tensor, dt_bias: Tensor,  # noqa: N803  fla_npu's
    scale: float, lower_bound: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q, k, v, g, beta = (x[0] for x in (q, k, v, g, beta))
    kept = _kept(g, A_log, dt_bias, lower_bound)
    out = torch.zeros_like(v, memory_format=torch.contiguous_format)
    final = initial_state.float().clone()
    for state, (start, end) in zip(final, pairwise(cu_seqlens), strict=True):
        rows = slice(start, end)
        out[rows] = (scale * recur(q[rows], k[rows], v[rows], kept[rows], beta[rows], state)).to(out.dtype)
    return out.unsqueeze(0), final


def _shapes_of_chunked(
    _q: Tensor, _k: Tensor, v: Tensor, _g: Tensor, _beta: Tensor, initial_state: Tensor, **_others: object
) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), initial_state.new_empty(initial_state.shape, dtype=torch.float32)


def recurrent_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor,
    *, cu_seqlens: Tensor, ssm_state_indices: Tensor, A_log: Tensor, dt_bias: Tensor,  # noqa: N803  fla_npu's
    scale: float, lower_bound: float, use_beta_sigmoid_in_kernel: bool, num_accepted_tokens: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """What requests that go on, of a token each or drafts, read of their states, [1, tokens, heads, size].

    ``q``, ``k``, ``v``, ``g`` [1, tokens, heads, size], ``beta`` [1, tokens, heads]; ``initial_state`` has all states.
    """
    assert others == {
        "layout": "BSND", "output_final_state": False, "inplace_final_state": True, "state_v_first": True,
        "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "allow_neg_eigval": False, "safe_gate": True,
    }  # fmt: skip
    out = torch.ops.fla_npu.recurrent_kda(
        q, k, v, g, beta, initial_state, cu_seqlens=cu_seqlens, indices=ssm_state_indices, accepted=num_accepted_tokens,
        A_log=A_log, dt_bias=dt_bias, scale=scale, lower_bound=lower_bound, is_raw_beta=use_beta_sigmoid_in_kernel,
    )  # fmt: skip
    return out, None


def chunk_kda_fwd(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, chunk_size: int,
    *, initial_state: Tensor, cu_seqlens: Sequence[int], chunk_indices: Sequence[int], A_log: Tensor,  # noqa: N803
    dt_bias: Tensor, lower_bound: float, **others: object,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What the tokens of prompts read, as above, and the states behind them, [requests, heads, value size, key size].

    Queries and keys have length one already. Chunks make no difference but in speed and rounding.
    """
    assert others == {
        "layout": "BSND", "output_final_state": True, "return_intermediate_states": False, "state_v_first": True,
        "use_gate_in_kernel": True, "safe_gate": True, "disable_recompute": False,
    }  # fmt: skip
    done: tuple[Tensor, Tensor] = torch.ops.fla_npu.chunk_kda_fwd(
        q, k, v, g, beta, initial_state, cu_seqlens=cu_seqlens, A_log=A_log, dt_bias=dt_bias, scale=scale,
        lower_bound=lower_bound,
    )  # fmt: skip
    return done


def define_kda_operators() -> tuple[Any, dict[str, Callable[..., Any]]]:
    """Define the operators; returns the library that holds them, and what fla_npu has under their names."""
    library = torch.library.Library("fla_npu", "FRAGMENT")
    for schema in (_RECURRENT, _CHUNKED):
        library.define(schema)
    operators = OperatorLibrary("fla_npu", library)
    operators.define(_recurrent, name="recurrent_kda", shapes=lambda _q, _k, v, *_args, **_others: v.new_empty(v.shape))
    operators.define(_chunked, name="chunk_kda_fwd", shapes=_shapes_of_chunked)
    return library, {"recurrent_kda": recurrent_kda, "chunk_kda_fwd": chunk_kda_fwd}


def copy_conv_states(
    _grid: tuple[int, ...], states: Tensor, packed: Tensor, indices: Tensor, starts: Tensor, places: Tensor,
    *_sizes: int, WRITE_BACK: bool, **_others: int,  # noqa: N803  Triton's
) -> None:  # fmt: skip
    """Requests' convolutions out of all ``states``, one behind the other, and where they are in ``packed``; or back.

    A request without tokens, or without a state, has none: its place is -1.
    """
    states, packed, indices, starts, places = map(host.view, (states, packed, indices, starts, places))

    def copy() -> None:
        first = indices.reshape(len(packed), -1)[:, 0].tolist()
        for request, (index, (start, end)) in enumerate(zip(first, pairwise(starts.tolist()), strict=False)):
            has_state = 0 <= index < len(states) and end > start
            if not WRITE_BACK:
                packed[request] = states[index] if has_state else 0
                places[request] = request if has_state else -1
            elif has_state:
                states[index] = packed[request]

    host.launch(copy)


def write_output(_grid: tuple[int, ...], source: Tensor, out: Tensor, ends: Tensor, last: int, *_sizes: int) -> None:
    """Rows of tokens, [1, tokens, heads, size], up to the end of the last request; zeros behind."""
    source, out, ends = map(host.view, (source, out, ends))

    def write() -> None:
        count = min(int(ends[last]), source.shape[1])
        out.zero_()
        out[:, :count] = source[:, :count]

    host.launch(write)


def norm_times_gate(
    _grid: tuple[int, ...], *, x: Tensor, g: Tensor, y: Tensor, w: Tensor, b: None, eps: float, residual: None,
    ACTIVATION: str, IS_RMS_NORM: bool, PACKED_GATE: bool, STRIDED_GATE: bool, **_others: Any,  # noqa: N803  Triton's
) -> None:  # fmt: skip
    """The norm of each head, times the sigmoid of a gate."""
    assert (b, residual, PACKED_GATE, STRIDED_GATE) == (None, None, False, False)
    assert (ACTIVATION, IS_RMS_NORM) == ("sigmoid", True)
    x, g, y, w = map(host.view, (x, g, y, w))

    def normalise() -> None:
        normalised, _ = scaled_norm(x.float(), w, eps)
        y.copy_(normalised * g.float().sigmoid().view(x.shape))

    host.launch(normalise)
