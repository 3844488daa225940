"""Copies bytes between tensors: what ``transfer.local_copy.reshape`` does, for memory that only a device can reach.

Moves bytes with tensor operators, the runs of all layers together. ``layout.plan`` and ``layout.staging`` decide which
bytes go where. Must not decide what is copied, and must not know caches, pulls or engines.

Source and destination are viewed as rows of one width, the largest that divides all runs; a run becomes row numbers:

    runs      [4 rows from 8 to 2] [2 rows from 0 to 9]
    sources      8  9 10 11           0  1         gathered by index_select, then
    destinations 2  3  4  5           9 10         scattered by index_copy_

Rows are integers, so that no bit pattern counts as NaN. According to the documentation and sources of CANN's operator
library (aclnnIndexSelect, aclnnInplaceIndexCopy) for Atlas A2 and A3, both operators take int32, int16 and int8 rows
and int64 indices; int32 runs on the vector cores, while the much slower AI CPU scatters narrower rows; on dimension 0
of a contiguous tensor only the named rows are touched. So widths that are multiples of four bytes, which nearly all
are, use int32.

Tested with CPU tensors, and on a simulated Ascend device with its operators replaced. Not run on hardware.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from layout.copies import Copies, Int64Array
from layout.geometry import Region
from layout.regions import RegionTable

#: A run of at least this size is copied by its own call.
LARGE_BYTES = 1 << 20
#: Up to this many runs are copied by a call each, because building indices would not pay off.
_FEW_RUNS = 4
_INDEX_BYTES = 16  # per row: its source and its destination

_ROW_DTYPES = {4: torch.int32, 2: torch.int16, 1: torch.int8}


class SideStream:
    """Owns a device stream beside the model's, for ``torch.cuda`` and ``torch.npu`` alike. Does nothing on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = None
        self._stream: Any = None
        if device.type != "cpu":
            self._module = torch.get_device_module(device)
            self._stream = self._module.Stream(device)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Submit to this stream inside a ``with`` block; the work is done when the block is left, also by an exception.

        Sets the device of the calling thread, because on an NPU a thread has none by default.
        """
        if self._module is None:
            yield
            return
        self._module.set_device(self._device)
        try:
            with self._module.stream(self._stream):
                yield
        finally:
            self._stream.synchronize()


class TensorCopier:
    """Copies runs of bytes between the storages of some tensors, on their device.

    Several threads may call it at once. Each call returns when its own bytes are in place. The calls share a stream, so
    a call may also wait for the bytes of others.
    """

    def __init__(
        self, tensors: Iterable[torch.Tensor], *, temporary_bytes: int = 16 << 20, view_bytes: int = 1 << 31
    ) -> None:
        """Keep the storages of ``tensors`` alive, and copy between them.

        Args:
            tensors: of any shape and dtype, all on one device. A tensor stands for its whole storage.
            temporary_bytes: device memory that a call may use at once. One row, of less than ``LARGE_BYTES``, must fit.
            view_bytes: the most bytes of a storage that an operator gets to see (plus ``LARGE_BYTES``), because the
                operators of some devices may count in 32 bits.

        Raises:
            ValueError: the tensors are on several devices or there are none, storages overlap partly, or a storage has
                a private format of its device.
        """
        self._memory = _storages(tensors)
        devices = {memory.device for memory in self._memory}
        if len(devices) != 1:
            raise ValueError(f"tensors must be on one device, not on {sorted(map(str, devices)) or 'none'}")
        self._device = devices.pop()
        self._table = RegionTable([Region(memory.data_ptr(), memory.numel()) for memory in self._memory])
        self._stream = SideStream(self._device)
        self._temporary_bytes = temporary_bytes
        self._view_bytes = view_bytes

    def __call__(self, copies: Copies) -> None:
        """Copy every run. When this returns, the bytes are in place, also for other streams and engines.

        No destination byte may be written twice or be a source. This is not checked.

        Raises:
            ValueError: a size is negative, or a run leaves the storages. Nothing was copied.
        """
        runs = self._locate(copies)
        if not len(runs.copies):
            return
        with torch.inference_mode(), self._stream.running():
            large = runs.copies.sizes >= LARGE_BYTES
            self._copy_one_by_one(runs.take(large))
            for part in self._parts(runs.take(~large)):
                self._copy_together(part)

    def _locate(self, copies: Copies) -> "_Runs":
        """Return the runs that are not empty, as offsets into storages."""
        if len(copies) and int(copies.sizes.min()) < 0:
            index = int(copies.sizes.argmin())
            raise ValueError(f"copy {index} of {len(copies)} has a negative size: {int(copies.sizes[index])} bytes")
        copies = copies[copies.sizes > 0]
        target = self._find_storages("destination", copies.destinations, copies.sizes)
        origin = self._find_storages("source", copies.sources, copies.sizes)
        starts = self._table.starts
        offsets = Copies(copies.destinations - starts[target], copies.sources - starts[origin], copies.sizes)
        return _Runs(offsets, target, origin)

    def _find_storages(self, what: str, addresses: Int64Array, sizes: Int64Array) -> Int64Array:
        """Return the index of the storage that holds each whole run."""
        outside = self._table.outside(addresses, sizes)
        if outside.any():
            index = int(outside.argmax())
            raise ValueError(
                f"the {what} of non-empty copy {index} of {len(sizes)}, {int(sizes[index])} bytes at "
                f"{int(addresses[index]):#x}, does not lie in one of the {len(self._memory)} storages"
            )
        return np.searchsorted(self._table.starts, addresses, side="right") - 1

    def _copy_one_by_one(self, runs: "_Runs") -> None:
        columns = (runs.target, runs.origin, runs.copies.destinations, runs.copies.sources, runs.copies.sizes)
        for target, origin, to, start, size in zip(*(column.tolist() for column in columns), strict=True):
            self._memory[target][to : to + size].copy_(self._memory[origin][start : start + size])

    def _parts(self, runs: "_Runs") -> Iterator["_Runs"]:
        """Yield the runs grouped by storage and by stretch of ``view_bytes``, on both sides."""
        if not len(runs.copies):
            return
        part = runs.target * len(self._memory) + runs.origin
        for offsets in (runs.copies.destinations, runs.copies.sources):
            stretch = offsets // self._view_bytes
            part = part * (int(stretch.max()) + 1) + stretch
        if (part == part[0]).all():
            yield runs
            return
        order = np.argsort(part, kind="stable")
        for which in np.split(order, np.flatnonzero(np.diff(part[order])) + 1):
            yield runs.take(which)

    def _copy_together(self, runs: "_Runs") -> None:
        """Copy runs between the same stretches of two storages. Each round copies at least half of the bytes left."""
        while len(runs.copies) > _FEW_RUNS:
            grid, fits = _widest_grid(runs.copies)
            self._copy_rows(runs.take(fits), grid)
            runs = runs.take(~fits)
        self._copy_one_by_one(runs)

    def _copy_rows(self, runs: "_Runs", grid: "_Grid") -> None:
        copies = runs.copies
        target, to = self._stretch(runs.target, copies.destinations, grid.destination, grid.width)
        origin, start = self._stretch(runs.origin, copies.sources, grid.source, grid.width)
        target, origin = _as_rows(target, origin, grid.width)
        counts = copies.sizes // grid.width
        ends = np.cumsum(counts)
        to, start = to - (ends - counts), start - (ends - counts)
        step = max(1, self._temporary_bytes // (grid.width + _INDEX_BYTES))
        for first in range(0, int(ends[-1]), step):
            rows = np.arange(first, min(first + step, int(ends[-1])))
            run = np.searchsorted(ends, rows, side="right")
            index = torch.from_numpy(np.stack((to[run] + rows, start[run] + rows))).to(self._device)
            target.index_copy_(0, index[0], origin.index_select(0, index[1]))

    def _stretch(
        self, storage: Int64Array, offsets: Int64Array, phase: int, width: int
    ) -> tuple[torch.Tensor, Int64Array]:
        """Return the whole rows in the stretch that holds all ``offsets``, as bytes, and the row number of each offset.

        Rows begin at offsets that are ``phase`` modulo ``width``.
        """
        memory = self._memory[int(storage[0])]
        begin = int(offsets[0]) // self._view_bytes * self._view_bytes
        begin += (phase - begin) % width
        end = min(begin + self._view_bytes + LARGE_BYTES, memory.numel())
        return memory[begin : begin + (end - begin) // width * width], (offsets - begin) // width


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs as byte offsets into storages; arrays of shape [n]."""

    copies: Copies
    target: Int64Array  # index of the storage written
    origin: Int64Array  # index of the storage read

    def take(self, which: npt.NDArray[np.bool_] | Int64Array) -> "_Runs":
        return _Runs(self.copies[which], self.target[which], self.origin[which])


@dataclass(frozen=True, slots=True)
class _Grid:
    """Rows of ``width`` bytes, and the offset modulo ``width`` at which rows begin on each side."""

    width: int
    destination: int
    source: int


def _widest_grid(runs: Copies) -> tuple[_Grid, npt.NDArray[np.bool_]]:
    """Return the widest grid, found cheaply, whose rows make up at least half of the bytes, and which runs fit it.

    Most pulls have runs of one size, plus a few that are cut at the end of the staging buffer. If no size prevails, the
    width is the greatest common divisor, which fits all runs.
    """
    width = _heaviest(runs.sizes, runs.sizes)
    phases = runs.destinations % width * width + runs.sources % width
    phase = _heaviest(phases, runs.sizes)
    fits = (phases == phase) & (runs.sizes % width == 0)
    if 2 * int(runs.sizes[fits].sum()) >= runs.total_bytes:
        return _Grid(width, *divmod(phase, width)), fits
    apart = (runs.sizes, runs.destinations - runs.destinations[0], runs.sources - runs.sources[0])
    width = int(np.gcd.reduce(np.concatenate(apart)))
    everything = np.ones(len(runs), np.bool_)
    return _Grid(width, int(runs.destinations[0]) % width, int(runs.sources[0]) % width), everything


def _heaviest(values: Int64Array, weights: Int64Array) -> int:
    """Return the value with the greatest sum of weights."""
    if (values == values[0]).all():
        return int(values[0])
    found, kind = np.unique(values, return_inverse=True)
    return int(found[np.bincount(kind, weights=weights).argmax()])


def _as_rows(target: torch.Tensor, origin: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """View two byte ranges as rows of the widest integers that suit the width and both addresses."""
    places = (memory.storage_offset() for memory in (target, origin))
    item = math.gcd(width, target.data_ptr(), origin.data_ptr(), *places, max(_ROW_DTYPES))
    rows = (memory.view(_ROW_DTYPES[item]).view(-1, width // item) for memory in (target, origin))
    return next(rows), next(rows)


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return each storage as bytes, by address, leaving out storages that lie inside another."""
    views = [_all_bytes(tensor) for tensor in tensors]
    views.sort(key=lambda memory: (memory.data_ptr(), -memory.numel()))
    outermost: list[torch.Tensor] = []
    end = 0  # of the memory seen so far
    for memory in views:
        if memory.numel() and memory.data_ptr() + memory.numel() > end:
            outermost.append(memory)
            end = memory.data_ptr() + memory.numel()
    return outermost


def _all_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of a tensor as bytes. Shape [bytes], uint8."""
    storage = tensor.untyped_storage()
    # By views, which leave the device library's metadata of the storage alone (set_ would not).
    memory = tensor.as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0).view(torch.uint8)
    if memory.data_ptr() != storage.data_ptr():
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} on {tensor.device} has a private format of its device, which "
            "cannot be viewed as bytes"
        )
    return memory
