"""Brings a pull's bytes from one prefill rank: straight to their place, or through staging where that is cheaper.

Which bytes go which way is decided in ``layout.staging``; here it is carried out.
"""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from layout.copies import Copies
from layout.cost import CostModel
from layout.geometry import Region
from layout.reshape import run_copies, warm_up
from layout.staging import Schedule, StagedWindow, schedule_reads
from transfer.engine.base import Link, ReadFailed
from transfer.engine.limits import RegionTable, check_copies
from transfer.memory import SlotPool

#: Pulls from so many prefill engines can be staged at once; further ones read straight to their place meanwhile.
SLOTS = 4


@dataclass(frozen=True)
class ReadPlanner:
    """What decides how a worker's reads are made. ``staging`` is None where the caches are not the CPU's memory."""

    cost: CostModel
    local_regions: tuple[Region, ...]
    staging: SlotPool | None = None

    @classmethod
    def with_staging(cls, cost: CostModel, local_regions: tuple[Region, ...], staging_bytes: int) -> "ReadPlanner":
        """A planner with a staging buffer, whose ``staging.region`` the caller registers. Builds the copy kernel."""
        warm_up()
        return cls(cost, local_regions, SlotPool(staging_bytes, SLOTS))

    @contextmanager
    def planned(self, copies: Copies, remote_regions: tuple[Region, ...]) -> Iterator[Schedule]:
        """How to bring ``copies``. What is staged is good for the time of the ``with`` block.

        Leave the block only when no read into the staging buffer can write any more.
        """
        if self.staging is None:
            yield schedule_reads(copies, self.cost, self.local_regions, remote_regions, None)
            return
        with self.staging.borrow() as address:
            slot = Region(address, self.staging.slot_bytes) if address is not None else None
            yield schedule_reads(copies, self.cost, self.local_regions, remote_regions, slot)

    def carry_out(self, link: Link, schedule: Schedule, timeout_s: float) -> None:
        """Read and copy everything; returns when all bytes are in their places.

        The copies of one window run while the next one is read.

        Raises:
            ReadFailed: as ``Link.read``.
            ValueError: an address is outside the memory that this side or the peer registered. Nothing of the batch
                at fault was read or copied.
        """
        deadline = time.monotonic() + timeout_s
        self._check_copies(schedule.windows)
        if len(schedule.direct):
            link.read(schedule.direct, timeout_s)
        if not schedule.windows:
            return
        with ThreadPoolExecutor(1, "pd-copies") as copier:
            copying: list[Future[None]] = []
            for number, window in enumerate(schedule.windows):
                if number >= 2:
                    copying[number - 2].result()  # it uses the same half of the buffer
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise ReadFailed(f"not all windows were read within {timeout_s:.1f} s", settled=True)
                link.read(window.reads, remaining)
                copying.append(copier.submit(run_copies, window.copies))
            for copies in copying:
                copies.result()

    def _check_copies(self, windows: tuple[StagedWindow, ...]) -> None:
        """The engine checks what it reads; what is copied is checked here, in the same words."""
        if not windows:
            return
        assert self.staging is not None
        local, staging = RegionTable(self.local_regions), RegionTable([self.staging.region])
        for window in windows:
            check_copies(window.copies, local, staging, "the staging buffer")
