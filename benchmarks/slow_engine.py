"""A slow network, as a model: all reads of an engine are spread over the time that so many bytes take."""

import threading
import time
from collections.abc import Sequence
from typing import Any

from layout.copies import Copies
from layout.geometry import Region
from transfer.engine.interface import GivenUp, Link, TransferEngine, never


class Network:
    """What goes over it takes its turn."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def carry(self, size: int) -> None:
        """Wait until so many bytes have passed."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + size / self._bytes_per_s
            done_at = self._free_at
        time.sleep(max(done_at - time.monotonic(), 0.0))


class _SlowLink:
    """A link whose reads take as long as on the network. All else is the link's own."""

    def __init__(self, link: Link, network: Network) -> None:
        self._link, self._network = link, network

    def read(self, copies: Copies, timeout_s: float, later_bytes: int = 0, given_up: GivenUp = never) -> None:
        """Read, and wait for the rest of the time."""
        self._link.read(copies, timeout_s, later_bytes, given_up)
        self._network.carry(copies.total_bytes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)


class SlowEngine:
    """An engine whose links are slow. All else is the engine's own."""

    def __init__(self, engine: TransferEngine, network: Network) -> None:
        self._engine, self._network = engine, network

    def open(self, address: str, regions: Sequence[Region], identity: Any, given_up: Any) -> Any:
        """Return a slow link."""
        return _SlowLink(self._engine.open(address, tuple(regions), identity, given_up), self._network)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)
