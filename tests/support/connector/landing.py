"""A decode worker's host memory, into which it really pulls."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from layout.cost import CostModel
from layout.geometry import Region
from layout.host_blocks import HostLayout, host_layout
from layout.host_slots import host_block_geometry
from pd_connector.orders import RankEnds, Report
from pd_connector.stats import StatsRecorder
from pd_connector.worker.remote_reader import RemoteReader
from pd_connector.worker.unawaited_pulls import LandingPulls
from tests.support.connector.engines import DecodeWorker
from tests.support.memory import Bytes
from tests.support.waiting import until
from transfer.copies.reshape.reshape import run_copies

LANDING_SLOTS = 8


class HostMemory:
    """A worker's host pool, into which it pulls."""

    def __init__(self, worker: DecodeWorker, slots: int = LANDING_SLOTS) -> None:
        self.worker = worker
        self.layout: HostLayout = host_layout(worker.rank.geometry)
        self.memory: Bytes = np.zeros(slots * self.layout.slot_bytes, np.uint8)
        self.region = Region(self.memory.ctypes.data, self.memory.nbytes)
        reads = RemoteReader.with_staging(CostModel.of_protocol("tcp"), (self.region,), 1 << 20)
        worker.engine.register((self.region, *reads.regions))
        local = host_block_geometry(worker.rank.geometry, self.layout, self.region)
        context = replace(worker.context(), local=local, reads=reads)
        self.stats = StatsRecorder()
        self.landings = LandingPulls(context, 600.0, self.stats)

    def end(self) -> RankEnds:
        reports: list[Report] = []

        def has_ended() -> bool:
            assert not self.landings.take_ends(), "no request waits for it"
            reports.append(self.landings.take_report())
            return bool(reports[-1].landings)

        until(has_ended)
        return reports[-1].landings["r"]

    def load(self, group: int, blocks: Sequence[int], landed: Sequence[int]) -> None:
        """Copy blocks of the host pool, as they were ordered, to blocks of the device."""
        run_copies(self.layout.loads(self.region, group, list(blocks), [block - 1 for block in landed]))

    def store(self, group: int, blocks: Sequence[int], landed: Sequence[int]) -> None:
        """Copy blocks of the device to blocks of the host pool."""
        run_copies(self.layout.stores(self.region, group, list(blocks), [block - 1 for block in landed]))

    def close(self) -> None:
        self.landings.close()
        self.landings.join()
