"""Runs of bytes between memories for whatever copies them on a device: random ones, and what they are made of."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import strategies as st

from layout.copies import Copies
from tests.support.memory import Bytes

ByteRun = tuple[int, int, int]  # destination, source, bytes

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool, torch.float64)


def copies_of(runs: Sequence[ByteRun]) -> Copies:
    return Copies(*(np.array([run[i] for run in runs], np.int64) for i in range(3)))


def part_of(memory: Bytes, dtype: torch.dtype, start: int, stop: int) -> torch.Tensor:
    """A tensor of some items of ``memory``, which all lies in its storage."""
    items = torch.from_numpy(memory[: len(memory) // dtype.itemsize * dtype.itemsize]).view(dtype)
    return items[start:stop]


def address(memory: Bytes) -> int:
    return int(memory.ctypes.data)


@dataclass
class Batch:
    """Runs between memories by number: (memory, offset) of both sides, and the size."""

    runs: list[tuple[int, int, int, int]] = field(default_factory=list)  # target, its offset, source offset, bytes
    target_bytes: list[int] = field(default_factory=list)
    source_bytes: int = 0


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Runs that are mostly whole rows of one width on some grid, some of them cut, and some of other widths."""
    batch = Batch()
    width = draw(st.sampled_from([1, 2, 3, 4, 6, 16, 36, 64, 100]))
    for target in range(draw(st.integers(1, 3))):
        end = draw(st.integers(0, 9))
        for _ in range(draw(st.integers(0, 14))):
            size = width * draw(st.integers(0, 3)) if draw(st.integers(0, 5)) else draw(st.integers(0, 70))
            batch.runs.append((target, end, batch.source_bytes, size))
            end += size + width * draw(st.integers(0, 2)) + draw(st.sampled_from([0, 0, 0, 0, 1, 2, 4]))
            batch.source_bytes += size + draw(st.sampled_from([0, 0, 0, width, 4, 5]))
        batch.target_bytes.append(end + 8)
    batch.runs = draw(st.permutations(batch.runs))
    batch.source_bytes += 8
    return batch
