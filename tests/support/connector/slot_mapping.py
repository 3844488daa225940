"""vLLM's own slot mapping, without a device: the source of its Triton kernel, run on numpy arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.worker import block_table


def slots_by_vllm(
    positions: Sequence[int], block_ids: Sequence[int], rows: int, split: tuple[int, int, int]
) -> npt.NDArray[np.int64]:
    """Return the slots of a request's tokens, -1 for those of other ranks. ``NumpyTriton`` takes the place of ``tl``.

    Args:
        positions: of the tokens.
        block_ids: of the request.
        rows: block size.
        split: interleave, ranks and rank.
    """
    interleave, size, rank = split
    slots = np.full(len(positions), -2, np.int64)
    kernel: Any = block_table.ComputeSlotMappingKernel.kernel
    by_name = {
        "KV_CACHE_BLOCK_SIZE": rows, "TOTAL_CP_WORLD_SIZE": size, "TOTAL_CP_RANK": rank, "BLOCK_SIZE": 1024,
        "CP_KV_CACHE_INTERLEAVE_SIZE": interleave, "PAD_ID": -1, "slot_mapping_ptr": Pointer(slots),
    }  # fmt: skip
    if "BLOCKS_PER_KV_BLOCK" in signature(kernel).parameters:  # before 0.32
        by_name |= {"block_size": rows, "BLOCKS_PER_KV_BLOCK": 1}
    kernel(
        len(positions), len(positions), Pointer(np.array([0, len(positions)])), Pointer(np.array(positions)),
        Pointer(np.array(block_ids)), len(block_ids), **by_name,
    )  # fmt: skip
    return slots


class _Loaded(np.ndarray[Any, Any]):
    def to(self, _: object) -> "_Loaded":
        return self


@dataclass(frozen=True)
class Pointer:
    """A Triton pointer, or several: elements of an array."""

    array: npt.NDArray[np.int64]
    at: Any = 0

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.array, self.at + offset)


class NumpyTriton:
    """What vLLM's slot mapping uses of ``triton.language``."""

    int64, constexpr = np.int64, int

    def program_id(self, _: int) -> int:
        return 0

    def num_programs(self, _: int) -> int:
        return 2  # one request, and the padding

    def arange(self, start: int, end: int) -> npt.NDArray[np.int64]:
        return np.arange(start, end)

    def load(self, pointer: Pointer, mask: Any = True, other: int = 0) -> _Loaded:
        at, wanted = np.broadcast_arrays(pointer.at, mask)
        values = np.where(wanted, pointer.array[np.where(wanted, at, 0)], other)
        return np.asarray(values).view(_Loaded)

    def store(self, pointer: Pointer, values: Any, mask: Any) -> None:
        pointer.array[pointer.at[mask]] = np.broadcast_to(values, mask.shape)[mask]

    def where(self, condition: Any, one: Any, other: Any) -> npt.NDArray[np.int64]:
        return np.where(condition, one, other)
