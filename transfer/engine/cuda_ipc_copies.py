"""Copies from a peer's mapped memory: by a kernel where the driver's own copies would take longer, else by these."""

import logging

import numpy as np

from layout.copies import EMPTY, Copies
from layout.geometry import Region
from layout.regions import RegionTable
from transfer.copies.batch.base import DeviceEvent
from transfer.copies.batch.device import DeviceBackend
from transfer.copies.batch.streams import DeviceStream
from transfer.copies.reshape.reshape_kernel import RunKernel

logger = logging.getLogger(__name__)

#: Runs of this size and more between two GPUs are left to the driver's batches: measured between an H200 and its host,
#: these come near the link's rate, and are far from it with shorter runs. Within a GPU, a kernel is said to be many
#: times as fast as a batch, whatever the size.
LONG_BYTES = 64 << 10

#: Said to fill a link. More would take multiprocessors from the model, and wait for the link on them.
LINK_PROGRAMS = 64

_ANYWHERE = RegionTable((Region(1, 1 << 62),))


class MappedCopies:
    """Copies on one stream from memory that is mapped here. For one thread at a time."""

    def __init__(
        self, batches: DeviceBackend, kernel: RunKernel | None, stream: DeviceStream, *, is_between_devices: bool
    ) -> None:
        """Take what copies on ``stream``; ``kernel`` is None if only the driver does."""
        self._batches = batches
        self._kernel = kernel
        self._stream = stream
        self._has_warned = False
        self._shorter_than = LONG_BYTES if is_between_devices else np.inf
        self._programs = LINK_PROGRAMS if is_between_devices else 0

    def enter_thread(self) -> None:
        """Make the device current in this thread."""
        self._batches.enter_thread()

    def start(self, copies: Copies, on_device: RegionTable) -> DeviceEvent:
        """Start to copy, by the kernel only to memory that is ``on_device``; return the event of the end of all.

        Raises:
            CopyFailed: not all of it could be started; see ``CopyBackend.start``.
        """
        if self._kernel is not None:
            by_kernel = (copies.sizes < self._shorter_than) & ~on_device.outside(copies.destinations, copies.sizes)
            chosen = copies if by_kernel.all() else copies[by_kernel]
            if len(chosen) and self._launch(self._kernel, chosen):
                copies = EMPTY if chosen is copies else copies[~by_kernel]
        return self._batches.start(copies, None)

    def _launch(self, kernel: RunKernel, copies: Copies) -> bool:
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
