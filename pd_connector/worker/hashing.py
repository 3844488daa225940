"""Takes the checksums of leased blocks on a prefill worker, on a thread of its own beside the model's.

What a checksum is, is the business of ``layout.checksums``; what becomes of it, of the scheduler half.
"""

import queue
import threading
from collections.abc import Sequence

from layout.checksums import PlaneSums
from layout.copies import Int64Array
from layout.geometry import Plane, WorkerGeometry
from pd_connector.metadata import Hashed, HashOrder
from pd_connector.vllm_compat import init_logger
from pd_connector.worker.block_tables import block_table
from transfer.local_copy.checksums import BlockReader, Readable, in_place, sum_plane, warm_up

logger = init_logger(__name__)

#: How long a shutdown waits for the thread: it looks every few megabytes whether it should end.
_CLOSE_TIMEOUT_S = 2.0


class Summing:
    """The checksums of one worker's caches. Safe from any thread."""

    def __init__(self, geometry: WorkerGeometry, read: BlockReader = in_place) -> None:
        """``read`` reaches the memory that ``geometry`` describes. Compiles what is needed."""
        self.geometry = geometry
        self._read = read
        warm_up([plane for group in geometry.groups for plane in group.planes])

    def sums(
        self, block_ids: Sequence[Sequence[int]], first_token: int, end_token: int, closing: threading.Event
    ) -> tuple[tuple[PlaneSums, ...], ...]:
        """The checksums of some tokens of a request, by cache group and plane.

        Raises:
            PlanError: as ``layout.checksums.sum_plane``.
            Interrupted: ``closing`` is set.
        """

        def read(plane: Plane, blocks: Int64Array) -> Readable:
            if closing.is_set():
                raise Interrupted
            return self._read(plane, blocks)

        return tuple(
            tuple(
                sum_plane(plane, group.block_tokens, block_table(ids), first_token, end_token, read)
                for plane in group.planes
            )
            for group, ids in zip(self.geometry.groups, block_ids, strict=True)
        )


class Interrupted(Exception):  # noqa: N818
    """The owner of the memory is closing."""


class HashService:
    """Carries out the scheduler half's orders, one after the other.

    ``submit``, ``take`` and ``close`` belong to the thread that vLLM calls the connector on; only ``close`` waits.
    """

    def __init__(self, summing: Summing, worker: int) -> None:
        """``worker`` is this one's number among the workers of the engine."""
        self._summing = summing
        self._worker = worker
        self._orders: queue.SimpleQueue[HashOrder | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Hashed] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pd-checksums", daemon=True)
        self._thread.start()

    def submit(self, order: HashOrder) -> None:
        """Queue an order; ``take`` reports it once."""
        self._orders.put(order)

    def take(self) -> tuple[Hashed, ...]:
        """What was finished since the last call."""
        done = []
        while not self._done.empty():
            done.append(self._done.get_nowait())
        return tuple(done)

    def close(self) -> None:
        """Read no memory any more: give up what is under way, drop what is queued, join the thread."""
        self._closing.set()
        self._orders.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("PDConnector: checksums were still being taken at shutdown")

    def _run(self) -> None:
        while (order := self._orders.get()) is not None and not self._closing.is_set():
            try:
                groups = self._summing.sums(order.block_ids, 0, order.end_token, self._closing)
            except Interrupted:
                return
            except Exception:
                logger.exception("PDConnector: no checksums of lease %s", order.lease_id)
                self._done.put(Hashed(order.lease_id, self._worker, None))
            else:
                self._done.put(Hashed(order.lease_id, self._worker, groups))
