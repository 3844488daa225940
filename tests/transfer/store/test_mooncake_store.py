"""Mooncake Store as it is: a master and a client as processes, which are killed, stopped and started again."""

import contextlib
import ctypes
import mmap
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from layout.geometry import Region
from tests.support.process import free_port
from tests.support.store.mooncake_processes import MooncakeProcesses
from tests.support.waiting import until
from transfer.peers import Address
from transfer.store.interface import Piece, StoreFailed
from transfer.store.mooncake_store import MooncakeStore
from transfer.store.store_thread import StoreThread

pytestmark = pytest.mark.skipif(
    not Path(sys.executable).with_name("mooncake_client").exists(), reason="mooncake_client is not installed"
)

SIZE, BUFFER = 1 << 20, 8 << 20


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeProcesses]:
    processes = MooncakeProcesses(tmp_path_factory.mktemp("store"), 64 << 20)
    yield processes
    processes.close()


@pytest.fixture
def store(processes: MooncakeProcesses) -> Iterator[MooncakeStore]:
    store = MooncakeStore(processes.address, BUFFER)
    yield store
    store.close()


def fill(store: MooncakeStore, piece: Piece, byte: int) -> None:
    ctypes.memset(store.buffer.address + piece.offset, byte, piece.size)


def held(store: MooncakeStore, piece: Piece) -> bytes:
    return ctypes.string_at(store.buffer.address + piece.offset, piece.size)


def shared_bytes(buffer: Region) -> int:
    """How much of a buffer is in memory, of this process and of the client's together."""
    pages = (ctypes.c_ubyte * (buffer.size // mmap.PAGESIZE))()
    address, size = ctypes.c_void_p(buffer.address), ctypes.c_size_t(buffer.size)
    assert ctypes.CDLL(None).mincore(address, size, pages) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def until_it_works(processes: MooncakeProcesses) -> MooncakeStore:
    """A connection to a store that keeps what is put, as it does some time after a failure."""

    def opened() -> MooncakeStore | None:
        try:
            store = MooncakeStore(processes.address, BUFFER)
        except StoreFailed:
            return None
        try:
            piece = Piece("does it work?", 0, 8)
            store.put([piece])
            if store.get([piece]) == [True]:
                return store
        except StoreFailed:
            pass
        store.close()
        return None

    store = until(opened, within_s=30)
    assert store is not None
    return store


class TestObjects:
    def test_what_one_puts_another_gets(self, processes: MooncakeProcesses, store: MooncakeStore) -> None:
        pieces = [Piece(f"shared/{number}", number * SIZE, SIZE - number) for number in range(4)]
        for number, piece in enumerate(pieces):
            fill(store, piece, 1 + number)
        assert store.exist([piece.key for piece in pieces]) == [False] * 4
        assert store.put(pieces) == [True] * 4
        other = MooncakeStore(processes.address, BUFFER)
        assert other.exist([piece.key for piece in pieces]) == [True] * 4
        assert other.get(pieces) == [True] * 4
        assert [held(other, piece)[:1] + held(other, piece)[-1:] for piece in pieces] == [
            bytes([1 + number] * 2) for number in range(4)
        ]
        other.close()

    def test_what_is_not_there_or_has_another_size_does_not_come(self, store: MooncakeStore) -> None:
        store.put([Piece("sized", 0, 1000)])
        larger, smaller = Piece("sized", 0, 1001), Piece("sized", 4096, 999)
        assert store.get([Piece("never put", 0, 8), larger]) == [False, False]
        assert store.get([smaller]) == [False]
        assert store.exist(["sized"]) == [False], "a larger one is nobody's of ours, and would be in the way"

    def test_the_first_to_put_a_key_wins(self, store: MooncakeStore) -> None:
        piece = Piece("contended", 0, 64)
        fill(store, piece, 1)
        store.put([piece])
        fill(store, piece, 2)
        assert store.put([piece]) == [True]
        assert store.get([piece]) == [True]
        assert held(store, piece) == b"\1" * 64

    def test_objects_are_removed_while_they_are_read(self, store: MooncakeStore) -> None:
        piece = Piece("to remove", 0, 64)
        store.put([piece])
        store.get([piece])
        store.remove([piece.key, "never put"])
        assert store.exist([piece.key]) == [False]

    def test_a_full_pool_keeps_what_it_can(self, store: MooncakeStore) -> None:
        pieces = [Piece(f"full/{number}", number * SIZE, SIZE) for number in range(8)]
        kept = []
        for round_ in range(12):
            named = [Piece(f"{piece.key}/{round_}", piece.offset, piece.size) for piece in pieces]
            kept += store.put(named)
            assert store.exist([named[0].key]) in ([True], [False])
        assert any(kept)
        assert store.put([Piece("small", 0, 8)]) in ([True], [False]), "it goes on"

    def test_only_look_ups_need_no_buffer(self, processes: MooncakeProcesses) -> None:
        store = MooncakeStore(processes.address, 0)
        assert store.exist(["never put"]) == [False]
        store.close()


class TestTrouble:
    def test_without_a_client_the_error_says_what_to_start(self) -> None:
        port = free_port()
        with pytest.raises(StoreFailed, match=f"no mooncake_client listens at 127.0.0.1:{port}.*--port={port}"):
            MooncakeStore(Address("127.0.0.1", port), BUFFER)

    def test_a_client_that_was_killed_fails_calls_and_comes_back_empty(self, processes: MooncakeProcesses) -> None:
        store, piece = until_it_works(processes), Piece("lost with its client", 0, 64)
        store.put([piece])
        processes.client.kill()
        processes.client.wait()
        with pytest.raises(StoreFailed):
            store.get([piece])
        processes.restart_client()
        again = until_it_works(processes)
        assert again.get([piece]) == [False]
        again.close()

    @pytest.mark.parametrize("is_killed", [False, True], ids=["closed", "killed"])
    def test_a_connection_that_is_let_go_keeps_no_memory(self, processes: MooncakeProcesses, is_killed: bool) -> None:
        store = until_it_works(processes)
        fill(store, Piece("all of it", 0, BUFFER), 1)
        assert shared_bytes(store.buffer) == BUFFER
        if is_killed:
            processes.client.kill()
            processes.client.wait()
        assert store.close() == (not is_killed)
        assert shared_bytes(store.buffer) == 0
        if is_killed:
            processes.restart_client()
            until_it_works(processes).close()

    def test_a_renewed_buffer_is_other_memory_and_the_old_is_freed(self, processes: MooncakeProcesses) -> None:
        store, piece = until_it_works(processes), Piece("renewed", 0, 64)
        old = store.buffer
        fill(store, Piece("all of it", 0, BUFFER), 1)
        store.renew_buffer()
        assert store.buffer.size == BUFFER
        assert store.buffer.address != old.address
        assert shared_bytes(old) == 0
        fill(store, piece, 2)
        assert store.put([piece]) == [True]
        fill(store, piece, 3)
        assert store.get([piece]) == [True]
        assert held(store, piece) == b"\2" * 64
        store.close()

    def test_a_connection_outlives_its_client(self, processes: MooncakeProcesses) -> None:
        store, piece = until_it_works(processes), Piece("of the next client", 0, 64)
        processes.client.kill()
        processes.client.wait()
        with pytest.raises(StoreFailed):
            store.get([piece])
        with pytest.raises(StoreFailed, match="no mooncake_client listens"):
            store.renew_buffer()
        processes.restart_client()

        def works_again() -> bool:
            with contextlib.suppress(StoreFailed):
                store.renew_buffer()
                return store.put([piece]) == [True] and store.get([piece]) == [True]
            return False

        until(works_again, within_s=30)
        store.close()

    def test_a_master_that_was_killed_fails_calls_and_comes_back_empty(self, processes: MooncakeProcesses) -> None:
        store, piece = until_it_works(processes), Piece("lost with the master", 0, 64)
        store.put([piece])
        processes.master.kill()
        processes.master.wait()
        with pytest.raises(StoreFailed, match="-900"):
            store.put([Piece("new", 0, 64)])
        processes.restart_master()
        again = until_it_works(processes)
        assert again.get([piece]) == [False]
        again.close()

    def test_memory_that_the_client_refuses_is_freed(self) -> None:
        """It is resident, and would be allocated again at each attempt."""
        with mmap.mmap(-1, 4 * mmap.PAGESIZE) as memory:
            memory.write(b"x" * len(memory))
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            store: Any = object.__new__(MooncakeStore)
            store._native = SimpleNamespace(alloc_from_mem_pool=lambda _: address, register_buffer=lambda *_: -1)
            store._client = Address("127.0.0.1", 1)
            with pytest.raises(StoreFailed, match="refuses a buffer"):
                store._share(len(memory))
            assert memory[:] == bytes(len(memory))

    @pytest.mark.parametrize("call", ["get", "put"])
    def test_what_may_still_be_written_to_is_not_kept(self, call: str) -> None:
        """-900 says that the master does not answer, or that the client has not in time."""
        store: Any = object.__new__(MooncakeStore)
        native = SimpleNamespace(batch_get_into=lambda *_: [-900], batch_put_from=lambda *_: [-900])
        store._native, store._buffer, store._client = native, Region(0, 64), Address("127.0.0.1", 1)
        with pytest.raises(StoreFailed) as failure:
            getattr(store, call)([Piece("k", 0, 64)])
        assert failure.value.keeps_buffer == (call == "put")

    def test_a_client_that_was_stopped_holds_up_nobody_and_goes_on(self, processes: MooncakeProcesses) -> None:
        until_it_works(processes).close()
        thread = StoreThread("pd-pool-test", partial(MooncakeStore, processes.address, BUFFER))
        assert thread.submit(lambda store: store.exist(["any"]), 10.0).result(10) == [False]
        with processes.client_stopped():
            stuck = thread.submit(lambda store: store.exist(["any"]), 0.2)
            until(lambda: not thread.works)
            assert thread.submit(lambda store: store.exist(["any"]), 0.2).done()
            assert not stuck.done()
        until(stuck.done, within_s=30)
        thread.close()
        thread.join()
        until_it_works(processes).close()
