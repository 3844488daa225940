"""Pulls for which no request of vLLM waits: their ends go to the scheduler side with the reports."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pd_connector.orders import Orders, PullOrder, RankEnds, Report
from pd_connector.stats import StatsRecorder
from pd_connector.worker.pull_end import PullEnd
from pd_connector.worker.pulls import Pulls
from pd_connector.worker.worker_role import WorkerRole

logger = logging.getLogger(__name__)


class UnawaitedPulls(WorkerRole, ABC):
    """Owns such pulls of one kind, and what carries them out."""

    #: Their name in a step's ``Orders``, and that of their ends in a ``Report``.
    kind: ClassVar[Literal["landings", "prefixes"]]

    def __init__(self, pulls: Pulls, stats: StatsRecorder) -> None:
        self._pulls = pulls
        self._stats = stats
        self._outstanding: set[str] = set()

    @abstractmethod
    def note(self, end: PullEnd) -> None:
        """Count a pull that has ended, and log if it has failed."""

    def execute(self, orders: Orders) -> list[str]:
        """Start the pulls. No request waits for them here."""
        pulls: tuple[PullOrder, ...] = getattr(orders, self.kind)
        self._outstanding.update(self._pulls.execute(Orders(pulls=pulls, model_changes=orders.model_changes)))
        return []

    def take_report(self) -> Report:
        """Return the pulls that have ended and settled since the last call.

        Raises:
            UnsettledReadError: nothing proves that the reads of a pull write no more.
        """
        ends = {}
        for end in self._pulls.take_ends():
            self.note(end)
            self._outstanding.discard(end.request_id)
            ends[end.request_id] = RankEnds(1, bool(end.failure), bool(end.lacking_states))
        self._pulls.take_report()  # of what lacked states, as the ends say it here
        return self._report(ends)

    def abandoned(self) -> Report:
        """Return the pulls that have not ended, as failed, after ``join``: nothing is written for them any more."""
        outstanding, self._outstanding = self._outstanding, set()
        return self._report({request_id: RankEnds(1, failed=True) for request_id in outstanding})

    def _report(self, ends: Mapping[str, RankEnds]) -> Report:
        named: dict[str, Any] = {self.kind: ends}
        return Report(**named)

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


class PrefixPulls(UnawaitedPulls):
    """Owns the pulls of prefixes that other engines hold, to blocks of the device that no request has."""

    kind = "prefixes"

    def note(self, end: PullEnd) -> None:
        """Count a pull apart from those of whole prompts: nothing depends on it."""
        self._stats.count("prefix_bytes", end.copied_bytes)
        self._stats.count("pull_bytes_from_host", end.host_bytes)
        self._stats.count("pull_bytes_over_ipc", end.mapped_bytes)
        if end.failure:
            logger.warning("PDConnector: prefix %s: not pulled, so it is computed: %s", end.request_id, end.failure)
