"""The copier: a queue of batches, and the thread that hands them to a backend one after another.

Knows nothing of devices. A failure on the thread goes to the handle of its batch and never ends the thread.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Self

from layout.copies import Copies
from transfer.copies.batch.base import CopierStartError, CopyBackend, CopyBounds, CopyFailed, DeviceEvent, Handle

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Batch:
    copies: Copies | Callable[[], Copies]
    after: DeviceEvent | None
    handle: Handle
    within: CopyBounds | None = None


class BatchCopier:
    """Moves batches of bytes one way. Owns the thread that starts them."""

    def __init__(self, backend: CopyBackend, name: str) -> None:
        """Start the thread ``name``, and let the backend enter it.

        Raises:
            CopierStartError: the backend cannot be used in the thread.
        """
        self._backend = backend
        self._batches: SimpleQueue[_Batch | None] = SimpleQueue()
        self._submitting = threading.Lock()  # no batch is queued after the None that ends the queue
        self._closing = threading.Event()
        self._entered = threading.Event()
        self._start_error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._entered.wait()
        if self._start_error is not None:
            self._thread.join()
            raise CopierStartError(f"{name} cannot start: {self._start_error}") from self._start_error

    def submit(
        self, copies: Copies | Callable[[], Copies], after: DeviceEvent | None = None, within: CopyBounds | None = None
    ) -> Handle:
        """Start a batch once ``after`` has completed; None means that sources and destinations are ready now.

        An event must be recorded before this call, which any thread may make. Sizes of zero are allowed and move
        nothing. Without ``within``, the caller must make sure that the addresses are valid. A function that makes the
        copies is called on the copier's thread; whatever it raises fails the batch, and nothing of it was copied.

        Raises:
            ValueError: a size is negative. Nothing was started.
            CopyFailed: the copier is closed.
        """
        if isinstance(copies, Copies):
            copies.check_sizes()
        handle = Handle()
        with self._submitting:
            if self._closing.is_set():
                raise CopyFailed("the copier is closed; nothing was copied", settled=True)
            self._batches.put(_Batch(copies, after, handle, within))
        return handle

    def close(self) -> None:
        """End the thread once everything in progress is done; batches that have not started fail. Idempotent.

        Blocks for as long as the device takes, including the events of ``after``.
        """
        with self._submitting:
            if not self._closing.is_set():
                self._closing.set()
                self._batches.put(None)
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            self._backend.enter_thread()
        except BaseException as error:  # the constructor waits to raise it, whatever it is
            self._start_error = error
            return
        finally:
            self._entered.set()
        while (batch := self._batches.get()) is not None:
            self._begin(batch)
            del batch  # free its descriptors while the thread waits for the next
        try:
            self._backend.drain()
        except Exception:
            logger.exception("%s: the device failed before its last copies had ended", self._thread.name)

    def _begin(self, batch: _Batch) -> None:
        settled = True  # until the backend has been given something
        try:
            if self._closing.is_set():
                raise CopyFailed("the copier was closed before this batch began; nothing was copied", settled=True)
            copies = batch.copies if isinstance(batch.copies, Copies) else batch.copies()
            copies.check_sizes()
            if batch.within is not None:
                batch.within.check(copies)
            batch.handle.copied_bytes, settled = copies.total_bytes, False
            batch.handle.begun(self._backend.start(copies, batch.after))
        except CopyFailed as failure:
            batch.handle.failed(failure)
        except BaseException as error:  # whatever it is: otherwise the handle would never end
            logger.exception("%s: a batch could not be started", self._thread.name)
            batch.handle.failed(CopyFailed(f"the batch could not be started: {error!r}", settled=settled))
