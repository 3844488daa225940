"""Takes checksums of a worker's caches, those of leased blocks on a thread of their own.

``layout.checksums`` defines what a checksum is.
"""

import logging
import queue
import threading
from collections.abc import Sequence

from layout.checksums import PlaneSums
from layout.copies import Int64Array
from layout.geometry import Plane, WorkerGeometry
from pd_connector.orders import ChecksumOrder, ChecksumReport, Orders, Report, block_table
from pd_connector.worker.worker_role import WorkerRole
from transfer.copies.checksums.block_checksums import (
    BlockReader,
    ReadableBlocks,
    in_place,
    sum_plane,
    sum_states,
    warm_up,
)

logger = logging.getLogger(__name__)

#: How long a shutdown waits for the thread, which checks every few megabytes whether it should end.
_CLOSE_TIMEOUT_S = 2.0


class CacheChecksums:
    """Takes checksums of one worker's caches. Thread-safe."""

    def __init__(self, geometry: WorkerGeometry, read: BlockReader = in_place) -> None:
        """Compile the kernels. ``read`` must reach the memory that ``geometry`` describes."""
        self.geometry = geometry
        self._read = read
        warm_up([plane for group in geometry.groups for plane in group.planes])

    def sums(
        self, block_ids: Sequence[Sequence[int]], first_token: int, end_token: int, closing: threading.Event
    ) -> tuple[tuple[PlaneSums, ...], ...]:
        """Return the checksums of a request's tokens ``first_token`` to ``end_token`` (exclusive), by group and plane.

        Of a group of states, those of all that its block table has, an entry counting as a token.

        Raises:
            PlanError: as ``sum_plane``.
            Interrupted: ``closing`` is set.
        """

        def read(plane: Plane, blocks: Int64Array) -> ReadableBlocks:
            if closing.is_set():
                raise Interrupted
            return self._read(plane, blocks)

        return tuple(
            tuple(
                sum_states(plane, block_table(ids), read)
                if group.states
                else sum_plane(plane, group.block_tokens, block_table(ids), first_token, end_token, read)
                for plane in group.planes
            )
            for group, ids in zip(self.geometry.groups, block_ids, strict=True)
        )


class Interrupted(Exception):  # noqa: N818
    """The owner of the caches is closing."""


class LeaseChecksums(WorkerRole):
    """Takes the checksums that the scheduler side orders, one lease after another."""

    def __init__(self, checksums: CacheChecksums, worker: int) -> None:
        """Start the thread. ``worker`` is this worker's index among the engine's workers."""
        self._checksums = checksums
        self._worker = worker
        self._orders: queue.SimpleQueue[ChecksumOrder | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[ChecksumReport] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pd-checksums", daemon=True)
        self._thread.start()

    def execute(self, orders: Orders) -> tuple[str, ...]:
        """Queue the orders. No request waits for checksums."""
        for order in orders.checksums:
            self._orders.put(order)
        return ()

    def take_report(self) -> Report:
        """Return the checksums finished since the last call."""
        done = []
        while not self._done.empty():
            done.append(self._done.get_nowait())
        return Report(checksums=tuple(done))

    def close(self) -> None:
        """Interrupt the order under way and drop those queued."""
        self._closing.set()
        self._orders.put(None)

    def join(self) -> None:
        """Wait for the thread."""
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("PDConnector: the checksum thread was still running at shutdown")

    def check_ended(self) -> None:
        """Raise RuntimeError if the thread still runs after ``join``: it may still read blocks."""
        if self._thread.is_alive():
            raise RuntimeError("the checksum thread did not end; the worker cannot go on")

    def _run(self) -> None:
        while (order := self._orders.get()) is not None and not self._closing.is_set():
            try:
                groups = self._checksums.sums(order.block_ids, 0, order.end_token, self._closing)
            except Interrupted:
                return
            except Exception:
                logger.exception("PDConnector: no checksums of lease %s, so verifying it will fail", order.lease_id)
                self._done.put(ChecksumReport(order.lease_id, self._worker, None))
            else:
                self._done.put(ChecksumReport(order.lease_id, self._worker, groups))
