"""The checksums of a prefill engine's leases: ordered from its workers, and kept while the lease is valid.

Orders, reports and answers only: no threads, no sockets, and no cache memory is read.
"""

import threading
from collections.abc import Callable, Iterable
from itertools import islice

import numpy as np

from layout.checksums import PlaneSums
from pd_connector.orders import ChecksumOrder, ChecksumReport, LeaseEnd
from transfer.control.limits import MAX_SUMS
from transfer.control.messages import Checksummed, Checksums, NoChecksums

#: The most orders that workers have and have not all carried out. Others wait here, where those of leases that end are
#: dropped, so that workers that cannot keep up do nothing else in vain.
_MOST_UNDER_WAY = 32


class ChecksumTable:
    """Holds what the workers have reported for each valid lease.

    Thread-safe: ``answer`` runs on the control channel's thread, ``ended`` on any, everything else on the scheduler's.
    """

    def __init__(self, still_valid: Callable[[Iterable[str]], frozenset[str]], *, enabled: bool = True) -> None:
        """``still_valid`` returns which of some leases have not ended; ``ended`` must be called for those that do.

        Unless ``enabled``, nothing is ordered.
        """
        self.enabled = enabled
        self._still_valid = still_valid
        self._lock = threading.Lock()
        self._workers = 0
        self._orders: dict[str, ChecksumOrder] = {}  # not given to the workers yet
        self._under_way: dict[str, set[int]] = {}  # by lease, valid or not: the workers that have carried its order out
        self._reports: dict[str, dict[int, ChecksumReport]] = {}  # by lease and worker

    def set_workers(self, number: int) -> None:
        """Set the number of workers that report. What others were ordered, they do not carry out."""
        with self._lock:
            self._workers = number
            self._under_way.clear()

    def order(self, order: ChecksumOrder) -> None:
        """Order the checksums of a new lease, with the next step."""
        if not self.enabled:
            return
        with self._lock:
            self._orders[order.lease_id] = order
            self._reports[order.lease_id] = {}
        if not self._still_valid([order.lease_id]):  # it may have ended before
            self.ended(order.lease_id)

    def ended(self, lease_id: str, how: LeaseEnd | None = None) -> None:
        """Forget a lease that has ended. Quick, and calls no ``still_valid``: its owner may be calling."""
        with self._lock:
            self._orders.pop(lease_id, None)
            self._reports.pop(lease_id, None)

    def take_orders(self) -> tuple[ChecksumOrder, ...]:
        """Return the next orders for the workers, each once."""
        with self._lock:
            orders = tuple(islice(self._orders.values(), _MOST_UNDER_WAY - len(self._under_way)))
            for order in orders:
                del self._orders[order.lease_id]
                self._under_way[order.lease_id] = set()
            return orders

    def add(self, report: ChecksumReport) -> None:
        """Store a worker's checksums. Those of ended leases are dropped."""
        with self._lock:
            if report.lease_id in self._reports:
                self._reports[report.lease_id].setdefault(report.worker, report)
            if (done := self._under_way.get(report.lease_id)) is not None:
                done.add(report.worker)
                if len(done) >= self._workers:
                    del self._under_way[report.lease_id]

    def are_taken(self, lease_id: str) -> bool:
        """Return whether no worker will still read a lease's blocks on the device for its checksums."""
        with self._lock:
            return lease_id not in self._orders and lease_id not in self._under_way

    @property
    def wants_step(self) -> bool:
        """Whether the engine must step to pass on an order, or to receive a report."""
        with self._lock:
            return bool(self._orders) or any(lease_id in self._reports for lease_id in self._under_way)

    def answer(self, asked: Checksums) -> Checksummed:
        """Return the requested checksums, or why there are none. Idempotent."""
        if not self.enabled:
            return Checksummed(reason=NoChecksums.OFF)
        valid = bool(self._still_valid([asked.lease_id]))
        with self._lock:
            reports = self._reports.get(asked.lease_id)
            if not valid or reports is None:
                return Checksummed(reason=NoChecksums.UNKNOWN)
            report = reports.get(asked.worker)
            if report is None:
                return Checksummed(reason=NoChecksums.PENDING if asked.worker < self._workers else NoChecksums.PLACE)
        if report.groups is None:
            return Checksummed(reason=NoChecksums.FAILED)
        return _sums(report.groups, asked)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        with self._lock:
            assert self._orders.keys() <= self._reports.keys(), "checksums are ordered for an unknown lease"
            assert not self._orders.keys() & self._under_way.keys(), "checksums would be taken twice"
            assert len(self._under_way) <= _MOST_UNDER_WAY, "the workers have too much to do"
            for lease_id in self._orders:
                assert not self._reports[lease_id], f"{lease_id} was reported before it was ordered"
            for lease_id, reports in self._reports.items():
                assert all(0 <= worker < self._workers for worker in reports), f"{lease_id} has an unknown worker"


def _sums(groups: tuple[tuple[PlaneSums, ...], ...], asked: Checksums) -> Checksummed:
    """Return the requested sums of a worker that has reported."""
    if asked.group >= len(groups):
        return Checksummed(reason=NoChecksums.PLACE)
    planes, borders = groups[asked.group], asked.borders
    if (len(borders) - 1) * sum(plane.totals[0].size for plane in planes) > MAX_SUMS:
        return Checksummed(reason=NoChecksums.SIZE)
    if len(borders) < 2 or not planes:
        return Checksummed()
    return Checksummed(tuple(np.concatenate([plane.between(borders).ravel() for plane in planes]).tolist()))
