"""What the roles of an engine (prefill for others, pull from others, host memory) offer to the scheduler side."""

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pd_connector.orders import Orders, Report, WorkerHandshake
from pd_connector.stats import StatsRecorder

if TYPE_CHECKING:
    from pd_connector.vllm.types import KVCacheBlocks, KVCacheEvent, Request

logger = logging.getLogger(__name__)


class SchedulerRole:
    """Does one kind of work with KV caches for an engine's requests.

    All methods belong to the scheduler's thread, and none waits for a peer or a device.
    """

    @cached_property
    def counts(self) -> Counter[tuple[str, str]]:
        """What has happened since the last ``update_stats``, by metric and label (empty if the metric has none)."""
        return Counter()

    def set_workers(self, handshakes: Sequence[WorkerHandshake]) -> None:
        """Take the workers' handshakes, by the workers' indices. Called again when the caches are registered anew."""

    def add(self, request: "Request") -> None:
        """Take up a new request."""

    def free_blocks(self) -> None:
        """Free device blocks that are no longer needed. Called before vLLM allocates blocks, and in every step."""

    def must_wait(self, request: "Request", computed_tokens: int) -> bool:
        """Return whether a request must not be given blocks in this step; begin what it is to wait for.

        ``computed_tokens``: those that the device holds already.
        """
        return False

    def is_waiting(self, request: "Request") -> bool:
        """Return whether ``must_wait`` has begun what a request waits for, and it has yet to come. Begins nothing.

        Not if that takes too long: whoever is told so in every step learns of news, and of the end of its time.
        """
        return False

    def answers(self, request: "Request") -> Collection[Future[Any]]:
        """Return what ``must_wait`` has a request wait for, if that is answers of others."""
        return ()

    def look_ahead(self, request: "Request", computed_tokens: int) -> None:
        """Ask already what ``must_wait`` would, if that takes time: the request waits for answers to another role."""

    def missing_tokens(self, request: "Request", computed_tokens: int) -> int:
        """Return how many tokens beyond ``computed_tokens`` this role will bring."""
        return 0

    def allocated(self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int) -> int:
        """Start bringing tokens into a request's blocks; return how many of ``external_tokens`` this role brings."""
        return 0

    def step_orders(self, scheduled: Mapping[str, int]) -> Orders:
        """Return the orders for the workers in a step that works on ``scheduled`` tokens of each request."""
        return Orders()

    def settled(self, request_ids: set[str], failed: set[str], report: Report) -> None:
        """Note that requests have ended their wait on all ranks, some as ``failed``, and what else ranks ``report``."""

    def finish(self, request: "Request", block_ids: Sequence[Sequence[int]]) -> dict[str, Any] | None:
        """Forget a request that has ended; return the ``kv_transfer_params`` of its response, if any."""
        return None

    @property
    def wants_step(self) -> bool:
        """Whether the engine must step even without requests."""
        return False

    @property
    def frees_blocks_soon(self) -> bool:
        """Whether it is better to wait a few steps for blocks than to preempt a request for them."""
        return False

    def loaded_tokens(self, request: "Request") -> int:
        """Return how many of the tokens that a request waits for come from host memory."""
        return 0

    def take_events(self) -> "Sequence[KVCacheEvent]":
        """Return the KV cache events since the last call."""
        return ()

    def update_stats(self, stats: StatsRecorder) -> None:
        """Record what has happened since the last call."""
        for (name, label), number in self.counts.items():
            stats.count(name, number, label)
        self.counts.clear()

    def device_references(self) -> "Counter[int]":
        """Return the number of references to each device block that this role holds, by block id."""
        return Counter()

    def release_device_blocks(self) -> None:
        """Give back all device blocks, whose contents are no longer valid."""

    def reset(self) -> bool:
        """Drop all contents of the caches, which are no longer valid; return False if that is not possible now."""
        return True

    def model_changed(self) -> None:
        """Take back what is known of this engine's model, which computes something else now. After ``reset``."""

    def close(self) -> None:
        """Stop all communication and join all threads."""

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""


class _OnRanks(Protocol):
    ends: Any  # the sum of what ranks have reported, with their number as ``ranks``


_Name = TypeVar("_Name", str, int)
_Work = TypeVar("_Work", bound=_OnRanks)


def ended(under_way: dict[_Name, _Work], report: Mapping[_Name, Any], ranks: int, what: str) -> list[_Work]:
    """Add what ranks ``report`` to the work under way; remove from there, and return, what all ``ranks`` have reported.

    ``what`` the work is, for the log, which tells of what is reported and not under way.
    """
    done = []
    for name, ends in report.items():
        if (work := under_way.get(name)) is None:
            logger.error("PDConnector: ignored that %s %s ended twice, which is a bug", what, name)
            continue
        work.ends += ends
        if work.ends.ranks >= ranks:
            done.append(under_way.pop(name))
    return done
