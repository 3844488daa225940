"""Visits to a real Mooncake Store: all well, and with each of its processes stopped, gone or full."""

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial

import pytest

from pd_connector.doctor.findings import CheckFailed, Examination
from pd_connector.doctor.pool_check import PoolCheck
from tests.support.process import free_port
from tests.support.store.mooncake_processes import MooncakeProcesses
from tests.support.waiting import until
from transfer.peers import Address
from transfer.store.interface import Piece
from transfer.store.mooncake_store import MooncakeStore

MIB = 1 << 20
HELD_MIB = 32  # of which the doctor takes 16 at a time
ALL_WELL = (
    r"ok   pool: mooncake_client at 127\.0\.0\.1:\d+ shares 16 MiB with this process$",
    r"ok   pool: look-up: 16 keys in \d+\.\d\d ms$",
    r"ok   pool: objects: 16 of 1 MiB each, put with \d+\.\d\d GB/s, fetched with \d+\.\d\d GB/s, every byte equal$",
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeProcesses]:
    processes = MooncakeProcesses(tmp_path_factory.mktemp("store"), HELD_MIB * MIB, lease_ms=10_000)
    yield processes
    processes.close()


def visit(client: Address) -> list[str]:
    """The lines of the report."""
    report = Examination()
    with closing(PoolCheck(client)) as check:
        report.run_chain(check.checks)
    return [str(finding) for finding in report.findings]


def assert_said(lines: Sequence[str], *patterns: str) -> None:
    assert len(lines) == len(patterns)
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.match(pattern, line), f"{line!r} is not {pattern!r}"


@contextmanager
def filled(client: Address, room: int) -> Iterator[None]:
    """A pool with room for so many objects of 1 MiB, all others of which are being looked up."""
    with closing(MooncakeStore(client, MIB)) as mine:
        kept = [f"filled/{n}" for n in range(HELD_MIB - room)]
        is_looked_at, done = threading.Event(), threading.Event()

        def is_kept(key: str) -> bool:
            return mine.put([Piece(key, 0, MIB)]) == mine.exist([key]) == [True]

        def look() -> None:
            with closing(MooncakeStore(client, 0)) as own:
                while not done.is_set():
                    own.exist(kept)
                    is_looked_at.set()
                    done.wait(0.1)

        looking = threading.Thread(target=look)
        looking.start()
        try:
            assert is_looked_at.wait(20)
            for key in kept:  # what another test has removed may take a moment to go
                until(partial(is_kept, key), f"there is room for {key}")
            yield
        finally:
            done.set()
            looking.join()
            mine.remove(kept)


def test_objects_are_put_found_fetched_and_removed(store: MooncakeProcesses) -> None:
    """Three times, for which there would be no room if anything was left."""
    for _ in range(3):
        assert_said(visit(store.address), *ALL_WELL)


def test_a_full_pool_is_a_failure(store: MooncakeProcesses) -> None:
    with filled(store.address, 0):
        said = visit(store.address)
    assert_said(said, *ALL_WELL[:2], r"FAIL pool: objects: the pool keeps none of 16 objects of 1 MiB \(-200\): ")


@pytest.mark.parametrize("evicts", [False, True])
def test_a_pool_that_is_almost_full_is_a_warning(
    store: MooncakeProcesses, monkeypatch: pytest.MonkeyPatch, evicts: bool
) -> None:
    """It may evict what it has just kept, too: nobody has looked for that."""
    get = MooncakeStore.get

    def after_eviction(mine: MooncakeStore, pieces: Sequence[Piece]) -> list[bool]:
        mine.remove([pieces[1].key])
        return get(mine, pieces)

    with filled(store.address, 3):
        if evicts:
            monkeypatch.setattr(MooncakeStore, "get", after_eviction)
        said = visit(store.address)
    evicted = r"; [123] of these were evicted before they were fetched" if evicts else ".*"
    assert_said(
        said, *ALL_WELL[:2], rf"WARN pool: objects: 3 of 1 MiB each, .*equal{evicted}; 13 more were not kept \(-200\): "
    )


@pytest.mark.parametrize("puts_another", [True, False])
def test_what_others_do_to_objects_is_noticed(
    store: MooncakeProcesses, monkeypatch: pytest.MonkeyPatch, puts_another: bool
) -> None:
    get = MooncakeStore.get

    def behind_a_stranger(mine: MooncakeStore, pieces: Sequence[Piece]) -> list[bool]:
        mine.remove([pieces[5].key])
        if puts_another:
            mine.put([pieces[5]])  # from the buffer for what is to come
        return get(mine, pieces)

    monkeypatch.setattr(MooncakeStore, "get", behind_a_stranger)
    what = "have other bytes than were put" if puts_another else "have not come"
    assert_said(visit(store.address), *ALL_WELL[:2], f"FAIL pool: objects: 1 of 16 objects {what}: other clients")


def test_where_no_client_is_nothing_else_is_checked() -> None:
    assert_said(
        visit(Address("127.0.0.1", free_port())),
        r"FAIL pool: no mooncake_client listens at 127\.0\.0\.1:\d+ \(Connection refused\); start one with --host=",
        "skip pool: look-up: not checked: 'pool' has failed",
        "skip pool: objects: not checked: 'pool: look-up' was not checked|skip pool: objects: not checked: 'pool' has",
    )


def test_a_client_that_is_stopped_is_not_waited_for(store: MooncakeProcesses, caplog: pytest.LogCaptureFixture) -> None:
    with closing(PoolCheck(store.address, timeout_s=0.5)) as check:
        check.connection()
        with store.client_stopped():
            with pytest.raises(CheckFailed, match=r"has not answered within 0\.5 s: it is stopped, or waits for"):
                check.look_up()
            check.close()
            assert "its thread is left behind" in caplog.text


def test_without_a_master_the_client_says_so(store: MooncakeProcesses) -> None:
    store.master.kill()
    said = visit(store.address)
    store.restart_master()
    assert_said(
        said, ALL_WELL[0], r"FAIL pool: look-up: .* ended with -\d+\. The client answers, so it is the master that",
        "skip pool: objects: not checked: 'pool: look-up' has failed",
    )  # fmt: skip
