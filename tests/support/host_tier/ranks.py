"""The ranks of a simulated engine: what their device blocks and host slots hold, and the copies between them.

A block is a row of numbers, one for each token: what a model with these weights computes for the token after all the
tokens before it. Copies end when the test wants them to, in any order, well or not. Whatever touches a block or a slot
that a copy is using is found at once, and so is a copy of anything but what it was ordered for.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from pd_connector.orders import BlockMoves, LoadOrder, Report, StoreEnds, StoreOrder
from pd_connector.worker.worker_role import Arrivals

Contents = tuple[int, ...]


def contents_of(weights: int, group: int, tokens: Sequence[int]) -> Contents:
    """What a cache group holds for each of ``tokens``, which are a prompt from its first token on."""
    contents, before = [], hash((weights, group))
    for token in tokens:
        before = hash((before, token))
        contents.append(before)
    return tuple(contents)


class End(Enum):
    """How a copy ends."""

    WELL = "well"
    FAILED = "failed"
    UNSETTLED = "unsettled"  # it has failed, and the device goes on writing


@dataclass(frozen=True)
class PullOrder:
    """Part of a prompt from a prefill engine: device blocks, and what arrives in them."""

    request_id: str
    blocks: tuple[int, ...]


@dataclass(eq=False)
class Copy:
    """A copy under way; ``wanted`` is what each of its blocks must hold in the end."""

    order: LoadOrder | StoreOrder | PullOrder
    wanted: tuple[Contents, ...]
    blocks: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    is_abandoned: bool = False  # a store of blocks that others may write to meanwhile: its slots hold anything

    def __post_init__(self) -> None:
        if isinstance(self.order, PullOrder):
            self.blocks = list(self.order.blocks)
        else:
            moves: BlockMoves = self.order.moves
            self.blocks, self.slots = moves.blocks.tolist(), moves.slots.tolist()
        assert len(self.blocks) == len(self.wanted)


@dataclass
class RankReport:
    """What a rank tells the scheduler of one step."""

    finished: set[str]
    failed: set[str]
    report: Report


class HostTierRank:
    """One worker: its device blocks, its host slots, and what is copied between them."""

    def __init__(self, device_blocks: int, slots: int, block_tokens: int) -> None:
        self._noise = itertools.count(-1, -1)
        self._block_tokens = block_tokens
        self.device = [self.noise() for _ in range(device_blocks)]
        self.host = [self.noise() for _ in range(slots)]
        self.under_way: list[Copy] = []
        self.runaway: set[int] = set()  # slots that the device never stops writing to
        self._arrivals = Arrivals()
        self._stores: dict[int, StoreEnds] = {}

    def noise(self) -> list[int]:
        return [next(self._noise) for _ in range(self._block_tokens)]

    def start(self, copy: Copy) -> None:
        """An order comes: whatever it reads is there, and nobody else is using what it writes."""
        self._check_start(copy)
        if isinstance(copy.order, StoreOrder):
            for slot in copy.slots:
                self.host[slot] = self.noise()
        else:
            self._arrivals.expect(copy.order.request_id)
            for block in copy.blocks:
                self.device[block] = self.noise()
        self.under_way.append(copy)

    def abandon_stores(self) -> None:
        """What is being stored is of no use any more; the copies go on to the end."""
        for copy in self.under_way:
            copy.is_abandoned |= isinstance(copy.order, StoreOrder)

    def finish(self, copy: Copy, end: End) -> None:
        """A copy comes to its end."""
        self.under_way.remove(copy)
        if end is End.WELL and not copy.is_abandoned:
            self._check_sources(copy)
        order = copy.order
        if isinstance(order, StoreOrder):
            for slot, contents in zip(copy.slots, copy.wanted, strict=True):
                if end is End.WELL and not copy.is_abandoned:
                    self.host[slot][: len(contents)] = contents
            if end is End.UNSETTLED:
                self.runaway |= set(copy.slots)
            self._stores[order.store_id] = StoreEnds(1, end is not End.WELL, end is End.UNSETTLED)
            return
        assert end is not End.UNSETTLED, "an engine does not survive it"
        for block, contents in zip(copy.blocks, copy.wanted, strict=True):
            if end is End.WELL:
                self.device[block][: len(contents)] = contents
        self._arrivals.settle(order.request_id, failed=end is End.FAILED)

    def run_away(self) -> None:
        """The device writes what nobody waits for any more."""
        for slot in self.runaway:
            self.host[slot] = self.noise()

    def compute(self, block: int, offset: int, value: int) -> None:
        """A step writes one token."""
        users = [copy.order for copy in self.under_way if block in copy.blocks and not copy.is_abandoned]
        assert not users, f"a step writes to block {block}, which a copy is using: {users}"
        self.device[block][offset] = value

    def take_report(self) -> RankReport:
        self._arrivals.check_integrity()
        finished, failed = self._arrivals.take()
        stores, self._stores = self._stores, {}
        return RankReport(finished, failed, Report(stores))

    def _check_start(self, copy: Copy) -> None:
        for blocks in (copy.blocks, copy.slots):
            assert len(set(blocks)) == len(blocks), f"an order names a block twice: {copy.order}"
        for other in self.under_way:
            shared = set(copy.blocks) & set(other.blocks)
            assert other.is_abandoned or not shared, f"{copy.order} and {other.order} share blocks"
            both_read = isinstance(copy.order, LoadOrder) and isinstance(other.order, LoadOrder)
            assert both_read or not set(copy.slots) & set(other.slots), f"{copy.order} and {other.order} share slots"
        if isinstance(copy.order, StoreOrder):
            assert not self.runaway & set(copy.slots), "I6: a slot that was lost is used again"
        self._check_sources(copy)

    def _check_sources(self, copy: Copy) -> None:
        if isinstance(copy.order, PullOrder):
            return
        memory, sources = (self.device, copy.blocks) if isinstance(copy.order, StoreOrder) else (self.host, copy.slots)
        for source, contents in zip(sources, copy.wanted, strict=True):
            assert memory[source][: len(contents)] == list(contents), (
                f"{type(copy.order).__name__}: block {source} holds something else than it is copied for"
            )
