"""Describes the KV cache tensors that vLLM's model runner hands over, as geometry.

Knows torch tensors and vLLM's shapes; decides nothing about transfers.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from layout.geometry import CacheGroup, Plane, Region, WorkerGeometry
from layout.sharding import held_heads
from pd_connector.vllm_compat import GroupSpec, Ranks


class UnknownCacheError(ValueError):
    """A KV cache tensor has a form that cannot be described; the message names layer, shape and strides."""


@dataclass(frozen=True)
class _LayerView:
    """One layer's tensor, logical shape [blocks, heads, tokens, content]."""

    name: str
    tensor: torch.Tensor

    @property
    def address(self) -> int:
        return int(self.tensor.data_ptr())

    @property
    def form(self) -> tuple[object, ...]:
        return tuple(self.tensor.shape), tuple(self.tensor.stride()), self.tensor.dtype


def describe_caches(
    kv_caches: Mapping[str, torch.Tensor],
    groups: Sequence[GroupSpec],
    ranks: Ranks,
    kv_heads: int,
    engine_address: str,
) -> WorkerGeometry:
    """The geometry of a worker's caches.

    Args:
        kv_caches: layer name to tensor, each [blocks, heads, tokens, content] in any strides, as vLLM 0.29 and later
            hand over; layers that share another layer's cache may be among them and are left out.
        groups: vLLM's cache groups.
        ranks: of this worker.
        kv_heads: KV heads of the whole model.
        engine_address: where this worker's transfer engine is reached.

    Raises:
        UnknownCacheError: a tensor is not of the form above.
    """
    described = tuple(_describe_group(kv_caches, group, ranks, kv_heads) for group in groups)
    used = [kv_caches[name] for group in groups for name in group.layer_names]
    return WorkerGeometry(
        tp_rank=ranks.tp_rank,
        tp_size=ranks.tp_size,
        pp_rank=ranks.pp_rank,
        pp_size=ranks.pp_size,
        kv_heads=kv_heads,
        engine_address=engine_address,
        groups=described,
        regions=_regions(used),
    )


def _describe_group(kv_caches: Mapping[str, torch.Tensor], group: GroupSpec, ranks: Ranks, kv_heads: int) -> CacheGroup:
    views = [_LayerView(name, kv_caches[name]) for name in group.layer_names]
    for view in views:
        _check_form(view, group)
    planes = tuple(_plane(run, ranks, kv_heads, group.packing) for run in _evenly_spaced(views))
    return CacheGroup(group.block_tokens, group.window, planes)


def _check_form(view: _LayerView, group: GroupSpec) -> None:
    tensor = view.tensor
    if not isinstance(tensor, torch.Tensor) or tensor.dim() != 4 or group.block_tokens % tensor.shape[2]:
        is_tensor = isinstance(tensor, torch.Tensor)
        got = f"shape {tuple(tensor.shape)}, strides {tensor.stride()}" if is_tensor else repr(type(tensor))
        raise UnknownCacheError(
            f"KV cache of layer {view.name!r} has {got}; expected [blocks, heads, tokens, content] with a number of "
            f"tokens that divides the block size {group.block_tokens}"
        )


def _evenly_spaced(views: Iterable[_LayerView]) -> list[list[_LayerView]]:
    """Layers of one form whose addresses are one stride apart, in runs as long as possible, by address."""
    forms: dict[tuple[object, ...], list[_LayerView]] = {}
    for view in views:
        forms.setdefault(view.form, []).append(view)
    runs: list[list[_LayerView]] = []
    for alike in forms.values():
        alike.sort(key=lambda view: view.address)
        runs.append(alike[:1])
        for previous, view in pairwise(alike):
            run = runs[-1]
            if len(run) > 1 and view.address - previous.address != run[1].address - run[0].address:
                runs.append([view])
            else:
                run.append(view)
    return runs


def _plane(run: list[_LayerView], ranks: Ranks, kv_heads: int, packing: str) -> Plane:
    tensor = run[0].tensor
    blocks, heads, tokens, content = tensor.shape
    item = tensor.element_size()
    block_stride, head_stride, token_stride, content_stride = (stride * item for stride in tensor.stride())
    head_start, head_end = held_heads(kv_heads, ranks.tp_size, ranks.tp_rank)
    if heads != head_end - head_start:
        raise UnknownCacheError(
            f"KV cache of layer {run[0].name!r} holds {heads} heads; rank {ranks.tp_rank} of {ranks.tp_size} should "
            f"hold {head_end - head_start} of the model's {kv_heads}"
        )
    if packing and (content_stride, token_stride) != (item, content * item):
        raise UnknownCacheError(
            f"KV cache of layer {run[0].name!r} is packed as {packing!r} but not dense inside a head: strides "
            f"{tensor.stride()} of shape {tuple(tensor.shape)}"
        )
    return Plane(
        part="kv",
        layers=tuple(view.name for view in run),
        head_start=head_start,
        heads=heads,
        block_tokens=tokens,
        content=content,
        item_size=item,
        blocks=blocks,
        address=run[0].address,
        layer_stride=run[1].address - run[0].address if len(run) > 1 else 0,
        block_stride=block_stride,
        head_stride=head_stride,
        token_stride=token_stride,
        content_stride=content_stride,
        packing=packing,
    )


def _regions(tensors: Iterable[torch.Tensor]) -> tuple[Region, ...]:
    """The memory behind the tensors, without overlaps: few, large regions."""
    storages = {(storage.data_ptr(), storage.nbytes()) for storage in (tensor.untyped_storage() for tensor in tensors)}
    regions: list[Region] = []
    for address, size in sorted(storages):
        if regions and address < regions[-1].end:
            start = regions[-1].address
            regions[-1] = Region(start, max(regions[-1].end, address + size) - start)
        else:
            regions.append(Region(address, size))
    return tuple(regions)
