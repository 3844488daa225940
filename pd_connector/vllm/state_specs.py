"""What vLLM states of a recurrent layer's cache: which heads, groups or channels each part of a state belongs to.

A state is a few tensors: the last inputs of a causal convolution, as rows, and what the recurrence knows. vLLM shards
each over tensor-parallel ranks by what its columns are of, and states the shapes on one rank only:

    type         columns of the convolution, in order      recurrence
    MAMBA2       x by head; B, C by group                  [heads, head size, state size]
    GDN_ATTN     q, k by key head; v by value head         [value heads, value size, key size]   (KDA, too)
    MAMBA1       channels                                  [channels, state size]
    SHORT_CONV   channels                                  none
    LINEAR       none                                      [heads, head size, head size]

Source: ``MambaStateShapeCalculator`` and the layers of ``vllm.model_executor.layers.mamba``. The convolution's tensor
is [rows, columns], or [columns, rows] with VLLM_SSM_CONV_STATE_LAYOUT=DS.

A ring is a state in which nothing belongs to heads: every rank holds all of it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from pd_connector.vllm.cache_specs import is_ring, numbers_under
from pd_connector.vllm.engine_config import UnsupportedError, engine_ranks

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

#: The part that is no row of a convolution.
RECURRENCE = "state"

_CONV_KERNEL = re.compile("conv")
_GROUPED = ("b", "c")
_GROUPS = re.compile(r"(^|_)n_?groups$")


@dataclass(frozen=True)
class StatePart:
    """Columns of one of a state's tensors, all of one kind: heads, groups or channels, called heads here."""

    name: str
    tensor: int  # which of the state's tensors
    rows: int  # the first so many are needed; others are room for drafts
    heads: int  # on this worker
    total_heads: int  # over all tensor-parallel ranks
    content: int  # columns of one head
    first_column: int


@dataclass(frozen=True)
class StateSpec:
    """What vLLM states of one layer's states on this worker; its tensors must agree."""

    parts: tuple[StatePart, ...]
    shapes: tuple[tuple[int, ...], ...]  # of one state's tensors
    dtypes: "tuple[torch.dtype, ...]"
    is_column_first: bool  # of a convolution: [columns, rows]
    is_replicated: bool  # every rank holds the whole state

    @property
    def content_bytes(self) -> int:
        """Bytes of one state, without padding."""
        sizes = zip(self.shapes, self.dtypes, strict=True)
        return sum(prod(shape) * int(dtype.itemsize) for shape, dtype in sizes)


def state_spec(vllm_config: "VllmConfig", layer: str, spec: Any) -> StateSpec:
    """Return what a ``MambaSpec``, or the specification of a ring, states of the states of ``layer``.

    Raises:
        UnsupportedError: its type or its shapes are not known; names both.
    """
    if is_ring(spec):
        return _ring(spec)
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first  # noqa: PLC0415

    shapes = tuple(tuple(int(size) for size in shape) for shape in spec.shapes)
    is_replicated = bool(getattr(spec, "tp_replicated", False))
    ranks = 1 if is_replicated else engine_ranks(vllm_config)[0]
    is_column_first = bool(is_conv_state_dim_first())
    conv, recurrence = _tensors(_type(spec), shapes)
    columns, rows = (conv if is_column_first else conv[::-1]) if conv else (0, 0)
    widths = _widths(_type(spec), columns, recurrence)
    if (conv is None and recurrence is None) or sum(heads * content for _, heads, content in widths) != columns:
        raise UnsupportedError(
            f"the states of layer {layer!r} are of type {_type(spec)} with shapes {shapes}, which PDConnector does not "
            f"know: start without --use-replayssm, if it is set, or serve this model without PDConnector"
        )
    parts, first = [], 0
    config = vllm_config.model_config.hf_text_config.to_dict()
    # With RecoverSSM, there are no blocks for drafts, and room for them in the convolution all the same.
    drafts = max(int(spec.num_speculative_blocks), int(getattr(vllm_config, "num_speculative_tokens", 0)))
    for name, heads, content in widths:
        total = _total_groups(heads, ranks, config) if name in _GROUPED else heads * ranks
        parts.append(StatePart(f"conv_{name}", 0, _input_rows(rows, drafts, config), heads, total, content, first))
        first += heads * content
    if recurrence is not None:
        heads = recurrence[0]
        parts.append(StatePart(RECURRENCE, len(shapes) - 1, 1, heads, heads * ranks, prod(recurrence[1:]), 0))
    return StateSpec(tuple(parts), shapes, tuple(spec.dtypes), is_column_first, is_replicated)


def _ring(spec: Any) -> StateSpec:
    page = int(getattr(spec, "unpadded_page_size_bytes", spec.page_size_bytes))
    items = page // int(spec.dtype.itemsize)
    part = StatePart(RECURRENCE, 0, 1, 1, 1, items, 0)
    return StateSpec((part,), ((items,),), (spec.dtype,), False, True)


def _type(spec: Any) -> str:
    return str(getattr(spec.mamba_type, "name", spec.mamba_type))


def _tensors(kind: str, shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, int] | None, tuple[int, ...] | None]:
    """Return the shapes of the convolution and the recurrence, None for what there is not, or if they are not known."""
    match kind, shapes:
        case "SHORT_CONV", ((one, other),):
            return (one, other), None
        case "LINEAR", ((_, _, _) as recurrence,):
            return None, recurrence
        case (("MAMBA2" | "GDN_ATTN"), ((one, other), (_, _, _) as recurrence)):
            return (one, other), recurrence
        case "MAMBA1", ((one, other), (_, _) as recurrence):
            return (one, other), recurrence
    return None, None


def _widths(kind: str, columns: int, recurrence: Sequence[int] | None) -> list[tuple[str, int, int]]:
    """Return the parts of a convolution in the order of its columns: name, heads here, columns of each.

    They have other than ``columns`` columns in all if these shapes do not belong together.
    """
    if not columns:
        return []
    if recurrence is None or len(recurrence) != 3:
        return [("x", columns if recurrence is None else recurrence[0], 1)]
    heads, size, inner = recurrence
    pairs = max(columns - heads * size, 0) // (2 * inner)
    if kind == "MAMBA2":
        return [("x", heads, size), ("b", pairs, inner), ("c", pairs, inner)]
    return [("q", pairs, inner), ("k", pairs, inner), ("v", heads, size)]


def _input_rows(rows: int, drafts: int, config: Any) -> int:
    """Return how many rows of a convolution are inputs; those behind are room for drafts."""
    return rows - drafts if drafts and rows + 1 not in set(numbers_under(_CONV_KERNEL, config)) else rows


def _total_groups(groups: int, ranks: int, config: Any) -> int:
    """Return the groups over all ranks. vLLM gives each rank a copy if there is only one."""
    stated = {number for number in numbers_under(_GROUPS, config) if number in (1, groups * ranks)}
    return stated.pop() if groups == 1 and len(stated) == 1 else groups * ranks
