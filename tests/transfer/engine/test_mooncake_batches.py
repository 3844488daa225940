"""What is known of a batch: from the counters of real Mooncake, and where they are not where they should be."""

import errno
import os
import struct
from collections.abc import Iterator

import numpy as np
import pytest

from layout.copies import Copies, concatenate
from layout.geometry import Region
from tests.support.engine.peer_process import PeerProcess
from tests.support.memory import Memory, even_copies
from tests.support.waiting import holds_for, until
from transfer.engine.mooncake_batches import (
    CountedBatch,
    ReadBatch,
    SingleBatches,
    State,
    UnprovenBatch,
    find_tasks,
    submit,
)
from transfer.engine.mooncake_native import NativeEngine, NativeOptions

MIB = 1 << 20
UNREGISTERED = Region(4096, MIB)


@pytest.fixture
def peer() -> Iterator[PeerProcess]:
    with PeerProcess(32 * MIB, seed=5) as peer:
        yield peer


@pytest.fixture
def destination() -> Memory:
    return Memory(32 * MIB)


@pytest.fixture
def native(destination: Memory) -> Iterator[NativeEngine]:
    native = NativeEngine(NativeOptions("127.0.0.1", "tcp", "", 2.0, 5.0))
    native.register([destination.region])
    yield native
    native.delete()


def begun(native: NativeEngine, address: str, copies: Copies) -> ReadBatch:
    batch = submit(native, address, copies)
    assert batch is not None
    return batch


def end_of(batch: ReadBatch) -> State:
    until(lambda: batch.look().is_final)
    return batch.look()


def test_the_first_batch_shows_that_the_counters_of_the_tested_build_can_be_read(
    native: NativeEngine, peer: PeerProcess, destination: Memory
) -> None:
    assert native.counts is None
    assert isinstance(begun(native, peer.address, even_copies(destination.region, peer.region, 1, 64)), CountedBatch)
    assert native.counts


@pytest.mark.parametrize("counts", [True, False])
def test_a_batch_is_done_when_all_of_it_has_landed(
    native: NativeEngine, peer: PeerProcess, destination: Memory, counts: bool
) -> None:
    native.counts = counts
    batch = begun(native, peer.address, even_copies(destination.region, peer.region, 200, 4096))
    assert isinstance(batch, CountedBatch if counts else SingleBatches)
    assert end_of(batch) is State.DONE
    assert np.all(destination.view[: 200 * 4096] != 0)
    assert not destination.view[200 * 4096 :].any()


@pytest.mark.parametrize("counts", [True, False])
def test_a_batch_that_fails_in_part_is_failed_and_then_final(
    native: NativeEngine, peer: PeerProcess, destination: Memory, counts: bool
) -> None:
    native.counts = counts
    good = even_copies(destination.region, peer.region, 100, 65536)
    bad = even_copies(destination.region, UNREGISTERED, 1, 64)
    batch = begun(native, peer.address, concatenate([good[:50], bad, good[50:]]))
    assert end_of(batch) is State.FAILED
    destination.view[:] = 0
    holds_for(lambda: not destination.view[::4096].any(), 0.2)


@pytest.mark.thorough  # waits until Mooncake gives up
@pytest.mark.parametrize("counts", [True, False])
def test_a_batch_from_a_peer_that_stands_still_is_not_final_until_mooncake_gives_up(
    native: NativeEngine, peer: PeerProcess, destination: Memory, counts: bool
) -> None:
    end_of(begun(native, peer.address, even_copies(destination.region, peer.region, 1, 64)))
    native.counts = counts
    peer.stop()
    batch = begun(native, peer.address, even_copies(destination.region, peer.region, 3, 4096))
    holds_for(lambda: batch.look() is State.PENDING, 0.2)
    assert end_of(batch) is State.FAILED  # after the progress timeout, for each
    destination.view[:] = 0
    peer.go_on()
    holds_for(lambda: not destination.view[:12288].any(), 0.2)


def test_a_batch_that_is_refused_is_none(native: NativeEngine, destination: Memory) -> None:
    native.counts = True
    assert submit(native, "127.0.0.1:1", even_copies(destination.region, UNREGISTERED, 2, 64)) is None
    native.counts = False
    assert submit(native, "127.0.0.1:1", even_copies(destination.region, UNREGISTERED, 2, 64)) is None


def test_nothing_is_known_of_an_address_that_is_no_batch(native: NativeEngine) -> None:
    memory = Memory(4096)
    for batch in (4096, memory.region.address, 2**64 - 1):
        assert find_tasks(native, batch, 1) is None


@pytest.mark.parametrize("wrong", ["id", "capacity", "tasks", "batch of a task", "more ended than there are", "none"])
def test_counters_that_are_laid_out_differently_are_not_read(native: NativeEngine, wrong: str) -> None:
    memory = Memory(4096)
    at, first = memory.region.address, memory.region.address + 512
    head = [at, 2, first, first + 2 * 112]
    tasks = np.zeros((2, 14), np.uint64)
    tasks[:, 0], tasks[:, 1], tasks[:, 6] = 3, 1, at

    def written() -> bool:
        memory.view[:32] = np.frombuffer(struct.pack("4Q", *head), np.uint8)
        memory.view[512 : 512 + 224] = tasks.view(np.uint8).ravel()
        return find_tasks(native, at, 2) is not None

    assert written()
    match wrong:
        case "id":
            head[0] += 8
        case "capacity":
            head[1] = 3
        case "tasks":
            head[3] += 8
        case "batch of a task":
            tasks[1, 6] += 8
        case "none":  # which would be done at once
            tasks[1, :3] = 0
        case _:
            tasks[1, 2] = 3
    assert not written()


def test_a_build_whose_counters_are_elsewhere_is_asked_for_each_descriptor(
    native: NativeEngine, peer: PeerProcess, destination: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transfer.engine.mooncake_batches.find_tasks", lambda *_: None)
    first = begun(native, peer.address, even_copies(destination.region, peer.region, 1, 64))
    assert isinstance(first, SingleBatches)
    assert (end_of(first), native.counts) == (State.DONE, False)
    assert isinstance(begun(native, peer.address, even_copies(destination.region, peer.region, 2, 64)), SingleBatches)


def test_a_batch_can_be_told_when_no_file_descriptor_is_free(
    native: NativeEngine, peer: PeerProcess, destination: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "open", fail)
    batch = begun(native, peer.address, even_copies(destination.region, peer.region, 1, 4096))
    assert isinstance(batch, CountedBatch)
    assert end_of(batch) is State.DONE


def test_a_batch_that_cannot_be_told_any_more_is_never_final(
    native: NativeEngine, peer: PeerProcess, destination: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    native.counts = True
    monkeypatch.setattr("transfer.engine.mooncake_batches.find_tasks", lambda *_: None)
    batch = begun(native, peer.address, even_copies(destination.region, peer.region, 2, 64))
    assert isinstance(batch, UnprovenBatch)
    assert batch.look() is State.FAILING


def test_descriptors_that_mooncake_took_before_it_refused_one_are_waited_for(
    native: NativeEngine, peer: PeerProcess, destination: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    native.counts = False
    real, taken = native.submit, []

    def takes_two(*batch: object) -> int:
        taken.append(batch)
        return real(*batch) if len(taken) < 3 else 0  # type: ignore[arg-type]

    monkeypatch.setattr(native, "submit", takes_two)
    batch = begun(native, peer.address, even_copies(destination.region, peer.region, 5, 4096))
    assert len(taken) == 3
    assert batch.descriptors == 5, "what was refused took room in the window too"
    assert end_of(batch) is State.FAILED
    assert np.all(destination.view[:8192] != 0)
    assert not destination.view[8192:].any()


def test_what_has_arrived_is_done_whatever_timeout_mooncake_reports_afterwards(
    native: NativeEngine, peer: PeerProcess, destination: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "wait", lambda _: -1)
    batch = begun(native, peer.address, even_copies(destination.region, peer.region, 1, 4096))
    assert end_of(batch) is State.DONE
    assert np.all(destination.view[:4096] != 0)


def test_a_slice_timeout_of_mooncakes_own_does_not_count_as_an_end(native: NativeEngine) -> None:
    class Answers:
        def transfer_check_status(self, batch: int) -> int:
            return -2

    native._engine, real = Answers(), native._engine
    assert native.poll(1) == 0
    native._engine = real


@pytest.mark.parametrize(
    ("words", "batch_word", "is_known"), [(14, 6, True), (19, 8, True), (19, 6, False), (16, 6, False)]
)
def test_tasks_are_found_in_the_layouts_that_are_known(
    native: NativeEngine, words: int, batch_word: int, is_known: bool
) -> None:
    """The installed release has one of them; 0.3.14 and newer ones have 19 words."""
    head, tasks = np.zeros(4, np.uint64), np.zeros((3, words), np.uint64)
    batch, first = head.ctypes.data, tasks.ctypes.data
    head[:] = batch, len(tasks), first, first + tasks.nbytes
    tasks[:, 0], tasks[:, batch_word] = 2, batch
    found = find_tasks(native, batch, len(tasks))
    assert (found is not None) is is_known
    if found is not None:
        tasks[1, 1] = 2  # it is that memory, and no copy
        assert found[:, :3].tolist() == [[2, 0, 0], [2, 2, 0], [2, 0, 0]]
