"""A transfer engine inside one process, for tests: it moves real bytes, and fails where it is told to.

Engines meet in an ``InProcessFabric``, which also holds the faults. Descriptors are copied in random order, so that
nobody comes to rely on one. Nothing here may know Mooncake.
"""

import ctypes
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from layout.copies import Copies
from layout.geometry import Identity, Region
from layout.regions import RegionTable
from transfer.engine.batches import RegisteredMemory, check_copies
from transfer.engine.identity import OwnIdentity, check_identity, wrong_identity
from transfer.engine.interface import GivenUp, Link, ReadFailed, TransferEngine, never


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with one read."""

    settled: bool = True  # of the ReadFailed that it raises; if false, the missing bytes may come late
    landed: int = 0  # descriptors that are copied before it fails, or before it waits
    fails: bool = True
    #: The read first waits for this event, at most for its timeout; if that passes, it fails unsettled.
    until: threading.Event | None = None


class InProcessFabric:
    """The network between in-process engines, and what goes wrong in it. Safe to use from any thread.

    ``closing_settles``: whether closing a link ends what its failed reads may still write, as on TCP. If not, only
    ``deliver_late_bytes`` does, as on RDMA, or the end of the engine.
    """

    def __init__(self, seed: int = 0, *, closing_settles: bool = True) -> None:
        self.closing_settles = closing_settles
        self.reads = 0  # begun so far, over all links
        self.lock = threading.RLock()  # held while bytes move
        self._random = random.Random(seed)
        self._faults: dict[int, Fault] = {}
        self._engines: dict[str, InProcessEngine] = {}
        self._late: list[tuple[InProcessLink, Copies]] = []
        self._created = 0

    def inject(self, read: int, fault: Fault) -> None:
        """Let ``fault`` befall the given read; they count from 1 over all links of this fabric."""
        with self.lock:
            self._faults[read] = fault

    def deliver_late_bytes(self, most: int = 1 << 62) -> int:
        """Write what unsettled reads have left, at most so many descriptors, the oldest first; return how many."""
        with self.lock:
            delivered = 0
            while self._late and delivered < most:
                link, copies = self._late.pop(0)
                now = copies[: most - delivered]
                _copy(now)
                delivered += len(now)
                if len(now) < len(copies):
                    self._late.insert(0, (link, copies[len(now) :]))
            return delivered

    def is_late(self, link: "InProcessLink") -> bool:
        """Whether bytes of a link may still be written."""
        with self.lock:
            return any(late is link for late, _ in self._late)

    def drop_late(self, link: "InProcessLink") -> None:
        """Never write what a link's reads have left."""
        with self.lock:
            self._late = [(late, copies) for late, copies in self._late if late is not link]

    @property
    def addresses(self) -> frozenset[str]:
        """Where there are engines that have not been closed."""
        with self.lock:
            return frozenset(self._engines)

    def remove(self, address: str) -> None:
        """The process at ``address`` is gone: links to it fail, settled, and no new one can be opened."""
        with self.lock:
            self._engines.pop(address, None)

    def replace(self, address: str, engine: "InProcessEngine") -> None:
        """Let another engine answer at ``address``, as a process that has taken the port of one that ended."""
        with self.lock:
            self._engines[address] = engine

    def join(self, engine: "InProcessEngine") -> str:
        """The address of a new engine."""
        with self.lock:
            self._created += 1
            address = f"in-process:{self._created}"
            self._engines[address] = engine
            return address

    def find(self, address: str) -> "InProcessEngine | None":
        """The engine at ``address``, if it is there."""
        with self.lock:
            return self._engines.get(address)

    def begin_read(self, copies: Copies) -> tuple[Copies, Fault]:
        """Count a read: its descriptors in random order, and what befalls it."""
        with self.lock:
            self.reads += 1
            order = list(range(len(copies)))
            self._random.shuffle(order)
            shuffled = Copies(copies.destinations[order], copies.sources[order], copies.sizes[order])
            return shuffled, self._faults.pop(self.reads, Fault(landed=len(copies), fails=False))

    def copy_unless_closed(self, link: "InProcessLink", copies: Copies) -> None:
        """Move the bytes, if the link and its peer are still there: one step, which ``close`` cannot interrupt."""
        with self.lock:
            if not link.closed and link.peer_address in self._engines:
                _copy(copies)

    def keep_late(self, link: "InProcessLink", copies: Copies) -> None:
        """Remember bytes that a failed read may still write."""
        with self.lock:
            self._late.append((link, copies))


def _copy(copies: Copies) -> None:
    for destination, source, size in zip(
        copies.destinations.tolist(), copies.sources.tolist(), copies.sizes.tolist(), strict=True
    ):
        ctypes.memmove(destination, source, size)


class InProcessEngine(TransferEngine):
    """An engine whose peers are in the same process and fabric."""

    def __init__(self, fabric: InProcessFabric) -> None:
        self._fabric = fabric
        self._lock = threading.Lock()
        self.memory = RegisteredMemory()
        self._links: set[InProcessLink] = set()
        self._closed = False
        self._address = fabric.join(self)
        self._own = OwnIdentity()

    @property
    def identity(self) -> Identity:
        """See the contract."""
        return self._own.identity

    @property
    def address(self) -> str:
        """Where peers reach this engine."""
        return self._address

    def register(self, regions: Sequence[Region]) -> None:
        """See the contract."""
        self.memory.add(regions)

    def open(
        self, address: str, regions: Sequence[Region], identity: Identity | None = None, given_up: GivenUp = never
    ) -> "InProcessLink":
        """See the contract."""
        found = self._fabric.find(address)
        if found is None:
            raise ReadFailed(f"cannot reach the transfer engine at {address}", settled=True)
        if identity is not None:
            check_identity(identity, address)
            if found.identity != identity:
                raise wrong_identity(address)
        try:
            peer = RegionTable(regions)
        except ValueError as error:
            raise ReadFailed(f"cannot open a link to {address}: {error}", settled=True) from error
        with self._lock:
            if self._closed:
                raise ReadFailed(f"transfer engine {self._address} is closed", settled=True)
            link = InProcessLink(self, self._fabric, address, peer, identity)
            self._links.add(link)
            return link

    def close(self) -> None:
        """See the contract."""
        with self._lock:
            self._closed = True
            links, self._links = self._links, set()
        for link in links:
            link.close()
            self._fabric.drop_late(link)
        self.memory.close()
        self._fabric.remove(self._address)


class InProcessLink(Link):
    """A link between two engines of one fabric."""

    def __init__(
        self,
        engine: InProcessEngine,
        fabric: InProcessFabric,
        address: str,
        peer: RegionTable,
        identity: Identity | None,
    ) -> None:
        self._engine = engine
        self._fabric = fabric
        self._peer = peer
        self._identity = identity
        self._broken = False
        self.peer_address = address
        self.closed = False
        self.is_forgotten = False  # by the network, which nobody is told

    @property
    def is_stale(self) -> bool:
        """See the contract."""
        return self.is_forgotten

    def read(self, copies: Copies, timeout_s: float, later_bytes: int = 0, given_up: GivenUp = never) -> None:
        """See the contract. After an unsettled failure the link refuses to read until it is closed."""
        if self.closed or self._broken:
            state = "closed" if self.closed else "broken by a read that failed and must be closed first"
            raise ReadFailed(f"the link to {self.peer_address} is {state}", settled=True)
        check_copies(copies, self._engine.memory.table, self._peer, self.peer_address)
        self._check_peer(copies)
        copies, fault = self._fabric.begin_read(copies)
        self._fabric.copy_unless_closed(self, copies[: fault.landed])
        rest = copies[fault.landed :]
        deadline = time.monotonic() + timeout_s
        while fault.until is not None and not fault.until.wait(min(0.01, timeout_s)):
            reason = f"it did not finish within {timeout_s:.3f} s" if time.monotonic() >= deadline else given_up()
            if reason:
                self._fail(rest, reason, settled=False)
        if fault.fails:
            self._fail(rest, "a fault was injected", settled=fault.settled)
        self._fabric.copy_unless_closed(self, rest)
        if self.closed:
            self._fail(rest, "the link was closed", settled=True)
        self._check_peer(copies)

    def prove(self, timeout_s: float) -> None:
        """See the contract."""
        if self._identity is None:
            return
        if self.closed or self._broken:
            raise ReadFailed(f"the link to {self.peer_address} is closed or broken", settled=True)
        found = self._fabric.find(self.peer_address)
        if found is None:
            raise ReadFailed(f"the peer at {self.peer_address} is gone", settled=True)
        if found.identity != self._identity:
            self._broken = True
            raise wrong_identity(self.peer_address)

    def _check_peer(self, copies: Copies) -> None:
        peer = self._fabric.find(self.peer_address)
        if peer is None:
            self._fail(copies, "the peer is gone", settled=True)
        elif peer.memory.table.outside(copies.sources, copies.sizes).any():
            self._fail(copies, "the peer refuses: a source is outside the memory that it registered", settled=True)

    def _fail(self, missing: Copies, reason: str, *, settled: bool) -> None:
        if not settled:
            self._broken = True
            self._fabric.keep_late(self, missing)
        raise ReadFailed(
            f"read from {self.peer_address} failed: {reason}; {len(missing)} descriptors missing", settled=settled
        )

    def close(self) -> None:
        """See the contract."""
        with self._fabric.lock:  # not in the middle of a copy
            self.closed = True
            if self._fabric.closing_settles:
                self._fabric.drop_late(self)

    @property
    def settled(self) -> bool:
        """See the contract."""
        return not self._fabric.is_late(self)
