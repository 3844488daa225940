"""Gated delta net: operators of fla_npu, in torch for the CPU.

fla_npu is the library of flash linear attention for NPUs. It is public; these are what its descriptions say, token by
token, in the types that they are given, where a device knows bfloat16 only.

A state of the recurrence is [value heads, value size, key size]. A convolution's are its last inputs, [rows, channels],
one row less than its kernel has, and behind them room for drafts.

With drafts, a request goes on with several tokens, of which only the next step knows how many are accepted. The
recurrence keeps the state after each of them in a place of its own. The convolution keeps all of their inputs behind
those that the first of them still needs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.support.ascend.host_kernels.dispatch import OperatorLibrary

#: Schemas, with what each operator writes.
_SCHEMAS = (
    "causal_conv1d_fn(Tensor x, Tensor weight, Tensor? bias, *, Tensor(a!) conv_states, Tensor query_start_loc, "
    "Tensor cache_indices, Tensor has_initial_state, str? activation, int pad_slot_id, int null_block_id) -> Tensor",
    "causal_conv1d_update(Tensor x, Tensor(a!) conv_state, Tensor weight, *, Tensor? bias, str? activation, "
    "Tensor conv_state_indices, Tensor query_start_loc, int max_query_len, int null_block_id, Tensor(b!) out, "
    "Tensor? num_accepted_tokens=None) -> Tensor(b!)",
    "recurrent_gated_delta_rule(Tensor query, Tensor key, Tensor value, Tensor(a!) state, *, Tensor g, Tensor beta, "
    "float scale, Tensor actual_seq_lengths, Tensor ssm_state_indices, Tensor? num_accepted_tokens=None) -> Tensor",
    "chunk_gated_delta_rule_fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, *, Tensor initial_state, "
    "bool output_final_state, int chunk_size, int[] cu_seqlens, int[] chunk_indices, float scale, str layout, "
    "bool use_exp2, bool use_qk_l2norm_in_kernel, bool allow_neg_eigval, bool disable_recompute, bool state_v_first) "
    "-> (Tensor, Tensor)",
)


def _convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, *, keeps_state: bool = True, accepted: int = 0
) -> Tensor:
    """A request's convolution, then SiLU; ``state`` becomes its last inputs.

    ``x`` [tokens, channels], ``weight`` [kernel, channels], of which the last row is that of a token itself.
    ``accepted``: tokens of the step before this one, if this one has drafts.
    """
    needed = weight.shape[0] - 1
    first = max(accepted - 1, 0)
    before = state[first : first + needed]
    inputs = torch.cat(((before if keeps_state else torch.zeros_like(before)).to(x.dtype), x))
    kept = inputs[1:] if accepted else inputs[-needed:]
    state[: kept.shape[0]] = kept.to(state.dtype)
    windows = inputs.unfold(0, needed + 1, 1).float()  # [tokens, channels, kernel]
    total = (windows * weight.t().float()).sum(-1)
    return functional.silu(total if bias is None else total + bias.float()).to(x.dtype)


def causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, conv_states: Tensor, query_start_loc: Tensor,
    cache_indices: Tensor, has_initial_state: Tensor, activation: str | None, pad_slot_id: int, null_block_id: int,
) -> Tensor:  # fmt: skip
    """Convolutions of prompts, one request after the other in ``x``; what has no state of its own begins with zeros."""
    assert activation == "silu", activation
    out = torch.zeros_like(x)
    starts = query_start_loc.tolist()
    for request, index in enumerate(cache_indices.tolist()):
        rows = slice(starts[request], starts[request + 1])
        if index in {pad_slot_id, null_block_id} or rows.start == rows.stop:
            continue
        out[rows] = _convolve(x[rows], weight, bias, conv_states[index], keeps_state=bool(has_initial_state[request]))
    return out


def causal_conv1d_update(
    x: Tensor, conv_state: Tensor, weight: Tensor,
    *, bias: Tensor | None, activation: str | None, conv_state_indices: Tensor, query_start_loc: Tensor,
    max_query_len: int, null_block_id: int, out: Tensor, num_accepted_tokens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Convolutions of requests that go on, of a token each, or of drafts behind it."""
    assert activation == "silu", activation
    starts, indices = query_start_loc.tolist(), conv_state_indices.tolist()
    accepted = [0] * len(indices) if num_accepted_tokens is None else num_accepted_tokens.tolist()
    for request, index in enumerate(indices):
        rows = slice(starts[request], starts[request + 1])
        if index != null_block_id and rows.start < rows.stop:
            assert rows.stop - rows.start <= max_query_len
            out[rows] = _convolve(x[rows], weight, bias, conv_state[index], accepted=accepted[request])
    return out


def _kept(g: Tensor) -> Tensor:
    """What each token leaves of a state, [tokens, value heads, 1, 1], of the logarithm of that."""
    return g.float().exp()[..., None, None]


def recur(q: Tensor, k: Tensor, v: Tensor, kept: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """What a request's tokens read of its state, which each of them changes before.

    ``q``, ``k`` [tokens, key heads, size], ``v`` [tokens, value heads, size], ``beta`` [tokens, value heads], and
    ``kept``, what a token leaves of the state, [tokens, value heads, 1, key size or 1]; ``state`` in float32, changed
    in place.
    """
    q, k = (x.float().repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    beta, v = beta.float(), v.float()
    out = torch.empty_like(v)
    for token in range(v.shape[0]):
        state *= kept[token]
        key = k[token].unsqueeze(-2)
        # Products of matrices would round otherwise for another number of heads.
        surprise = (v[token] - (state * key).sum(-1)) * beta[token].unsqueeze(-1)
        state += surprise.unsqueeze(-1) * key
        out[token] = (state * q[token].unsqueeze(-2)).sum(-1)
    return out


def recurrent_gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, state: Tensor,
    *, g: Tensor, beta: Tensor, scale: float, actual_seq_lengths: Tensor, ssm_state_indices: Tensor,
    num_accepted_tokens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Requests that go on, of a token each, or of drafts behind it; ``state`` has all states, of which theirs change.

    ``actual_seq_lengths`` begins with the number of tokens before the first request, which are none's;
    ``ssm_state_indices`` has as many places for each request as it may have tokens.
    """
    start, *lengths = actual_seq_lengths.tolist()
    places = ssm_state_indices.view(len(lengths), -1).tolist()
    accepted = [1] * len(lengths) if num_accepted_tokens is None else num_accepted_tokens.tolist()
    kept, out = _kept(g), torch.zeros_like(value)
    for request, length in enumerate(lengths):
        assert length <= len(places[request]), "more tokens than places for states"
        own = state[places[request][accepted[request] - 1]].to(torch.float32, copy=True)
        for token, place in zip(range(start, start + length), places[request], strict=False):
            row = slice(token, token + 1)
            out[row] = (scale * recur(query[row], key[row], value[row], kept[row], beta[row], own)).to(out.dtype)
            state[place] = own.to(state.dtype)
        start += length
    return out


def chunk_gated_delta_rule_fwd(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    *, initial_state: Tensor, cu_seqlens: Sequence[int], scale: float, layout: str, state_v_first: bool,
    use_exp2: bool, use_qk_l2norm_in_kernel: bool, allow_neg_eigval: bool, **_others: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Prompts: what their tokens read, [1, tokens, value heads, size], and their states [requests, heads, key, value].

    ``q``, ``k``, ``v`` [1, heads, tokens, size], ``g`` and ``beta`` [1, tokens, value heads]. Whether it is computed in
    chunks makes no difference but in speed and rounding.
    """
    assert (layout, state_v_first) == ("BNSD", False), "as on A2 and A3"
    assert not any((use_exp2, use_qk_l2norm_in_kernel, allow_neg_eigval))
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    kept, out = _kept(g[0]), torch.zeros_like(v, memory_format=torch.contiguous_format)
    final = initial_state.float().transpose(-1, -2).contiguous()
    for request, state in enumerate(final):
        rows = slice(cu_seqlens[request], cu_seqlens[request + 1])
        out[rows] = (scale * recur(q[rows], k[rows], v[rows], kept[rows], beta[0, rows], state)).to(out.dtype)
    return out.unsqueeze(0), final.transpose(-1, -2).contiguous()


def _update(*args: Any, out: Tensor | None = None, max_query_len: int = 0, **others: Any) -> Tensor:
    """``causal_conv1d_update``, into a tensor of its own if none is given, of any number of tokens if that is not."""
    out = torch.zeros_like(args[0]) if out is None else out
    most = max_query_len or len(args[0])
    updated: Tensor = torch.ops.fla_npu.causal_conv1d_update(*args, out=out, max_query_len=most, **others)
    return updated


def _like_the_input(x: Tensor, *_args: object, **_others: object) -> Tensor:
    return x.new_empty(x.shape)


def _like_the_values(_query: Tensor, _key: Tensor, value: Tensor, *_args: object, **_others: object) -> Tensor:
    return value.new_empty(value.shape)


def _shapes_of_chunks(
    _q: Tensor, _k: Tensor, v: Tensor, *_args: object, initial_state: Tensor, **_others: object
) -> tuple[Tensor, Tensor]:
    one, heads, tokens, size = v.shape
    return v.new_empty((one, tokens, heads, size)), initial_state.new_empty(initial_state.shape, dtype=torch.float32)


def define_operators() -> tuple[Any, dict[str, Callable[..., Any]]]:
    """Define the operators; returns the library that holds them, and what fla_npu has under their names."""
    library = torch.library.Library("fla_npu", "DEF")
    for schema in _SCHEMAS:
        library.define(schema)
    operators = OperatorLibrary("fla_npu", library)
    operators.define(causal_conv1d_fn, shapes=_like_the_input)
    operators.define(causal_conv1d_update, shapes=lambda *_args, out, **_others: out)
    operators.define(recurrent_gated_delta_rule, shapes=_like_the_values)
    operators.define(chunk_gated_delta_rule_fwd, shapes=_shapes_of_chunks)
    names = [schema.partition("(")[0] for schema in _SCHEMAS]
    return library, {name: getattr(torch.ops.fla_npu, name) for name in names} | {"causal_conv1d_update": _update}
