"""What a batch of descriptors must respect before it is submitted: registered memory, piece size, the window of a peer.

Plain arithmetic over addresses, and one counter. Nothing here knows Mooncake or touches the memory described.
"""

import itertools
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from layout.copies import Copies, Int64Array
from layout.geometry import Region


class RegionTable:
    """Regions of one process, in the order given, against which many addresses are checked at once. Immutable.

    Raises:
        ValueError: a region is empty, has no address, or overlaps another.
    """

    def __init__(self, regions: Sequence[Region]) -> None:
        self.regions = tuple(regions)
        ascending = sorted(regions, key=lambda region: region.address)
        for region in ascending:
            if region.size <= 0 or region.address <= 0:
                raise ValueError(f"{describe_region(region)} is empty or has no address")
        for before, after in itertools.pairwise(ascending):
            if before.end > after.address:
                raise ValueError(f"{describe_region(after)} overlaps {describe_region(before)}")
        self._starts = np.array([region.address for region in ascending], np.int64)
        self._ends = np.array([region.end for region in ascending], np.int64)

    def outside(self, addresses: Int64Array, sizes: Int64Array) -> npt.NDArray[np.bool_]:
        """Which runs do not lie within one region. ``sizes`` must be positive. Shape [n] in, [n] out."""
        if not self.regions:
            return np.ones(len(addresses), np.bool_)
        index = np.searchsorted(self._starts, addresses, side="right") - 1
        # A run that ends past int64 would wrap: compare its size with the room that is left instead.
        room = np.where(index >= 0, self._ends[index] - addresses, 0)
        return np.asarray(sizes > room)


def describe_region(region: Region) -> str:
    """A region for an error message."""
    return f"region at {region.address:#x} of {region.size} bytes"


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
