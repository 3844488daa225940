"""Copies bytes between tensors: what ``transfer.copies.reshape.reshape`` does, for memory that only a device can reach.

Moves bytes with tensor operators, the runs of all layers together. ``layout.plan`` and ``layout.staging`` decide which
bytes go where. Must not decide what is copied, and must not know caches, pulls or engines.

Source and destination are viewed as rows of one width that divides all runs; a run becomes row numbers:

    runs      [4 rows from 8 to 2] [2 rows from 0 to 9]
    sources      8  9 10 11           0  1         gathered by index_select, then
    destinations 2  3  4  5           9 10         scattered by index_copy_

So a call takes a few operators, whatever the number of runs: one brings the row numbers to the device, one gathers, and
one scatters into each view of ``device_views`` that is written to. Sources that follow each other
need no gathering, as when whole blocks of several ranks are merged.

Rows are integers, so that no bit pattern counts as NaN. According to the documentation and sources of CANN's operator
library (aclnnIndexSelect, aclnnInplaceIndexCopy) for Atlas A2 and A3, both operators take int32, int16 and int8 rows
and int64 indices; int32 runs on the vector cores, while the much slower AI CPU scatters narrower rows; on dimension 0
of a contiguous tensor only the named rows are touched. So widths that are multiples of four bytes, which nearly all
are, use int32.

Tested with CPU tensors, on a simulated Ascend device with its operators replaced, and on one whose operators run on the
host. Not run on hardware.
"""

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from layout.copies import Copies, Int64Array
from layout.geometry import Region
from transfer.copies.reshape.device_views import DeviceViews
from transfer.copies.reshape.rows import RowNumbers, Rows, Runs, follow_each_other, stretches, widest_rows
from transfer.copies.reshape.storages import StorageTable

logger = logging.getLogger(__name__)

#: A run of at least this size is copied by its own call.
LARGE_BYTES = 1 << 20
#: Device memory that a call may use at once, unless told otherwise.
DEFAULT_TEMPORARY_BYTES = 16 << 20
#: Up to this many runs are copied by a call each, because building indices would not pay off.
_FEW_RUNS = 4
_INDEX_BYTES = 16  # per row: its source and its destination

_ROW_DTYPES = {4: torch.int32, 2: torch.int16, 1: torch.int8}


class SideStream:
    """Owns a device stream beside the model's, for ``torch.cuda`` and ``torch.npu`` alike. Does nothing on the CPU.

    Keep it: torch_npu takes streams from a pool of 32, in turn, and one that comes round again is shared with whoever
    has it. vllm-ascend updates its graphs on such a stream, where other work is taken for part of the update.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = None
        self._stream: Any = None
        self._has_warned = False
        if device.type != "cpu":
            self._module = torch.get_device_module(device)
            self._stream = self._module.Stream(device)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Submit to this stream inside a ``with`` block; the work is done when the block is left, also by an exception.

        Waits for an event behind that work, not for what other threads submit later. Sets the device of the calling
        thread, because on an NPU a thread has none by default.
        """
        if self._module is None:
            yield
            return
        self._module.set_device(self._device)
        try:
            with self._module.stream(self._stream):
                yield
        finally:
            self._stream.record_event().synchronize()

    def upload(self, numbers: Int64Array) -> torch.Tensor:
        """Return the numbers on the device. On this stream they are there for what is submitted next."""
        memory = torch.from_numpy(numbers)
        if self._module is None:
            return memory
        # From pinned memory, because from other memory the calling thread would wait for the stream.
        try:
            memory = memory.pin_memory()
        except RuntimeError as error:  # of the device's library
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "PDConnector: reshapes on %s are slower: no memory can be pinned: %s", self._device, error
                )
            return memory.to(self._device)
        return memory.to(self._device, non_blocking=True)


class TensorCopier:
    """Copies runs of bytes between the storages of some tensors, on their device.

    Several threads may call it at once. Each call returns when its own bytes are in place. The calls share a stream, so
    a call may also wait for the bytes of others.
    """

    def __init__(
        self,
        *sides: Iterable[torch.Tensor],
        segments: Sequence[Region] = (),
        temporary_bytes: int = DEFAULT_TEMPORARY_BYTES,
        view_bytes: int = 1 << 31,
        stream: SideStream | None = None,
    ) -> None:
        """Keep the storages of all tensors alive, and copy between them.

        Args:
            sides: tensors of any shape and dtype, all on one device. A tensor stands for its whole storage.
            segments: memory of the device that is mapped without a hole. One operator writes to all storages of a side
                that are neighbours in a segment.
            temporary_bytes: device memory that a call may use at once. One row, of less than ``LARGE_BYTES``, must fit.
            view_bytes: the most bytes that an operator gets to see (plus ``LARGE_BYTES``), because the operators of
                some devices may count in 32 bits.
            stream: to copy on, of the same device; None: one of its own.

        Raises:
            ValueError: the tensors are on several devices or there are none, storages or segments overlap partly, or a
                storage has a private format of its device.
        """
        self._storages = StorageTable(sides)
        self._views = DeviceViews(self._storages.storages, segments, view_bytes, LARGE_BYTES)
        self._stream = stream or SideStream(self._storages.device)
        self._temporary_bytes = temporary_bytes

    @property
    def view_starts(self) -> Int64Array:
        """Addresses, ascending: one operator writes to the memory from one of them up to the next. Shape [views]."""
        return self._views.starts

    def __call__(self, copies: Copies) -> None:
        """Copy every run. When this returns, the bytes are in place, also for other streams and engines.

        No destination byte may be written twice or be a source. This is not checked.

        Raises:
            ValueError: a size is negative, or a run leaves the storages. Nothing was copied.
        """
        copies = self._storages.checked(copies)
        if not len(copies):
            return
        with torch.inference_mode(), self._stream.running():
            large = copies.sizes >= LARGE_BYTES
            self._copy_one_by_one(copies[large])
            copies = copies[~large]
            while len(copies) > _FEW_RUNS:  # each round copies at least half of the bytes left
                rows, fit = widest_rows(Runs.of(copies, self.view_starts), len(self.view_starts))
                self._copy_rows(rows)
                copies = copies[~fit]
            self._copy_one_by_one(copies)

    def _copy_one_by_one(self, copies: Copies) -> None:
        for target, origin, size in zip(*(column.tolist() for column in copies.columns), strict=True):
            self._storages.bytes_at(target, size).copy_(self._storages.bytes_at(origin, size))

    def _copy_rows(self, rows: Rows) -> None:
        dtype = self._row_dtype(rows)
        for part in rows.parts(max(1, self._temporary_bytes // (rows.width + _INDEX_BYTES))):
            index = self._stream.upload(np.stack((part.target.row, part.origin.row)))
            for begin, end in stretches(part.origin.view):
                read = self._row_view(part.origin, begin, rows.width, dtype)
                writes = [
                    (begin + first, begin + last, self._row_view(part.target, begin + first, rows.width, dtype))
                    for first, last in stretches(part.target.view[begin:end])
                ]
                source = _following(read, part.origin.row[begin:end], [target for _, _, target in writes])
                if source is None:
                    source = read.index_select(0, index[1, begin:end])
                for first, last, target in writes:
                    target.index_copy_(0, index[0, first:last], source[first - begin : last - begin])

    def _row_dtype(self, rows: Rows) -> torch.dtype:
        """Return the widest integers that suit the width of rows and the addresses of all views that they are in."""
        item = math.gcd(rows.width, max(_ROW_DTYPES))
        for end in (rows.target, rows.origin):
            for number in np.flatnonzero(np.bincount(end.view)).tolist():
                view, phase = self._views.views[number], int(end.phases[number])
                item = math.gcd(item, view.data_ptr() + phase, view.storage_offset() + phase)
        return _ROW_DTYPES[item]

    def _row_view(self, end: RowNumbers, index: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the view that row ``index`` is in. Shape [rows, integers]."""
        number = int(end.view[index])
        view, phase = self._views.views[number], int(end.phases[number])
        whole = view[phase : phase + (view.numel() - phase) // width * width]
        return whole.view(dtype).view(-1, width // dtype.itemsize)


def _following(read: torch.Tensor, rows: Int64Array, writes: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return ``rows`` of ``read`` without a copy, if they follow each other and lie apart from what is written."""
    if not follow_each_other(rows):
        return None
    source = read[int(rows[0]) : int(rows[-1]) + 1]
    start, end = _range(source)
    apart = all(end <= first or last <= start for first, last in map(_range, writes))
    return source if apart else None


def _range(memory: torch.Tensor) -> tuple[int, int]:
    return memory.data_ptr(), memory.data_ptr() + memory.numel() * memory.element_size()
