"""A rank's device memory as bytes on the host, where the simulated device has it."""

import ctypes
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from layout.copies import Copies
from tests.support.memory import Bytes


def tensors_of(cache: Any) -> list[torch.Tensor]:
    """A layer's tensors, of whichever form the runner hands over, without those that hold nothing."""
    given = [cache] if isinstance(cache, torch.Tensor) else list(cache)
    return [tensor for tensor in given if tensor.numel()]


class RankMemory:
    """All allocations behind a rank's caches, from their first byte to their last: also where no layer is."""

    def __init__(self, kv_caches: Mapping[str, Any]) -> None:
        torch.npu.synchronize()  # the device has yet to clear what was allocated
        storages = [tensor.untyped_storage() for cache in kv_caches.values() for tensor in tensors_of(cache)]
        self._live = {
            storage.data_ptr(): np.ctypeslib.as_array(
                (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
            )
            for storage in storages
        }

    def __iter__(self) -> Iterator[Bytes]:
        return iter(self._live.values())

    def fill_with_noise(self, seed: int) -> None:
        """Other bytes in every allocation."""
        noise = np.random.default_rng(seed)
        for memory in self:
            memory[:] = noise.integers(0, 256, len(memory), np.uint8)

    def copy(self) -> "RankMemory":
        """The same bytes elsewhere; ``view`` finds tensors there by their addresses here."""
        other = RankMemory({})
        other._live = {address: memory.copy() for address, memory in self._live.items()}
        return other

    def clear(self) -> None:
        """Zeros everywhere."""
        for memory in self:
            memory[:] = 0

    def view(self, tensor: torch.Tensor) -> Bytes:
        """A tensor's elements, with a last axis for the bytes of each."""
        start, item = tensor.untyped_storage().data_ptr(), tensor.element_size()
        shape, strides = (*tensor.shape, item), (*(stride * item for stride in tensor.stride()), 1)
        first = tensor.data_ptr() - start
        return np.lib.stride_tricks.as_strided(self._live[start][first:], shape, strides)

    def receive(self, copies: Copies, sources: Iterable["RankMemory"]) -> None:
        """Execute copies one by one; each must stay inside one allocation on both sides."""
        theirs = [extent for source in sources for extent in source._extents()]
        ours = list(self._extents())
        for to, start, size in zip(copies.destinations, copies.sources, copies.sizes, strict=True):
            assert _inside(int(to), int(size), ours), "a descriptor writes beyond the caches"
            assert _inside(int(start), int(size), theirs), "a descriptor reads beyond the caches"
            ctypes.memmove(int(to), int(start), int(size))

    def _extents(self) -> Iterator[tuple[int, int]]:
        return ((address, address + len(memory)) for address, memory in self._live.items())


def _inside(address: int, size: int, extents: Iterable[tuple[int, int]]) -> bool:
    return any(start <= address and address + size <= end for start, end in extents)


def differences(memory: RankMemory, expected: RankMemory) -> str:
    """Where two memories differ first, in words; empty if they do not."""
    for number, (ours, right) in enumerate(zip(memory, expected, strict=True)):
        wrong = np.flatnonzero(ours != right)
        if len(wrong):
            return f"{len(wrong)} of {len(ours)} bytes of allocation {number} are wrong, the first is {wrong[0]}"
    return ""
