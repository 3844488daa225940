"""What a batch of descriptors must respect before it is submitted: registered memory, piece size, the window of a peer.

Plain arithmetic over addresses, and two small books. Nothing here knows Mooncake or touches the memory described.
"""

import threading
from collections.abc import Callable, Sequence

import numpy as np

from layout.copies import Copies
from layout.geometry import Region
from layout.regions import RegionTable
from transfer.engine.base import EngineStartError


def check_copies(copies: Copies, local: RegionTable, peer: RegionTable, peer_address: str) -> None:
    """Refuse a batch that would leave the memory that both sides registered.

    Raises:
        ValueError: names the first descriptor at fault, its values and the rule.
    """
    faults = (
        (copies.sizes <= 0, "its size is not positive"),
        (local.outside(copies.destinations, copies.sizes), "its destination is outside the memory registered here"),
        (
            peer.outside(copies.sources, copies.sizes),
            f"its source is outside the memory that {peer_address} registered",
        ),
    )
    found = [(int(at_fault.argmax()), rule) for at_fault, rule in faults if at_fault.any()]
    if found:
        index, rule = min(found, key=lambda fault: fault[0])
        raise ValueError(
            f"descriptor {index} of {len(copies)} ({copies.sizes[index]} bytes from {copies.sources[index]:#x} to "
            f"{copies.destinations[index]:#x}): {rule}"
        )


def split_large(copies: Copies, piece_bytes: int) -> Copies:
    """The same bytes with no descriptor above ``piece_bytes``; ``copies`` itself where that is so already."""
    pieces = -(-copies.sizes // piece_bytes)
    total = int(pieces.sum())
    if total == len(copies):
        return copies
    first = np.cumsum(pieces) - pieces
    offsets = (np.arange(total, dtype=np.int64) - np.repeat(first, pieces)) * piece_bytes
    return Copies(
        np.repeat(copies.destinations, pieces) + offsets,
        np.repeat(copies.sources, pieces) + offsets,
        np.minimum(np.repeat(copies.sizes, pieces) - offsets, piece_bytes),
    )


class RegisteredMemory:
    """The regions that an engine has registered, until it is closed. Safe to use from any thread."""

    def __init__(self) -> None:
        self.table = RegionTable(())
        self._closed = False
        self._lock = threading.Lock()

    def add(self, regions: Sequence[Region], register: Callable[[Sequence[Region]], None] = lambda _: None) -> None:
        """More regions. ``register`` tells the transport, of all of them or of none.

        Raises:
            EngineStartError: the engine is closed, a region is empty or overlaps another, or ``register`` says so.
        """
        with self._lock:
            if self._closed:
                raise EngineStartError("the transfer engine is closed; memory cannot be registered")
            try:
                table = RegionTable((*self.table.regions, *regions))
            except ValueError as error:
                raise EngineStartError(f"cannot register memory: {error}") from error
            register(regions)
            self.table = table

    def close(self) -> None:
        """Nothing is registered from now on. Waits for an ``add`` under way."""
        with self._lock:
            self._closed = True
            self.table = RegionTable(())


class Window:
    """How many descriptors are in flight to one peer, over all links to it. Safe to use from any thread."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.most_in_flight = 0
        self._in_flight = 0
        self._lock = threading.Lock()

    @property
    def in_flight(self) -> int:
        """Descriptors in flight at this moment."""
        return self._in_flight

    def try_acquire(self, count: int) -> bool:
        """Take room for ``count`` descriptors, or take nothing and answer False."""
        with self._lock:
            if self._in_flight + count > self.capacity:
                return False
            self._in_flight += count
            self.most_in_flight = max(self.most_in_flight, self._in_flight)
            return True

    def release(self, count: int) -> None:
        """Give back what ``try_acquire`` took."""
        with self._lock:
            self._in_flight -= count

    def check_integrity(self) -> None:
        """Raise AssertionError unless no more is in flight than fits, and no more was given back than taken."""
        with self._lock:
            assert 0 <= self._in_flight <= self.most_in_flight <= self.capacity, "the window's count is wrong"
