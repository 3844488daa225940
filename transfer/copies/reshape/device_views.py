"""Views of device memory as bytes, through which operators reach as many allocations at once as they can.

An operator takes one tensor to write to, and a layer's cache is an allocation of its own. But a device's allocator
often puts neighbouring allocations into one segment of mapped memory: always with expandable segments, which
vllm-ascend switches on unless sleep mode is on. A view over such a segment reaches all layers:

    storages    [layer 0] [layer 1] [layer 2] . [other's] [staging]   [layer 3]
    segments    [---------------------------------------------------] [-------]
    views       [--------------- layers 0 to 2 -]         [staging]   [layer 3]

What lies between the storages of a view belongs to others: only operators that touch nothing but the rows they are
told of may write through it. Must not know what is copied.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import groupby
from typing import Any

import numpy as np
import torch

from layout.copies import Int64Array
from layout.geometry import Region
from layout.regions import RegionTable


@dataclass(frozen=True, slots=True)
class Storage:
    """All bytes of a storage, and which side of copies it is on: no copy goes between storages of one side."""

    memory: torch.Tensor  # [bytes], uint8
    side: int

    @property
    def region(self) -> Region:
        """Where it lies."""
        return Region(self.memory.data_ptr(), self.memory.numel())


class DeviceViews:
    """Owns the views over some storages. An address belongs to the last view that starts at or before it."""

    def __init__(self, storages: Sequence[Storage], segments: Sequence[Region], view_bytes: int, spare: int) -> None:
        """Make the views.

        Args:
            storages: of one device, by address, none of them overlapping.
            segments: memory of the device that is mapped without a hole.
            view_bytes: bytes in which storages of a view may start; a longer storage has several views.
            spare: bytes by which a view extends beyond that, so that a run of fewer bytes ends in the view in which it
                starts.
        """
        self._kept = tuple(storages)  # what the views show must live as long as they do
        views: list[torch.Tensor] = []
        for joined in _joinable(storages, segments):
            memory = joined[0].memory if len(joined) == 1 else _over(joined)
            if memory is None:
                for storage in joined:
                    views.extend(_cut([storage], storage.memory, view_bytes, spare))
            else:
                views.extend(_cut(joined, memory, view_bytes, spare))
        self.views = tuple(views)
        self.starts: Int64Array = np.array([view.data_ptr() for view in views], np.int64)


def mapped_segments(device: torch.device) -> list[Region]:
    """Return the segments of mapped memory that PyTorch's allocator holds on ``device``; none on the CPU."""
    snapshot = None if device.type == "cpu" else getattr(torch.get_device_module(device), "memory_snapshot", None)
    if snapshot is None:
        return []
    return [Region(held["address"], held["total_size"]) for held in snapshot() if held["device"] == device.index]


def _joinable(storages: Sequence[Storage], segments: Sequence[Region]) -> list[list[Storage]]:
    """Return the storages in groups of neighbours that are of one side and in one segment."""
    table = RegionTable(segments)

    def segment_of(storage: Storage) -> int:
        region = storage.region
        if table.outside(np.array([region.address]), np.array([region.size]))[0]:
            return -1 - region.address  # in no segment that is known, so in none with another
        return int(np.searchsorted(table.starts, region.address, side="right"))

    return [list(joined) for _, joined in groupby(storages, key=lambda one: (one.side, segment_of(one)))]


def _over(storages: Sequence[Storage]) -> torch.Tensor | None:
    """Return a view from the first to the last byte of ``storages``; None if PyTorch makes none of an address."""
    address, end = storages[0].region.address, storages[-1].region.end
    device, size = storages[0].memory.device, end - address
    try:
        if device.type == "npu":
            return _npu_bytes(address, size, device)
        storage: Any = torch._C._construct_storage_from_data_pointer(address, device, size)
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (size,), (1,))
    except AttributeError:  # not public, so a release may be without it
        return None


def _npu_bytes(address: int, size: int, device: torch.device) -> torch.Tensor:
    npu = import_module("torch_npu")._C
    storage = npu._construct_storage_from_data_pointer(address, device, size)
    form: dict[str, Any] = {"nbytes": size, "data_ptr": address, "size": (size,), "stride": (1,), "storage_offset": 0}
    form |= {"dtype": torch.uint8, "device": device}
    memory: torch.Tensor = npu._construct_NPU_Tensor_From_Storage_And_Metadata(form, storage)
    return memory


def _cut(storages: Sequence[Storage], memory: torch.Tensor, view_bytes: int, spare: int) -> list[torch.Tensor]:
    """Return ``memory``, which shows ``storages``, in views in which no more than ``view_bytes`` are started."""
    base, starts = memory.data_ptr(), [storages[0].region.address]
    for storage in storages:
        region = storage.region
        if region.end - starts[-1] > view_bytes and region.address > starts[-1]:
            starts.append(region.address)
        while region.end - starts[-1] > view_bytes:
            starts.append(starts[-1] + view_bytes)
    last = storages[-1].region.end
    ends = [min(start + view_bytes + spare, last) for start in starts]
    return [memory[start - base : end - base] for start, end in zip(starts, ends, strict=True)]
