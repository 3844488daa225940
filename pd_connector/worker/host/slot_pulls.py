"""A worker's pulls to host memory: those of ``Pulls``, with host slots in the place of device blocks.

No request of vLLM waits for such a pull, so its end goes to the scheduler side with the reports.
"""

import logging
from dataclasses import replace

from layout.geometry import Region, WorkerGeometry
from layout.host_blocks import HostLayout
from layout.host_slots import slot_geometry
from pd_connector.orders import LandingEnds, Orders, Report
from pd_connector.stats import StatsRecorder
from pd_connector.worker.pulls import Pulls
from pd_connector.worker.worker_role import WorkerRole

logger = logging.getLogger(__name__)


def host_block_geometry(geometry: WorkerGeometry, layout: HostLayout, pool: Region) -> WorkerGeometry:
    """Return the host pool as a cache whose block ids are those of the host pool's blocks: slot s is block s + 1.

    Block 0, which stands for a hole and is never read or written, would lie before the pool.

    Raises:
        SlotPlaneError: see ``slot_geometry``.
    """
    shifted = Region(pool.address - layout.slot_bytes, pool.size + layout.slot_bytes)
    return replace(slot_geometry(geometry, layout, shifted), regions=(pool,))


class LandingPulls(WorkerRole):
    """Owns the pulls to host memory. ``pulls`` are made with the geometry of the host pool."""

    def __init__(self, pulls: Pulls, stats: StatsRecorder) -> None:
        self._pulls = pulls
        self._stats = stats
        self._outstanding: set[str] = set()

    def execute(self, orders: Orders) -> list[str]:
        """Start the pulls to host memory. No request waits for them here."""
        self._outstanding.update(self._pulls.execute(Orders(pulls=orders.landings, model_changes=orders.model_changes)))
        return []

    def take_report(self) -> Report:
        """Return the pulls that have ended and settled since the last call.

        Raises:
            UnsettledReadError: nothing proves that the reads of a pull write no more.
        """
        landings = {}
        for end in self._pulls.take_ends():
            end.count(self._stats)
            self._stats.count("landed_bytes", end.copied_bytes)
            if end.failure:
                logger.error("PDConnector: request %s: not brought to host memory: %s", end.request_id, end.failure)
            self._outstanding.discard(end.request_id)
            landings[end.request_id] = LandingEnds(1, bool(end.failure), bool(end.lacking_states))
        return Report(landings=landings)

    def abandoned(self) -> Report:
        """Return the pulls that have not ended, as failed, after ``join``: nothing writes to host memory any more."""
        outstanding, self._outstanding = self._outstanding, set()
        return Report(landings={request_id: LandingEnds(1, failed=True) for request_id in outstanding})

    def close(self) -> None:
        """Start no more reads."""
        self._pulls.close()

    def join(self) -> None:
        """Wait for the threads."""
        self._pulls.join()

    def check_ended(self) -> None:
        """Raise RuntimeError if a thread still runs after ``join``."""
        self._pulls.check_ended()

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        self._pulls.check_integrity()
