"""Reads a pull's bytes from one prefill rank: straight to their place, or through staging where that is cheaper.

``layout.staging`` decides which bytes go which way; here it is carried out.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Protocol

import torch

from layout import staging
from layout.copies import Copies
from layout.cost import CostModel
from layout.cross_layer import ALIGNMENT
from layout.geometry import Region
from layout.regions import RegionTable
from layout.staging import Schedule, schedule_reads
from transfer.engine.base import Link, ReadFailed
from transfer.engine.batches import check_copies
from transfer.local_copy import reshape
from transfer.local_copy.reshape_torch import TensorCopier
from transfer.memory import HostMemory, SlotPool

#: Reads from so many prefill ranks can be staged at once; further ones go straight to their place meanwhile.
SLOTS = 4

#: Seconds of the host for each run that a device copies, to group runs and number their rows: measured on one core.
#: What the device itself takes is not known; bytes are priced as the CPU's.
_DEVICE_COPY_ALPHA = 0.2e-6


class Copier(Protocol):
    """Carries out copies from the staging buffer to the caches; called by one thread for each rank's read under way."""

    def __call__(self, copies: Copies, /) -> None:
        """Return when all bytes are in their places, for every thread and stream; raise if that will not be."""


class RemoteReader:
    """Plans and carries out a worker's reads. ``staging`` is None where everything is read straight to its place.

    Raises:
        ValueError: local regions overlap, or one is empty.
    """

    def __init__(
        self,
        cost: CostModel,
        local_regions: tuple[Region, ...],
        pool: SlotPool | None = None,
        copy: Copier = reshape.run_copies,
    ) -> None:
        """Compile what plans a read, so that no pull waits for it.

        ``copy`` must reach both the memory of ``pool``, which is the staging buffer, and ``local_regions``.
        """
        self.staging = pool
        self._copy = copy
        self._cost = cost
        self._local = RegionTable(local_regions)
        self._staging_table = RegionTable(() if pool is None else (pool.region,))
        staging.warm_up()

    @classmethod
    def with_staging(cls, cost: CostModel, local_regions: tuple[Region, ...], staging_bytes: int) -> "RemoteReader":
        """Return a reader with a staging buffer, for caches that are host memory. Compiles the copy kernel.

        Raises:
            ValueError: ``staging_bytes`` is too little to be cut into slots.
        """
        reshape.warm_up()
        memory = HostMemory(staging_bytes)
        return cls(cost, local_regions, SlotPool(memory.region, SLOTS, memory))

    @classmethod
    def with_device_staging(
        cls, cost: CostModel, local_regions: tuple[Region, ...], staging_bytes: int, caches: Sequence[torch.Tensor]
    ) -> "RemoteReader":
        """Return a reader for ``caches`` that only their device reaches: the buffer is there, and the device copies.

        Raises:
            ValueError: as ``with_staging`` and ``TensorCopier``.
            MemoryError: the device has no ``staging_bytes`` left.
        """
        cost = replace(cost, copy_alpha=_DEVICE_COPY_ALPHA)
        buffer = _device_memory(staging_bytes, caches[0].device)
        pool = SlotPool(Region(buffer.data_ptr(), buffer.numel()), SLOTS, buffer)
        return cls(cost, local_regions, pool, TensorCopier([*caches, buffer]))

    @property
    def regions(self) -> tuple[Region, ...]:
        """The memory beside the caches that reads write to, which the caller registers."""
        return () if self.staging is None else (self.staging.region,)

    @contextmanager
    def planned(self, copies: Copies, remote: RegionTable) -> Iterator[Schedule]:
        """Yield how to bring ``copies`` from a peer that registered ``remote``.

        What is staged is good for the time of the ``with`` block. Leave the block only when no read into the staging
        buffer can write any more.
        """
        if self.staging is None:
            yield schedule_reads(copies, self._cost, self._local, remote, None)
            return
        with ExitStack() as borrowing:
            address = borrowing.enter_context(self.staging.borrow())
            slot = Region(address, self.staging.slot_bytes) if address is not None else None
            schedule = schedule_reads(copies, self._cost, self._local, remote, slot)
            if not len(schedule.reads):
                borrowing.close()  # others may need the slot
            yield schedule

    def carry_out(self, link: Link, schedule: Schedule, timeout_s: float) -> None:
        """Read and copy everything; returns when all bytes are in their places.

        The copies of one window run while the next one is read.

        Raises:
            ReadFailed: as ``Link.read``.
            ValueError: an address is outside the memory that this side or the peer registered. Nothing of the batch
                at fault was read or copied.
        """
        deadline = time.monotonic() + timeout_s
        # The engine checks what it reads; what is copied is checked here, in the same words.
        check_copies(schedule.copies, self._local, self._staging_table, "the staging buffer")
        if len(schedule.direct):
            link.read(schedule.direct, timeout_s)
        if not len(schedule.reads):
            return
        with ThreadPoolExecutor(1, "pd-copies") as copier:
            copying: list[Future[None]] = []
            for number, window in enumerate(schedule.windows()):
                if number >= 2:
                    copying[number - 2].result()  # it uses the same half of the buffer
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise ReadFailed(f"not all windows were read within {timeout_s:.1f} s", settled=True)
                link.read(window.reads, remaining)
                copying.append(copier.submit(self._copy, window.copies))
            for copies in copying:
                copies.result()


def _device_memory(size: int, device: torch.device) -> torch.Tensor:
    """Memory that starts at the address and has the granularity that transfer engines of devices ask for."""
    size = -(-size // ALIGNMENT) * ALIGNMENT
    try:
        memory = torch.empty(size + ALIGNMENT, dtype=torch.uint8, device=device)
    except RuntimeError as error:  # torch's error for a lack of memory is one
        raise MemoryError(
            f"{device} has no {size} bytes left for the staging buffer: lower gpu_memory_utilization or staging_bytes "
            "(0 reads everything straight to its place)"
        ) from error
    start = -memory.data_ptr() % ALIGNMENT
    return memory[start : start + size]
