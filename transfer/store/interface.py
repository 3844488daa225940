"""The contract of a store of objects that many engines share.

A store is a cache: an object may be gone between any two calls, and may be put by somebody else at the same time.
Objects of one key are alike, so whichever came first stays.

**Calls block**, for as long as the store likes, and cannot be cancelled. Whoever uses a store has a thread for it, and
does not wait for that thread without a bound.

**Late bytes.** After a ``get`` that has failed, bytes may still arrive in its part of the buffer. So objects are
fetched to a buffer that is the store's own, and a store that has failed takes another one before it is used again.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from layout.geometry import Region
from transfer.errors import TransferError


class StoreFailed(TransferError):  # noqa: N818  named after the event
    """The store does not work, for no fault of an object's: it is to be used again later.

    ``keeps_buffer``: with the same buffer. Else after ``renew_buffer``.
    """

    def __init__(self, reason: str, *, keeps_buffer: bool = False) -> None:
        super().__init__(reason)
        self.keeps_buffer = keeps_buffer


@dataclass(frozen=True, slots=True)
class Piece:
    """An object in the buffer."""

    key: str  # not empty
    offset: int  # bytes into the buffer
    size: int  # bytes, more than 0


class ObjectStore(ABC):
    """A connection to a store. All methods belong to one thread; all but ``buffer`` may block."""

    @property
    @abstractmethod
    def buffer(self) -> Region:
        """Memory that belongs to this connection, from and to which objects go. Valid until it is renewed or closed."""

    @abstractmethod
    def exist(self, keys: Sequence[str]) -> list[bool]:
        """Return of which keys there are objects. It may keep these from being evicted for a while.

        Raises:
            StoreFailed: the store does not work.
        """

    @abstractmethod
    def put(self, pieces: Sequence[Piece]) -> list[bool]:
        """Keep objects; return which are kept, as far as is known. One whose key exists already stays as it is.

        Raises:
            StoreFailed: the store does not work.
        """

    @abstractmethod
    def get(self, pieces: Sequence[Piece]) -> list[bool]:
        """Fetch objects to the buffer; return which have come. One of another size has not.

        Raises:
            StoreFailed: the store does not work. Bytes may still arrive.
        """

    @abstractmethod
    def remove(self, keys: Sequence[str]) -> None:
        """Remove objects, also those that somebody fetches. Unknown keys are ignored.

        Raises:
            StoreFailed: the store does not work.
        """

    @abstractmethod
    def renew_buffer(self) -> None:
        """Take another buffer of this size, and free the memory of the old one, to which bytes may still come.

        Raises:
            StoreFailed: the store does not work. This may be tried again.
        """

    @abstractmethod
    def close(self) -> bool:
        """Let go of the connection and its buffer; return whether that could be done.

        If not, this object must live on: its end would hold up the process.
        """
