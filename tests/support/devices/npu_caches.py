"""What one worker has of the host tier, on the simulated device: KV caches of torch's, host memory for their blocks.

The connector describes the caches; where a block lies in them is written down here a second time, to check its copies.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

import numpy as np
import torch

from layout.geometry import WorkerGeometry
from layout.host_blocks import host_layout
from pd_connector.orders import BlockMoves, StoreEnds
from pd_connector.stats import StatsRecorder
from pd_connector.vllm.cache_groups import GroupSpec, Ranks
from pd_connector.vllm.cache_specs import LayerSpec
from pd_connector.worker.caches import describe_caches
from pd_connector.worker.host.device_copies import CopyEnd, HostCopies
from pd_connector.worker.host.pool import HostPool, HostQuota
from tests.support.connector.tensors import stated_of
from tests.support.devices.npu_device import DeviceBytes
from tests.support.memory import Bytes
from tests.support.waiting import until
from transfer.copies.batch.backends import Backend, open_copier, pinned_memory
from transfer.copies.batch.base import Direction

BLOCKS, TOKENS = 12, 8  # of each cache group

_Key = TypeVar("_Key")
_End = TypeVar("_End")


@dataclass(frozen=True, repr=False)  # device tensors take minutes to show
class Part:
    """A part of a layer's cache: a tensor [kernel blocks, tokens, heads, content] in one of the allocations."""

    group: int
    layer: str
    name: str
    tensor: torch.Tensor
    allocation: int
    start: int  # byte of the allocation at which block 0 begins

    @property
    def kernel_blocks(self) -> int:
        """In a block."""
        return int(TOKENS // self.tensor.shape[1])

    def rows(self, block: int) -> torch.Tensor:
        """A block of it, dense."""
        return self.tensor[block * self.kernel_blocks : (block + 1) * self.kernel_blocks]

    def place(self, block: int) -> slice:
        """The bytes of its allocation that are ``block``."""
        item = self.tensor.element_size()
        start = self.start + block * self.kernel_blocks * self.tensor.stride(0) * item
        return slice(start, start + self.rows(block).numel() * item)


@dataclass(frozen=True, repr=False)  # device tensors take minutes to show
class Caches:
    """A worker's KV caches. Allocations are flat tensors of bytes."""

    memory: DeviceBytes
    allocations: list[torch.Tensor]
    parts: list[Part]  # by group

    @property
    def geometry(self) -> WorkerGeometry:
        """As the connector describes them."""
        layers = {name: list(parts) for name, parts in groupby(self.parts, lambda part: part.layer)}
        groups = []
        for parts in self.groups():
            names = tuple(dict.fromkeys(part.layer for part in parts))
            stated = {name: _stated(layers[name]) for name in names}
            groups.append(GroupSpec(names, TOKENS, 0, BLOCKS, stated))
        tensors = {name: [part.tensor for part in parts] for name, parts in layers.items()}
        return describe_caches(tensors, groups, Ranks(0, 1, 0, 1), "")

    def groups(self) -> list[list[Part]]:
        return [list(parts) for _, parts in groupby(self.parts, lambda part: part.group)]

    def fill(self, seed: int) -> None:
        """Write noise everywhere, at once."""
        torch.npu.synchronize(self.allocations[0].device)
        noise = np.random.default_rng(seed)
        for flat in self.allocations:
            self.memory.put(flat.data_ptr(), noise.integers(0, 256, len(flat), np.uint8))

    def now(self) -> list[Bytes]:
        """All bytes of the allocations, whatever is under way."""
        return [self.memory.of(flat) for flat in self.allocations]

    def block(self, block: int, group: int = 0) -> list[Bytes]:
        """The bytes of a block now, by part."""
        places = [(part, part.place(block)) for part in self.groups()[group]]
        return [
            self.memory.at(self.allocations[part.allocation].data_ptr() + at.start, at.stop - at.start)
            for part, at in places
        ]

    def contents(self, seed: int) -> list[torch.Tensor]:
        """New contents of a block of group 0 for ``write``, in pinned memory."""
        noise, rows = np.random.default_rng(seed), [part.rows(0) for part in self.groups()[0]]
        return [
            torch.from_numpy(noise.integers(0, 256, row.numel() * row.element_size(), np.uint8))
            .pin_memory()
            .view(row.dtype)
            .view(row.shape)
            for row in rows
        ]

    def write(self, block: int, contents: Sequence[torch.Tensor]) -> None:
        """Queue the writing of a block of group 0 on the current stream, as the model's step does."""
        for part, values in zip(self.groups()[0], contents, strict=True):
            part.rows(block).copy_(values, non_blocking=True)

    def read(self, block: int) -> list[torch.Tensor]:
        """Queue the reading of a block of group 0 on the current stream, as attention does: what it will have seen."""
        found = [torch.empty_like(part.rows(block), device="cpu").pin_memory() for part in self.groups()[0]]
        for part, values in zip(self.groups()[0], found, strict=True):
            values.copy_(part.rows(block), non_blocking=True)
        return found


def _stated(parts: Sequence[Part]) -> LayerSpec:
    """What vLLM would state of a layer's cache."""
    contents = tuple((part.name, part.tensor.shape[3]) for part in parts)
    page_bytes = sum(part.rows(0).numel() * part.tensor.element_size() for part in parts)
    return stated_of(parts[0].tensor, contents, heads_axis=2, page_bytes=page_bytes)


def as_bytes(contents: Sequence[torch.Tensor]) -> list[Bytes]:
    return [tensor.view(torch.uint8).numpy().ravel() for tensor in contents]


def are_equal(some: Sequence[Bytes], others: Sequence[Bytes]) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(some, others, strict=True))


# Forms of caches


class _Builder:
    def __init__(self, device: torch.device, memory: DeviceBytes) -> None:
        self._device = device
        self.caches = Caches(memory, [], [])

    def allocate(self, size: int) -> torch.Tensor:
        self.caches.allocations.append(torch.empty(size, dtype=torch.uint8, device=self._device))
        return self.caches.allocations[-1]

    def add(
        self, layer: int, name: str, shape: tuple[int, int, int], dtype: torch.dtype, padding: int, group: int = 0
    ) -> None:
        """A tensor of its own, padded and sliced as vllm-ascend allocates them; ``shape``: tokens, heads, content."""
        kernel_blocks = BLOCKS * TOKENS // shape[0]
        size = kernel_blocks * int(np.prod(shape)) * dtype.itemsize
        tensor = self.allocate(padding + size + 64)[padding : padding + size].view(dtype).view(kernel_blocks, *shape)
        allocation = len(self.caches.allocations) - 1
        self.caches.parts.append(Part(group, f"layer {layer}", name, tensor, allocation, padding))


def keys_and_values(device: torch.device, memory: DeviceBytes) -> Caches:
    made = _Builder(device, memory)
    for layer in range(3):
        made.add(layer, "k", (TOKENS, 2, 64), torch.bfloat16, 512 * layer)
        made.add(layer, "v", (TOKENS, 2, 32), torch.bfloat16, (2 << 20) - 64)
    return made.caches


def mla(device: torch.device, memory: DeviceBytes) -> Caches:
    made = _Builder(device, memory)
    for layer in range(2):
        made.add(layer, "mla_latent", (TOKENS, 1, 512), torch.bfloat16, 0)
        made.add(layer, "mla_rope", (TOKENS, 1, 64), torch.bfloat16, 1024)
    return made.caches


def quantised_in_kernel_blocks(device: torch.device, memory: DeviceBytes) -> Caches:
    made = _Builder(device, memory)
    for layer in range(2):
        for name, content, dtype in (("k", 64, torch.int8), ("v", 64, torch.int8), ("scale", 1, torch.float32)):
            made.add(layer, name, (TOKENS // 2, 2, content), dtype, 64)
    return made.caches


def two_groups(device: torch.device, memory: DeviceBytes) -> Caches:
    """Blocks of group 1 are smaller, and in slots of the same size."""
    made = _Builder(device, memory)
    for layer, group, content in ((0, 0, 64), (1, 0, 64), (2, 1, 48)):
        made.add(layer, "k", (TOKENS, 2, content), torch.bfloat16, 0, group)
        made.add(layer, "v", (TOKENS, 2, content), torch.bfloat16, 128, group)
    return made.caches


def cross_layer(device: torch.device, memory: DeviceBytes) -> Caches:
    """All layers of a block together, in one allocation."""
    made, (layers, shape) = _Builder(device, memory), (3, (TOKENS, 2, 64))
    flat = made.allocate(BLOCKS * layers * 2 * int(np.prod(shape)) * 2)
    whole = flat.view(torch.bfloat16).view(BLOCKS, layers, 2, *shape)
    for layer in range(layers):
        for number, name in enumerate(("k", "v")):
            tensor = whole[:, layer, number]
            start = tensor.data_ptr() - flat.data_ptr()
            made.caches.parts.append(Part(0, f"layer {layer}", name, tensor, 0, start))
    return made.caches


def many_layers(device: torch.device, memory: DeviceBytes) -> Caches:
    """More than 4,096 runs in ten blocks."""
    made = _Builder(device, memory)
    for layer in range(206):
        made.add(layer, "k", (TOKENS, 1, 8), torch.int8, 0)
        made.add(layer, "v", (TOKENS, 1, 8), torch.int8, 0)
    return made.caches


Form = Callable[[torch.device, DeviceBytes], Caches]
CACHE_FORMS: list[Form] = [keys_and_values, mla, quantised_in_kernel_blocks, two_groups, cross_layer]


# Host memory for them


def open_pool(caches: Caches, slots: int) -> HostPool:
    """The share of a worker that is alone, for ``slots`` blocks."""
    geometry = caches.geometry
    share = HostQuota(slots * host_layout(geometry).slot_bytes, workers=1, workers_here=1)
    return HostPool.open(share, geometry, [part.tensor for part in caches.parts], StatsRecorder())


def open_pool_without_marks(caches: Caches, slots: int) -> HostPool:
    """What must not be: copies that do not wait for the model's stream."""
    layout, device = host_layout(caches.geometry), caches.allocations[0].device.index
    pinned = pinned_memory(Backend.ACL, slots * layout.slot_bytes, device)
    stores, loads = (
        open_copier(Backend.ACL, way, device) for way in (Direction.DEVICE_TO_HOST, Direction.HOST_TO_DEVICE)
    )
    return HostPool(HostCopies(layout, pinned.region, stores, loads, lambda: None), pinned, slots, StatsRecorder())


def moves(*triples: tuple[int, int, int]) -> BlockMoves:
    """Of (group, block, slot)."""
    return BlockMoves.of(triples)


def end_of_store(copies: HostCopies, store_id: int) -> tuple[CopyEnd, StoreEnds]:
    """Ask as the model's thread does, until a store has ended; no other is under way."""
    return _ended(copies.take_stores, store_id)


def end_of_load(copies: HostCopies, request_id: str) -> CopyEnd:
    """The same of a load."""
    return _ended(copies.take_loads, request_id)


def _ended(take: Callable[[], dict[_Key, _End]], key: _Key) -> _End:
    ended = until(take, f"{key} has ended")
    assert list(ended) == [key]
    return ended[key]
