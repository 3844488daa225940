"""Copy bytes between tensors: what ``transfer.local_copy.reshape`` does, for memory that only a device reaches.

Which bytes go where is decided in ``layout.plan`` and ``layout.staging``; here they are moved by tensor operators, the
runs of all layers together. Must not decide what is copied, nor know caches, pulls or engines.

Source and destination are seen as rows of one width, the largest that all runs are made of; a run becomes row numbers:

    runs      [4 rows from 8 to 2] [2 rows from 0 to 9]
    sources      8  9 10 11           0  1         gathered by index_select, then
    destinations 2  3  4  5           9 10         scattered by index_copy_

Rows are integers, so that no bit of them can be taken for a number that is not one. What is relied on, read in the
documents and sources of CANN's operator library (aclnnIndexSelect, aclnnInplaceIndexCopy) for Atlas A2 and A3: both
take int32, int16 and int8 rows and int64 indices; int32 runs on the vector cores, while narrower rows are scattered
by the much slower AI CPU; on dimension 0 of a contiguous tensor nothing but the rows named is touched. Widths that are
multiples of four bytes, which is nearly all, are therefore int32.

Run on CPU tensors, and on the tensors of a simulated Ascend device with its operators replaced. Not run on hardware.
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

#: A run of so many bytes is copied by a call of its own.
LARGE_BYTES = 1 << 20
#: So few runs are not worth building indices for: each is copied by a call of its own.
_FEW_RUNS = 4
_INDEX_BYTES = 16  # of a row: where it comes from and where it goes

_ROW_DTYPES = {4: torch.int32, 2: torch.int16, 1: torch.int8}


class SideStream:
    """A stream of a device, beside the model's: ``torch.cuda`` and ``torch.npu`` alike. On the CPU there is none."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = None
        self._stream: Any = None
        if device.type != "cpu":
            self._module = torch.get_device_module(device)
            self._stream = self._module.Stream(device)

    @contextmanager
    def running(self) -> Iterator[None]:
        """What is submitted inside has been carried out when the block is left, by an exception too.

        Makes the device the calling thread's own: a thread that has not chosen one has none on an NPU.
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
    """Copies runs of bytes between the storages of the tensors given, on their device.

    Calls from several threads may overlap; each returns when its own bytes are in their places (they share a stream,
    so it may wait for the others' too).
    """

    def __init__(
        self, tensors: Iterable[torch.Tensor], *, temporary_bytes: int = 16 << 20, view_bytes: int = 1 << 31
    ) -> None:
        """Storages stay alive as long as this object.

        Args:
            tensors: of any form and dtype, all on one device. Those that share a storage, or show a part of it, stand
                for all of it.
            temporary_bytes: device memory that a call may take at once. A row, of less than ``LARGE_BYTES``, must fit.
            view_bytes: no operator gets to see more than so many bytes of a storage (and ``LARGE_BYTES`` more), as
                operators of some devices may count in 32 bits.

        Raises:
            ValueError: the tensors are on several devices or none, their storages overlap in part, or one is kept in
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
        """Copy every run; when it returns, the bytes are in their places, for other streams and engines too.

        No destination byte may be written twice or be a source, which nobody checks.

        Raises:
            ValueError: a size is negative, or a run leaves the storages. Nothing was copied.
        """
        runs = self._located(copies)
        if not len(runs.copies):
            return
        with torch.inference_mode(), self._stream.running():
            large = runs.copies.sizes >= LARGE_BYTES
            self._copy_one_by_one(_chosen(runs, large))
            for part in self._parts(_chosen(runs, ~large)):
                self._copy_together(part)

    def _located(self, copies: Copies) -> "_Runs":
        """The runs that have bytes, as offsets into storages."""
        if len(copies) and int(copies.sizes.min()) < 0:
            index = int(copies.sizes.argmin())
            raise ValueError(f"copy {index} of {len(copies)} has a negative size: {int(copies.sizes[index])} bytes")
        some = copies.sizes > 0
        copies = Copies(copies.destinations[some], copies.sources[some], copies.sizes[some])
        target = self._find("destination", copies.destinations, copies.sizes)
        origin = self._find("source", copies.sources, copies.sizes)
        starts = self._table.starts
        offsets = Copies(copies.destinations - starts[target], copies.sources - starts[origin], copies.sizes)
        return _Runs(offsets, target, origin)

    def _find(self, what: str, addresses: Int64Array, sizes: Int64Array) -> Int64Array:
        """Number of the storage that holds all of each run."""
        outside = self._table.outside(addresses, sizes)
        if outside.any():
            index = int(outside.argmax())
            raise ValueError(
                f"the {what} of copy {index} of {len(sizes)} with bytes, {int(sizes[index])} at "
                f"{int(addresses[index]):#x}, does not lie in one of the {len(self._memory)} storages given"
            )
        return np.searchsorted(self._table.starts, addresses, side="right") - 1

    def _copy_one_by_one(self, runs: "_Runs") -> None:
        columns = (runs.target, runs.origin, runs.copies.destinations, runs.copies.sources, runs.copies.sizes)
        for target, origin, to, start, size in zip(*(column.tolist() for column in columns), strict=True):
            self._memory[target][to : to + size].copy_(self._memory[origin][start : start + size])

    def _parts(self, runs: "_Runs") -> Iterator["_Runs"]:
        """The runs by storage, and by stretch of it, on both sides."""
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
            yield _chosen(runs, which)

    def _copy_together(self, runs: "_Runs") -> None:
        """Runs between the same stretches of two storages. Each round deals with at least half of the bytes left."""
        while len(runs.copies) > _FEW_RUNS:
            grid, fits = _widest_grid(runs.copies)
            self._copy_rows(_chosen(runs, fits), grid)
            runs = _chosen(runs, ~fits)
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
        """The bytes of whole rows in the stretch that holds all ``offsets``, and the number of the row at each."""
        memory = self._memory[int(storage[0])]
        begin = int(offsets[0]) // self._view_bytes * self._view_bytes
        begin += (phase - begin) % width
        end = min(begin + self._view_bytes + LARGE_BYTES, memory.numel())
        return memory[begin : begin + (end - begin) // width * width], (offsets - begin) // width


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs as byte offsets into storages; arrays of shape [n]."""

    copies: Copies
    target: Int64Array  # number of the storage written
    origin: Int64Array  # number of the storage read


@dataclass(frozen=True, slots=True)
class _Grid:
    """Rows of ``width`` bytes; on each side, rows begin where the offset modulo ``width`` is the one named."""

    width: int
    destination: int
    source: int


def _chosen(runs: _Runs, which: npt.NDArray[np.bool_] | Int64Array) -> _Runs:
    copies = Copies(runs.copies.destinations[which], runs.copies.sources[which], runs.copies.sizes[which])
    return _Runs(copies, runs.target[which], runs.origin[which])


def _widest_grid(runs: Copies) -> tuple[_Grid, npt.NDArray[np.bool_]]:
    """Rows that at least half of the bytes are made of, as wide as can be found cheaply; and which runs are.

    Most pulls are of runs of one size, beside a few that are cut at the end of the staging buffer. Where no size
    prevails, the width is the greatest common divisor, of which all runs are made.
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
    """The value that has the greatest sum of weights."""
    if (values == values[0]).all():
        return int(values[0])
    found, kind = np.unique(values, return_inverse=True)
    return int(found[np.bincount(kind, weights=weights).argmax()])


def _as_rows(target: torch.Tensor, origin: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two runs of bytes as rows of the widest integers that suit the width and both addresses."""
    places = (memory.storage_offset() for memory in (target, origin))
    item = math.gcd(width, target.data_ptr(), origin.data_ptr(), *places, max(_ROW_DTYPES))
    rows = (memory.view(_ROW_DTYPES[item]).view(-1, width // item) for memory in (target, origin))
    return next(rows), next(rows)


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """All bytes of each storage, by address, without those that lie inside another."""
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
    """The storage of a tensor, whatever part of it the tensor shows. Shape [bytes], uint8."""
    storage = tensor.untyped_storage()
    # As views, which change nothing that the device's library keeps about the storage (set_ would).
    memory = tensor.as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0).view(torch.uint8)
    if memory.data_ptr() != storage.data_ptr():
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} on {tensor.device} is kept in a private format of its device, "
            "which has no plain view of bytes"
        )
    return memory
