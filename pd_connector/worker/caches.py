"""Describes the KV cache tensors of vLLM's model runner as geometry.

Knows torch tensors and vLLM's shapes; decides nothing about transfers.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

import torch

from layout.context_parallel import WHOLE, TokenSplit
from layout.geometry import CacheGroup, Plane, Region, WorkerGeometry, over_layers
from layout.sharding import held_heads
from pd_connector.vllm.cache_groups import GroupSpec, Ranks
from pd_connector.vllm.cache_specs import PADDING, LayerSpec
from pd_connector.vllm.cpu.head_order import HeadOrder
from pd_connector.vllm.state_specs import RECURRENCE, StatePart, StateSpec

#: What a model runner passes for a layer: one tensor, or one for each part.
Cache: TypeAlias = torch.Tensor | Sequence[torch.Tensor]


#: A part of one layer's cache, and the type of its tensor: planes of other types are not joined.
_Part: TypeAlias = tuple[torch.dtype, Plane]


class UnknownCacheError(ValueError):
    """A KV cache tensor cannot be described; the message names its layer, shape and strides."""


def describe_caches(
    kv_caches: Mapping[str, Cache], groups: Sequence[GroupSpec], ranks: Ranks, engine_address: str
) -> WorkerGeometry:
    """Return the geometry of a worker's caches.

    Args:
        kv_caches: by layer name, a tensor [blocks, heads, tokens, content] with any strides, as in vLLM 0.29 and later,
            or a tensor [blocks, tokens, heads, content] for each part, as in vllm-ascend. Of a compressed cache, the
            token axis has a row for several tokens. Layers that share another layer's cache may be included, and are
            ignored.
        groups: vLLM's cache groups.
        ranks: of this worker.
        engine_address: address of this worker's transfer engine.

    Raises:
        UnknownCacheError: a cache does not have this form, or its tensors are not what vLLM states of it.
    """
    described = tuple(_describe_group(kv_caches, group, ranks) for group in groups)
    named = [tensor for group in groups for name in group.layer_names for tensor in tensors_of(kv_caches[name])]
    used = [tensor for tensor in named if tensor.numel()]  # those of parts that a model lacks have no address
    place = asdict(ranks)
    del place["dcp_rank"]  # the planes tell
    return WorkerGeometry(**place, engine_address=engine_address, groups=described, regions=_regions(used))


def _describe_group(kv_caches: Mapping[str, Cache], group: GroupSpec, ranks: Ranks) -> CacheGroup:
    parts = [part for name in group.layer_names for part in _parts(name, kv_caches[name], group, ranks)]
    planes, seen = over_layers(parts), dict(group.seen_tokens)
    return CacheGroup(group.block_tokens, group.window, planes, group.chunk, seen, states=group.holds_states)


def _parts(layer: str, cache: Cache, group: GroupSpec, ranks: Ranks) -> list[_Part]:
    """Return the logical parts of a layer's cache, each with its strides in memory."""
    if group.holds_states:
        return _state_parts(layer, cache, group, ranks)
    spec, order = group.layers[layer], group.orders.get(layer)

    def view(part: str, tensor: torch.Tensor, packing: str = "", dtype: str = "") -> _Part:
        split = TokenSplit(spec.token_interleave, spec.token_ranks, ranks.dcp_rank) if spec.token_ranks > 1 else WHOLE
        return _part(
            part, layer, tensor, spec.total_heads, ranks, optional=spec.optional, packing=packing, dtype=dtype,
            tokens_per_row=spec.tokens_per_row, tokens=split,
        )  # fmt: skip

    if spec.is_by_part or not isinstance(cache, torch.Tensor):
        tensors = _by_part(cache)
        _check_tensors(layer, tensors, group)
        names = [name for name, _ in spec.parts] + [f"part{number}" for number in range(len(spec.parts), len(tensors))]
        parts = [
            (name, tensor if _token_axis(tensor, spec, group) == 2 else tensor.transpose(1, 2))
            for name, tensor in zip(names, tensors, strict=True)
        ]
        if spec.packed_parts and len(parts) == 1:
            return [view(part, each, dtype=dtype) for part, each, dtype in _packed_views(parts[0][1], spec)]
        return [view(*part) for part in parts]
    _check_form(layer, cache, group)
    if order is not None:
        return [view(*part) for part in _ordered_views(layer, cache, order)]
    if spec.packing:
        _check_dense(layer, cache)
    items = [content for _, content in spec.parts]
    if spec.packing or sum(items) != cache.shape[3]:
        return [view("kv", cache, spec.packing)]
    slices = zip(spec.parts, cache.split(items, dim=3), strict=True)
    return [view(name, tensor) for (name, _), tensor in slices if name != PADDING]


def _by_part(cache: Cache) -> list[torch.Tensor]:
    """Return the tensors of a layer's parts, [blocks, rows, heads, content], that have bytes of their own.

    Others are of parts that a model lacks, or, on some devices, views of the others together. An indexer's tensor may
    be [blocks, rows, content].
    """
    parts: list[torch.Tensor] = []
    for tensor in tensors_of(cache):
        if not isinstance(tensor, torch.Tensor):
            parts.append(tensor)  # refused later, by name
        elif tensor.numel() and not any(_spans(tensor, part) for part in parts):
            parts.append(tensor.unsqueeze(2) if tensor.dim() == 3 else tensor)
    return parts


def _spans(tensor: torch.Tensor, part: torch.Tensor) -> bool:
    """Return whether ``tensor`` is a view of a part and more."""
    return bool(tensor.data_ptr() == part.data_ptr() and tensor.shape[-1] > part.shape[-1])


def _packed_views(rows: torch.Tensor, spec: LayerSpec) -> Iterable[tuple[str, torch.Tensor, str]]:
    """Yield the parts of rows of bytes [blocks, heads, rows, bytes]: name, items, and dtype."""
    first = 0
    for name, dtype, items in spec.packed_parts:
        end = first + items * dtype.itemsize // rows.element_size()
        part = rows[..., first:end]
        yield name, part if dtype == rows.dtype else part.view(dtype), str(dtype).removeprefix("torch.")
        first = end


def _state_parts(layer: str, cache: Cache, group: GroupSpec, ranks: Ranks) -> list[_Part]:
    """Return the parts of a layer's states."""
    spec = group.states[layer]
    tensors = _state_tensors(layer, cache, spec, group.blocks)
    return [
        _part(
            part.name,
            layer,
            _rows_of_heads(tensors[part.tensor], part, is_column_first=spec.is_column_first),
            part.total_heads,
            ranks,
            is_replicated=spec.is_replicated,
            dtype=str(spec.dtypes[part.tensor]).removeprefix("torch."),
        )
        for part in spec.parts
    ]


def _state_tensors(layer: str, cache: Cache, spec: StateSpec, blocks: int) -> list[torch.Tensor]:
    """Return the tensors of a layer's states, [blocks, *shape]: as they are passed, or out of pages of bytes."""
    given = tensors_of(cache)
    is_ring = spec.shapes == ((spec.parts[0].content,),)
    if is_ring and len(given) == 1 and given[0].dtype == spec.dtypes[0]:
        tensors = [given[0].view(len(given[0]), -1)]
    elif not isinstance(cache, torch.Tensor):
        tensors = list(cache)
    else:
        tensors, offset = [], 0
        is_page = cache.dim() == 4 and tuple(cache.shape[1:]) == (1, 1, spec.content_bytes)
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True) if is_page and cache.dtype == torch.int8 else ():
            size = math.prod(shape) * dtype.itemsize
            tensors.append(cache[:, 0, 0, offset : offset + size].view(dtype).unflatten(1, shape))
            offset += size
    tensors = [tensor[:blocks] for tensor in tensors]  # of a device that has room for more than others
    forms = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    expected = [((blocks, *shape), dtype) for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)]
    if forms != expected:
        raise UnknownCacheError(
            f"the states of layer {layer!r} are {[(tuple(each.shape), each.dtype) for each in given]}; expected "
            f"{expected}, or one tensor ({blocks}, 1, 1, {spec.content_bytes}) of int8"
        )
    return tensors


def _rows_of_heads(tensor: torch.Tensor, part: StatePart, *, is_column_first: bool) -> torch.Tensor:
    """Return a part of a state's tensor as [blocks, heads, rows, content]."""
    columns = slice(part.first_column, part.first_column + part.heads * part.content)
    if part.name == RECURRENCE:
        return tensor.flatten(1).unflatten(1, (part.heads, 1, part.content))
    if is_column_first:
        return tensor[:, columns, : part.rows].unflatten(1, (part.heads, part.content)).transpose(2, 3)
    return tensor[:, : part.rows, columns].unflatten(2, (part.heads, part.content)).transpose(1, 2)


def _ordered_views(layer: str, cache: torch.Tensor, order: HeadOrder) -> list[tuple[str, torch.Tensor, str]]:
    """Return K and V as a CPU kernel puts them into each head's block, or the whole, opaque block, with its packing."""
    blocks, heads, tokens, content = cache.shape
    block_stride, head_stride = cache.stride()[:2]
    _check_dense(layer, cache)
    if order.key is None or order.value is None:
        return [("kv", cache, order.packing)]
    return [
        (
            name,
            cache.as_strided(
                (blocks, heads, tokens, content // 2),
                (block_stride, head_stride, part.token_stride, part.content_stride),
                cache.storage_offset() + part.offset,
            ),
            "",
        )
        for name, part in (("k", order.key), ("v", order.value))
    ]


def _check_dense(layer: str, cache: torch.Tensor) -> None:
    """Raise unless a head's block is one run, as kernels need that order its tokens in their own way."""
    if cache.stride()[2:] != (cache.shape[3], 1):
        raise UnknownCacheError(
            f"KV cache of layer {layer!r} is written by a kernel with an order of its own, but not dense inside a "
            f"head: it has shape {tuple(cache.shape)}, strides {tuple(cache.stride())}"
        )


def _check_form(layer: str, tensor: torch.Tensor, group: GroupSpec) -> None:
    """Raise unless a layer's tensor is [blocks, heads, tokens, content] with the numbers that vLLM states."""
    spec = group.layers[layer]
    fits = tensor.dim() == 4 and _holds_blocks(tensor, 2, spec, group)
    if not (fits and tensor.shape[1] == spec.heads and _token_bytes(tensor) == spec.token_bytes) or (
        tensor.dtype != spec.dtype
    ):
        raise UnknownCacheError(
            f"KV cache of layer {layer!r} has shape {tuple(tensor.shape)}, strides {tensor.stride()}, {tensor.dtype}; "
            f"expected [blocks, heads, tokens, content] of {group.blocks} blocks of {_rows(spec, group)} tokens (or as "
            f"many smaller ones as these make){_of_rows(spec)}, {spec.heads} heads of {spec.token_bytes} bytes a "
            f"token, {spec.dtype}"
        )


def _check_tensors(layer: str, tensors: Sequence[torch.Tensor], group: GroupSpec) -> None:
    """Raise unless a layer's cache has one tensor for each part, as vllm-ascend allocates it.

    vLLM states the sizes of the first parts, and of all of them together.
    """
    spec = group.layers[layer]
    if len(tensors) < max(1, len(spec.parts)):
        names = ", ".join(name for name, _ in spec.parts)
        raise UnknownCacheError(
            f"KV cache of layer {layer!r} has {len(tensors)} tensors; expected one for each part"
            + (f" ({names})" if names else "")
        )
    stated = [content for _, content in spec.parts] + [None] * (len(tensors) - len(spec.parts))
    for tensor, content in zip(tensors, stated, strict=True):
        fits = isinstance(tensor, torch.Tensor) and tensor.dim() == 4 and _token_axis(tensor, spec, group)
        if not fits or content not in (None, tensor.shape[3]):
            got = f"shape {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else repr(type(tensor))
            items = f", {content} items a token" if content is not None else ""
            raise UnknownCacheError(
                f"KV cache of layer {layer!r} has a part of {got}; expected [blocks, tokens, heads, content] or "
                f"[blocks, heads, tokens, content] of {group.blocks} blocks of {_rows(spec, group)} tokens (or as many "
                f"smaller ones as these make){_of_rows(spec)}, {spec.heads} heads{items}"
            )
    block_bytes = sum(_token_bytes(tensor) for tensor in tensors) * spec.heads * _rows(spec, group)
    if block_bytes > spec.page_bytes:
        raise UnknownCacheError(
            f"KV cache of layer {layer!r} has {len(tensors)} tensors with {block_bytes} bytes of each block; vLLM "
            f"states {spec.page_bytes}"
        )


def _of_rows(spec: LayerSpec) -> str:
    return f", each a row of {spec.tokens_per_row} tokens" if spec.tokens_per_row > 1 else ""


def _token_axis(tensor: torch.Tensor, spec: LayerSpec, group: GroupSpec) -> int:
    """Return which axis of a part's tensor the tokens are, 1 or 2; the heads are the other. 0 if neither can be.

    Of a block with as many heads as tokens, vLLM's layout says it.
    """
    axes = [
        axis for axis in (1, 2) if _holds_blocks(tensor, axis, spec, group) and tensor.shape[3 - axis] == spec.heads
    ]
    return axes[-1 if group.heads_first else 0] if axes else 0


def _rows(spec: LayerSpec, group: GroupSpec) -> int:
    """Return how many rows of a block a layer's tensors have on this rank."""
    return group.block_tokens // (spec.token_ranks * spec.tokens_per_row)


def _holds_blocks(tensor: torch.Tensor, axis: int, spec: LayerSpec, group: GroupSpec) -> bool:
    """Return whether a tensor whose ``axis`` is the rows of a kernel block holds all blocks of vLLM's pool."""
    rows, of_block = int(tensor.shape[axis]), _rows(spec, group)
    return of_block % max(rows, 1) == 0 and int(tensor.shape[0]) * rows == group.blocks * of_block


def _token_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.shape[3]) * int(tensor.element_size())


def _part(
    part: str, layer: str, tensor: torch.Tensor, total_heads: int, ranks: Ranks, *, is_replicated: bool = False,
    **others: Any,
) -> _Part:  # fmt: skip
    """Return a part of a layer's cache, of logical shape [blocks, heads, tokens, content]. Of states, rows are tokens.

    ``is_replicated``: every rank holds all heads. ``others``: further fields of the plane.
    """
    blocks, heads, tokens, content = tensor.shape
    block_stride, head_stride, token_stride, content_stride = (step * tensor.element_size() for step in tensor.stride())
    return tensor.dtype, Plane(
        part=part,
        layers=(layer,),
        head_start=0 if is_replicated else held_heads(total_heads, ranks.tp_size, ranks.tp_rank)[0],
        heads=heads,
        block_tokens=tokens,
        content=content,
        item_size=tensor.element_size(),
        blocks=blocks,
        address=tensor.data_ptr(),
        layer_stride=0,
        block_stride=block_stride,
        head_stride=head_stride,
        token_stride=token_stride,
        content_stride=content_stride,
        total_heads=total_heads,
        **others,
    )


def tensors_of(cache: Cache) -> Sequence[torch.Tensor]:
    """Return a layer's tensors: one, or one for each part."""
    return [cache] if isinstance(cache, torch.Tensor) else cache


def all_tensors(kv_caches: Mapping[str, Cache]) -> list[torch.Tensor]:
    """Return the tensors of all layers."""
    return [tensor for cache in kv_caches.values() for tensor in tensors_of(cache)]


def _regions(tensors: Iterable[torch.Tensor]) -> tuple[Region, ...]:
    """Return the memory that the tensors use, as few, large regions that do not overlap.

    A region spans from the first to the last tensor of a storage, not the whole storage: an allocation that was trimmed
    to an alignment begins before its tensors, and some transfer engines accept only aligned addresses.
    """
    spans: dict[int, tuple[int, int]] = {}
    for tensor in tensors:
        start, end = int(tensor.data_ptr()), int(tensor.data_ptr()) + _span_bytes(tensor)
        before = spans.get(tensor.untyped_storage().data_ptr(), (start, end))
        spans[tensor.untyped_storage().data_ptr()] = min(start, before[0]), max(end, before[1])
    regions: list[Region] = []
    for start, end in sorted(spans.values()):
        if regions and start < regions[-1].end:
            first = regions[-1].address
            regions[-1] = Region(first, max(regions[-1].end, end) - first)
        else:
            regions.append(Region(start, end - start))
    return tuple(regions)


def _span_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int((last + 1) * tensor.element_size())
