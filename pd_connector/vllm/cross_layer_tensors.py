"""Allocates the KV caches of all layers in one tensor per part, for model runners that leave that to the connector.

``layout.cross_layer`` decides where each element lies; this module makes tensors of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from layout.cross_layer import CachePart, CrossLayerBuffer, cross_layer_shapes


@dataclass(frozen=True)
class CrossLayerCaches:
    """The tensors that a model runner binds, and the buffers that a worker registers."""

    layers: Mapping[str, tuple[torch.Tensor, ...]]  # a view of each part: [blocks, tokens, heads, content]
    buffers: tuple[CrossLayerBuffer, ...]  # of each part, with its plane and the region to register


def allocate_cross_layer(
    parts: Sequence[tuple[CachePart, torch.dtype]],
    layers: Sequence[str],
    blocks: int,
    block_tokens: int,
    device: torch.device | str,
    order: str = "BLHNC",
) -> CrossLayerCaches:
    """Allocate zeroed caches, each part aligned to 2 MiB, with all layers of a block together.

    Args:
        parts: K and V, or MLA's parts, each with its own heads and items, and the data type of the items.
        layers: layer names, in the order of the layer axis.
        blocks: number of the kernel's blocks.
        block_tokens: tokens in a block of the kernel.
        device: of the tensors.
        order: physical order of the axes, see ``layout.cross_layer.cross_layer_shapes``.

    Raises:
        CrossLayerError: a size is not positive, a name is repeated, ``order`` is not an order of the axes, or the item
            size of a part is not that of its data type.
    """
    for part, dtype in parts:
        part.check_item_size(dtype.itemsize, str(dtype))
    shapes = cross_layer_shapes([part for part, _ in parts], layers, blocks, block_tokens, order)
    views: dict[str, list[torch.Tensor]] = {name: [] for name in layers}
    buffers = []
    for shape, (_, dtype) in zip(shapes, parts, strict=True):
        raw = torch.zeros(shape.allocation_bytes // dtype.itemsize, dtype=dtype, device=device)
        buffer = shape.at(raw.data_ptr())
        buffers.append(buffer)
        for name in layers:
            view = buffer.layer_view(name)
            views[name].append(raw.as_strided(view.shape, view.strides, view.offset))
    return CrossLayerCaches({name: tuple(tensors) for name, tensors in views.items()}, tuple(buffers))
