"""Reads a pull's bytes from one prefill rank, directly into place or through staging where that is cheaper.

``layout.staging`` decides which bytes go which way; this module executes its schedules.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Protocol, TypeVar

import torch

from layout import staging
from layout.copies import Copies
from layout.cost import CostModel, ReadCost
from layout.geometry import Region
from layout.regions import RegionTable
from layout.staging import ONE_AREA, CopyAreas, Schedule, schedule_reads
from pd_connector.worker.device_fence import Land, nothing_to_land
from pd_connector.worker.device_memory import device_memory
from transfer.copies.reshape import reshape
from transfer.copies.reshape.device_views import mapped_segments
from transfer.copies.reshape.reshape_kernel import KernelCopier, KernelUnusable
from transfer.copies.reshape.reshape_torch import DEFAULT_TEMPORARY_BYTES, TensorCopier
from transfer.engine.batches import check_copies
from transfer.engine.interface import GivenUp, Link, ReadFailed, never
from transfer.memory import HostMemory, SlotPool

#: Reads from this many prefill ranks can be staged at once, of all pulls together. Others wait for as long as staging
#: would save them, and then go directly into place.
SLOTS = 8

#: Bound of that wait, which a shutdown does not end.
_LONGEST_WAIT_S = 1.0

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

#: Seconds that the host needs for each run that a device copies, to number its rows: measured on one core. The device's
#: own time is unknown; its bytes are assumed to cost as much as the CPU's. A window's few operators are left out.
_DEVICE_COPY_ALPHA = 0.1e-6

#: The same where a kernel copies, for which the host lists the runs: measured on one core.
_KERNEL_COPY_ALPHA = 6e-9

#: A window copies to at most this many areas of device memory, each of which takes an operator. With the row numbers'
#: way to the device and the gathering, this makes at most six operators a window.
AREAS_PER_WINDOW = 4

#: What a range of a prompt costs besides its bytes: the question for it, its plan, a call of the transfer engine, the
#: proof of the peer's identity, and the hand-over between threads. Over Mooncake TCP on loopback, a pull of one block
#: takes 1.2 ms more than its bytes (``benchmarks.pull --tokens 32``). Until a prompt is complete, nothing is read that
#: takes less than this: what is left to the end then takes no longer than the range would have cost.
RANGE_S = 1e-3

#: If the device has no memory left for the staging buffer.
_WAY_OUT = "lower gpu_memory_utilization or tuning.staging_bytes (0 reads everything directly into place)"


class Copier(Protocol):
    """Copies from the staging buffer to the caches. Called by one thread for each rank that is being read."""

    def __call__(self, copies: Copies, /) -> None:
        """Return when all bytes are in place, visible to every thread and stream; raise if that will never be so."""


class RemoteReader:
    """Plans and executes a worker's reads. ``staging`` is None if everything is read directly into place."""

    def __init__(
        self,
        cost: CostModel,
        local_regions: tuple[Region, ...],
        pool: SlotPool | None = None,
        copy: Copier = reshape.run_copies,
        areas: CopyAreas = ONE_AREA,
        land: Land = nothing_to_land,
    ) -> None:
        """Compile the planning kernels, so that no pull waits for that.

        ``copy`` must reach both the memory of ``pool``, which is the staging buffer, and ``local_regions``. ``areas``
        limits what it is given at once. ``land`` is called before what was read is copied, and by who holds the memory
        that is read to, when no read writes there any more; not for links whose reads land by themselves.

        Raises:
            ValueError: local regions overlap, or one is empty.
        """
        self.staging = pool
        self._copy = copy
        self.land = land
        self._areas = areas
        self._cost = cost
        self._local = RegionTable(local_regions)
        self._staging_table = RegionTable(() if pool is None else (pool.region,))
        staging.warm_up()

    @classmethod
    def with_staging(cls, cost: CostModel, local_regions: tuple[Region, ...], staging_bytes: int) -> "RemoteReader":
        """Return a reader with a staging buffer, for caches in host memory.

        Compiles the copy kernel and allocates the buffer's pages, so that no pull waits for that.

        Raises:
            ValueError: ``staging_bytes`` is too little to be divided into slots.
        """
        reshape.warm_up()
        memory = HostMemory(staging_bytes)
        memory.allocate()
        return cls(cost, local_regions, SlotPool(memory.region, SLOTS, memory))

    @classmethod
    def with_device_staging(
        cls,
        cost: CostModel,
        local_regions: tuple[Region, ...],
        staging_bytes: int,
        caches: Sequence[torch.Tensor],
        land: Land = nothing_to_land,
    ) -> "RemoteReader":
        """Return a reader for ``caches`` that only their device can reach, which holds the buffer and copies.

        On CUDA by a kernel, if that proves itself; otherwise by operators.

        Raises:
            ValueError: as ``with_staging`` and ``TensorCopier``.
            MemoryError: the device has no ``staging_bytes`` left.
        """
        buffer = device_memory(staging_bytes, caches[0].device, _WAY_OUT)
        pool = SlotPool(Region(buffer.data_ptr(), buffer.numel()), SLOTS, buffer)
        if _has_kernel(buffer.device) and (kernel := _kernel_copier(caches, buffer)) is not None:
            return cls(replace(cost, copy_alpha=_KERNEL_COPY_ALPHA), local_regions, pool, kernel, land=land)
        cost = replace(cost, copy_alpha=_DEVICE_COPY_ALPHA)
        # A window is half a slot, and its row numbers are no larger than its rows: so it is copied in one round.
        temporary_bytes = max(pool.slot_bytes, DEFAULT_TEMPORARY_BYTES)
        segments = mapped_segments(buffer.device)
        copier = TensorCopier(caches, [buffer], segments=segments, temporary_bytes=temporary_bytes)
        return cls(cost, local_regions, pool, copier, CopyAreas(copier.view_starts, AREAS_PER_WINDOW), land)

    def least_bytes(self, costs: Iterable[ReadCost | None] = (None,)) -> float:
        """Return the fewest bytes that are worth a range of their own as long as more of the prompt is to come.

        ``costs``: of the links that read them, of which the slowest counts.
        """
        beta = max((self._cost.over(cost).beta for cost in costs), default=0.0)
        return RANGE_S / beta if beta else math.inf

    @property
    def regions(self) -> tuple[Region, ...]:
        """Memory besides the caches that reads write to, for the caller to register."""
        return () if self.staging is None else (self.staging.region,)

    @contextmanager
    def planned(self, copies: Copies, remote: RegionTable, reads: ReadCost | None = None) -> Iterator[Schedule]:
        """Yield a schedule to read ``copies`` from a peer that registered ``remote``, over a link that costs ``reads``.

        The schedule's staging memory belongs to it inside the ``with`` block only. Leave the block only when no read
        can write to that memory any longer.
        """
        cost = self._cost.over(reads)
        if self.staging is None:
            yield schedule_reads(copies, cost, self._local, remote, None)
            return
        with ExitStack() as borrowing:
            address = borrowing.enter_context(self.staging.borrow())
            if address is None:
                patience_s = min(self._saved_s(copies, cost, remote, self.staging), _LONGEST_WAIT_S)
                address = borrowing.enter_context(self.staging.borrow(patience_s))
            slot = Region(address, self.staging.slot_bytes) if address is not None else None
            schedule = schedule_reads(copies, cost, self._local, remote, slot, self._areas)
            if not len(schedule.reads):
                borrowing.close()  # for others that need the slot
            yield schedule

    def _saved_s(self, copies: Copies, cost: CostModel, remote: RegionTable, pool: SlotPool) -> float:
        """Return the seconds that reading ``copies`` through staging would save, as predicted."""
        any_slot = Region(pool.region.address, pool.slot_bytes)  # planning does not touch it
        schedule = schedule_reads(copies, cost, self._local, remote, any_slot, self._areas)
        return schedule.direct_s - schedule.predicted_s

    def carry_out(self, link: Link, schedule: Schedule, timeout_s: float, given_up: GivenUp = never) -> float:
        """Read and copy everything; return when all bytes are in place once they have landed (``land``).

        The bytes of a window are copied while the next window is read. ``given_up``: see ``Link.read``.

        Returns:
            Seconds from the end of the last read to that of the last copy; 0 if nothing goes through staging.

        Raises:
            ReadFailed: as ``Link.read``.
            ValueError: an address is outside the memory that this side or the peer registered. Nothing of that batch
                was read or copied.
        """
        deadline = time.monotonic() + timeout_s
        # The engine checks reads; copies are checked here, with the same messages.
        check_copies(schedule.copies, self._local, self._staging_table, "the staging buffer")
        later_bytes = schedule.staged_bytes
        if len(schedule.direct):
            link.read(schedule.direct, timeout_s, later_bytes, given_up)
        if not len(schedule.reads):
            return 0.0
        with ThreadPoolExecutor(1, "pd-copies") as copier:
            copying: list[Future[None]] = []
            for number, window in enumerate(schedule.windows()):
                if number >= 2:
                    copying[number - 2].result()  # it copies from the half of the buffer that this window uses
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise ReadFailed(f"not all windows were read within {timeout_s:.1f} s", settled=True)
                later_bytes -= window.reads.total_bytes
                link.read(window.reads, remaining, later_bytes, given_up)
                if not link.lands:
                    self.land()
                copying.append(copier.submit(self._copy, window.copies))
            all_read = time.monotonic()
            for copies in copying:
                copies.result()
        return time.monotonic() - all_read


def _has_kernel(device: torch.device) -> bool:
    """Return whether a kernel may copy on a device. Triton's for NPUs has not been tried."""
    return bool(device.type == "cuda")


def _kernel_copier(caches: Sequence[torch.Tensor], buffer: torch.Tensor) -> Copier | None:
    try:
        return KernelCopier(caches, [buffer])
    except KernelUnusable as error:
        logger.warning("PDConnector: caches are reshaped by operators, which is slower than by a kernel: %s", error)
        return None


def for_each_rank(work: Callable[[int], _Result], ranks: Sequence[int]) -> dict[int, _Result]:
    """Return the results of ``work`` for all ranks once all have ended; runs as many at once as can be staged."""
    if len(ranks) <= 1:
        return {rank: work(rank) for rank in ranks}
    with ThreadPoolExecutor(min(len(ranks), SLOTS), "pd-rank") as threads:
        results = {rank: threads.submit(work, rank) for rank in ranks}
    return {rank: result.result() for rank, result in results.items()}
