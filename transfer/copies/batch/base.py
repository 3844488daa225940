"""The contract of batched copies between host and device memory: descriptors in, a handle out.

**One direction.** A copier moves bytes in one ``Direction``, on its own thread and stream, batch after batch. Loads and
stores therefore use two copiers, and neither queues behind the other.

**Non-blocking.** ``submit`` hands the batch to the copier's thread and returns; that thread submits the descriptors,
which may be a million, and makes them if it is given a function. ``Handle.query`` never blocks either.

**Explicit order.** A batch starts after the device event given as ``after``, recorded after the sources were written
(and the destinations last used). Copies inside a batch are unordered and must not overlap.

**Addresses.** A driver need not refuse an address that is none: CUDA takes what it does not know for host memory, and
the process dies. So a batch says ``within`` which memory its ends lie, and a descriptor beyond it fails the batch.

**Lifetime.** From ``submit`` until the handle is settled (``query`` returned True, or raised ``CopyFailed`` with
``settled`` true) both ends of every descriptor must stay allocated, sources unchanged and destinations unread; the
descriptor arrays belong to the copier. After ``CopyFailed`` with ``settled`` false the device may still write, and the
destinations must not be reused for the life of the process.
"""

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from threading import Event as ThreadEvent
from typing import Protocol

from layout.copies import Copies
from layout.regions import RegionTable
from transfer.errors import TransferError


class Direction(Enum):
    """Which way a copier moves bytes."""

    HOST_TO_DEVICE = "host to device"
    DEVICE_TO_HOST = "device to host"
    PEER_TO_DEVICE = "another process's device memory to device"


class DeviceEvent(Protocol):
    """A recorded point in a stream's work, such as ``torch.cuda.Event`` or ``torch.npu.Event``."""

    def query(self) -> bool:
        """Return whether everything before it is done. Never blocks."""

    def synchronize(self) -> None:
        """Block until everything before it is done."""


class CopierStartError(TransferError):
    """The backend cannot be used: a library, a symbol or the device is missing; the message says which."""


class CopyFailed(TransferError):  # noqa: N818  named after the event, like ReadFailed
    """A batch did not deliver all bytes. ``settled``: no byte of it will be written any more."""

    def __init__(self, reason: str, *, settled: bool) -> None:
        super().__init__(reason)
        self.settled = settled


class Handle:
    """The completion of one batch. May be used from any thread that has set the copier's device."""

    def __init__(self) -> None:
        self._begun = ThreadEvent()  # set once the copier's thread has set the attributes below
        self._end: DeviceEvent | None = None  # None: nothing is in flight
        self.copied_bytes = 0  # of all descriptors, once ``query`` has returned True
        #: When the last byte landed, by ``time.monotonic``; on a device, the first ``query`` after that.
        self.ended_at: float | None = None
        self._failure: CopyFailed | None = None

    def query(self) -> bool:
        """Return whether every byte has landed. Never blocks.

        Raises:
            CopyFailed: not all bytes landed. Every later call raises it again.
        """
        if not self._begun.is_set():
            return False
        if self._failure is not None:
            raise self._failure
        end = self._end
        if end is not None:
            try:
                if not end.query():
                    return False
            except Exception as error:
                self._failure = CopyFailed(f"the device failed while the batch was under way: {error}", settled=False)
                raise self._failure from error
            self.ended_at = time.monotonic()
            self._end = None
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until every byte has landed, at most ``timeout_s`` seconds (None: no limit).

        Raises:
            CopyFailed: not all bytes landed.
            TimeoutError: the batch is still in progress, and continues.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._begun.wait(timeout_s)
        pauses = Pauses()
        while not self.query():
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"the batch was not done after {timeout_s} s; it continues")
            time.sleep(pauses.next_s())

    def begun(self, end: DeviceEvent | None) -> None:
        """Record that the batch has been started and ends at ``end``, None if it has ended. For the copier."""
        self._end = end
        self.ended_at = time.monotonic() if end is None else None
        self._begun.set()

    def failed(self, failure: CopyFailed) -> None:
        """Record that the batch has failed. For the copier."""
        self._failure = failure
        self._begun.set()


class Pauses:
    """The exponential backoff of a poll for something that is soon done: from 20 us up to 200 us."""

    def __init__(self) -> None:
        self._pause_s = 10e-6

    def next_s(self) -> float:
        """Return the next pause in seconds."""
        self._pause_s = min(2 * self._pause_s, 200e-6)
        return self._pause_s


class CopyBackend(ABC):
    """Moves the bytes of one copier. Only the copier's thread calls its methods."""

    @abstractmethod
    def enter_thread(self) -> None:
        """Make the device current in this thread. Called first.

        Raises:
            CopierStartError: the device cannot be made current.
        """

    @abstractmethod
    def start(self, copies: Copies, after: DeviceEvent | None) -> DeviceEvent | None:
        """Start a batch after ``after`` and return the event of its end, None if all bytes have landed.

        No size is negative.

        Raises:
            CopyFailed: not all of it could be started; ``settled`` tells whether the part that was has settled.
        """

    @abstractmethod
    def drain(self) -> None:
        """Block until everything started has ended, or raise the device's error. Called last."""


@dataclass(frozen=True, slots=True)
class CopyBounds:
    """The memory in which both ends of a batch's descriptors lie."""

    destinations: RegionTable
    sources: RegionTable

    def check(self, copies: Copies) -> None:
        """Raise unless every descriptor that moves bytes stays within one region at each end.

        Raises:
            CopyFailed: naming the first one that does not, its values and the rule. Nothing was copied.
        """
        ends = (("to", self.destinations, copies.destinations), ("from", self.sources, copies.sources))
        for way, table, addresses in ends:
            outside = table.outside(addresses, copies.sizes) & (copies.sizes > 0)
            if outside.any():
                index = int(outside.argmax())
                raise CopyFailed(
                    f"copy {index} of {len(copies)} is of {copies.sizes[index]} bytes {way} {addresses[index]:#x}, "
                    "which is outside the memory that belongs to these copies; nothing was copied. This is a bug",
                    settled=True,
                )
