"""Reads between processes of one host: who is refused, what is mapped for how long, and the three ends of a read.

On fake drivers and by Triton's interpreter, not on a GPU. What every engine must do is in ``test_contract``.

Covers: transfer.engine.cuda_ipc_address.
"""

import base64
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any
from unittest.mock import Mock, patch

import msgspec
import numpy as np
import pytest

from layout.geometry import Identity
from tests.support.devices.shared_devices import SharedDevices
from tests.support.engine.ipc_engines import FakeIpcEngine, kernel_or_skip
from tests.support.memory import Memory, even_copies
from tests.support.waiting import WAIT_S, holds_for, until
from transfer.copies.batch.cuda import IpcRefused
from transfer.copies.reshape.reshape_kernel import RunKernel
from transfer.engine import cuda_ipc
from transfer.engine.cuda_ipc import CudaIpcEngine, CudaIpcLink
from transfer.engine.cuda_ipc_address import Allocation, ExportedMemory, ProcessPlace
from transfer.engine.interface import ReadFailed

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim")  # of Triton 3.6's interpreter

COUNT, SIZE = 8, 4096


class World:
    """A reader and a peer on one host, each with its own driver."""

    def __init__(self, *, has_batches: bool = True, kernel: RunKernel | None = None) -> None:
        self.devices = SharedDevices()
        self.destination, self.source = Memory(COUNT * SIZE), Memory.of_noise(COUNT * SIZE, seed=1)
        options: dict[str, Any] = {"has_batches": has_batches, "kernel": kernel}
        self.reader, self.peer = (FakeIpcEngine(self.devices, **options) for _ in range(2))
        self.reader.register([self.destination.region])
        self.peer.register([self.source.region])

    def open(self, reader: FakeIpcEngine | None = None) -> CudaIpcLink:
        return (reader or self.reader).open(self.peer.address, [self.source.region], self.peer.identity)

    def open_and_close(self) -> CudaIpcLink:
        (link := self.open()).close()
        assert link.settled
        return link

    def read(self, link: CudaIpcLink, timeout_s: float = WAIT_S, given_up: Callable[[], str] = lambda: "") -> None:
        link.read(even_copies(self.destination.region, self.source.region, COUNT, SIZE), timeout_s, 0, given_up)

    @property
    def has_all(self) -> bool:
        return np.array_equal(self.destination.view, self.source.view)

    @property
    def mapped(self) -> int:
        """Allocations of the peer that the reader has mapped."""
        return len(self.reader.driver.opened)


@pytest.fixture(params=["driver", "kernel"])
def world(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[World]:
    """What copies is the driver or the kernel."""
    monkeypatch.setattr(cuda_ipc, "_PATIENCE_S", 0.1)
    world = World(kernel=kernel_or_skip() if request.param == "kernel" else None)
    yield world
    for engine in (world.reader, world.peer):
        engine.driver.running.set()
        engine.close()


# Who is read


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (1, "1 CUDA_ERROR_INVALID_VALUE: the memory comes from cuMemCreate .* or its GPU is not in this container"),
        (201, "201 CUDA_ERROR_INVALID_CONTEXT: .*PID namespaces"),
        (205, "205 .*dynamic resource allocation"),
        (217, "217 .*nvidia-smi topo -p2p r"),
        (704, "704 .*its own access to that GPU"),
        (711, "711 .*too many GPUs"),
        (801, "801 .*MIG"),
    ],
)
def test_a_handle_that_does_not_open_is_a_reason_and_nothing_stays_mapped(world: World, code: int, said: str) -> None:
    world.reader.driver.open_error = code
    with pytest.raises(ReadFailed, match=f"cuIpcOpenMemHandle_v2 answers {said}") as failure:
        world.open()
    assert failure.value.settled
    assert not world.mapped
    world.reader.driver.open_error = 0
    world.read(world.open())
    assert world.has_all


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"boot_id": "another boot"}, "it runs on another host"),
        ({}, "it is this process, which cannot map its own memory"),
        ({"pid_namespace": 2}, r"both processes have pid \d+, each in its own PID namespace"),
    ],
)
def test_a_process_that_cannot_share_is_refused_before_the_driver_is_asked(
    world: World, change: dict[str, Any], said: str
) -> None:
    reader = FakeIpcEngine(world.devices, replace(world.peer.here, **change))
    reader.driver.open_error = 999
    with pytest.raises(ReadFailed, match=f"^cannot open a link to cuda-ipc:.*: {said}") as failure:
        world.open(reader)
    assert failure.value.settled
    reader.close()


def test_where_this_process_runs_is_what_the_system_says() -> None:
    here = ProcessPlace.here()
    assert here.pid == os.getpid()
    assert len(here.boot_id) == 36
    assert here.pid_namespace == os.stat("/proc/self/ns/pid").st_ino


def test_memory_without_handles_gives_no_address(world: World) -> None:
    """Sleep mode's, say."""
    world.peer.driver.has_handles = False
    world.peer.register([Memory(SIZE).region])
    assert not world.peer.address
    assert "cuIpcGetMemHandle answers 1 " in world.peer.refusal
    assert "sleep mode" in world.peer.refusal


def test_a_region_of_several_allocations_gives_no_address(world: World) -> None:
    pages = Memory(2 * SIZE)
    first, second = replace(pages.region, size=SIZE), replace(pages.region, address=pages.region.address + SIZE)
    world.peer.driver.adopt(first)
    world.peer.driver.adopt(replace(second, size=SIZE))
    cuda_ipc.CudaIpcEngine.register(world.peer, [pages.region])
    assert world.peer.refusal.endswith("lies in several allocations")


def test_host_memory_is_not_shared_and_keeps_nobody_from_sharing_the_rest(world: World) -> None:
    host = Memory.of_noise(SIZE, seed=3)
    world.peer.driver.pin(host.view)
    cuda_ipc.CudaIpcEngine.register(world.peer, [host.region])
    assert not world.peer.refusal
    link = world.reader.open(world.peer.address, [world.source.region, host.region], world.peer.identity)
    with pytest.raises(ReadFailed, match="2 of 2 sources are outside the allocations that it shares") as failure:
        link.read(even_copies(world.destination.region, host.region, 2, 64), WAIT_S)
    assert failure.value.settled
    world.read(link)


def test_an_engine_that_nobody_reads_has_no_address_and_reads(world: World) -> None:
    reader = FakeIpcEngine(world.devices, is_read=False)
    reader.register([world.destination.region])
    assert not reader.address
    world.read(world.open(reader))
    assert world.has_all
    reader.close()


def _address(**changes: object) -> str:
    allocation = Allocation(4096, 4096, bytes(64))
    memory = ExportedMemory(ProcessPlace("this boot", 1, 1), "GPU", Identity(4096, bytes(16)), (allocation,))
    return msgspec.structs.replace(memory, **changes).encode()


#: MessagePack of the members, and a fifth one of arrays in arrays.
NESTED = (
    b"\x95"
    + msgspec.msgpack.encode(ProcessPlace("b", 1, 1))
    + b"\xa3GPU"
    + (msgspec.msgpack.encode(Identity(4096, bytes(16))) + b"\x90" + b"\x91" * 100_000)
)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "127.0.0.1:1234",
        "cuda-ipc:1@GPU/?",
        f"cuda-ipc:1@GPU/{base64.urlsafe_b64encode(NESTED).decode()}",
        f"cuda-ipc:1@GPU/{base64.urlsafe_b64encode(b'junk').decode()}",
        _address(allocations=(Allocation(4096, 4096, b"short"),)),
        _address(allocations=(Allocation(-1, 4096, bytes(64)),)),
        _address(allocations=(Allocation(4096, 2**63 - 1, bytes(64)),)),
        _address(allocations=(Allocation(4096, 64, bytes(64)),) * 5000),
        _address(device="x" * 5000),
    ],
)
def test_an_address_that_is_none_is_refused_in_a_short_message(world: World, address: str) -> None:
    with pytest.raises(ReadFailed, match="it is no address") as failure:
        world.reader.open(address, [world.source.region])
    assert failure.value.settled
    assert len(str(failure.value)) < 400


def test_overlapping_allocations_of_a_peer_are_refused(world: World) -> None:
    twice = (Allocation(4096, 4096, bytes(64)),) * 2
    with pytest.raises(ReadFailed, match="overlaps"):
        world.reader.open(_address(allocations=twice), [])


@pytest.mark.parametrize("more", [1, 2**40])
def test_an_allocation_that_is_announced_larger_than_the_driver_maps_it_is_refused(world: World, more: int) -> None:
    """Else a read could go to whatever this process has mapped behind it."""
    told = ExportedMemory.decode(world.peer.address)
    (one,) = (each for each in told.allocations if each.address == world.source.region.address)
    grown = msgspec.structs.replace(told, allocations=(msgspec.structs.replace(one, size=one.size + more),))
    with pytest.raises(ReadFailed, match=rf"an allocation of \d+ bytes, and the driver has mapped {COUNT * SIZE}"):
        world.reader.open(grown.encode(), [world.source.region], world.peer.identity)
    world.reader.check_integrity()
    assert not world.mapped
    world.read(world.open())
    assert world.has_all


def test_a_driver_that_does_not_say_how_large_it_is_maps_it_all_the_same(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world.reader.runtime, "allocation", Mock(side_effect=IpcRefused("no")))
    world.read(world.open())
    assert world.has_all


def test_no_error_tells_the_handles(world: World) -> None:
    secret = world.peer.address.partition("/")[2]
    world.reader.driver.open_error = 201
    with pytest.raises(ReadFailed) as failure:
        world.open()
    assert secret not in str(failure.value)
    assert secret[:40] not in str(failure.value)


# What is mapped


def test_links_to_one_peer_share_a_mapping_which_ends_with_the_last(world: World) -> None:
    first, second = world.open(), world.open()
    assert world.mapped == 2  # the memory, and the peer's number
    assert {times for _, times in world.reader.driver.opened.values()} == {1}
    world.reader.check_integrity()
    first.close()
    world.read(second)
    second.close()
    assert not world.mapped
    assert world.has_all


def test_what_a_reader_has_mapped_outlives_its_owner(world: World) -> None:
    link = world.open()
    world.devices.die(world.peer.driver)
    world.read(link)
    link.prove(WAIT_S)
    assert world.has_all
    with pytest.raises(ReadFailed, match="cannot reach the transfer engine"):
        FakeIpcEngine(world.devices).open(world.peer.address, [world.source.region])


def test_an_abandoned_link_lets_go_of_the_memory(world: World) -> None:
    link = world.open()
    link.abandon()
    until(lambda: not world.mapped, "nothing is mapped")
    assert link.is_stale
    assert link.settled
    with pytest.raises(ReadFailed, match="closed"):
        world.read(link)


def test_a_link_that_no_thread_can_close_is_stale_and_closed_by_its_owner(world: World) -> None:
    link = world.open()
    with patch.object(world.reader._abandoned, "submit", side_effect=RuntimeError("can't start new thread")):
        link.abandon()
    assert link.is_stale
    assert world.mapped
    link.close()
    assert not world.mapped


def test_a_read_ends_when_its_link_is_abandoned(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_ipc, "_PATIENCE_S", WAIT_S)
    link = world.open()
    world.reader.driver.running.clear()
    failures: list[ReadFailed] = []

    def read() -> None:
        try:
            world.read(link)
        except ReadFailed as error:
            failures.append(error)

    reading = threading.Thread(target=read)
    reading.start()
    until(lambda: world.reader.driver.in_flight, "it reads")
    link.abandon()
    holds_for(reading.is_alive, 0.5)  # it has seen that, and waits for the device
    world.reader.driver.running.set()
    reading.join(WAIT_S)
    until(lambda: not world.mapped, "nothing is mapped")
    assert [failure.settled for failure in failures] == [True]
    assert "the link was closed" in str(failures[0])


def test_abandoning_a_link_of_a_closed_engine_is_harmless(world: World) -> None:
    link = world.open()
    world.reader.close()
    link.abandon()
    assert link.settled


def test_what_fails_when_an_abandoned_link_is_closed_is_logged(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    link = world.open()
    with monkeypatch.context() as patched:
        patched.setattr(type(link), "close", lambda _: 1 / 0)
        link.abandon()
        until(lambda: "its link could not be closed" in caplog.text, "the log says so")


def test_an_engine_says_after_its_end_what_may_still_write(world: World) -> None:
    link = world.open()
    world.reader.driver.running.clear()
    with pytest.raises(ReadFailed, match="did not finish within"):
        world.read(link, 0.01)
    CudaIpcEngine.close(world.reader)  # and not the driver, which goes with its process
    with pytest.raises(RuntimeError, match=f"copies from {link.name} have not ended"):
        world.reader.check_settled()
    world.reader.driver.running.set()

    def is_settled() -> bool:
        with suppress(RuntimeError):
            world.reader.check_settled()
            return True
        return False

    until(is_settled, "nothing is copied any more")


def test_another_life_of_a_peer_ends_the_links_to_the_one_before(world: World) -> None:
    """It has slept, say, and its process goes on."""
    link = world.open()
    again = FakeIpcEngine(world.devices, world.peer.here)
    again.register([world.source.region])
    other = world.reader.open(again.address, [world.source.region], again.identity)
    until(lambda: world.mapped == 2, "only the memory of the new life is mapped")
    assert link.is_stale
    assert not other.is_stale
    again.close()


def test_a_number_that_cannot_be_read_in_time_proves_nothing_and_harms_no_caller(world: World) -> None:
    link = world.open()
    world.reader.driver.running.clear()
    with pytest.raises(ReadFailed, match=r"did not prove who it is: .*did not finish within") as failure:
        link.prove(0.01)
    assert failure.value.settled
    link.close()
    assert world.mapped  # the copy goes on
    world.reader.driver.running.set()
    until(lambda: link.settled and not world.mapped, "nothing is mapped")


def test_a_peer_whose_number_cannot_be_read_in_time_does_not_stay_mapped(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has the link, so nobody asks whether it has settled."""
    monkeypatch.setattr(cuda_ipc, "_OPEN_S", 0.01)
    world.reader.driver.running.clear()
    with pytest.raises(ReadFailed, match=r"did not prove who it is: .*did not finish within"):
        world.open()
    assert world.mapped  # the copy goes on
    world.reader.driver.running.set()
    until(lambda: not world.mapped, "nothing is mapped", within_s=5.0)


def test_a_link_takes_the_stream_of_one_that_has_settled(world: World) -> None:
    """torch's pool of streams is soon round, and then one of them is the model's."""
    streams = {world.open_and_close().stream for _ in range(40)}
    assert len(streams) == 1
    assert world.open().stream is not world.open().stream


def test_a_stream_that_may_still_copy_is_not_taken(world: World) -> None:
    link = world.open()
    world.reader.driver.running.clear()
    with pytest.raises(ReadFailed, match="did not finish within"):
        world.read(link, 0.01)
    link.close()
    assert link.stream not in world.reader._idle_streams
    world.reader.driver.running.set()
    until(lambda: link.settled, "it has ended")
    assert world.open().stream is link.stream


@pytest.mark.parametrize("is_old", [True, False], ids=["none in the library", "none in the chip"])
def test_a_driver_without_batches_is_told_of_once_for_all_links(caplog: pytest.LogCaptureFixture, is_old: bool) -> None:
    world = World(has_batches=not is_old)
    world.reader.driver.unsupported = True
    for _ in range(3):
        world.read(world.open())
    ours = [line for line in caplog.messages if "is submitted on its own" in line]
    assert len(ours) == (2 if is_old else 1), "one for each process"
    assert world.has_all
    world.reader.close()
    world.peer.close()


# The three ends of a read; the first is in the contract's tests


@pytest.mark.parametrize("world", ["driver"], indirect=True)
def test_a_refused_copy_fails_settled_and_the_link_stays_usable(world: World) -> None:
    link = world.open()
    world.reader.driver.fail_at = 3
    with pytest.raises(ReadFailed, match=r"copy 3 of 8 .* to 0x.*CUDA_ERROR_INVALID_VALUE") as failure:
        world.read(link)
    assert failure.value.settled
    assert link.settled
    world.reader.driver.fail_at = None
    world.read(link)
    assert world.has_all


@pytest.mark.parametrize(("timeout_s", "given_up"), [(0.02, ""), (WAIT_S, "its engine was given up")])
def test_a_read_that_is_given_up_ends_settled_if_the_device_is_done_soon(
    world: World, monkeypatch: pytest.MonkeyPatch, timeout_s: float, given_up: str
) -> None:
    monkeypatch.setattr(cuda_ipc, "_PATIENCE_S", WAIT_S)
    link = world.open()
    world.reader.driver.running.clear()
    timer = threading.Timer(0.1, world.reader.driver.running.set)
    timer.start()
    with pytest.raises(ReadFailed, match=given_up or "did not finish within 0.020 s") as failure:
        world.read(link, timeout_s, lambda: given_up)
    assert failure.value.settled
    assert link.settled
    timer.join()


def test_a_copy_that_does_not_end_fails_unsettled_and_keeps_the_mapping_until_it_does(world: World) -> None:
    link = world.open()
    world.reader.driver.running.clear()
    with pytest.raises(ReadFailed, match="did not finish within") as failure:
        world.read(link, 0.01)
    assert not failure.value.settled
    assert not link.settled
    with pytest.raises(ReadFailed, match="broken by a read that failed"):
        world.read(link)
    link.close()
    assert not link.settled
    assert world.mapped
    assert not world.destination.view.any()
    world.reader.driver.running.set()
    until(lambda: link.settled, "the link has settled")
    assert world.has_all  # it came late, and not later
    assert not world.mapped


@pytest.mark.parametrize("while_it_reads", [False, True])
def test_after_an_error_of_the_device_nothing_settles_nor_is_unmapped(world: World, while_it_reads: bool) -> None:
    link = world.open()
    driver = world.reader.driver
    if while_it_reads:
        driver.running.clear()

    def strike() -> str:
        driver.sticky = 719
        return ""

    if not while_it_reads:
        strike()
    with pytest.raises(ReadFailed, match=r"719|unspecified launch failure") as failure:
        world.read(link, WAIT_S, strike)
    assert not failure.value.settled
    link.close()
    assert not link.settled
    assert world.mapped


def test_an_engine_that_closes_under_a_copy_leaves_it_unsettled_until_it_ends(world: World) -> None:
    link = world.open()
    world.reader.driver.running.clear()
    with pytest.raises(ReadFailed):
        world.read(link, 0.01)
    cuda_ipc.CudaIpcEngine.close(world.reader)
    assert not link.settled
    world.reader.driver.running.set()
    until(lambda: link.settled, "the link has settled")
