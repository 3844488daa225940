"""What the device backends share: order by events, chunks, the fallback to single copies, and failures half-way.

A driver's library is seen through ``CopyRuntime``, a stream through ``DeviceStream``; neither is imported here.
"""

import logging
from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np

from layout.copies import EMPTY, Copies
from transfer.batch_copy.base import CopyBackend, CopyFailed, DeviceEvent, Direction
from transfer.batch_copy.streams import DeviceStream

logger = logging.getLogger(__name__)


class Refusal(NamedTuple):
    """The driver did not take a submission. What it took of it before the refused copy is under way."""

    code: int  # the driver's error
    position: int | None  # of the refused copy in what was submitted; None where the driver does not say
    call: str  # the function that refused


class Explanation(NamedTuple):
    """A driver's error in words."""

    name: str  # e.g. "CUDA_ERROR_INVALID_VALUE"
    meaning: str  # what it says and what to do about it


class CopyRuntime(ABC):
    """A driver's library as far as copies need it. The device is current in the calling thread."""

    platform: str  # as the user names it
    chunk: int  # most copies of one batch call

    @property
    @abstractmethod
    def takes_batches(self) -> bool:
        """Whether the library has a call for batches. The driver may still refuse it as unsupported."""

    @abstractmethod
    def submit_batch(self, copies: Copies, direction: Direction, stream: int, *, sources_ready: bool) -> Refusal | None:
        """Submit at most ``chunk`` copies in one call; None if all are under way.

        ``sources_ready``: nothing that the stream still waits for writes the sources.
        """

    @abstractmethod
    def submit_singly(self, copies: Copies, direction: Direction, stream: int) -> Refusal | None:
        """Submit any number of copies, each in a call; None if all are under way."""

    @abstractmethod
    def is_unsupported(self, code: int) -> bool:
        """Whether an error of ``submit_batch`` says that driver or chip takes no batches at all."""

    @abstractmethod
    def is_pageable(self, address: int) -> bool:
        """Whether ``address`` is host memory that the driver does not know as pinned."""

    @abstractmethod
    def explain(self, code: int) -> Explanation:
        """An error of this library in words."""


class DeviceBackend(CopyBackend):
    """Copies in one direction on one stream of a device."""

    def __init__(self, runtime: CopyRuntime, stream: DeviceStream, direction: Direction) -> None:
        self._runtime = runtime
        self._stream = stream
        self._direction = direction
        # No driver takes batches inside one device.
        self._batches = runtime.takes_batches and direction is not Direction.DEVICE_TO_DEVICE
        self._warned = direction is Direction.DEVICE_TO_DEVICE  # there is no host memory to warn of

    def enter_thread(self) -> None:
        """Make the device current: the runtimes know it by thread. Compile what single copies need, too."""
        self._stream.enter_thread()
        self._runtime.submit_singly(EMPTY, self._direction, self._stream.handle())

    def start(self, copies: Copies, after: DeviceEvent | None) -> DeviceEvent:
        """Submit everything behind ``after``. If that fails half-way, what was submitted has ended on return."""
        copies = _as_arguments(copies)
        self._warn_if_pageable(copies)
        try:
            if after is not None:
                self._stream.wait_event(after)
            submitted = 0
            while submitted < len(copies):
                submitted += self._submit_from(submitted, copies, sources_ready=after is None)
            end = self._stream.record_event()
            self._stream.handle()  # the record must have left torch's queue before anyone asks for it
        except CopyFailed:
            raise
        except Exception as error:  # of the stream: torch raises RuntimeError
            raise self._settled_failure(f"the stream failed: {error}") from error
        return end

    def drain(self) -> None:
        """Wait for the stream."""
        self._stream.synchronize()

    def _submit_from(self, first: int, copies: Copies, *, sources_ready: bool) -> int:
        """Submit the next copies, in one call if the driver can; how many."""
        part, refusal = copies[first:], None
        if self._batches:
            part = copies[first : first + self._runtime.chunk]
            refusal = self._runtime.submit_batch(
                part, self._direction, self._stream.handle(), sources_ready=sources_ready
            )
            if refusal is not None and self._runtime.is_unsupported(refusal.code):
                self._stop_batches(refusal)
        if not self._batches:  # what a refused batch may have begun is copied again: the same bytes, in stream order
            refusal = self._runtime.submit_singly(part, self._direction, self._stream.handle())
        if refusal is not None:
            raise self._refused(refusal, first, copies)
        return len(part)

    def _stop_batches(self, refusal: Refusal) -> None:
        self._batches = False
        logger.warning(
            "%s: %s is not supported by this driver or chip (%d %s). Every copy is submitted by itself from now on, "
            "which costs more time a block; a newer driver may take batches",
            self._runtime.platform, refusal.call, refusal.code, self._runtime.explain(refusal.code).name,
        )  # fmt: skip

    def _refused(self, refusal: Refusal, first: int, copies: Copies) -> CopyFailed:
        error = self._runtime.explain(refusal.code)
        if refusal.position is not None and first + refusal.position < len(copies):
            i = first + refusal.position
            which = (
                f"copy {i} of {len(copies)} ({copies.sizes[i]} bytes from {copies.sources[i]:#x} "
                f"to {copies.destinations[i]:#x})"
            )
        else:
            which = f"one of the copies from number {first} of {len(copies)} on"
        reason = (
            f"{self._runtime.platform}, {self._direction.value}: {refusal.call} refused {which}: "
            f"{refusal.code} {error.name}: {error.meaning}"
        )
        return self._settled_failure(reason, refusal.code, error.name)

    def _settled_failure(self, reason: str, code: int | None = None, name: str = "") -> CopyFailed:
        """What was submitted before a failure is under way: it must end before the caller may reuse any memory."""
        try:
            self._stream.synchronize()
        except Exception as error:
            reason += f". Nor could what had been submitted be waited for, so it may still write: {error}"
            return CopyFailed(reason, settled=False, code=code, name=name)
        return CopyFailed(reason, settled=True, code=code, name=name)

    def _warn_if_pageable(self, copies: Copies) -> None:
        if self._warned or not len(copies):
            return
        host = copies.sources if self._direction is Direction.HOST_TO_DEVICE else copies.destinations
        if self._runtime.is_pageable(int(host[0])):
            self._warned = True
            logger.warning(
                "%s, %s: the host memory at %#x is not pinned, so the driver waits out every copy of it. Take it from "
                "transfer.batch_copy.backends.pinned_memory",
                self._runtime.platform, self._direction.value, int(host[0]),
            )  # fmt: skip


def _as_arguments(copies: Copies) -> Copies:
    """The copies that have bytes, as contiguous words that C can read: drivers refuse empty ones."""
    arrays = (copies.destinations, copies.sources, copies.sizes)
    if len(copies) and not int(copies.sizes.min()):
        some = copies.sizes > 0
        arrays = (arrays[0][some], arrays[1][some], arrays[2][some])
    return Copies(*(np.ascontiguousarray(array, np.int64) for array in arrays))
