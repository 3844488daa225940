"""A worker's pulls to host memory: those of ``Pulls``, with host slots in the place of device blocks.

No request of vLLM waits for such a pull, so its end goes to the scheduler side with the reports.
"""

import logging
from dataclasses import replace

from layout.geometry import Region, WorkerGeometry
from layout.host_blocks import HostLayout
from layout.host_slots import slot_geometry
from pd_connector.worker.pull_end import PullEnd
from pd_connector.worker.unawaited_pulls import UnawaitedPulls

logger = logging.getLogger(__name__)


def host_block_geometry(geometry: WorkerGeometry, layout: HostLayout, pool: Region) -> WorkerGeometry:
    """Return the host pool as a cache whose block ids are those of the host pool's blocks: slot s is block s + 1.

    Block 0, which stands for a hole and is never read or written, would lie before the pool.

    Raises:
        SlotPlaneError: see ``slot_geometry``.
    """
    shifted = Region(pool.address - layout.slot_bytes, pool.size + layout.slot_bytes)
    return replace(slot_geometry(geometry, layout, shifted), regions=(pool,))


class LandingPulls(UnawaitedPulls):
    """Owns the pulls to host memory. ``pulls`` are made with the geometry of the host pool."""

    kind = "landings"

    def note(self, end: PullEnd) -> None:
        """Count a pull, as one to the device is."""
        end.count(self._stats)
        self._stats.count("landed_bytes", end.copied_bytes)
        if end.failure:
            logger.error("PDConnector: request %s: not brought to host memory: %s", end.request_id, end.failure)
