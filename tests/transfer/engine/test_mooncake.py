"""Real Mooncake over loopback TCP: peers that stop, die or refuse, and what is left behind.

Covers: transfer.engine.mooncake_native.
"""

import gc
import os
import re
import resource
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import psutil
import pytest

from layout.copies import concatenate
from layout.geometry import Region
from tests.support.engine.peer_process import MIB, SIZE, PeerProcess, fail_mid_read
from tests.support.memory import Memory, even_copies, noise
from tests.support.process import OpenResources
from tests.support.waiting import WAIT_S, until
from transfer.engine.interface import EngineStartError, ReadFailed
from transfer.engine.mooncake import MooncakeEngine, MooncakeOptions
from transfer.engine.mooncake_native import ENGINE_FILES


@pytest.fixture
def engine(destination: Memory) -> Iterator[MooncakeEngine]:
    destination.view[:] = 0
    engine = MooncakeEngine(MooncakeOptions("127.0.0.1", connect_timeout_s=WAIT_S, progress_timeout_s=2.0))
    engine.register([destination.region])
    yield engine
    engine.check_integrity()
    engine.close()
    engine.check_integrity()


def test_a_peer_that_stops_fails_the_read_in_time_and_no_byte_lands_after_close(
    engine: MooncakeEngine, victim: PeerProcess, destination: Memory
) -> None:
    link = engine.open(victim.address, [victim.region], victim.identity)
    failure = fail_mid_read(link, victim, destination, "stopped")
    assert not failure.settled
    # On a busy machine, Mooncake may give the first call up in that moment.
    assert re.search(r"did not finish within 1\.000 s|after 1\.\d* s: Mooncake reported an error", str(failure))
    link.close()
    destination.view[:] = 0
    victim.go_on()
    time.sleep(0.5)
    assert not destination.view.any()


def test_late_bytes_do_land_while_the_link_is_open(
    engine: MooncakeEngine, victim: PeerProcess, destination: Memory
) -> None:
    # The case that the test above guards against is real: without this one it could pass for another reason.
    link = engine.open(victim.address, [victim.region], victim.identity)
    fail_mid_read(link, victim, destination, "stopped")
    destination.view[:] = 0
    victim.go_on()
    until(lambda: bool(destination.view.any()))


def test_a_peer_that_is_killed_fails_the_read_unsettled(
    engine: MooncakeEngine, victim: PeerProcess, destination: Memory
) -> None:
    link = engine.open(victim.address, [victim.region], victim.identity)
    failure = fail_mid_read(link, victim, destination, "killed")
    assert not failure.settled
    assert victim.address in str(failure)
    assert "Mooncake reported an error" in str(failure)


def test_a_failed_link_refuses_reads_until_it_is_closed_and_a_new_one_works(
    engine: MooncakeEngine, peer: PeerProcess, destination: Memory
) -> None:
    unregistered = Region(4096, MIB)
    link = engine.open(peer.address, [peer.region, unregistered], peer.identity)
    with pytest.raises(ReadFailed, match=r"failed in call 1 \(4 descriptors, 262144 bytes\)") as failure:
        link.read(even_copies(destination.region, unregistered, 4, 65536), 5)
    assert not failure.value.settled
    good = even_copies(destination.region, peer.region, 16, 65536)
    with pytest.raises(ReadFailed, match="must be closed first") as refusal:
        link.read(good, 5)
    assert refusal.value.settled
    link.close()
    engine.open(peer.address, [peer.region], peer.identity).read(good, 5)
    assert np.array_equal(destination.view[:MIB], noise(SIZE, 5)[:MIB])


def test_a_failure_before_the_last_descriptor_of_a_call_is_not_missed(
    engine: MooncakeEngine, peer: PeerProcess, destination: Memory
) -> None:
    unregistered = Region(4096, MIB)
    link = engine.open(peer.address, [peer.region, unregistered], peer.identity)
    bad, good = (even_copies(destination.region, region, 1, 4096) for region in (unregistered, peer.region))
    with pytest.raises(ReadFailed, match="Mooncake reported an error"):
        link.read(concatenate([bad, good]), 10)


def test_a_peer_that_accepts_but_never_answers_is_given_up_after_the_connect_timeout(victim: PeerProcess) -> None:
    with closing(MooncakeEngine(MooncakeOptions("127.0.0.1", connect_timeout_s=0.5))) as engine:
        before = OpenResources.now()
        victim.stop()
        started = time.monotonic()
        with pytest.raises(ReadFailed, match="accepts connections but does not answer") as failure:
            engine.open(victim.address, [victim.region], victim.identity)
        assert failure.value.settled
        assert time.monotonic() - started < WAIT_S  # by itself it would take 60
        until(lambda: before.is_all, lambda: f"{OpenResources.now()} is more than {before}")


def test_a_link_whose_caller_gives_up_is_opened_no_longer(victim: PeerProcess) -> None:
    with closing(MooncakeEngine(MooncakeOptions("127.0.0.1", connect_timeout_s=60))) as engine:
        victim.stop()
        began = time.monotonic()
        with pytest.raises(ReadFailed, match="its network is cut") as failure:
            engine.open(
                victim.address, [victim.region], victim.identity,
                given_up=lambda: "its network is cut" if time.monotonic() > began + 0.3 else "",
            )  # fmt: skip
        assert failure.value.settled
        assert time.monotonic() - began < WAIT_S


def test_a_closed_port_cannot_be_opened(engine: MooncakeEngine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ReadFailed, match=f"cannot reach the transfer engine at 127.0.0.1:{port}") as failure:
        engine.open(f"127.0.0.1:{port}", [Region(4096, 4096)])
    assert failure.value.settled


def test_a_link_that_another_has_cut_by_giving_the_peer_up_says_so(engine: MooncakeEngine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    given_up = iter([""])  # not while the link waits
    with pytest.raises(ReadFailed, match="its network is cut") as failure:
        engine.open(f"127.0.0.1:{port}", [Region(4096, 4096)], given_up=lambda: next(given_up, "its network is cut"))
    assert failure.value.settled


@pytest.mark.parametrize("address", ["no port", "host:", "1.2.3.4:99999"])
def test_an_address_that_is_none_cannot_be_opened(engine: MooncakeEngine, address: str) -> None:
    with pytest.raises(ReadFailed, match=f"cannot open a link to {address}: .* is not "):
        engine.open(address, [Region(4096, 4096)])


def test_a_healthy_peer_is_read_while_another_hangs(peer: PeerProcess, destination: Memory) -> None:
    engine = MooncakeEngine(MooncakeOptions("127.0.0.1", connect_timeout_s=30.0))
    engine.register([destination.region])
    with closing(engine), PeerProcess(MIB, seed=6) as hanging:
        hanging.stop()
        failures: list[ReadFailed] = []

        def open_the_hanging_one() -> None:
            try:
                engine.open(hanging.address, [hanging.region], hanging.identity)
            except ReadFailed as error:
                failures.append(error)

        opening = threading.Thread(target=open_the_hanging_one)
        opening.start()
        engine.open(peer.address, [peer.region], peer.identity).read(
            even_copies(destination.region, peer.region, 4, 4096), 5
        )
        overtook = opening.is_alive()
        hanging.kill()
        opening.join()
        assert overtook
        assert failures


def test_descriptors_in_flight_stay_within_the_window(
    engine: MooncakeEngine, peer: PeerProcess, destination: Memory
) -> None:
    link = engine.open(peer.address, [peer.region], peer.identity)
    link.read(even_copies(destination.region, peer.region, 5000, 4096), 30)
    assert 64 <= link.window.most_in_flight <= 1024, "calls of one read do not overlap, or too much is in flight"
    assert link.window.in_flight == 0
    assert np.array_equal(destination.view[: 5000 * 4096], noise(SIZE, 5)[: 5000 * 4096])


def test_links_to_one_peer_share_its_window(engine: MooncakeEngine, peer: PeerProcess) -> None:
    first, second = (engine.open(peer.address, [peer.region], peer.identity) for _ in range(2))
    assert first.window is second.window


def test_a_read_that_finds_the_window_full_fails_settled_and_the_link_stays_usable(
    engine: MooncakeEngine, peer: PeerProcess, destination: Memory
) -> None:
    link = engine.open(peer.address, [peer.region], peer.identity)
    batch = even_copies(destination.region, peer.region, 4, 4096)
    other = link.window.enter()
    assert link.window.try_acquire(other, 1024, 0.0)
    with pytest.raises(ReadFailed, match="failed waiting") as failure:
        link.read(batch, 0.01)
    assert failure.value.settled
    link.window.release(other, 1024, 0.0)
    link.read(batch, 5)
    assert np.array_equal(destination.view[:16384], noise(SIZE, 5)[:16384])


def test_closing_ends_a_read_that_waits_for_room(
    engine: MooncakeEngine, peer: PeerProcess, destination: Memory
) -> None:
    link = engine.open(peer.address, [peer.region], peer.identity)
    other = link.window.enter()
    assert link.window.try_acquire(other, 1024, 0.0)
    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(link.read, even_copies(destination.region, peer.region, 4, 4096), 60)
        until(lambda: any(flow.is_waiting for flow in link.window._flows))
        link.close()
        with pytest.raises(ReadFailed, match=r"failed waiting for room .* the link was closed") as failure:
            reading.result(10)
    assert failure.value.settled
    link.window.release(other, 1024, 0.0)


@pytest.mark.parametrize("engine_per_link", [True, False])
def test_a_short_read_ends_before_a_long_one_from_the_same_peer_that_began_before(
    peer: PeerProcess, destination: Memory, engine_per_link: bool
) -> None:
    destination.view[:] = 0
    engine = MooncakeEngine(MooncakeOptions("127.0.0.1", engine_per_link=engine_per_link))
    engine.register([destination.region])
    long = even_copies(Region(destination.region.address + MIB, SIZE - MIB), peer.region, 8000, 4096)
    short = even_copies(destination.region, peer.region, 16, 65536)
    with closing(engine), ThreadPoolExecutor(1) as thread:
        first, second = (engine.open(peer.address, [peer.region], peer.identity) for _ in range(2))
        reading = thread.submit(first.read, concatenate([long] * 20), 300)
        until(lambda: bool(destination.view[MIB]))
        second.read(short, 300)
        overtook = not reading.done()
        engine.check_integrity()
        first.close()  # enough of it
        assert overtook
        with pytest.raises(ReadFailed, match="the link was closed"):
            reading.result(60)
    assert np.array_equal(destination.view[:MIB], noise(SIZE, 5)[:MIB])


def test_a_failed_read_gives_its_place_in_the_window_back_on_close(
    engine: MooncakeEngine, victim: PeerProcess, destination: Memory
) -> None:
    link = engine.open(victim.address, [victim.region], victim.identity)
    fail_mid_read(link, victim, destination, "stopped")
    assert link.window.in_flight > 0
    link.close()
    assert link.window.in_flight == 0


def test_closing_ends_a_read_that_is_under_way(
    engine: MooncakeEngine, victim: PeerProcess, destination: Memory
) -> None:
    link = engine.open(victim.address, [victim.region], victim.identity)
    victim.stop()
    failures: list[ReadFailed] = []

    def read() -> None:
        try:
            link.read(even_copies(destination.region, victim.region, 4, 4096), 60)
        except ReadFailed as error:
            failures.append(error)

    reading = threading.Thread(target=read)
    reading.start()
    until(lambda: link.window.in_flight == 4)
    engine.close()
    reading.join()
    assert "the link was closed" in str(failures[0])


def test_a_read_whose_caller_gives_up_ends_then_and_settles_with_the_link(
    engine: MooncakeEngine, victim: PeerProcess, destination: Memory
) -> None:
    link = engine.open(victim.address, [victim.region], victim.identity)
    victim.stop()
    began = time.monotonic()
    with pytest.raises(ReadFailed, match=r"failed in call .*: its network is cut; the whole read is") as failure:
        link.read(
            even_copies(destination.region, victim.region, 4, 4096), 60,
            given_up=lambda: "its network is cut" if time.monotonic() > began + 0.3 else "",
        )  # fmt: skip
    assert time.monotonic() - began < 5  # Mooncake's own limit is not reached
    assert not failure.value.settled
    link.close()
    assert link.settled


@pytest.mark.thorough
def test_close_leaves_no_thread_and_no_file_behind(peer: PeerProcess, destination: Memory) -> None:
    gc.collect()
    before = OpenResources.now()
    for _ in range(3):
        engine = MooncakeEngine(MooncakeOptions("127.0.0.1"))
        engine.register([destination.region])
        link = engine.open(peer.address, [peer.region], peer.identity)
        link.read(even_copies(destination.region, peer.region, 4, 4096), 5)
        with pytest.raises(ReadFailed):
            engine.open("127.0.0.1:1", [peer.region])
        engine.close()
        engine.close()
    until(lambda: before.is_all, lambda: f"{OpenResources.now()} is more than {before}")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_link_opens_no_more_files_than_are_asked_for_before(
    engine: MooncakeEngine, peer: PeerProcess, destination: Memory
) -> None:
    gc.collect()
    before = open_files()
    link = engine.open(peer.address, [peer.region], peer.identity)
    link.read(even_copies(destination.region, peer.region, 2000, 4096), 5)
    until(lambda: open_files() - before == ENGINE_FILES, lambda: f"{open_files() - before} more than before")


def test_no_link_is_opened_with_the_last_files_of_the_process(
    engine: MooncakeEngine, peer: PeerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_use = open_files()
    few, enough = in_use + ENGINE_FILES + 100, in_use + ENGINE_FILES + 200
    monkeypatch.setattr(resource, "getrlimit", lambda _: (few, 1 << 20))
    with pytest.raises(
        ReadFailed, match=rf"files open and may have {few}, .* a link needs 10\. Raise the hard"
    ) as failure:
        engine.open(peer.address, [peer.region], peer.identity)
    assert failure.value.settled
    for limit in (enough, resource.RLIM_INFINITY):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        engine.open(peer.address, [peer.region], peer.identity).close()


def test_mooncake_raises_the_soft_limit_of_open_files_to_the_hard_one() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard // 2, hard))  # which the peer inherits
    try:
        with PeerProcess(MIB, seed=5) as peer:
            assert psutil.Process(peer.pid).rlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_closing_a_link_does_not_stop_other_python_threads(engine: MooncakeEngine, peer: PeerProcess) -> None:
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.wait(0.001):
            ticks.append(time.monotonic())

    ticking = threading.Thread(target=tick)
    ticking.start()
    longest = []
    for _ in range(3):
        link = engine.open(peer.address, [peer.region], peer.identity)
        until(lambda: len(ticks) > 1)
        ticks.clear()
        ticks.append(time.monotonic())
        link.close()
        longest.append(float(np.diff([*ticks, time.monotonic()]).max()))
    done.set()
    ticking.join()
    assert sorted(longest)[1] < 0.6  # Mooncake's destructor by itself: 1.0


def test_registration_that_fails_half_way_takes_nothing(engine: MooncakeEngine, destination: Memory) -> None:
    good, stranger = Memory(4096), Memory(8192)
    # Behind the engine's back, so that the second of two regions meets Mooncake's own refusal.
    engine.native.register([Region(stranger.region.address, 4096)])
    with pytest.raises(EngineStartError, match=r"\(code -7\): it overlaps memory that is registered already"):
        engine.register([good.region, stranger.region])
    engine.register([good.region])
