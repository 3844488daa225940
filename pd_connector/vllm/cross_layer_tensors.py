"""Allocates the KV caches of all layers in one tensor per part, for model runners that leave that to the connector.

An attention kernel sees the view of one layer, whose blocks are far apart: give a view only to a backend that is known
to honour its strides.
"""

from collections.abc import Sequence

import torch

from pd_connector.vllm.npu.cache_check import PartShape

ALIGNMENT = 2 * 1024 * 1024  # bytes; Ascend's transfer engine registers memory in units of this size


def allocate_cross_layer(
    parts: Sequence[PartShape], layers: Sequence[str], blocks: int, device: torch.device | str
) -> dict[str, tuple[torch.Tensor, ...]]:
    """Return zeroed caches by layer, a view [blocks, *block of the part] for each part.

    Each part is a tensor [blocks, layers, *block] at a multiple of ``ALIGNMENT``. Its last aligned unit is whole.
    """
    together = []
    for part in parts:
        shape, unit = torch.Size((blocks, len(layers), *part.block)), ALIGNMENT // part.dtype.itemsize
        raw = torch.zeros((-(-shape.numel() // unit) + 1) * unit, dtype=part.dtype, device=device)
        first = -raw.data_ptr() % ALIGNMENT // part.dtype.itemsize
        together.append(raw[first : first + shape.numel()].view(shape))
    return {name: tuple(part[:, number] for part in together) for number, name in enumerate(layers)}
