"""What the roles of a worker have in common (pulls, host memory, checksums), and what its requests wait for of them."""

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from pd_connector.orders import Orders, Report
from pd_connector.stats import StatsRecorder


class PartEnd(Protocol):
    """The end of one part of what a request waits for on this rank: nothing of it will be written any more."""

    @property
    def request_id(self) -> str:
        """Whose part it is."""

    @property
    def failure(self) -> str:
        """A sentence for people; empty if every byte is in its place."""

    def count(self, stats: StatsRecorder) -> None:
        """Add it to the statistics."""


class WorkerRole:
    """Does one thing with a worker's KV caches, as the scheduler side orders.

    All methods belong to the thread that vLLM calls the connector on, and none but ``join`` waits.
    """

    def execute(self, orders: Orders) -> Sequence[str]:
        """Start what is ordered of this role; return the id of a request for each part that it waits for."""
        return ()

    def take_ends(self) -> Sequence[PartEnd]:
        """Return the parts that have ended since the last call, each once."""
        return ()

    def take_report(self) -> Report:
        """Return what has ended since the last call that no request waits for."""
        return Report()

    def close(self) -> None:
        """Begin nothing any more, and touch no cache once the transfer engine is closed and ``join`` has returned."""

    def join(self) -> None:
        """Wait for the threads, after ``close`` and after the transfer engine was closed."""

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""


class Arrivals:
    """Counts the parts of each request, and reports it when the last of them has ended. Belongs to one thread."""

    def __init__(self) -> None:
        self._expected: Counter[str] = Counter()
        self._failed: set[str] = set()
        self._finished: set[str] = set()

    def expect(self, request_id: str) -> None:
        """Add a part that is under way."""
        self._expected[request_id] += 1

    def settle(self, request_id: str, *, failed: bool) -> None:
        """End a part: nothing of it will be written any more."""
        self._expected[request_id] -= 1
        if failed:
            self._failed.add(request_id)
        if not self._expected[request_id]:
            del self._expected[request_id]
            self._finished.add(request_id)

    def take(self) -> tuple[set[str], set[str]]:
        """Return the requests whose parts have all ended since the last call, and those of them with a failed part."""
        finished, self._finished = self._finished, set()
        failed = finished & self._failed
        self._failed -= failed
        return finished, failed

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        assert all(count > 0 for count in self._expected.values()), "a part has settled that was not expected"
        assert not self._finished & self._expected.keys(), "a request is reported before its last part"
        assert self._failed <= self._finished | self._expected.keys(), "a request has failed that is not known"
