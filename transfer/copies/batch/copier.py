"""The copier: a queue of batches, and the thread that hands them to a backend one after another.

Knows nothing of devices. A failure on the thread goes to the handle of its batch and never ends the thread.
"""

import logging
import threading
from dataclasses import dataclass
from queue import SimpleQueue

from layout.copies import Copies
from transfer.copies.batch.base import (
    BatchCopier,
    CopierStartError,
    CopyBackend,
    CopyBounds,
    CopyFailed,
    DeviceEvent,
    Handle,
    Pauses,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Batch:
    copies: Copies
    after: DeviceEvent | Handle | None
    handle: Handle
    within: CopyBounds | None = None


class ThreadedCopier(BatchCopier):
    """Owns the thread that starts its batches."""

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
        self, copies: Copies, after: DeviceEvent | Handle | None = None, within: CopyBounds | None = None
    ) -> Handle:
        """See ``BatchCopier``."""
        if len(copies) and int(copies.sizes.min()) < 0:
            index = int(copies.sizes.argmin())
            raise ValueError(f"copy {index} of {len(copies)} has a negative size: {int(copies.sizes[index])} bytes")
        handle = Handle()
        with self._submitting:
            if self._closing.is_set():
                raise CopyFailed("the copier is closed; nothing was copied", settled=True)
            self._batches.put(_Batch(copies, after, handle, within))
        return handle

    def close(self) -> None:
        """See ``BatchCopier``."""
        with self._submitting:
            if not self._closing.is_set():
                self._closing.set()
                self._batches.put(None)
        self._thread.join()

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
        try:
            after = self._device_event(batch.after)
            if batch.within is not None:
                batch.within.check(batch.copies)
            batch.handle.begun(self._backend.start(batch.copies, after))
        except CopyFailed as failure:
            batch.handle.failed(failure)
        except BaseException as error:  # whatever it is: otherwise the handle would never end
            logger.exception("%s: a batch could not be started", self._thread.name)
            batch.handle.failed(CopyFailed(f"the batch could not be started: {error!r}", settled=False))

    def _device_event(self, after: DeviceEvent | Handle | None) -> DeviceEvent | None:
        """Wait for ``after`` if it is a handle; otherwise return it for the backend to wait for."""
        pauses = Pauses()
        while True:
            if self._closing.is_set():
                raise CopyFailed("the copier was closed before this batch began; nothing was copied", settled=True)
            if not isinstance(after, Handle):
                return after
            try:
                if after.query():
                    return None
            except CopyFailed as failure:
                raise CopyFailed(
                    f"the batch before this one failed, so nothing of this one was copied: {failure}", settled=True
                ) from failure
            self._closing.wait(pauses.next_s())
