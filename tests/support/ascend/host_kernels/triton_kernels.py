"""Triton kernels that vllm-ascend launches in eager mode, in torch: there is no Triton for the simulated device."""

import ctypes
import importlib.abc
import importlib.util
import math
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.machinery import ModuleSpec
from typing import Any

import torch
from torch import Tensor

from tests.support.ascend.host_kernels.dispatch import host


class HostTritonKernel:
    """Launched like a Triton kernel: ``kernel[grid](...)``."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._function, grid)


@dataclass(frozen=True)
class _Batch:
    """What all cache groups of a step share; CPU tensors over device memory."""

    requests: int
    tokens: int
    max_tokens: int
    query_start: Tensor  # [requests + 1]
    positions: Tensor  # [tokens]
    padding: int

    def map_slots(self, table: Tensor, block_size: int, slots: Tensor, *, circular: bool) -> None:
        """Write ``slots`` [max_tokens] from the block table [requests, blocks]."""
        slots[self.tokens : self.max_tokens] = self.padding
        bounds = self.query_start[: self.requests + 1].tolist()
        for request in range(self.requests):
            start, end = bounds[request], bounds[request + 1]
            if end > start:
                position = self.positions[start:end].long()
                block = torch.zeros_like(position) if circular else position // block_size
                mapped = table[request].long()[block] * block_size + position % block_size
                if circular:
                    mapped = torch.where(position < 0, self.padding, mapped)
                slots[start:end] = mapped.to(slots.dtype)


def _slot_mapping(
    grid: tuple[int, ...], num_tokens: int, max_tokens: int, query_start: Tensor, positions: Tensor, table: Tensor,
    _stride: int, block_size: int, slots: Tensor,
    *, TOTAL_CP_WORLD_SIZE: int, PAD_ID: int, IS_CIRCULAR: bool = False, **_others: Any,  # noqa: N803  Triton's
) -> None:  # fmt: skip
    assert TOTAL_CP_WORLD_SIZE == 1, "no context parallelism here"
    view = host.view
    batch = _Batch(grid[0] - 1, num_tokens, max_tokens, view(query_start), view(positions), PAD_ID)
    table, slots = view(table), view(slots)
    host.launch(lambda: batch.map_slots(table, block_size, slots, circular=IS_CIRCULAR))


def _slot_mapping_of_groups(
    grid: tuple[int, ...], num_tokens: int, max_tokens: int, query_start: Tensor, positions: Tensor,
    table_addresses: Tensor, slot_addresses: Tensor, strides: Tensor, block_sizes: Tensor, circular: Tensor | None,
    *, PAD_ID: int, PARALLEL_TILES: int = 1, **_others: Any,  # noqa: N803  Triton's
) -> None:  # fmt: skip
    """All KV cache groups at once; block tables and slots are given by their addresses."""
    view = host.view
    groups, requests = grid[0], (grid[1] - 1) // PARALLEL_TILES
    batch = _Batch(requests, num_tokens, max_tokens, view(query_start), view(positions), PAD_ID)
    columns = [view(column) for column in (table_addresses, slot_addresses, strides, block_sizes)]
    rings = view(circular) if circular is not None else torch.zeros(groups)

    def map_all() -> None:
        for group in range(groups):
            table, slots, stride, block_size = (int(column[group]) for column in columns)
            batch.map_slots(
                _int32_at(table, (requests, stride)), block_size, _int32_at(slots, (max_tokens,)),
                circular=bool(rings[group]),
            )  # fmt: skip

    host.launch(map_all)


def _int32_at(address: int, shape: tuple[int, ...]) -> Tensor:
    """A CPU tensor over device memory."""
    count = math.prod(shape)
    memory = (ctypes.c_int32 * count).from_address(host.reach(address, 4 * count))
    return torch.frombuffer(memory, dtype=torch.int32).view(shape)


#: Module: its kernels.
_KERNELS: Mapping[str, Mapping[str, Callable[..., None]]] = {
    "vllm.v1.worker.block_table": {"_compute_slot_mapping_kernel": _slot_mapping},
    "vllm_ascend.worker.block_table": {"_compute_slot_mapping_kernel": _slot_mapping},
    "vllm_ascend.ops.triton.compute_slot_mapping": {
        "_compute_slot_mapping_kernel": _slot_mapping,
        "_compute_slot_mapping_fused_groups_kernel": _slot_mapping_of_groups,
        "_compute_slot_mapping_fused_groups_adaptive_kernel": _slot_mapping_of_groups,
    },
}


def _patch(module: types.ModuleType) -> None:
    for name, function in _KERNELS[module.__name__].items():
        if hasattr(module, name):
            setattr(module, name, HostTritonKernel(function))


class _KernelFinder(importlib.abc.MetaPathFinder):
    """Patches a module once it has been imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _KERNELS:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            _patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install_triton_kernels() -> None:
    """Replace the kernels, also of modules that are imported later."""
    for name in _KERNELS:
        if name in sys.modules:
            _patch(sys.modules[name])
    sys.meta_path.insert(0, _KernelFinder())
