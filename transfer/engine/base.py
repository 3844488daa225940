"""The transfer engine's contract: register memory, open a link to a peer, read a batch of descriptors.

A read has three ends. It returns: every byte has landed. It raises ``ReadFailed`` with ``settled`` true:
bytes may be missing, but none will be written any more. It raises ``ReadFailed`` with ``settled`` false: the
engine may still write to the destinations, until the link's ``close`` has returned. A caller that must reuse
the destinations after a failure closes the link first.

Threads: an engine may be used from any thread. A link belongs to one thread at a time; links of different
peers never wait for each other where the engine's transport allows it (on TCP it does).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from layout.copies import Copies
from layout.geometry import Region
from transfer.errors import TransferError


class EngineStartError(TransferError):
    """The engine could not be started or could not register memory; the message names the values."""


class ReadFailed(TransferError):  # noqa: N818  it is named after the event, like its message
    """A read did not bring all bytes. ``settled``: no byte of it will be written any more."""

    def __init__(self, reason: str, *, settled: bool) -> None:
        super().__init__(reason)
        self.settled = settled


class Link(ABC):
    """A connection to one peer's engine, through which its registered memory is read."""

    @abstractmethod
    def read(self, copies: Copies, timeout_s: float) -> None:
        """Read every descriptor: sources in the peer's memory, destinations in this process's.

        Returns when all bytes have landed. The batch may be of any length; the engine cuts it to what its
        transport takes at once.

        Raises:
            ReadFailed: not all bytes landed within ``timeout_s`` seconds, or the peer refused or is gone.
            ValueError: a descriptor is outside the memory that this side or the peer registered, or not
                positive in size. Nothing was read.
        """

    @abstractmethod
    def close(self) -> None:
        """End the link. After it returns no read of this link writes any more. Idempotent."""


class TransferEngine(ABC):
    """One worker process's part in the transfer: its registered memory and its links to peers."""

    @property
    @abstractmethod
    def address(self) -> str:
        """Where peers reach this engine: what they pass to ``open``."""

    @abstractmethod
    def register(self, regions: Sequence[Region]) -> None:
        """Let peers read ``regions``, and let reads of this engine's links write to them.

        Raises:
            EngineStartError: a region is empty, overlaps another, or the transport refuses it.
        """

    @abstractmethod
    def open(self, address: str, regions: Sequence[Region]) -> Link:
        """A link to the peer at ``address``, whose registered memory is ``regions``.

        May connect at once or at the first read.

        Raises:
            ReadFailed: the peer cannot be reached (always settled).
        """

    @abstractmethod
    def close(self) -> None:
        """Close every link, unregister the memory, stop the engine's threads. Idempotent."""
