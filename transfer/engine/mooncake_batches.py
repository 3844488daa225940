"""What Mooncake has done of a batch: whether all of it has landed, and if not, whether Mooncake may still write.

Mooncake's own calls do not tell. The one for a batch of many reports a failure while other descriptors are still in
flight, and the one for a single descriptor looks at the first and may free the batch. So the counters behind a batch
are read where they lie. A batch id is the address of its ``BatchDesc``, whose tasks, one for each descriptor, count
their slices: how many there are, how many have succeeded, how many have failed for good. A descriptor is final, and
nothing of it is written any more, when these add up. That holds on every transport, however late a slice begins.

    BatchDesc                    0 id     8 capacity    16 first task    24 end of the last task
    TransferTask (112 bytes)     0 slices 8 succeeded   16 failed        48 batch id
    from 0.3.14 on (152 bytes)   0 slices 8 succeeded   16 failed        64 batch id

The layouts are those of Mooncake's default builds. Every batch is checked against them; where none fits, each
descriptor becomes a batch of its own, about whose end Mooncake's own answer is exact.
"""

import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from ctypes import c_char
from enum import Enum
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from layout.copies import Copies
from transfer.engine.mooncake_native import NativeEngine

_SLICES, _SUCCEEDED, _FAILED = 0, 1, 2  # words of a task, of 8 bytes
_BATCH: Mapping[int, int] = MappingProxyType({14: 6, 19: 8})  # by how many words a task has

Tasks = npt.NDArray[np.uint64]  # [descriptors, words of a task]: Mooncake's own memory


class State(Enum):
    """How far a batch is."""

    PENDING = "pending"
    FAILING = "failing"  # a descriptor has failed; others may still be written
    FAILED = "failed"  # not all bytes have landed, and none is written any more
    DONE = "done"  # all bytes have landed

    @property
    def is_final(self) -> bool:
        """Whether nothing of the batch is written any more."""
        return self in {State.FAILED, State.DONE}

    @property
    def is_failure(self) -> bool:
        """Whether not all bytes will land."""
        return self in {State.FAILING, State.FAILED}


class ReadBatch(ABC):
    """Descriptors that were submitted together. Belongs to one thread at a time."""

    def __init__(self, descriptors: int) -> None:
        self.descriptors = descriptors
        self._state = State.PENDING

    def look(self) -> State:
        """Return how far the batch is. Never waits. Frees what Mooncake holds of it as soon as Mooncake allows."""
        if not self._state.is_final:
            self._state = self._look()
        return self._state

    @abstractmethod
    def _look(self) -> State:
        """Return the state of a batch that was not final at the last look."""


class CountedBatch(ReadBatch):
    """A batch whose counters are read."""

    def __init__(self, native: NativeEngine, batch: int, tasks: Tasks) -> None:
        super().__init__(len(tasks))
        self._native = native
        self._batch = batch
        self._tasks: Tasks | None = tasks

    def _look(self) -> State:
        assert self._tasks is not None
        # Each slice is counted once, and the number of slices was fixed when the submission returned.
        ended = self._tasks[:, _SUCCEEDED] + self._tasks[:, _FAILED]
        final = bool((ended == self._tasks[:, _SLICES]).all())
        failed = bool(self._tasks[:, _FAILED].any())
        if not final:
            return State.FAILING if failed else State.PENDING
        self._tasks = None  # before Mooncake frees it
        if failed:
            return State.FAILED  # Mooncake cannot free a batch that has failed: a few hundred bytes a descriptor leak
        # Frees the batch. It also orders the counters, which were read without a barrier, before the data. What it
        # returns says nothing new: it reports a time-out of Mooncake's own for bytes that have arrived late.
        self._native.wait(self._batch)
        return State.DONE


class SingleBatches(ReadBatch):
    """Descriptors that are a batch each, for a build of Mooncake whose counters are somewhere else."""

    def __init__(self, native: NativeEngine, batches: Sequence[int], refused: int = 0) -> None:
        """``refused``: how many more there are, of which Mooncake has taken none: they took room in the window, too."""
        super().__init__(len(batches) + refused)
        self._native = native
        self._waiting = list(batches)
        self._failed = refused > 0

    def _look(self) -> State:
        while self._waiting:
            state = self._native.poll(self._waiting[-1])
            if state == 0:
                return State.FAILING if self._failed else State.PENDING
            self._failed |= state < 0
            self._waiting.pop()
        return State.FAILED if self._failed else State.DONE


class UnprovenBatch(ReadBatch):
    """A batch about whose end nothing can be known: only deleting the engine ends it."""

    def _look(self) -> State:
        return State.FAILING


def submit(native: NativeEngine, address: str, part: Copies) -> ReadBatch | None:
    """Submit descriptors to read from the peer at ``address``; None if Mooncake refuses, and then nothing is in flight.

    The first batch of an engine must hold one descriptor: it shows whether this build's counters can be read.
    """
    destinations, sources, sizes = (column.tolist() for column in part.columns)
    if native.counts is False:
        return _submit_singly(native, address, destinations, sources, sizes)
    assert native.counts or len(part) == 1, "the first batch of an engine shows what Mooncake's batches look like"
    batch = native.submit(address, destinations, sources, sizes)
    if not batch:
        return None
    tasks = find_tasks(native, batch, len(part))
    if native.counts is None:
        native.counts = tasks is not None
    if tasks is not None:
        return CountedBatch(native, batch, tasks)
    return SingleBatches(native, [batch]) if len(part) == 1 else UnprovenBatch(len(part))


def _submit_singly(
    native: NativeEngine, address: str, destinations: list[int], sources: list[int], sizes: list[int]
) -> ReadBatch | None:
    batches: list[int] = []
    for destination, source, size in zip(destinations, sources, sizes, strict=True):
        batch = native.submit(address, [destination], [source], [size])
        if not batch:
            return SingleBatches(native, batches, len(sizes) - len(batches)) if batches else None
        batches.append(batch)
    return SingleBatches(native, batches)


def find_tasks(native: NativeEngine, batch: int, descriptors: int) -> Tasks | None:
    """Return the tasks of a batch that was just submitted, None if they are not where the default build has them."""
    head = struct.Struct("4Q")
    # What is not mapped cannot be read, and does no harm.
    with suppress(OSError, OverflowError, ValueError, struct.error):
        identity, capacity, first, end = head.unpack(native.memory_at(batch, head.size))
        size = end - first
        words, rest = divmod(size, 8 * descriptors)
        if identity != batch or capacity != descriptors or rest or words not in _BATCH:
            return None
        copy = np.frombuffer(native.memory_at(first, size), np.uint64).reshape(-1, words)
        ended = copy[:, _SUCCEEDED] + copy[:, _FAILED]
        counted = (copy[:, _SLICES] > 0).all() and (ended <= copy[:, _SLICES]).all()
        if len(copy) == descriptors and (copy[:, _BATCH[words]] == batch).all() and counted:
            return np.ndarray((descriptors, words), np.uint64, memoryview((c_char * size).from_address(first)))
    return None
