"""The thread between an engine and a store that may fail, hang, or come back.

Covers: transfer.store.interface.
"""

import logging
import threading
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from unittest.mock import patch

import pytest

from tests.support.store.in_memory import InMemoryStore, SharedObjects
from tests.support.waiting import ManualClock, until
from transfer.store import store_thread
from transfer.store.interface import ObjectStore, StoreFailed
from transfer.store.store_thread import RETRY_S, StoreThread


@pytest.fixture
def shared() -> SharedObjects:
    return SharedObjects()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def thread(shared: SharedObjects, clock: ManualClock) -> Iterator[StoreThread]:
    thread = StoreThread("pd-pool-test", partial(InMemoryStore, shared, 64), clock)
    yield thread
    shared.goes_on.set()
    thread.close()
    thread.join()
    assert "pd-pool-test" not in {each.name for each in threading.enumerate()}


def look(store: ObjectStore) -> list[bool]:
    return store.exist(["key"])


def test_the_connection_is_opened_once_for_many_jobs(thread: StoreThread, shared: SharedObjects) -> None:
    assert shared.opened == 0, "not before it is needed"
    assert [thread.submit(look, 1.0).result(10) for _ in range(3)] == [[False]] * 3
    assert shared.opened == 1


def test_after_a_failure_the_store_is_left_alone_for_a_while(
    thread: StoreThread, shared: SharedObjects, clock: ManualClock
) -> None:
    thread.submit(look, 1.0).result(10)
    shared.fails = True
    with pytest.raises(StoreFailed, match="a test"):
        thread.submit(look, 1.0).result(10)
    shared.fails = False
    assert not thread.works
    calls = len(shared.calls)
    refused = thread.submit(look, 1.0)
    assert refused.done(), "who asks does not wait"
    with pytest.raises(StoreFailed, match="not used for a while"):
        refused.result(0)
    assert len(shared.calls) == calls
    clock.advance(RETRY_S)
    assert thread.submit(look, 1.0).result(10) == [False]
    assert (shared.opened, shared.renewed) == (1, 1), "with another buffer"


def test_a_connection_that_cannot_be_closed_does_not_hold_up_the_end(
    thread: StoreThread, caplog: pytest.LogCaptureFixture
) -> None:
    store = thread.submit(lambda store: store, 1.0).result(10)
    with patch.object(store, "close", side_effect=RuntimeError("of a library")):
        thread.close()
        thread.join()
    assert "cannot be closed" in caplog.text


def test_a_failure_of_the_master_alone_keeps_the_buffer(
    thread: StoreThread, shared: SharedObjects, clock: ManualClock
) -> None:
    thread.submit(look, 1.0).result(10)
    shared.fails = shared.keeps_buffer = True
    with pytest.raises(StoreFailed):
        thread.submit(look, 1.0).result(10)
    shared.fails = False
    clock.advance(RETRY_S)
    assert thread.submit(look, 1.0).result(10) == [False]
    assert (shared.opened, shared.renewed) == (1, 0)


def test_one_connection_outlives_all_failures_but_no_buffer_does(
    thread: StoreThread, shared: SharedObjects, clock: ManualClock
) -> None:
    """Each that is open holds up the process's end. Bytes may still come to the buffer."""
    buffers = []
    for _ in range(3):
        shared.fails = False
        buffers.append(thread.submit(lambda store: store.buffer.address, 1.0).result(10))
        thread.submit(look, 1.0).result(10)
        shared.fails = True
        for _ in range(2):  # the second time, no other buffer can be had
            with pytest.raises(StoreFailed):
                thread.submit(look, 1.0).result(10)
            clock.advance(RETRY_S)
    assert all(one != other for one, other in pairwise(buffers))
    assert (shared.opened, shared.renewed) == (1, 2)
    thread.close()
    thread.join()
    assert shared.closed == 1


def test_after_many_buffers_the_connection_is_another(
    thread: StoreThread, shared: SharedObjects, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client keeps all buffers of a connection that is open."""
    monkeypatch.setattr(store_thread, "_MOST_RENEWALS", 2)
    for _ in range(4):
        shared.fails = False
        thread.submit(look, 1.0).result(10)
        shared.fails = True
        with pytest.raises(StoreFailed):
            thread.submit(look, 1.0).result(10)
        clock.advance(RETRY_S)
    assert (shared.opened, shared.renewed, shared.closed) == (2, 2, 1)


def test_a_store_that_cannot_be_opened_is_left_alone_too(thread: StoreThread, shared: SharedObjects) -> None:
    shared.fails = True
    with pytest.raises(StoreFailed, match="nobody there"):
        thread.submit(look, 1.0).result(10)
    assert not thread.works


def test_one_failure_is_told_once_until_the_store_works_again(
    thread: StoreThread, shared: SharedObjects, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be gone for weeks, and every rank has such a thread."""

    def told() -> list[str]:
        texts = [record.getMessage().removeprefix("PDConnector: ") for record in caplog.records]
        caplog.clear()
        return texts

    def fail(times: int) -> None:
        for _ in range(times):
            with pytest.raises(StoreFailed):
                thread.submit(look, 1.0).result(10)
            clock.advance(RETRY_S)

    caplog.set_level(logging.INFO)
    thread.submit(look, 1.0).result(10)
    assert told() == ["pd-pool-test is connected to the pool"]
    shared.fails = True
    fail(3)
    assert told() == ["the pool is not used for 10 s: a test", "the pool is not used for 10 s: still nobody there"]
    shared.fails = False
    thread.submit(look, 1.0).result(10)
    assert told() == ["pd-pool-test uses the pool again"]
    shared.fails = shared.keeps_buffer = True
    fail(2)
    assert told() == ["the pool is not used for 10 s: a test"]


def test_what_waits_when_the_store_fails_fails_with_it(thread: StoreThread, shared: SharedObjects) -> None:
    shared.goes_on.clear()
    first, second = thread.submit(look, 1.0), thread.submit(look, 1.0)
    until(lambda: shared.calls)
    shared.fails = True
    shared.goes_on.set()
    for future in (first, second):
        with pytest.raises(StoreFailed):
            future.result(10)
    assert len(shared.calls) == 1


def test_a_store_that_hangs_does_not_count_as_working(
    thread: StoreThread, shared: SharedObjects, clock: ManualClock
) -> None:
    shared.goes_on.clear()
    stuck = thread.submit(look, 1.0)
    until(lambda: shared.calls)
    assert thread.works
    clock.advance(1.0)
    assert not thread.works
    assert thread.submit(look, 1.0).done()
    shared.goes_on.set()
    assert stuck.result(10) == [False]
    until(lambda: thread.works)


def test_a_bug_in_a_job_does_not_end_the_thread(thread: StoreThread) -> None:
    def fail(store: ObjectStore) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        thread.submit(fail, 1.0).result(10)
    assert thread.submit(look, 1.0).result(10) == [False]


def test_a_call_that_does_not_return_does_not_hold_up_the_end(
    shared: SharedObjects, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("transfer.store.store_thread._JOIN_S", 0.1)
    thread = StoreThread("pd-pool-stuck", partial(InMemoryStore, shared, 64))
    shared.goes_on.clear()
    thread.submit(look, 1.0)
    until(lambda: shared.calls)
    thread.close()
    thread.join()
    assert "has not returned" in caplog.text
    shared.goes_on.set()
    until(lambda: "pd-pool-stuck" not in {each.name for each in threading.enumerate()})
