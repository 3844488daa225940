"""What the device backends share: ordering by events, chunks, the fallback to single copies, partial failures.

Uses a driver's library through ``CopyRuntime`` and a stream through ``DeviceStream``. Imports no library itself.
"""

import ctypes
import logging
from abc import ABC, abstractmethod
from collections.abc import Container, Mapping
from typing import Any, NamedTuple

from layout.copies import EMPTY, Copies
from transfer.copies.batch.base import CopierStartError, CopyBackend, CopyFailed, DeviceEvent, Direction
from transfer.copies.batch.streams import DeviceStream

logger = logging.getLogger(__name__)

#: Batches in a row that are refused, and their copies taken, before no more are tried.
_MOST_REFUSED = 8


class Refusal(NamedTuple):
    """The driver refused a submission. The copies before the refused one are in progress."""

    code: int  # the driver's error
    position: int | None  # of the refused copy in the submission; None if the driver does not say
    call: str  # the function that refused


class Explanation(NamedTuple):
    """A description of a driver's error."""

    name: str  # e.g. "CUDA_ERROR_INVALID_VALUE"
    meaning: str  # what it means and what to do about it


class CopyRuntime(ABC):
    """The part of a driver's library that copies need. The device must be current in the calling thread."""

    platform: str  # as the user names it
    chunk: int  # the most copies of one batch call
    batch_call: str  # the batch call's name, and what has it
    _gave_up_batches = False

    @property
    @abstractmethod
    def takes_batches(self) -> bool:
        """Whether the library has a batch call. The driver may still refuse it as unsupported."""

    @property
    def submits_batches(self) -> bool:
        """Whether copies are submitted in batches, as far as it is known."""
        return self.takes_batches and not self._gave_up_batches

    def give_up_batches(self, reason: str) -> None:
        """Have every copy submitted on its own from now on, and log why: once, whatever number of backends finds it."""
        if not self._gave_up_batches:
            self._gave_up_batches = True
            logger.warning("%s. Every copy is submitted on its own, which takes longer per block", reason)

    @abstractmethod
    def submit_batch(self, copies: Copies, direction: Direction, stream: int) -> Refusal | None:
        """Submit at most ``chunk`` copies in one call; return None if all were taken."""

    @abstractmethod
    def submit_singly(self, copies: Copies, direction: Direction, stream: int) -> Refusal | None:
        """Submit any number of copies with one call each; return None if all were taken."""

    @abstractmethod
    def is_unsupported(self, code: int) -> bool:
        """Return whether an error of ``submit_batch`` means that driver or chip supports no batches at all."""

    @abstractmethod
    def is_stricter(self, code: int) -> bool:
        """Return whether ``submit_batch`` may answer so although ``submit_singly`` takes each of the copies."""

    @abstractmethod
    def explain(self, code: int) -> Explanation:
        """Return the name and meaning of an error of this library."""

    def describe(self, code: int) -> str:
        """Return an error of this library with its name and meaning, for messages."""
        error = self.explain(code)
        return f"{code} {error.name}: {error.meaning}"


def bind(
    library: ctypes.CDLL,
    name: str,
    prototypes: Mapping[str, tuple[tuple[type, ...], type]],
    required: Container[str],
    otherwise: str,
) -> dict[str, Any]:
    """Return the library's functions by name, with the argument and result types of their prototypes set.

    Raises:
        CopierStartError: it lacks some of those that are ``required``. ``otherwise``: what that means, for people.
    """
    functions: dict[str, Any] = {}
    for each, types in prototypes.items():
        if (function := getattr(library, each, None)) is not None:
            function.argtypes, function.restype = types
            functions[each] = function
    if missing := [each for each in prototypes if each in required and each not in functions]:
        raise CopierStartError(f"{name} has no {', '.join(missing)}: {otherwise}")
    return functions


class DeviceBackend(CopyBackend):
    """Copies in one direction on one stream of a device."""

    def __init__(self, runtime: CopyRuntime, stream: DeviceStream, direction: Direction) -> None:
        """Log a warning if the library has no batch call. Whether the driver takes one, the first copies show."""
        self._runtime = runtime
        self._stream = stream
        self._direction = direction
        self._refused_batches = 0  # in a row, see ``_MOST_REFUSED``
        self._said_refused = False
        if not runtime.takes_batches:
            runtime.give_up_batches(
                f"{runtime.platform}, {direction.value}: the installed library has no {runtime.batch_call}"
            )

    def enter_thread(self) -> None:
        """Make the device current, which runtimes keep per thread, and compile the loop of single copies."""
        self._stream.enter_thread()
        self._runtime.submit_singly(EMPTY, self._direction, self._stream.handle())

    def start(self, copies: Copies, after: DeviceEvent | None) -> DeviceEvent:
        """Submit everything after ``after``. On a partial failure, waits for what was submitted before it raises."""
        copies = _as_c_arrays(copies)
        try:
            if after is not None:
                self._stream.wait_event(after)
            submitted = 0
            while submitted < len(copies):
                submitted += self._submit_from(submitted, copies)
            end = self._stream.record_event()
            self._stream.handle()  # flush: the record must have left torch's queue before anyone queries the event
        except CopyFailed:
            raise
        except Exception as error:  # of the stream: torch raises RuntimeError
            raise self._failure_after_sync(f"the stream failed: {error}") from error
        return end

    def drain(self) -> None:
        """Wait for the stream."""
        self._stream.synchronize()

    def _submit_from(self, first: int, copies: Copies) -> int:
        """Submit the next copies, in one call if the driver supports it, and return how many."""
        part, of_batch = copies[first:], None
        if self._runtime.submits_batches:
            part = copies[first : first + self._runtime.chunk]
            of_batch = self._runtime.submit_batch(part, self._direction, self._stream.handle())
            if of_batch is None:
                self._refused_batches = 0
                return len(part)
            if self._runtime.is_unsupported(of_batch.code):
                self._give_up_batches(of_batch, "is not supported by this driver or chip")
            elif not self._runtime.is_stricter(of_batch.code):
                raise self._refused(of_batch, first, copies)
        # Copies that a refused batch has begun are repeated: the same bytes, in stream order.
        refusal = self._runtime.submit_singly(part, self._direction, self._stream.handle())
        if refusal is not None:
            raise self._refused(refusal, first, copies)
        if of_batch is not None and self._runtime.submits_batches:
            self._note_refused_batch(of_batch, len(part))
        return len(part)

    def _give_up_batches(self, refusal: Refusal, why: str) -> None:
        self._runtime.give_up_batches(
            f"{self._runtime.platform}: {refusal.call} {why} ({refusal.code} "
            f"{self._runtime.explain(refusal.code).name}); a newer driver may support batches"
        )

    def _note_refused_batch(self, refusal: Refusal, count: int) -> None:
        """Take note of a refused batch whose copies were taken one by one: nothing is wrong with them."""
        self._refused_batches += 1
        if self._refused_batches == _MOST_REFUSED:
            self._give_up_batches(refusal, f"has refused {_MOST_REFUSED} batches in a row, whose copies were taken")
        elif not self._said_refused:
            self._said_refused = True
            logger.warning(
                "%s, %s: %s refused a batch of %d copies (%d %s) and took each of them on its own, which takes longer "
                "per block. The next batches are tried again; this is logged once",
                self._runtime.platform, self._direction.value, refusal.call, count, refusal.code,
                self._runtime.explain(refusal.code).name,
            )  # fmt: skip

    def _refused(self, refusal: Refusal, first: int, copies: Copies) -> CopyFailed:
        if refusal.position is not None and first + refusal.position < len(copies):
            i = first + refusal.position
            which = (
                f"copy {i} of {len(copies)} ({copies.sizes[i]} bytes from {copies.sources[i]:#x} "
                f"to {copies.destinations[i]:#x})"
            )
        else:
            which = f"one of the copies from number {first} of {len(copies)} on"
        return self._failure_after_sync(
            f"{self._runtime.platform}, {self._direction.value}: {refusal.call} refused {which}: "
            f"{self._runtime.describe(refusal.code)}"
        )

    def _failure_after_sync(self, reason: str) -> CopyFailed:
        """Wait for what was submitted before a failure, so that the caller may reuse its memory; return the error."""
        try:
            self._stream.synchronize()
        except Exception as error:
            reason += f". Waiting for the copies already submitted failed as well, so it may still write: {error}"
            return CopyFailed(reason, settled=False)
        return CopyFailed(reason, settled=True)


def _as_c_arrays(copies: Copies) -> Copies:
    """Return the copies as contiguous arrays for C, without empty ones, which drivers refuse."""
    if len(copies) and not int(copies.sizes.min()):
        copies = copies[copies.sizes > 0]
    return copies.contiguous()
