"""What copies from mapped memory, by the length of runs and where they go: a kernel or the driver, with the same bytes.

By Triton's interpreter and on fake drivers, not on a GPU. The ends of a read are in ``test_cuda_ipc``, for both.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from layout.copies import concatenate
from layout.cost import ReadCost
from tests.support.devices.kernel_devices import interpreted_kernel, kernel_marks
from tests.support.devices.run_batches import Batch, batches, copies_of
from tests.support.devices.shared_devices import SharedDevices
from tests.support.engine.ipc_engines import FakeIpcEngine
from tests.support.memory import Memory, copies, even_copies, shuffled_copies
from tests.support.waiting import WAIT_S
from transfer.copies.reshape import reshape_kernel
from transfer.copies.reshape.reshape_kernel import RunKernel
from transfer.engine.cuda_ipc import CudaIpcEngine, CudaIpcLink
from transfer.engine.cuda_ipc_copies import LINK_PROGRAMS, LONG_BYTES
from transfer.engine.identity import NONCE_BYTES
from transfer.engine.interface import ReadFailed

pytestmark = kernel_marks

MEMORY_BYTES = 4 << 20
SAME, OTHER = 0, 1  # the reader's GPU; the peer has 0
on_every_gpu = pytest.mark.parametrize("gpu", [SAME, OTHER], ids=["the same GPU", "another GPU"])


class Launches:
    """Stands before the kernel: how many programs it was launched with, each time."""

    def __init__(self, kernel: RunKernel) -> None:
        self._kernel, kernel._kernel = kernel._kernel, self
        self.programs: list[int] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.programs.append(grid[0])
        return self._kernel[grid]


class Host:
    """A peer's memory, and a reader's, on one host; the reader has the kernel."""

    def __init__(self, kernel: RunKernel | None, gpu: int) -> None:
        self.destination, self.source = Memory(MEMORY_BYTES), Memory.of_noise(MEMORY_BYTES, seed=1)
        devices = SharedDevices()
        self.reader = FakeIpcEngine(devices, is_read=False, gpu=gpu, kernel=kernel)
        self.peer = FakeIpcEngine(devices)
        self.driver = self.reader.driver
        self.reader.register([self.destination.region])
        self.peer.register([self.source.region])
        self.link: CudaIpcLink = self.reader.open(self.peer.address, [self.source.region], self.peer.identity)
        self.driver.launches = 0

    def read(self, *parts: tuple[int, int]) -> None:
        """Read runs, ``parts`` of some number of some size, and compare all bytes."""
        sizes = np.repeat([size for _, size in parts], [count for count, _ in parts])
        starts = np.cumsum(sizes) - sizes
        batch = copies_of(
            [
                (self.destination.region.address + start, self.source.region.address + start, size)
                for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)
            ]
        )
        self.destination.view[:] = 0
        self.link.read(batch, WAIT_S)
        end = int(sizes.sum())
        assert np.array_equal(self.destination.view[:end], self.source.view[:end])
        assert not self.destination.view[end:].any()

    @property
    def driver_sizes(self) -> list[int]:
        """Of what the driver has copied, in no order, without the peer's number."""
        return sorted(entry.size for _, batch in self.driver.batches for entry in batch if entry.size != NONCE_BYTES)

    def close(self) -> None:
        for engine in (self.reader, self.peer):
            engine.close()


@pytest.fixture
def kernel() -> RunKernel:
    return interpreted_kernel()


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """Closes them."""
    made: list[Host] = []
    yield made
    for host in made:
        host.close()


@pytest.fixture
def host(kernel: RunKernel, hosts: list[Host], gpu: int) -> Host:
    hosts.append(Host(kernel, gpu))
    return hosts[-1]


@pytest.mark.parametrize("gpu", [SAME])
@pytest.mark.parametrize("size", [64, 4096, LONG_BYTES, 1 << 20])
def test_within_a_gpu_the_kernel_copies_runs_of_every_length(host: Host, size: int) -> None:
    host.read((3, size))
    assert host.driver.launches == 1
    assert host.driver_sizes == []


@pytest.mark.parametrize("gpu", [OTHER])
def test_between_gpus_long_runs_are_left_to_the_driver(host: Host) -> None:
    host.read((2, LONG_BYTES), (5, 512), (1, LONG_BYTES - 4), (1, 1 << 20))
    assert host.driver.launches == 1
    assert host.driver_sizes == [LONG_BYTES, LONG_BYTES, 1 << 20]
    host.read((2, 1 << 20))
    assert host.driver.launches == 1


@pytest.mark.parametrize(("gpu", "most"), [(SAME, 0), (OTHER, LINK_PROGRAMS)])
def test_between_gpus_few_programs_copy_all_runs(host: Host, kernel: RunKernel, most: int) -> None:
    launches = Launches(kernel)
    host.read((4 * LINK_PROGRAMS * 16 + 3, 512))
    (programs,) = launches.programs
    assert programs == (most or 4 * LINK_PROGRAMS + 1)


@pytest.mark.thorough
@on_every_gpu
@settings(deadline=None, max_examples=15)
@given(batches())
def test_random_runs_equal_slices_in_numpy(gpu: int, batch: Batch) -> None:
    host = Host(interpreted_kernel(), gpu)
    starts = np.cumsum([0, *batch.target_bytes]).tolist()
    expected = host.destination.view.copy()
    for target, to, start, size in batch.runs:
        expected[starts[target] + to : starts[target] + to + size] = host.source.view[start : start + size]
    runs = [
        (host.destination.region.address + starts[target] + to, host.source.region.address + start, size)
        for target, to, start, size in batch.runs
        if size
    ]
    host.link.read(copies_of(runs), WAIT_S)
    assert np.array_equal(host.destination.view, expected)
    host.close()


@on_every_gpu
def test_many_runs_are_launched_in_parts(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reshape_kernel, "MOST_RUNS", 100)
    batch, places = shuffled_copies(host.destination.region.address, host.source.region.address, 250, 1024)
    host.link.read(batch, WAIT_S)
    assert host.driver.launches == 3
    shape = 250, 1024
    found, sent = (memory.view[: 250 * 1024].reshape(shape) for memory in (host.destination, host.source))
    assert np.array_equal(found, sent[places])


@on_every_gpu
def test_host_memory_is_written_by_the_driver(host: Host) -> None:
    pinned = Memory(MEMORY_BYTES)
    host.driver.pin(pinned.view)
    CudaIpcEngine.register(host.reader, [pinned.region])
    source = host.source.region
    to_host, to_device = (even_copies(each.region, source, 6, 512) for each in (pinned, host.destination))
    host.link.read(concatenate([to_host, to_device]), WAIT_S)
    for memory in (pinned, host.destination):
        assert np.array_equal(memory.view[: 6 * 512], host.source.view[: 6 * 512])
    assert host.driver.launches == 1
    assert host.driver_sizes == [512] * 6


@on_every_gpu
@pytest.mark.parametrize("taken", [0, 1])
def test_what_a_kernel_cannot_be_launched_for_is_left_to_the_driver(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, taken: int
) -> None:
    """``taken``: launches until one is refused."""
    monkeypatch.setattr(reshape_kernel, "MOST_RUNS", 4)
    host.driver.takes_kernels = taken
    host.read((8, 512))
    assert host.driver_sizes == [512] * 8
    host.driver.takes_kernels = host.driver.launches
    host.read((8, 512))
    (line,) = caplog.messages
    assert "the driver copies from mapped memory what a kernel cannot: CUDA error: too many resources" in line
    host.driver.takes_kernels = None
    host.driver.batches.clear()
    host.read((8, 512))
    assert host.driver_sizes == []


@on_every_gpu
@pytest.mark.parametrize("by_kernel", [True, False])
def test_a_link_costs_what_copies_over_it(kernel: RunKernel, hosts: list[Host], gpu: int, by_kernel: bool) -> None:
    hosts.append(Host(kernel if by_kernel else None, gpu))
    assert hosts[0].link.cost == ReadCost.of_mapped(by_kernel=by_kernel, is_between_devices=gpu == OTHER)


@pytest.mark.parametrize("gpu", [SAME])
@pytest.mark.parametrize(
    ("run", "rule"),
    [
        ((MEMORY_BYTES - 10, 0, 11), "destination is outside"),
        ((-1, 0, 10), "destination is outside"),
        ((MEMORY_BYTES + 1, 0, 10), "destination is outside"),
        ((0, MEMORY_BYTES - 10, 11), "source is outside the memory that"),
        ((0, -1, 10), "source is outside the memory that"),
        ((0, MEMORY_BYTES + 1, 10), "source is outside the memory that"),
        ((0, 0, 0), "not positive"),
        ((0, 0, -5), "not positive"),
        ((0, 0, 2**63 - 1), "destination is outside"),
    ],
)
def test_one_run_that_is_wrong_keeps_all_from_being_read(host: Host, run: tuple[int, int, int], rule: str) -> None:
    with pytest.raises(ValueError, match=f"descriptor 1 of 2 .*{rule}"):
        host.link.read(copies(host.destination.region, host.source.region, [(64, 64, 64), run]), WAIT_S)
    assert not host.driver.launches
    assert not host.destination.view.any()


@pytest.mark.parametrize("gpu", [SAME])
@pytest.mark.parametrize("start", [-100, MEMORY_BYTES - 50, MEMORY_BYTES])
def test_memory_that_a_peer_announces_and_does_not_share_is_not_read(host: Host, start: int) -> None:
    """What lies there in this process is another's."""
    grown = replace(host.source.region, address=host.source.region.address - 200, size=MEMORY_BYTES + 400)
    link = host.reader.open(host.peer.address, [grown], host.peer.identity)
    with pytest.raises(ReadFailed, match="1 of 2 sources are outside the allocations that it shares"):
        link.read(copies(host.destination.region, host.source.region, [(64, 64, 64), (0, start, 100)]), WAIT_S)
    assert not host.driver.launches
    assert not host.destination.view.any()


@pytest.mark.parametrize("gpu", [SAME])
@pytest.mark.parametrize("half", [0, 1])
def test_memory_that_a_peer_shares_and_has_not_registered_is_not_read(host: Host, half: int) -> None:
    """An allocation is shared as a whole. The second run crosses the middle of it."""
    size = MEMORY_BYTES // 2
    registered = replace(host.source.region, address=host.source.region.address + half * size, size=size)
    link = host.reader.open(host.peer.address, [registered], host.peer.identity)
    runs = [(64, half * size + 64, 64), (0, size - 50, 100)]
    with pytest.raises(ValueError, match=r"descriptor 1 of 2 .*source is outside the memory that"):
        link.read(copies(host.destination.region, host.source.region, runs), WAIT_S)
    assert not host.destination.view.any()


@pytest.mark.parametrize("gpu", [SAME])
def test_runs_come_from_and_go_to_several_regions_in_any_order(host: Host) -> None:
    more = Memory(MEMORY_BYTES), Memory.of_noise(MEMORY_BYTES, seed=2)
    host.reader.register([more[0].region])
    host.peer.register([more[1].region])
    link = host.reader.open(host.peer.address, [host.source.region, more[1].region], host.peer.identity)
    theirs, ours = (host.source, more[1]), (host.destination, more[0])
    runs = [
        (ours[number // 2 % 2].region.address + 512 * number, theirs[number % 2].region.address + 512 * number, 512)
        for number in range(40)
    ]
    link.read(copies_of(runs), WAIT_S)
    for number in range(40):
        part = slice(512 * number, 512 * number + 512)
        assert np.array_equal(ours[number // 2 % 2].view[part], theirs[number % 2].view[part])
