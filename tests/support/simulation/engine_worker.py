"""A simulated worker, in steps: what its device and its host memory hold of every token, and how that comes there.

Pulls, copies to and from host memory, and steps of the model write the hash of the prompt up to a token where the token
is. Whoever finds another one there, or none, has read what is not its own.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from pd_connector.orders import (
    BlockMoves,
    CanaryEnds,
    CanaryReference,
    Cause,
    LoadOrder,
    Orders,
    PullOrder,
    RankEnds,
    Report,
    StoreEnds,
    StoreOrder,
)
from pd_connector.worker.worker_role import Arrivals
from tests.support.simulation.scheduler_pulls import FAILED, BlockStamps, Memories, Peer, ScheduledPull

_PULL_TIMEOUT_S = 20.0
_SCRATCH = 1 << 16  # between the blocks of cache groups in scratch memory, each of which has its own there

PeerOf = Callable[[PullOrder], Peer]


@dataclass(eq=False)
class _Copy:
    """A copy between the device and host memory."""

    order: LoadOrder | StoreOrder
    ends_at: float
    found: list[int]  # where it reads, when it begins
    fails: bool = False


@dataclass(frozen=True, slots=True)
class Ends:
    """What has ended since the last step."""

    done: set[str]  # requests whose last part has
    failed: set[str]  # those of them of which a part has failed
    pulls: list[ScheduledPull]  # of these and of landings
    borders: list[ScheduledPull]
    report: Report


class EngineWorker:
    """One worker: its memories, and what is under way to and from them."""

    def __init__(self, block_tokens: int, state_tokens: int, pull_s: float) -> None:
        self._block_tokens, self._state_tokens = block_tokens, state_tokens
        self.pull_s, self.copy_s = pull_s, 0.0
        self.memories = Memories({}, {})
        self.pulls: dict[str, ScheduledPull] = {}
        self.pulled: dict[str, range] = {}  # tokens, by request
        self.landings: dict[str, ScheduledPull] = {}
        self.prefixes: dict[str, ScheduledPull] = {}
        self.borders: dict[str, ScheduledPull] = {}
        self.canaries: dict[str, ScheduledPull] = {}
        self._references: dict[str, CanaryReference] = {}
        self._copies: list[_Copy] = []
        self._refused: set[str] = set()
        self._arrivals = Arrivals()

    @property
    def is_busy(self) -> bool:
        """Whether a request waits for something that is under way, or has ended and is not reported."""
        loads = any(isinstance(copy.order, LoadOrder) for copy in self._copies)
        return bool(self.pulls or loads or self._refused)

    def start(self, orders: Orders, now: float, peer_of: PeerOf) -> None:
        """Begin what a step orders."""
        for order in orders.pulls:
            self.pulls[order.request_id] = self._pull(order, now, peer_of)
            self._arrivals.expect(order.request_id)
        for order in orders.landings:
            self.landings[order.request_id] = self._pull(order, now, peer_of)
        for order in orders.prefixes:
            self.prefixes[order.request_id] = self._pull(order, now, peer_of)
        for order in orders.borders:
            self.borders[order.request_id] = self._pull(order, now, peer_of)
        for order in orders.canaries:
            tables = enumerate(order.local_block_ids)
            ids = tuple(tuple(block and block + group * _SCRATCH for block in table) for group, table in tables)
            self.canaries[order.request_id] = self._pull(replace(order, local_block_ids=ids), now, peer_of)
        self._references.update({reference.request_id: reference for reference in orders.references})
        copies: tuple[LoadOrder | StoreOrder, ...] = (*orders.loads, *orders.stores)
        self._copies += [_Copy(copy, now + self.copy_s, self._read(copy)) for copy in copies]
        for copy in copies:
            self._write(copy, itertools.repeat(FAILED))
        for load in orders.loads:
            self._arrivals.expect(load.request_id)
        for refusal in orders.refusals:
            self._arrivals.expect(refusal.request_id)
            self._refused.add(refusal.request_id)

    def fail_copies(self) -> None:
        """No copy that is under way ends well."""
        for copy in self._copies:
            copy.fails = True

    def take_ends(self, now: float) -> Ends:
        """Read and copy what is due, and return what has ended."""
        for request_id in self._refused:
            self._arrivals.settle(request_id, failed=True)
        self._refused.clear()
        stores = self._end_copies(now)
        pulls, landings = self._end_pulls(now), self._end_landings(now)
        prefixes, borders = self._end_others(self.prefixes, now), self._end_others(self.borders, now)
        done, failed = self._arrivals.take()
        canaries = dict(self._end_canaries(now))
        report = Report(stores, _rank_ends(landings), _rank_ends(prefixes), _rank_ends(borders), canaries=canaries)
        return Ends(done, failed, [*pulls, *landings], borders, report)

    def compute(self, table: list[int], stamps: list[int], first: int, end: int) -> int | None:
        """Write tokens ``first`` to ``end`` of a prompt; return the first one before them that is not there, if any."""
        places = [(table[token // self._block_tokens], token % self._block_tokens) for token in range(end)]
        self.memories.device.update(zip(places[first:], stamps[first:], strict=False))
        found = map(self.memories.device.get, places[:first])
        return next((token for token, stamp in enumerate(found) if stamp != stamps[token]), None)

    def _pull(self, order: PullOrder, now: float, peer_of: PeerOf) -> ScheduledPull:
        ends_at = now + self.pull_s
        sizes, fails_at = (self._block_tokens, self._state_tokens), ends_at + _PULL_TIMEOUT_S
        return ScheduledPull(order, *sizes, ends_at, fails_at, peer_of(order))

    def _end_pulls(self, now: float) -> list[ScheduledPull]:
        ended = _ended(self.pulls, now)
        for pull in ended:
            self.memories.device.update(pull.read)
            self.pulled[pull.order.request_id] = range(pull.order.first_token, pull.order.end_token)
            self._arrivals.settle(pull.order.request_id, failed=not pull.has_succeeded)
        return ended

    def _end_landings(self, now: float) -> list[ScheduledPull]:
        ended = _ended(self.landings, now)
        for pull in ended:  # into blocks of the host pool, which are numbered from 1
            self.memories.host.update({(block - 1, offset): stamp for (block, offset), stamp in pull.read.items()})
        return ended

    def _end_others(self, pulls: dict[str, ScheduledPull], now: float) -> list[ScheduledPull]:
        ended = _ended(pulls, now)
        for pull in ended:
            self.memories.device.update(pull.read)
        return ended

    def _end_canaries(self, now: float) -> Iterator[tuple[str, CanaryEnds]]:
        """Compare what was pulled with what was computed, before a step writes to that."""
        for pull in self.canaries.values():
            pull.step(now)
        for request_id, pull in list(self.canaries.items()):
            if pull.has_ended and not pull.has_succeeded:
                yield request_id, CanaryEnds(1, cause=Cause.READ, failure="as the peer says")
            elif pull.has_ended and request_id in self._references:
                yield request_id, self._compared(pull, self._references.pop(request_id))
            else:
                continue
            del self.canaries[request_id]

    def _compared(self, pull: ScheduledPull, computed: CanaryReference) -> CanaryEnds:
        if not computed.block_ids:
            return CanaryEnds(1)
        order, tokens = pull.order, range(pull.order.first_token, pull.order.end_token)
        places = [
            ((order.local_block_ids[0][block], offset), (computed.block_ids[0][block], offset))
            for block, offset in (divmod(token, self._block_tokens) for token in tokens)
        ]
        for group, (there, here) in enumerate(zip(order.local_block_ids, computed.block_ids, strict=True)):
            pairs = enumerate(zip(there, here, strict=False))
            states = ((ours, theirs) for entry, (theirs, ours) in pairs if (group, entry) not in pull.lacking_states)
            places += [((theirs, 0), (ours, 0)) for ours, theirs in states if group and ours and theirs]
        differ = [places for places in places if pull.read[places[0]] != self.memories.device[places[1]]]
        return CanaryEnds(1, samples=len(places), difference=f"{len(differ)} stamps" if differ else "")

    def _end_copies(self, now: float) -> dict[int, StoreEnds]:
        """Copy what has stayed the same since the copy has begun, and note which stores have ended."""
        stores: dict[int, StoreEnds] = {}
        due = [copy for copy in self._copies if copy.ends_at <= now]
        self._copies = [copy for copy in self._copies if copy.ends_at > now]
        for copy in due:
            found = zip(copy.found, self._read(copy.order), strict=True)
            stamps = [before if before == after and not copy.fails else FAILED for before, after in found]
            self._write(copy.order, stamps)
            if isinstance(copy.order, LoadOrder):
                self._arrivals.settle(copy.order.request_id, failed=copy.fails)
            else:
                stores[copy.order.store_id] = StoreEnds(1, failed=copy.fails)
        return stores

    def _read(self, order: LoadOrder | StoreOrder) -> list[int]:
        moves: BlockMoves = order.moves
        is_load = isinstance(order, LoadOrder)
        memory: BlockStamps = self.memories.host if is_load else self.memories.device
        return [memory.get(place, FAILED) for place in self._places(moves.slots if is_load else moves.blocks)]

    def _write(self, order: LoadOrder | StoreOrder, stamps: Iterable[int]) -> None:
        is_load = isinstance(order, LoadOrder)
        memory = self.memories.device if is_load else self.memories.host
        memory.update(zip(self._places(order.moves.blocks if is_load else order.moves.slots), stamps, strict=False))

    def _places(self, blocks: Iterable[int]) -> list[tuple[int, int]]:
        return [(int(block), offset) for block in blocks for offset in range(self._block_tokens)]


def _rank_ends(pulls: Iterable[ScheduledPull]) -> dict[str, RankEnds]:
    return {
        pull.order.request_id: RankEnds(1, not pull.has_succeeded, frozenset(pull.lacking_states)) for pull in pulls
    }


def _ended(pulls: dict[str, ScheduledPull], now: float) -> list[ScheduledPull]:
    for pull in pulls.values():
        pull.step(now)
    ended = [pull for pull in pulls.values() if pull.has_ended]
    for pull in ended:
        del pulls[pull.order.request_id]
    return ended
