"""The contract of batched copies between host and device memory: descriptors in, a handle out.

**One way each.** A copier moves bytes in one ``Direction``, on one thread and one stream of its own, batch after
batch. Loads and stores therefore take two copiers, and neither queues behind the other.

**Never in the caller's way.** ``submit`` checks the sizes, hands the batch to the copier's thread and returns;
building and submitting thousands of descriptors happens there. ``Handle.query`` never blocks either.

**Order is explicit.** A batch starts after the event given as ``after``: an event of the device, recorded where the
sources are written (and where the destinations were last used), or the handle of another batch, of any copier. Its
own end is an event too: the handle. Copies inside a batch are in no order and must not overlap.

**Lifetime.** From ``submit`` until the handle is settled (``query`` returned True, or it raised ``CopyFailed`` with
``settled`` true) both ends of every descriptor stay allocated, sources unchanged and destinations unread; the arrays
of the descriptors belong to the copier. After ``CopyFailed`` with ``settled`` false the device may still write: only
the end of the process frees the destinations for another use.
"""

import time
from abc import ABC, abstractmethod
from enum import Enum
from threading import Event as ThreadEvent
from typing import Protocol, Self

from layout.copies import Copies
from transfer.errors import TransferError


class Direction(Enum):
    """Which way a copier moves bytes."""

    HOST_TO_DEVICE = "host to device"
    DEVICE_TO_HOST = "device to host"
    DEVICE_TO_DEVICE = "device to device"


class DeviceEvent(Protocol):
    """A point in a stream's work that was recorded: ``torch.cuda.Event``, ``torch.npu.Event`` and their like."""

    def query(self) -> bool:
        """Whether everything before it is done. Never blocks."""

    def synchronize(self) -> None:
        """Block until everything before it is done."""


class CopierStartError(TransferError):
    """The backend cannot be used here: a library, a symbol or the device is missing; the message says which."""


class CopyFailed(TransferError):  # noqa: N818  it is named after the event, like ReadFailed
    """A batch did not bring all bytes. ``settled``: no byte of it will be written any more.

    ``code`` and ``name`` are the backend's own error, where it gave one.
    """

    def __init__(self, reason: str, *, settled: bool, code: int | None = None, name: str = "") -> None:
        super().__init__(reason)
        self.settled = settled
        self.code = code
        self.name = name


class Handle:
    """The end of one batch. Safe to ask from any thread that has the copier's device set."""

    def __init__(self) -> None:
        self._begun = ThreadEvent()  # the copier's thread is through with the batch; what follows is set before it
        self._end: DeviceEvent | None = None  # None: nothing is in flight
        self._ended_at: float | None = None
        self._failure: CopyFailed | None = None

    @property
    def ended_at(self) -> float | None:
        """When the last byte landed, by ``time.monotonic``; of a device, when it was first asked after that."""
        return self._ended_at

    def query(self) -> bool:
        """True once every byte has landed, False before. Never blocks.

        Raises:
            CopyFailed: not all bytes landed. Raised again by every later call.
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
            self._ended_at = time.monotonic()
            self._end = None
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until every byte has landed, at most ``timeout_s`` seconds (None: without limit).

        Raises:
            CopyFailed: not all bytes landed.
            TimeoutError: the batch is still under way. It goes on.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._begun.wait(timeout_s)
        pauses = Pauses()
        while not self.query():
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"the batch was not done after {timeout_s} s; it goes on")
            time.sleep(pauses.next_s())

    def begun(self, end: DeviceEvent | None) -> None:
        """For the copier: the batch is under way and over at ``end``; None if it is over already."""
        self._end = end
        self._ended_at = time.monotonic() if end is None else None
        self._begun.set()

    def failed(self, failure: CopyFailed) -> None:
        """For the copier: the batch is not under way (any more), because of ``failure``."""
        self._failure = failure
        self._begun.set()


class Pauses:
    """How long to sleep between two looks at something that is soon done: from 20 us up to 200 us."""

    def __init__(self) -> None:
        self._pause_s = 10e-6

    def next_s(self) -> float:
        """The next pause, in seconds."""
        self._pause_s = min(2 * self._pause_s, 200e-6)
        return self._pause_s


class CopyBackend(ABC):
    """What moves the bytes of one copier. Every method is called on the copier's thread, and on no other."""

    @abstractmethod
    def enter_thread(self) -> None:
        """Called first: make the device current in this thread.

        Raises:
            CopierStartError: it cannot be.
        """

    @abstractmethod
    def start(self, copies: Copies, after: DeviceEvent | None) -> DeviceEvent | None:
        """Start a batch behind ``after``; its end, or None if all bytes have landed. No size is negative.

        Raises:
            CopyFailed: not all of it could be started; what had been is settled, or the error says that it is not.
        """

    @abstractmethod
    def drain(self) -> None:
        """Called last: block until everything started has come to its end, or raise what the device says instead."""


class BatchCopier(ABC):
    """Moves batches of bytes one way. ``submit`` may be called from any thread."""

    @abstractmethod
    def submit(self, copies: Copies, after: DeviceEvent | Handle | None = None) -> Handle:
        """Start a batch once ``after`` has come; None: its sources are written and its destinations free now.

        A device event must have been recorded before this call. A batch after a handle that fails, fails as well.
        Sizes of zero are allowed and move nothing. Whether the addresses may be read and written is the caller's to
        know: nothing here can tell.

        Raises:
            ValueError: a size is negative. Nothing was started.
            CopyFailed: the copier is closed.
        """

    @abstractmethod
    def close(self) -> None:
        """End the thread, once all that is under way is done; batches that have not begun fail. Idempotent.

        Blocks for as long as the device takes, an event of ``after`` included.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
