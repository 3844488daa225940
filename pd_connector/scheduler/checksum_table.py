"""The checksums of what a prefill engine has leased: ordered of its workers, kept for as long as the lease is valid.

Orders, reports and answers only: no thread, no socket, no memory that is read.
"""

import threading
from collections.abc import Callable, Iterable

import numpy as np

from layout.checksums import PlaneSums
from pd_connector.orders import ChecksumOrder, ChecksumReport
from transfer.control.limits import MAX_SUMS
from transfer.control.messages import Checksummed, Checksums, NoChecksums


class ChecksumTable:
    """Knows of each valid lease which workers have reported what.

    Thread-safe: ``answer`` runs on the control channel's thread, everything else on the scheduler's.
    """

    def __init__(self, still_valid: Callable[[Iterable[str]], frozenset[str]], *, enabled: bool = True) -> None:
        """``still_valid``: which of some leases have not ended. Not ``enabled``: it orders and knows nothing."""
        self.enabled = enabled
        self._still_valid = still_valid
        self._lock = threading.Lock()
        self._workers = 0
        self._orders: dict[str, ChecksumOrder] = {}  # not yet given to the workers
        self._reports: dict[str, dict[int, ChecksumReport]] = {}  # by lease and worker

    def set_workers(self, number: int) -> None:
        """How many workers report."""
        self._workers = number

    def order(self, order: ChecksumOrder) -> None:
        """Have a new lease's blocks summed in the next step."""
        if not self.enabled:
            return
        with self._lock:
            self._orders[order.lease_id] = order
            self._reports[order.lease_id] = {}

    def take_orders(self) -> tuple[ChecksumOrder, ...]:
        """What the workers have to sum, each once."""
        self._forget_ended()
        with self._lock:
            orders = tuple(self._orders.values())
            self._orders.clear()
            return orders

    def add(self, report: ChecksumReport) -> None:
        """Take a worker's checksums. Those of leases that have ended are dropped."""
        with self._lock:
            if report.lease_id in self._reports:
                self._reports[report.lease_id].setdefault(report.worker, report)

    @property
    def wants_step(self) -> bool:
        """Whether a step would bring orders to the workers, or a report from them."""
        self._forget_ended()
        with self._lock:
            return any(len(reports) < self._workers for reports in self._reports.values())

    def answer(self, asked: Checksums) -> Checksummed:
        """The checksums asked for, or why there are none. Asking again changes nothing."""
        if not self.enabled:
            return Checksummed(reason=NoChecksums.OFF)
        valid = bool(self._still_valid([asked.lease_id]))
        with self._lock:
            reports = self._reports.get(asked.lease_id)
            if not valid or reports is None:
                return Checksummed(reason=NoChecksums.UNKNOWN)
            report = reports.get(asked.worker)
            if report is None:
                there_is_one = asked.worker < self._workers
                return Checksummed(reason=NoChecksums.PENDING if there_is_one else NoChecksums.PLACE)
        if report.groups is None:
            return Checksummed(reason=NoChecksums.FAILED)
        return _sums(report.groups, asked)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        with self._lock:
            assert self._orders.keys() <= self._reports.keys(), "a lease is to be summed that is not known"
            for lease_id in self._orders:
                assert not self._reports[lease_id], f"{lease_id} was reported before it was ordered"
            for lease_id, reports in self._reports.items():
                assert all(0 <= worker < self._workers for worker in reports), f"{lease_id} has an unknown worker"

    def _forget_ended(self) -> None:
        with self._lock:
            for lease_id in self._reports.keys() - self._still_valid(list(self._reports)):
                del self._reports[lease_id]
                self._orders.pop(lease_id, None)


def _sums(groups: tuple[tuple[PlaneSums, ...], ...], asked: Checksums) -> Checksummed:
    """The answer of a worker that has reported."""
    if asked.group >= len(groups):
        return Checksummed(reason=NoChecksums.PLACE)
    planes, borders = groups[asked.group], asked.borders
    if (len(borders) - 1) * sum(plane.totals[0].size for plane in planes) > MAX_SUMS:
        return Checksummed(reason=NoChecksums.SIZE)
    if len(borders) < 2 or not planes:
        return Checksummed()
    return Checksummed(tuple(np.concatenate([plane.between(borders).ravel() for plane in planes]).tolist()))
