"""What limits a batch of descriptors before it is submitted: registered memory and the size of a piece.

Arithmetic over addresses, and the state of registered memory. Does not know Mooncake, touches no memory.
"""

import threading
from collections.abc import Callable, Sequence

import numpy as np

from layout.copies import Copies
from layout.geometry import Region
from layout.regions import RegionTable
from transfer.engine.interface import EngineStartError


def check_copies(copies: Copies, local: RegionTable, peer: RegionTable, peer_address: str) -> None:
    """Raise unless all descriptors have bytes and stay inside the memory that both sides registered.

    Raises:
        ValueError: names the first bad descriptor, its values and the rule.
    """
    outside_peer = peer.outside(copies.sources, copies.sizes)
    faults = (
        (copies.sizes <= 0, "its size is not positive"),
        (local.outside(copies.destinations, copies.sizes), "its destination is outside the memory registered here"),
        (outside_peer, f"its source is outside the memory that {peer_address} registered"),
    )
    found = [(int(bad.argmax()), rule) for bad, rule in faults if bad.any()]
    if found:
        index, rule = min(found, key=lambda fault: fault[0])
        raise ValueError(
            f"descriptor {index} of {len(copies)} ({copies.sizes[index]} bytes from {copies.sources[index]:#x} to "
            f"{copies.destinations[index]:#x}): {rule}"
        )


def split_large(copies: Copies, piece_bytes: int) -> Copies:
    """Split descriptors larger than ``piece_bytes``. Returns ``copies`` itself if there are none."""
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
    """Holds the regions that an engine has registered, until it is closed. Safe to use from any thread."""

    def __init__(self) -> None:
        self.table = RegionTable(())
        self._closed = False
        self._lock = threading.Lock()

    def add(self, regions: Sequence[Region], register: Callable[[Sequence[Region]], None] = lambda _: None) -> None:
        """Add regions. ``register`` registers them with the transport, all or none.

        Raises:
            EngineStartError: the engine is closed, a region is empty or overlaps another, or ``register`` failed.
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
        """Forget all regions and accept no more. Waits for an ``add`` in progress."""
        with self._lock:
            self._closed = True
            self.table = RegionTable(())
