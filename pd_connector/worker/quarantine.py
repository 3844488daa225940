"""Pulls that have failed while the transfer engine may still write to their blocks.

Such a pull is not reported, so vLLM keeps its blocks allocated to the request, also if that has been aborted. It is
reported when the engine proves that nothing is written any more. If that takes too long, the worker ends: only the end
of its transfer engine is then a proof, and a worker that starts anew serves again.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from pd_connector.orders import PullOrder
from pd_connector.stats import StatsRecorder
from pd_connector.worker.device_fence import Land, nothing_to_land
from pd_connector.worker.pull_end import PullEnd
from transfer.engine.interface import Link

logger = logging.getLogger(__name__)

#: How long a read may take to settle. What keeps one in flight are calls to a peer that does not answer, which are
#: interrupted every second, retries (10 s on RDMA), and on Ascend two tries of two calls to each rank: one link at a
#: time is made for all of them, in 33 s if that fails. So this is enough for some four ranks that cannot be reached.
MAX_AGE_S = 300.0


_Kept = TypeVar("_Kept")


class UnsettledReadError(RuntimeError):
    """The transfer engine may still write to KV blocks, and nothing proves when that ends: the worker must end."""


class HeldRead:
    """The read from one prefill rank: its link, and what must not be reused before it has settled."""

    def __init__(self, link: Link, land: Land = nothing_to_land) -> None:
        """``land`` waits for what the device was still to copy when the read settled, whether it has failed or not."""
        self._link = link
        self._land = land
        self._kept = ExitStack()

    def keep(self, context: AbstractContextManager[_Kept]) -> _Kept:
        """Enter ``context``, which ``release`` leaves when the read has settled. Returns what it yields."""
        return self._kept.enter_context(context)

    def release(self) -> bool:
        """Return whether the read has settled, and let go of what was kept if so. Idempotent."""
        if not self._link.settled:
            return False
        if not self._link.lands:
            self._land()
        self._kept.close()
        return True


@dataclass(frozen=True)
class UnsettledPull:
    """A pull that has failed, and the reads of it that may still write to its blocks."""

    order: PullOrder
    end: PullEnd  # to report when all reads have settled
    reads: Sequence[HeldRead]

    @cached_property
    def blocks(self) -> frozenset[int]:
        """The blocks that the request holds."""
        return frozenset(block for table in self.order.local_block_ids for block in table if block)


@dataclass(frozen=True)
class LostPull:
    """A pull whose clean-up has failed: it is not known whether anything still writes to its blocks."""

    request_id: str
    reason: str


class Quarantine:
    """Holds the pulls whose reads have not settled. Belongs to the thread on which vLLM calls the connector."""

    def __init__(self, stats: StatsRecorder, clock: Callable[[], float] = time.monotonic) -> None:
        """Start empty."""
        self._stats = stats
        self._clock = clock
        self._pulls: list[tuple[float, UnsettledPull]] = []  # with the time of arrival, oldest first
        self._blocks: int | None = 0  # that they hold; None: to be counted anew, which takes milliseconds

    def add(self, pull: UnsettledPull) -> None:
        """Take a pull, which ``take_settled`` returns when it may be reported."""
        self._pulls.append((self._clock(), pull))
        self._blocks = None
        logger.warning(
            "PDConnector: request %s: %d blocks are in quarantine until %d reads have settled: %s",
            pull.order.request_id, len(pull.blocks), len(pull.reads), pull.end.reason,
        )  # fmt: skip

    def take_settled(self) -> list[PullEnd]:
        """Return the pulls to which nothing is written any more, each once. Never waits.

        Raises:
            UnsettledReadError: a pull has not settled within ``MAX_AGE_S``.
        """
        ends, held = [], []
        for since, pull in self._pulls:
            unsettled = [read for read in pull.reads if not read.release()]
            if not unsettled:
                ends.append(pull.end)
                logger.info(
                    "PDConnector: request %s: its reads have settled after %.1f s, %d blocks leave quarantine",
                    pull.order.request_id, self._clock() - since, len(pull.blocks),
                )  # fmt: skip
            else:
                held.append((since, pull))
        self._pulls = held
        if ends or self._blocks is None:
            self._blocks = self._count()
        self._stats.gauge_of_rank("quarantined_blocks", self._blocks, self)
        self._check_age()
        return ends

    def close(self) -> None:
        """Count nothing any more: nobody asks again."""
        self._stats.gauge_of_rank("quarantined_blocks", 0, self)

    def _count(self) -> int:
        return len(frozenset[int]().union(*(pull.blocks for _, pull in self._pulls)))

    def _check_age(self) -> None:
        if not self._pulls:
            return
        now = self._clock()
        since, oldest = self._pulls[0]
        if now - since > MAX_AGE_S:
            raise UnsettledReadError(
                f"reads of request {oldest.order.request_id} have not settled for {now - since:.0f} s, of at most "
                f"{MAX_AGE_S:.0f}; the worker ends, because nothing else proves that they write no more. They failed "
                f"because: {oldest.end.reason}"
            )

    def check_integrity(self) -> None:
        """Raise AssertionError unless the pulls are in order, each once."""
        arrivals = [since for since, _ in self._pulls]
        assert arrivals == sorted(arrivals), "pulls in quarantine are out of order"
        assert len({pull.order.pull_id for _, pull in self._pulls}) == len(self._pulls), "a pull is in quarantine twice"
