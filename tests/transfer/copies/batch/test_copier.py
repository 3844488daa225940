"""What every copier keeps, whatever moves its bytes: handles, failures, and an orderly end.

Covers: transfer.copies.batch.base.
"""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from layout.copies import EMPTY, Copies
from layout.geometry import Region
from layout.regions import RegionTable
from tests.support.waiting import WAIT_S, until
from transfer.copies.batch.base import CopierStartError, CopyBackend, CopyBounds, CopyFailed, DeviceEvent
from transfer.copies.batch.copier import BatchCopier


@dataclass
class Event:
    """An event that tests reach by hand."""

    reached: bool = False
    error: str = ""

    def query(self) -> bool:
        if self.error:
            raise RuntimeError(self.error)
        return self.reached

    def synchronize(self) -> None:
        raise AssertionError("copiers with a device never block on events")


@dataclass
class Backend(CopyBackend):
    """Moves nothing: it notes what it is told and does as it is told."""

    started: list[tuple[Copies, DeviceEvent | None]] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)
    may_start: threading.Event = field(default_factory=threading.Event)
    is_starting: threading.Event = field(default_factory=threading.Event)
    end: Event | None = None
    error: BaseException | None = None
    enter_error: Exception | None = None
    drained: bool = False

    def enter_thread(self) -> None:
        self.threads.add(threading.get_ident())
        if self.enter_error is not None:
            raise self.enter_error

    def start(self, copies: Copies, after: DeviceEvent | None) -> DeviceEvent | None:
        self.threads.add(threading.get_ident())
        self.is_starting.set()
        assert self.may_start.wait(WAIT_S)
        self.started.append((copies, after))
        if self.error is not None:
            raise self.error
        return self.end

    def drain(self) -> None:
        self.threads.add(threading.get_ident())
        self.drained = True


def threads_left() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "copier under test"]


@pytest.fixture
def backend() -> Backend:
    made = Backend()
    made.may_start.set()
    return made


@pytest.fixture
def copier(backend: Backend) -> Iterator[BatchCopier]:
    with BatchCopier(backend, "copier under test") as made:
        yield made
        backend.may_start.set()


def test_the_caller_never_waits_for_the_backend(backend: Backend, copier: BatchCopier) -> None:
    backend.may_start.clear()
    handles = [copier.submit(EMPTY) for _ in range(3)]
    assert [handle.query() for handle in handles] == [False] * 3
    backend.may_start.set()
    for handle in handles:
        handle.wait(WAIT_S)


def test_the_backend_is_used_on_one_thread_only_and_not_the_callers(backend: Backend, copier: BatchCopier) -> None:
    copier.submit(EMPTY).wait(WAIT_S)
    copier.submit(EMPTY).wait(WAIT_S)
    copier.close()
    assert len(backend.threads) == 1
    assert threading.get_ident() not in backend.threads


def test_copies_are_made_on_the_copiers_thread_when_it_is_their_turn(backend: Backend, copier: BatchCopier) -> None:
    backend.may_start.clear()
    copier.submit(EMPTY)
    threads: list[int] = []

    def made() -> Copies:
        threads.append(threading.get_ident())
        return Copies(*np.full((3, 2), 7))

    handle = copier.submit(made)
    assert backend.is_starting.wait(WAIT_S)
    assert threads == []
    backend.may_start.set()
    handle.wait(WAIT_S)
    assert threads == [*backend.threads]
    assert handle.copied_bytes == 14


@pytest.mark.parametrize("bad", [IndexError("block 8 does not exist"), Copies(*np.full((3, 1), -1))])
def test_copies_that_cannot_be_made_fail_their_batch_alone_and_nothing_was_copied(
    backend: Backend, copier: BatchCopier, bad: IndexError | Copies
) -> None:
    def made() -> Copies:
        if isinstance(bad, Copies):
            return bad
        raise bad

    with pytest.raises(CopyFailed, match=r"block 8 does not exist|has a negative size") as caught:
        copier.submit(made).wait(WAIT_S)
    assert caught.value.settled
    copier.submit(lambda: EMPTY).wait(WAIT_S)
    assert [copies for copies, _ in backend.started] == [EMPTY]


def test_batches_begin_in_the_order_of_their_submission(backend: Backend, copier: BatchCopier) -> None:
    batches = [Copies(*np.full((3, 1), i)) for i in range(50)]
    handles = [copier.submit(batch) for batch in batches]
    handles[-1].wait(WAIT_S)
    assert [copies for copies, _ in backend.started] == batches


def test_a_batch_is_done_when_its_event_is_reached(backend: Backend, copier: BatchCopier) -> None:
    backend.end = Event()
    handle = copier.submit(EMPTY)
    assert handle._begun.wait(WAIT_S)
    with pytest.raises(TimeoutError, match=r"not done after 0\.01 s; it continues"):
        handle.wait(0.01)
    assert not handle.query()
    backend.end.reached = True
    assert handle.query()
    handle.wait(0)


def test_the_end_of_a_batch_is_known_though_nobody_asked_then(copier: BatchCopier) -> None:
    begun = time.monotonic()
    handle = copier.submit(EMPTY)
    until(lambda: handle.ended_at is not None)
    ended = time.monotonic()
    assert handle.query()
    assert handle.ended_at is not None
    assert begun <= handle.ended_at <= ended


def test_the_end_of_a_device_is_known_when_it_is_asked(backend: Backend, copier: BatchCopier) -> None:
    backend.end = Event()
    handle = copier.submit(EMPTY)
    assert not handle.query()
    assert handle.ended_at is None
    backend.end.reached = True
    handle.wait(WAIT_S)
    ended = handle.ended_at
    assert ended is not None
    assert handle.query()
    assert handle.ended_at == ended


def test_a_done_batch_stays_done_and_asks_its_event_no_more(backend: Backend, copier: BatchCopier) -> None:
    backend.end = Event(reached=True)
    handle = copier.submit(EMPTY)
    handle.wait(WAIT_S)
    backend.end.error = "asked again"
    assert handle.query()


def test_a_device_event_is_left_to_the_backend(backend: Backend, copier: BatchCopier) -> None:
    event = Event()
    copier.submit(EMPTY, after=event).wait(WAIT_S)
    assert backend.started == [(EMPTY, event)]


# Addresses

HERE, THERE = Region(4096, 1000), Region(9000, 500)
BOUNDS = CopyBounds(destinations=RegionTable([HERE]), sources=RegionTable([THERE]))


def copies_of(*rows: tuple[int, int, int]) -> Copies:
    return Copies(*(np.array(column, np.int64) for column in zip(*rows, strict=True)))


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ((0, 9000, 1), "1 bytes to 0x0"),
        ((4095, 9000, 10), "10 bytes to 0xfff"),
        ((4096, 9000, 1001), "1001 bytes to 0x1000"),
        ((4096, 9001, 500), "500 bytes from 0x2329"),
        ((4096, 0x7F0000000000, 64), "64 bytes from 0x7f0000000000"),
        ((9000, 4096, 10), "10 bytes to 0x2328"),  # the wrong way round
    ],
)
def test_a_batch_that_leaves_its_memory_never_reaches_the_backend(
    backend: Backend, copier: BatchCopier, row: tuple[int, int, int], what: str
) -> None:
    batch = copies_of((4096, 9000, 500), row)
    with pytest.raises(CopyFailed, match=rf"copy 1 of 2 is of {what}, which is outside") as caught:
        copier.submit(batch, within=BOUNDS).wait(WAIT_S)
    assert caught.value.settled
    assert backend.started == []
    copier.submit(batch[:1], within=BOUNDS).wait(WAIT_S)
    assert len(backend.started) == 1


def test_a_copy_of_nothing_may_be_anywhere(backend: Backend, copier: BatchCopier) -> None:
    copier.submit(copies_of((0, 0, 0), (5096, 9500, 0)), within=BOUNDS).wait(WAIT_S)
    assert len(backend.started) == 1


# Failures


def test_a_failure_to_start_is_the_handles_and_the_next_batch_is_served(backend: Backend, copier: BatchCopier) -> None:
    backend.error = CopyFailed("refused", settled=True)
    handle = copier.submit(EMPTY)
    for _ in range(2):  # whoever asks is told
        with pytest.raises(CopyFailed, match="refused") as caught:
            handle.wait(WAIT_S)
        assert caught.value.settled
    backend.error = None
    copier.submit(EMPTY).wait(WAIT_S)


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_an_error_that_nobody_foresaw_counts_as_unsettled(
    backend: Backend, copier: BatchCopier, caplog: pytest.LogCaptureFixture, error: type[BaseException]
) -> None:
    backend.error = error("by zero")
    with pytest.raises(CopyFailed, match="by zero") as caught:
        copier.submit(EMPTY).wait(WAIT_S)
    assert not caught.value.settled
    assert "a batch could not be started" in caplog.text
    backend.error = None
    copier.submit(EMPTY).wait(WAIT_S)


def test_a_device_that_fails_under_way_leaves_the_batch_unsettled(backend: Backend, copier: BatchCopier) -> None:
    backend.end = Event(error="the device is lost")
    handle = copier.submit(EMPTY)
    for _ in range(2):
        with pytest.raises(CopyFailed, match="failed while the batch was under way: the device is lost") as caught:
            handle.wait(WAIT_S)
        assert not caught.value.settled
        backend.end.error = ""


def test_a_negative_size_is_refused_at_once(backend: Backend, copier: BatchCopier) -> None:
    with pytest.raises(ValueError, match="copy 1 of 2 has a negative size: -5 bytes"):
        copier.submit(Copies(np.zeros(2, np.int64), np.zeros(2, np.int64), np.array([4, -5])))
    assert not backend.started


def test_a_backend_that_cannot_enter_its_thread_makes_no_copier() -> None:
    with pytest.raises(CopierStartError, match="copier under test cannot start: no device 9"):
        BatchCopier(Backend(enter_error=RuntimeError("no device 9")), "copier under test")
    assert not threads_left()


# The end


def test_closing_awaits_the_batch_under_way_and_fails_those_behind_it(backend: Backend, copier: BatchCopier) -> None:
    backend.may_start.clear()
    first, second = copier.submit(EMPTY), copier.submit(EMPTY)
    assert backend.is_starting.wait(WAIT_S)
    closing = threading.Thread(target=copier.close)
    closing.start()
    while not copier._closing.is_set():
        time.sleep(0.001)
    assert not backend.drained
    backend.may_start.set()
    closing.join(WAIT_S)
    assert backend.drained
    assert first.query()
    with pytest.raises(CopyFailed, match="closed before this batch began") as caught:
        second.query()
    assert caught.value.settled


def test_a_closed_copier_takes_nothing_and_may_be_closed_again(copier: BatchCopier) -> None:
    copier.close()
    copier.close()
    with pytest.raises(CopyFailed, match="the copier is closed"):
        copier.submit(EMPTY)


def test_no_thread_is_left(backend: Backend) -> None:
    for _ in range(3):
        with BatchCopier(backend, "copier under test") as copier:
            copier.submit(EMPTY)
            assert threads_left()
    assert not threads_left()
