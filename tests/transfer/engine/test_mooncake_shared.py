"""Links that share an engine, as on RDMA and Ascend, over loopback TCP: when they settle, who waits, whom they read.

Covers: transfer.engine.mooncake_settling, transfer.engine.identity.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from unittest.mock import create_autospec

import numpy as np
import pytest

from layout.copies import Copies
from layout.geometry import Identity, Region
from tests.support.engine.peer_process import MIB, SIZE, PeerProcess, fail_mid_read
from tests.support.engine.strange_peers import SilentPeer, forwarded
from tests.support.memory import Memory, even_copies, noise
from tests.support.waiting import WAIT_S, until
from transfer.engine.interface import ReadFailed
from transfer.engine.mooncake import MooncakeEngine, MooncakeOptions
from transfer.engine.mooncake_batches import ReadBatch, State
from transfer.engine.mooncake_links import MooncakeLink
from transfer.engine.mooncake_native import NativeEngine, find_open_segment
from transfer.engine.mooncake_settling import Leftover, Settling


def _cannot_start(*_: object) -> None:
    raise RuntimeError("can't start new thread")


@pytest.fixture
def shared(destination: Memory) -> Iterator[MooncakeEngine]:
    destination.view[:] = 0
    engine = MooncakeEngine(
        MooncakeOptions("127.0.0.1", connect_timeout_s=WAIT_S, progress_timeout_s=3.0, engine_per_link=False)
    )
    engine.register([destination.region])
    yield engine
    engine.check_integrity()
    engine.close()
    engine.check_integrity()


@pytest.mark.thorough
def test_a_shared_link_that_is_closed_settles_when_its_last_byte_has_landed(
    shared: MooncakeEngine, victim: PeerProcess, destination: Memory
) -> None:
    link = shared.open(victim.address, [victim.region], victim.identity)
    assert not fail_mid_read(link, victim, destination, "stopped").settled
    link.close()
    assert not link.settled
    assert link.window.in_flight > 0
    destination.view[:] = 0
    victim.go_on()
    until(lambda: link.settled)
    assert destination.view.any(), "nothing came late, so the test shows nothing"
    assert link.window.in_flight == 0
    destination.view[:] = 0
    time.sleep(0.3)
    assert not destination.view.any()


@pytest.mark.thorough
def test_a_peer_whose_reads_have_not_settled_is_not_opened_and_afterwards_it_is(
    shared: MooncakeEngine, victim: PeerProcess, destination: Memory
) -> None:
    link = shared.open(victim.address, [victim.region], victim.identity)
    fail_mid_read(link, victim, destination, "stopped")
    link.close()
    with pytest.raises(ReadFailed, match="earlier reads from it have failed and not settled") as refusal:
        shared.open(victim.address, [victim.region], victim.identity)
    assert refusal.value.settled
    victim.go_on()
    until(lambda: link.settled)
    shared.open(victim.address, [victim.region], victim.identity).read(
        even_copies(destination.region, victim.region, 4, 4096), 5
    )


@pytest.mark.thorough
def test_a_peer_whose_reads_have_not_settled_is_not_read_over_other_links_and_afterwards_it_is(
    shared: MooncakeEngine, victim: PeerProcess, destination: Memory
) -> None:
    """More descriptors would only wait behind those that hang, and hold what they are to write to."""
    link, other = (shared.open(victim.address, [victim.region], victim.identity) for _ in range(2))
    fail_mid_read(link, victim, destination, "stopped")
    link.close()
    in_flight = other.window.in_flight
    with pytest.raises(ReadFailed, match="earlier reads from it have failed and not settled") as refusal:
        other.read(even_copies(destination.region, victim.region, 4, 4096), 5)
    assert refusal.value.settled
    assert other.window.in_flight == in_flight
    victim.go_on()
    until(lambda: link.settled)
    other.read(even_copies(destination.region, victim.region, 4, 4096), 5)


def test_a_shared_link_settles_when_mooncake_has_given_up_a_peer_that_was_killed(
    shared: MooncakeEngine, victim: PeerProcess, destination: Memory
) -> None:
    link = shared.open(victim.address, [victim.region], victim.identity)
    fail_mid_read(link, victim, destination, "killed")
    link.close()
    until(lambda: link.settled)
    assert link.window.in_flight == 0


def test_a_refused_descriptor_on_a_shared_link_fails_settled_and_the_link_reads_on(
    shared: MooncakeEngine, peer: PeerProcess, destination: Memory
) -> None:
    unregistered = Region(4096, MIB)
    link = shared.open(peer.address, [peer.region, unregistered], peer.identity)
    with pytest.raises(ReadFailed) as failure:
        link.read(even_copies(destination.region, unregistered, 1, 4096), 5)
    assert failure.value.settled
    link.read(even_copies(destination.region, peer.region, 4, 4096), 5)
    assert np.array_equal(destination.view[:16384], noise(SIZE, 5)[:16384])


def test_leftovers_are_watched_by_another_thread_if_one_could_not_start_or_has_died(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Batch(ReadBatch):
        def __init__(self, *, raises: bool) -> None:
            super().__init__(1)
            self._raises = raises

        def _look(self) -> State:
            if self._raises:
                self._raises = False
                raise ValueError("as told")
            return State.DONE

    settling, ended = Settling(create_autospec(NativeEngine, instance=True)), list[int]()
    leftovers = [Leftover("host:1", [Batch(raises=number == 1)], partial(ended.append, number)) for number in range(3)]
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _cannot_start)
        settling.add(leftovers[0])
    with pytest.raises(ReadFailed, match="have failed and not settled"):
        settling.check("host:1")
    until(lambda: ended == [0], "the next look at the peer has started the thread")
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    settling.add(leftovers[1])
    until(lambda: settling._thread is None)
    assert ended == [0]
    settling.add(leftovers[2])
    until(lambda: sorted(ended) == [0, 1, 2])
    settling.stop()
    assert all(leftover.settled for leftover in leftovers)


@pytest.mark.thorough
def test_closing_a_shared_engine_settles_its_links_and_no_byte_lands_after_it(
    shared: MooncakeEngine, victim: PeerProcess, destination: Memory
) -> None:
    link = shared.open(victim.address, [victim.region], victim.identity)
    fail_mid_read(link, victim, destination, "stopped")
    link.close()
    shared.close()
    assert link.settled
    destination.view[:] = 0
    victim.go_on()
    time.sleep(0.3)
    assert not destination.view.any()


@pytest.mark.thorough
def test_reads_from_others_go_on_beside_one_that_has_not_settled(
    shared: MooncakeEngine, peer: PeerProcess, victim: PeerProcess, destination: Memory
) -> None:
    link, other = (
        shared.open(victim.address, [victim.region], victim.identity),
        shared.open(peer.address, [peer.region]),
    )
    fail_mid_read(link, victim, destination, "stopped")
    link.close()
    for _ in range(5):
        other.read(even_copies(destination.region, peer.region, 4, 4096), 5)
    assert not link.settled


# Connecting beside reading


@pytest.fixture
def silent() -> Iterator[SilentPeer]:
    with closing(SilentPeer()) as peer:
        yield peer


def opening(engine: MooncakeEngine, address: str) -> tuple[threading.Thread, list[ReadFailed]]:
    """Open a peer that will not answer, on a thread; its failure."""
    failures: list[ReadFailed] = []

    def run() -> None:
        try:
            engine.open(address, [Region(4096, 4096)], Identity(4096, bytes(16)))
        except ReadFailed as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, failures


def test_reads_from_others_go_on_while_a_peer_never_says_how_it_is_read(
    peer: PeerProcess, silent: SilentPeer, destination: Memory
) -> None:
    """On a shared engine Mooncake asks for that under the lock of all transfers, unless it was asked for before."""
    engine = MooncakeEngine(MooncakeOptions("127.0.0.1", connect_timeout_s=WAIT_S, engine_per_link=False))
    engine.register([destination.region])
    with closing(engine):
        link = engine.open(peer.address, [peer.region], peer.identity)
        thread, failures = opening(engine, silent.address)
        assert silent.asked.wait(WAIT_S)
        for _ in range(20):
            link.read(even_copies(destination.region, peer.region, 4, 4096), 5)
            link.prove(5)
        engine.open(peer.address, [peer.region], peer.identity).close()
        assert thread.is_alive(), "the peer was given up before the others had read"
        silent.close()
        thread.join()
        assert "cannot reach the transfer engine" in str(failures[0])


def test_closing_a_shared_engine_ends_what_opens_a_peer_and_waits_for_it(silent: SilentPeer) -> None:
    engine = MooncakeEngine(MooncakeOptions("127.0.0.1", connect_timeout_s=WAIT_S, engine_per_link=False))
    thread, failures = opening(engine, silent.address)
    assert silent.asked.wait(WAIT_S)
    engine.close()
    thread.join(WAIT_S)
    assert "closed here" in str(failures[0])


def test_without_the_way_around_the_lock_a_peer_is_opened_all_the_same(
    peer: PeerProcess, destination: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transfer.engine.mooncake_native.find_open_segment", lambda: None)
    engine = MooncakeEngine(MooncakeOptions("127.0.0.1", engine_per_link=False))
    engine.register([destination.region])
    with closing(engine):
        link = engine.open(peer.address, [peer.region], peer.identity)
        link.read(even_copies(destination.region, peer.region, 4, 4096), 5)


def test_the_tested_build_has_the_way_around_the_lock() -> None:
    assert find_open_segment() is not None


# Whom a link reads

FIXED = 0x6F0000000000  # an address at which no process of the tests has memory


@pytest.mark.thorough
def test_bytes_of_a_process_that_took_the_data_port_of_another_are_noticed(
    shared: MooncakeEngine, destination: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have memory at the same addresses, so that reading succeeds: without the proof nobody would know."""
    # Reads over lost connections settle in between.
    monkeypatch.setattr("transfer.engine.mooncake_links._PATIENCE_S", WAIT_S)
    with PeerProcess(MIB, 5, FIXED) as first, PeerProcess(MIB, 6, FIXED) as second:
        link = shared.open(first.address, [first.region], first.identity)
        batch = even_copies(destination.region, first.region, 1, 16384)
        link.read(batch, 5)
        link.prove(5)
        port = first.data_port
        first.kill()
        with forwarded(port, second.data_port):
            until(lambda: _is_read(link, batch))
            assert np.array_equal(destination.view[:16384], noise(MIB, 6)[:16384])
            with pytest.raises(ReadFailed, match="another process than the one that was announced answers") as failure:
                link.prove(5)
        assert failure.value.settled
        with pytest.raises(ReadFailed, match="could not be proven"):
            link.read(batch, 5)


def _is_read(link: MooncakeLink, batch: Copies) -> bool:
    try:
        link.read(batch, 5)
    except ReadFailed as error:
        if not error.settled:
            raise
        return False
    return True


@pytest.mark.thorough
def test_a_process_that_took_the_address_of_another_is_not_opened(shared: MooncakeEngine) -> None:
    with PeerProcess(MIB, 5, FIXED) as first, PeerProcess(MIB, 6, FIXED) as second:
        with pytest.raises(ReadFailed, match="another process than the one that was announced answers"):
            shared.open(second.address, [first.region], first.identity)
        shared.open(first.address, [first.region], first.identity)
