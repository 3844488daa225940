"""Pulls for which no request of vLLM waits: their ends go to the scheduler side with the reports."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pd_connector.orders import Orders, PullOrder, RankEnds, Report
from pd_connector.worker.pull_end import PullEnd
from pd_connector.worker.pulls import Pulls

logger = logging.getLogger(__name__)


class UnawaitedPulls(Pulls, ABC):
    """Owns such pulls of one kind."""

    #: Their name in a step's ``Orders``, and that of their ends in a ``Report``.
    kind: ClassVar[Literal["landings", "prefixes"]]

    @abstractmethod
    def note(self, end: PullEnd) -> None:
        """Count a pull that has ended, and log if it has failed."""

    def execute(self, orders: Orders) -> list[str]:
        """Start the pulls. No request waits for them here."""
        pulls: tuple[PullOrder, ...] = getattr(orders, self.kind)
        super().execute(Orders(pulls=pulls, model_changes=orders.model_changes))
        return []

    def take_ends(self) -> list[PullEnd]:
        """Return none: they are in the reports."""
        return []

    def take_report(self) -> Report:
        """Return the pulls that have ended and settled since the last call.

        Raises:
            UnsettledReadError: nothing proves that the reads of a pull write no more.
        """
        ends = {}
        for end in super().take_ends():
            self.note(end)
            ends[end.request_id] = RankEnds(1, bool(end.failure), end.lacking_states)
        return self._report(ends)

    def abandoned(self) -> Report:
        """Return the pulls that have not ended, as failed, after ``join``: nothing is written for them any more."""
        outstanding, self._outstanding = self._outstanding, set()
        return self._report({request_id: RankEnds(1, failed=True) for request_id in outstanding})

    def _report(self, ends: Mapping[str, RankEnds]) -> Report:
        named: dict[str, Any] = {self.kind: ends}
        return Report(**named)


class LandingPulls(UnawaitedPulls):
    """Owns the pulls to host memory. ``context`` has the geometry of the host pool."""

    kind = "landings"

    def note(self, end: PullEnd) -> None:
        """Count a pull, as one to the device is."""
        end.count(self._stats)
        self._stats.count("landed_bytes", end.copied_bytes)
        if end.failure:
            logger.error("PDConnector: request %s: not brought to host memory: %s", end.request_id, end.failure)


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
