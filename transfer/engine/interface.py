"""The transfer engine's contract: register memory, open a link to a peer, read a batch of descriptors.

A read ends in one of three ways:

- It returns: every byte has landed.
- It raises ``ReadFailed`` with ``settled`` true: bytes may be missing, but none will be written any more.
- It raises ``ReadFailed`` with ``settled`` false: the engine may still write to the destinations. A caller that must
  reuse them closes the link, and waits until the link says that it has settled. That is proven, never guessed from the
  time that has passed. It may take for ever, so the caller needs a bound of its own; closing the engine ends it.

Threads: an engine may be used from any thread. A link belongs to one thread at a time, except for ``settled``. Links of
different peers never wait for each other where the transport allows it (TCP does).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from layout.copies import Copies
from layout.cost import ReadCost
from layout.geometry import Identity, Region
from transfer.errors import TransferError

#: Returns why a read is to end before its time, empty if it is not.
GivenUp = Callable[[], str]


def never() -> str:
    """Let a read take its time."""
    return ""


class EngineStartError(TransferError):
    """The engine could not start or could not register memory; the message names the values."""


class ReadFailed(TransferError):  # noqa: N818  named after the event
    """A read did not deliver all bytes. ``settled``: no byte of it will be written any more."""

    def __init__(self, reason: str, *, settled: bool) -> None:
        super().__init__(reason)
        self.settled = settled


class Link(ABC):
    """A connection to one peer's engine, through which its registered memory is read."""

    #: Whether what a read has brought is in place for every stream of the device once the link has ``settled``.
    lands: ClassVar[bool] = False

    @abstractmethod
    def read(self, copies: Copies, timeout_s: float, later_bytes: int = 0, given_up: GivenUp = never) -> None:
        """Read every descriptor: sources in the peer's memory, destinations in this process.

        Returns when all bytes have landed. The batch may have any length; the engine splits it as its transport needs.
        Of reads from one peer over several links, those with less to go go first, as far as the transport allows it.

        Args:
            copies: the descriptors.
            timeout_s: see below.
            later_bytes: what the caller will read over this link after this batch, for the same purpose.
            given_up: asked often while it reads, on the same thread; the read fails once it returns a reason.

        Raises:
            ReadFailed: not all bytes landed within ``timeout_s`` seconds, the peer refused or is gone, or was given up.
            ValueError: a size is not positive, or a descriptor lies outside the memory that this side or the peer
                registered. Nothing was read.
        """

    @abstractmethod
    def prove(self, timeout_s: float) -> None:
        """Raise unless all that the link has read came from the process whose identity it was opened with.

        Raises:
            ReadFailed: another process answers now, or none does within ``timeout_s`` seconds (always settled). What
                the link has read must not be used.
        """

    @abstractmethod
    def close(self) -> None:
        """End the link: no read begins any more. Never waits for the peer. Idempotent.

        What failed reads left behind may still be written until the link has ``settled``.
        """

    @property
    def cost(self) -> ReadCost | None:
        """What reads over it cost, for whoever plans them; None: what they cost over the engine's protocol."""
        return None

    @property
    def is_stale(self) -> bool:
        """Whether to open another link: the network may drop what is sent over one that was idle, or it has ended."""
        return False

    @property
    @abstractmethod
    def settled(self) -> bool:
        """Whether no read of the link writes any more. Once true of a closed link, true for ever. Any thread; cheap."""


class TransferEngine(ABC):
    """One worker process's end of transfers: its registered memory and its links to peers."""

    @property
    @abstractmethod
    def address(self) -> str:
        """Where peers reach this engine, as they pass it to ``open``."""

    @property
    @abstractmethod
    def identity(self) -> Identity:
        """What tells this engine from every other, for peers to pass to ``open``."""

    @abstractmethod
    def register(self, regions: Sequence[Region]) -> None:
        """Let peers read ``regions``, and let reads of this engine's links write to them.

        Raises:
            EngineStartError: a region is empty, overlaps another, or the transport refuses it.
        """

    @abstractmethod
    def open(
        self, address: str, regions: Sequence[Region], identity: Identity | None = None, given_up: GivenUp = never
    ) -> Link:
        """Return a link to the peer at ``address``, whose registered memory is ``regions``.

        Connects on threads on which nothing is read, so that a peer that does not answer delays no other, as far as the
        transport allows it. ``identity`` is the peer's; if it is None, nobody proves who it is. ``given_up`` is as for
        ``Link.read``.

        Raises:
            ReadFailed: the peer cannot be reached, was given up, or is another than ``identity`` says (always settled).
        """

    @abstractmethod
    def close(self) -> None:
        """Close every link, unregister the memory, stop the engine's threads. Idempotent.

        Once this returns, all links have settled, or ``check_settled`` says which have not.
        """

    def check_settled(self) -> None:  # noqa: B027  most have settled by then
        """Raise RuntimeError if, after ``close``, something may still write to what was registered."""
