"""Copies from a peer's mapped memory: by a kernel where the driver's own copies would take longer, else by these.

The host looks at each run once, in a compiled loop: more than that would take longer than a kernel's copies.
"""

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from numba import njit

from layout.copies import EMPTY, Copies, Int64Array
from layout.cost import ReadCost
from layout.geometry import Region
from layout.regions import RegionTable
from transfer.copies.batch.base import DeviceEvent
from transfer.copies.batch.device import DeviceBackend
from transfer.copies.batch.streams import DeviceStream

if TYPE_CHECKING:
    from transfer.copies.reshape.reshape_kernel import RunKernel  # which needs torch

logger = logging.getLogger(__name__)

#: Runs of this size and more between two GPUs are left to the driver's batches: measured between an H200 and its host,
#: these come near the link's rate, and are far from it with shorter runs. Within a GPU, a kernel is said to be many
#: times as fast as a batch, whatever the size.
LONG_BYTES = 64 << 10

#: Said to fill a link. More would take multiprocessors from the model, and wait for the link on them.
LINK_PROGRAMS = 64

_ALL = 1 << 62
_ANYWHERE = RegionTable((Region(1, _ALL),))


@dataclass(frozen=True, slots=True)
class MappedMemory:
    """The memory of both sides: what is registered, and where the peer's is mapped here."""

    local: RegionTable
    on_device: RegionTable  # the regions of ``local`` that are device memory
    peer: RegionTable
    allocations: RegionTable  # of the peer, which hold all of it that can be read
    mapped_at: Int64Array  # where each of them is here, in the table's order


@dataclass(frozen=True, slots=True)
class PlacedCopies:
    """Copies between addresses of this process, and what is to carry out each of them."""

    copies: Copies
    by_kernel: npt.NDArray[np.bool_]  # else by the driver
    kernels: int  # how many

    def of(self, *, by_kernel: bool) -> Copies:
        """Return those that the kernel is to carry out, or the others."""
        number = self.kernels if by_kernel else len(self.copies) - self.kernels
        if number in (0, len(self.copies)):
            return self.copies if number else EMPTY
        return self.copies[self.by_kernel == by_kernel]


class MappedCopies:
    """Copies on one stream from memory that is mapped here. For one thread at a time."""

    def __init__(
        self, batches: DeviceBackend, kernel: "RunKernel | None", stream: DeviceStream, *, is_between_devices: bool
    ) -> None:
        """Take what copies on ``stream``; ``kernel`` is None if only the driver does."""
        self._batches = batches
        self._kernel = kernel
        self._stream = stream
        self._has_warned = False
        self._shorter_than = (LONG_BYTES if is_between_devices else _ALL) if kernel is not None else 0
        self._programs = LINK_PROGRAMS if is_between_devices else 0
        self.cost = ReadCost.of_mapped(by_kernel=kernel is not None, is_between_devices=is_between_devices)

    def enter_thread(self) -> None:
        """Make the device current in this thread."""
        self._batches.enter_thread()

    def place(self, copies: Copies, memory: MappedMemory) -> PlacedCopies | None:
        """Find out where the sources are here, and who is to copy; only the driver writes to host memory.

        Returns:
            None if a size is not positive, or a run leaves the memory of either side.
        """
        local, peer, allocations = memory.local, memory.peer, memory.allocations
        if not (local.regions and peer.regions and allocations.regions):
            return None
        copies = copies.contiguous()
        tables = local.starts, local.ends, peer.starts, peer.ends, allocations.starts, allocations.ends
        limits = np.where(np.isin(local.starts, memory.on_device.starts), self._shorter_than, 0)
        here, by_kernel = np.empty(len(copies), np.int64), np.empty(len(copies), np.bool_)
        shifts = memory.mapped_at - allocations.starts
        kernels = _locate(*copies.columns, *tables, limits, shifts, here, by_kernel)
        return PlacedCopies(replace(copies, sources=here), by_kernel, kernels) if kernels >= 0 else None

    def start(self, placed: PlacedCopies) -> DeviceEvent:
        """Start to copy; return the event of the end of all.

        Raises:
            CopyFailed: not all of it could be started; see ``CopyBackend.start``.
        """
        rest = placed.copies
        if self._kernel is not None and placed.kernels:
            others = placed.of(by_kernel=False)  # now: behind a launch, nothing may fail before its end is recorded
            if self._launch(self._kernel, placed.of(by_kernel=True)):
                rest = others
        return self._batches.start(rest, None)  # the event follows what was launched, too

    def _launch(self, kernel: "RunKernel", copies: Copies) -> bool:
        """Have the kernel copy; return False if it cannot now: what it was given may then be copied once more."""
        try:
            for launch in kernel.launches(copies, _ANYWHERE, self._programs):
                self._stream.run(launch)
        except Exception as error:  # of torch or Triton
            if not self._has_warned:
                self._has_warned = True
                logger.warning("PDConnector: the driver copies from mapped memory what a kernel cannot: %s", error)
            return False
        return True


def _locate_loop(
    destinations: Any, sources: Any, sizes: Any, local_starts: Any, local_ends: Any, peer_starts: Any, peer_ends: Any,
    starts: Any, ends: Any, limits: Any, shifts: Any, here: Any, by_kernel: Any,
) -> Any:  # fmt: skip
    """Fill in where sources are ``here``, and which runs are shorter than the limit of their destination's region.

    Returns how many these are, -1 if a size is not positive, or a run leaves a table's memory.
    """
    count = to_at = peer_at = at = 0  # and the regions of the last run
    for i in range(len(sizes)):
        to, origin, size = destinations[i], sources[i], sizes[i]
        if to < local_starts[to_at] or to >= local_ends[to_at]:
            to_at = max(np.searchsorted(local_starts, to, side="right") - 1, 0)
        if origin < peer_starts[peer_at] or origin >= peer_ends[peer_at]:
            peer_at = max(np.searchsorted(peer_starts, origin, side="right") - 1, 0)
        if origin < starts[at] or origin >= ends[at]:
            at = max(np.searchsorted(starts, origin, side="right") - 1, 0)
        if size <= 0 or to < local_starts[to_at] or origin < peer_starts[peer_at] or origin < starts[at]:
            return -1
        if size > local_ends[to_at] - to or size > min(peer_ends[peer_at], ends[at]) - origin:
            return -1
        here[i] = origin + shifts[at]
        by_kernel[i] = size < limits[to_at]
        count += by_kernel[i]
    return count


_locate = njit(nogil=True)(_locate_loop)


def warm_up() -> None:
    """Compile what looks at the runs, so that no read waits for that."""
    numbers: Int64Array = np.empty(0, np.int64)
    _locate(*[numbers] * 12, np.empty(0, np.bool_))
