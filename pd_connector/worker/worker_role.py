"""What a worker's roles (pulls, host memory, checksums) have in common, and how requests wait for them."""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

from pd_connector.orders import CanaryEnds, Cause, Destinations, Orders, PoolEnds, RankEnds, Report
from pd_connector.stats import StatsRecorder

logger = logging.getLogger(__name__)


class PartEnd(Protocol):
    """How one part of what a request waits for ended on this rank: nothing writes to its blocks any longer."""

    @property
    def request_id(self) -> str:
        """The request that waits for it."""

    @property
    def failure(self) -> str:
        """Why it failed, for people; empty if every byte is in place."""

    @property
    def is_told(self) -> bool:
        """Whether another rank logs the same failure."""

    @property
    def comes_of_leaving(self) -> bool:
        """Whether it ends so where its request's client leaves: then it is no failure."""

    def count(self, stats: StatsRecorder) -> None:
        """Record it in the statistics."""


class WorkerRole:
    """Does one kind of work with a worker's KV caches, as the scheduler side orders.

    All methods belong to the thread on which vLLM calls the connector. Only ``join`` blocks.
    """

    def execute(self, orders: Orders) -> Sequence[str]:
        """Start this role's orders; return a request id for each part that a request will wait for."""
        return ()

    def take_ends(self) -> Sequence[PartEnd]:
        """Return the parts that have ended since the last call, each once."""
        return ()

    def take_report(self) -> Report:
        """Return what else has ended since the last call, for which no request waits."""
        return Report()

    def abandoned(self) -> Report:
        """Return what has not ended, as failed, after ``join``; no request waits for it."""
        return Report()

    def close(self) -> None:
        """Start nothing new. Once the transfer engine is closed and ``join`` has returned, touch no cache."""

    def join(self) -> None:
        """Wait for the threads. Call it after ``close``, when the transfer engine is closed too."""

    def check_ended(self) -> None:
        """Raise RuntimeError unless, after ``join``, nothing that this role has started touches the caches any more."""

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""


class Arrivals:
    """Counts the parts that each request waits for, and reports it when the last has ended. Belongs to one thread."""

    def __init__(self) -> None:
        self._expected: Counter[str] = Counter()
        self._failed: set[str] = set()
        self._finished: set[str] = set()
        self._left: set[str] = set()  # of those that wait

    def expect(self, request_id: str) -> None:
        """Add a part that has been started."""
        self._expected[request_id] += 1

    def leave(self, request_ids: Iterable[str]) -> None:
        """Note that requests have ended, some of them while they wait."""
        self._left |= self._expected.keys() & set(request_ids)

    def has_left(self, request_id: str) -> bool:
        """Return whether a request that waits has ended."""
        return request_id in self._left

    def settle(self, request_id: str, *, failed: bool) -> None:
        """End a part: nothing writes to its blocks any longer."""
        self._expected[request_id] -= 1
        if failed:
            self._failed.add(request_id)
        if not self._expected[request_id]:
            del self._expected[request_id]
            self._finished.add(request_id)
            self._left.discard(request_id)

    def take(self) -> tuple[set[str], set[str]]:
        """Return the requests whose last part has ended since the last call, and those of them with a failed part."""
        finished, self._finished = self._finished, set()
        failed = finished & self._failed
        self._failed -= failed
        return finished, failed

    def abandon(self) -> None:
        """Fail every request that has not been taken: what has arrived for it, or would have, is lost."""
        self._finished |= self._expected.keys()
        self._expected.clear()
        self._left.clear()
        self._failed |= self._finished

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        assert all(count > 0 for count in self._expected.values()), "a part has settled that was not expected"
        assert not self._finished & self._expected.keys(), "a request is reported before its last part"
        assert self._left <= self._expected.keys(), "a request that has left is remembered"
        assert self._failed <= self._finished | self._expected.keys(), "a request has failed that is not known"


def fail_transfers(orders: Orders, arrivals: Arrivals) -> Report:
    """End what waits for transfers that nobody can carry out, as the engine sleeps; return what ended for nobody."""
    waiting = [pull.request_id for pull in orders.pulls] + [refusal.request_id for refusal in orders.refusals]
    landing = [pull.request_id for pull in orders.landings]
    prefixes = [pull.request_id for pull in orders.prefixes]
    if waiting or landing:
        logger.error("PDConnector: request %s: not pulled: the engine sleeps", ", ".join(waiting + landing))
    for request_id in waiting:
        arrivals.expect(request_id)
        arrivals.settle(request_id, failed=True)
    asleep = CanaryEnds(1, cause=Cause.INTERNAL, failure="the engine sleeps")
    return Report(
        landings={request_id: RankEnds(1, failed=True) for request_id in landing},
        prefixes={find_id: RankEnds(1, failed=True) for find_id in prefixes},
        borders={pull.request_id: RankEnds(1, failed=True) for pull in orders.borders},
        canaries={order.request_id: asleep for order in orders.canaries},
        fetches={order.pool_id: PoolEnds.nothing(order) for order in orders.fetches},
        puts={order.pool_id: PoolEnds.nothing(order) for order in orders.puts},
    )


class FailedBlocks:
    """Which blocks failed to be filled, for a vLLM that is told of failures by block ids. Belongs to one thread.

    It keeps the destinations of every request that waits, and, until they are taken, those of the requests that failed.
    Holds nothing if no destinations are ordered.
    """

    def __init__(self) -> None:
        self._destinations: dict[str, tuple[int, ...]] = {}  # by request
        self._blocks: set[int] = set()
        self._requests: frozenset[str] = frozenset()

    def expect(self, destinations: Sequence[Destinations]) -> None:
        """Remember which blocks belong to requests that begin to wait."""
        self._destinations |= {each.request_id: each.block_ids for each in destinations}

    def settle(self, finished: set[str], failed: set[str]) -> None:
        """Forget the blocks of requests that have ``finished`` their wait, and keep those of the ``failed`` ones."""
        for request_id in finished & self._destinations.keys():
            block_ids = self._destinations.pop(request_id)
            if request_id in failed:
                self._blocks.update(block_ids)
                self._requests |= {request_id}

    def take_blocks(self) -> set[int]:
        """Return the blocks of failed requests since the last call."""
        blocks, self._blocks = self._blocks, set()
        return blocks

    def take_requests(self) -> frozenset[str]:
        """Return the failed requests since the last call, whose destinations were known."""
        requests, self._requests = self._requests, frozenset()
        return requests

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        assert 0 not in self._blocks, "vLLM's null block cannot fail"
