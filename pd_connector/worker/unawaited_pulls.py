"""Pulls of one kind for which no request of vLLM waits: their ends go to the scheduler side with the reports."""

import logging
from typing import Any

from pd_connector.orders import Orders
from pd_connector.worker.pull_end import PullEnd
from pd_connector.worker.pulls import Pulls

logger = logging.getLogger(__name__)


class UnawaitedPulls(Pulls):
    """Owns such pulls of one kind, and no others."""

    def execute(self, orders: Orders) -> list[str]:
        """Start the pulls. No request waits for them here."""
        named: dict[str, Any] = {self.unawaited: getattr(orders, self.unawaited)}
        return super().execute(Orders(**named, model_changes=orders.model_changes))


class LandingPulls(UnawaitedPulls):
    """Owns the pulls to host memory. ``context`` has the geometry of the host pool."""

    unawaited = "landings"

    def note(self, end: PullEnd) -> None:
        """Count a pull, as one to the device is."""
        end.count(self._stats)
        self._stats.count("landed_bytes", end.copied_bytes)
        if end.failure:
            logger.error("PDConnector: request %s: not brought to host memory: %s", end.request_id, end.failure)


class PrefixPulls(UnawaitedPulls):
    """Owns the pulls of prefixes that other engines hold, to blocks of the device that no request has."""

    unawaited = "prefixes"

    def note(self, end: PullEnd) -> None:
        """Count a pull apart from those of whole prompts: nothing depends on it."""
        self._stats.count("prefix_bytes", end.copied_bytes)
        self._stats.count("pull_bytes_from_host", end.host_bytes)
        self._stats.count("pull_bytes_over_ipc", end.mapped_bytes)
        if end.failure:
            logger.warning("PDConnector: prefix %s: not pulled, so it is computed: %s", end.request_id, end.failure)
