"""Staging and its copies on device tensors: streams, threads, addresses, and bytes that the host cannot reach.

The device, its memory, its streams and contiguous copies are the simulation's, under the real torch_npu. It has no
kernels: ``index_select`` and ``index_copy_`` are replaced, in these tests only, by host functions that fetch and bring
their tensors by copies on the current stream. So nothing is shown here about CANN's own operators.
"""

import ctypes
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch

from layout.copies import Copies, concatenate
from layout.cost import CostModel
from layout.geometry import Region
from layout.regions import RegionTable
from pd_connector.worker.remote_reader import RemoteReader
from tests.support.devices.npu_device import DeviceBytes
from tests.support.memory import Bytes, noise
from transfer.copies.reshape.device_views import mapped_segments
from transfer.copies.reshape.reshape_torch import SideStream, TensorCopier
from transfer.engine.interface import GivenUp, Link, never

DEVICES = [torch.device("npu:0"), torch.device("npu:1")]
HUGE_PAGE = 2 << 20


@pytest.fixture(params=DEVICES, ids=str)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def host_operators() -> Iterator[list[str]]:
    """The two operators, carried out by the host; the names of those that were called."""
    called: list[str] = []

    def index_select(tensor: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
        called.append("index_select")
        return tensor.cpu().index_select(dim, index.cpu()).to(tensor.device)

    def index_copy_(tensor: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        called.append("index_copy_")
        return tensor.copy_(tensor.cpu().index_copy_(dim, index.cpu(), source.cpu()))

    operators = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that these operators had kernels before
        operators.impl("index_select", index_select, "PrivateUse1")
        operators.impl("index_copy_", index_copy_, "PrivateUse1")
    yield called
    operators._destroy()


@pytest.fixture
def memory(acl: ctypes.CDLL) -> DeviceBytes:
    torch.npu.set_device(DEVICES[0])
    return DeviceBytes(acl)


def cache(device: torch.device, shape: Sequence[int], dtype: torch.dtype, start: int) -> torch.Tensor:
    """Padded and sliced, as vllm-ascend allocates caches: the storage begins ``start`` bytes before the tensor."""
    size = int(np.prod(shape)) * dtype.itemsize
    return torch.empty(start + size, dtype=torch.uint8, device=device)[start:].view(dtype).view(*shape)


def copies_of(runs: Sequence[tuple[int, int, int]]) -> Copies:
    return Copies(*(np.array([run[i] for run in runs], np.int64) for i in range(3)))


def in_a_thread(work: Callable[[], object]) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


# The side stream


def test_leaving_the_stream_waits_for_its_work(
    device: torch.device, memory: DeviceBytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, source = cache(device, [64], torch.uint8, 0), torch.from_numpy(noise(64)).pin_memory()
    stream = SideStream(device)
    torch.npu.synchronize()
    monkeypatch.setenv("SIMACL_COPY_US", "30000")

    def fail() -> None:
        with stream.running():
            target.copy_(source, non_blocking=True)
            raise RuntimeError("after submitting")

    with pytest.raises(RuntimeError, match="after submitting"):
        fail()
    np.testing.assert_array_equal(memory.of(target), source.numpy())


def test_it_is_not_the_models_stream(device: torch.device) -> None:
    stream = SideStream(device)
    torch.npu.set_device(device)
    models = torch.npu.current_stream()
    with stream.running():
        assert torch.npu.current_stream() != models
        assert torch.npu.current_stream().device == device
    assert torch.npu.current_stream() == models


def test_a_thread_gets_the_device_of_the_stream(device: torch.device, acl: ctypes.CDLL) -> None:
    stream = SideStream(device)

    def work() -> None:
        chosen = ctypes.c_int32(-1)
        assert acl.aclrtGetDevice(ctypes.byref(chosen)) != 0, "a new thread has none"
        with stream.running():
            assert acl.aclrtGetDevice(ctypes.byref(chosen)) == 0
            assert chosen.value == device.index
        assert acl.aclrtGetDevice(ctypes.byref(chosen)) == 0
        assert chosen.value == device.index

    in_a_thread(work)


# Copies


def test_a_few_runs_are_copied_by_the_device_itself(
    device: torch.device, memory: DeviceBytes, calls: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    staging = cache(device, [4096], torch.uint8, 512)
    keys = cache(device, [8, 64], torch.bfloat16, HUGE_PAGE - 1024)
    memory.put(staging.data_ptr(), noise(4096))
    before = noise(1024, 1)
    memory.put(keys.data_ptr(), before)
    copier = TensorCopier([keys, staging])
    torch.npu.synchronize()
    monkeypatch.setenv("SIMACL_COPY_US", "5000")
    runs = [(keys.data_ptr() + at, staging.data_ptr() + start, size) for at, start, size in _FEW]
    in_a_thread(lambda: copier(copies_of(runs)))
    expected = before.copy()
    for at, start, size in _FEW:
        expected[at : at + size] = noise(4096)[start : start + size]
    np.testing.assert_array_equal(memory.of(keys), expected)
    assert calls("pageable_copies") == 0, "the bytes took a way through the host"


_FEW = [(0, 100, 128), (301, 7, 33), (1000, 4090, 6)]


@pytest.mark.usefixtures("host_operators")
@pytest.mark.parametrize("cut", [0, 6])
def test_k_and_v_of_all_layers_in_padded_allocations(
    device: torch.device, memory: DeviceBytes, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    caches = [
        cache(device, [16, 4, 2, content], torch.bfloat16, padding)
        for content, padding in ((64, 4096), (64, HUGE_PAGE - 64), (24, 130), (24, 0))
    ]
    before = [noise(tensor.numel() * 2, number) for number, tensor in enumerate(caches)]
    for tensor, values in zip(caches, before, strict=True):
        memory.put(tensor.data_ptr(), values)
    staged = noise(1 << 16, 9)
    staging = cache(device, [1 << 16], torch.uint8, 64)
    memory.put(staging.data_ptr(), staged)
    runs, expected, end = [], [values.copy() for values in before], 0
    for number, tensor in enumerate(caches):
        head = tensor.shape[3] * 2
        for token in range(0, 16 * 4, 3):
            at, size = (token * 2 + 1) * head, head - (cut if token == 33 else 0)
            runs.append((tensor.data_ptr() + at, staging.data_ptr() + end, size))
            expected[number][at : at + size] = staged[end : end + size]
            end += size
    copier = TensorCopier([*caches, staging])
    torch.npu.synchronize()
    monkeypatch.setenv("SIMACL_COPY_US", "500")
    in_a_thread(lambda: copier(copies_of(runs)))
    for tensor, values in zip(caches, expected, strict=True):
        np.testing.assert_array_equal(memory.of(tensor), values)


def test_one_gather_and_one_scatter_whatever_the_number_of_runs(host_operators: list[str], memory: DeviceBytes) -> None:
    target, staging = (cache(DEVICES[0], [256, 64], torch.float32, 256) for _ in range(2))
    memory.put(staging.data_ptr(), noise(1 << 16))
    order = np.random.default_rng(0).permutation(256)
    runs = [(target.data_ptr() + 256 * to, staging.data_ptr() + 256 * int(at), 256) for to, at in enumerate(order)]
    TensorCopier([target, staging])(copies_of(runs))
    np.testing.assert_array_equal(memory.of(target).reshape(256, 256), noise(1 << 16).reshape(256, 256)[order])
    assert host_operators == ["index_select", "index_copy_"]


def test_neighbours_in_a_segment_of_torch_npu_take_one_scatter(host_operators: list[str], memory: DeviceBytes) -> None:
    torch.npu.empty_cache()  # what follows gets a segment of 20 MiB
    layers = [cache(DEVICES[0], [64, 8, 2048], torch.uint8, 512) for _ in range(4)]
    staging = cache(DEVICES[0], [4 * 64 * 1024], torch.uint8, 512)
    before = [noise(layer.numel(), number) for number, layer in enumerate(layers)]
    for layer, values in zip(layers, before, strict=True):
        memory.put(layer.data_ptr(), values)
    memory.put(staging.data_ptr(), noise(staging.numel(), 9))
    copier = TensorCopier(layers, [staging], segments=mapped_segments(DEVICES[0]))
    runs = [
        (layer.data_ptr() + (block * 8 + 3) * 2048, staging.data_ptr() + (number * 64 + block) * 1024, 1024)
        for number, layer in enumerate(layers)
        for block in range(64)
    ]
    torch.npu.synchronize()
    in_a_thread(lambda: copier(copies_of(runs)))
    assert host_operators == ["index_copy_"]
    for number, (layer, values) in enumerate(zip(layers, before, strict=True)):
        values.reshape(64, 8, 2048)[:, 3, :1024] = noise(staging.numel(), 9).reshape(4, 64, 1024)[number]
        np.testing.assert_array_equal(memory.of(layer), values)


# Pulls


class Wire(Link):
    """Stands for a transfer engine: writes a peer's bytes to device addresses, without torch or a stream."""

    def __init__(self, memory: DeviceBytes, peer: Bytes) -> None:
        self.memory = memory
        self.peer = peer
        self.reads: list[Copies] = []

    def read(self, copies: Copies, timeout_s: float, later_bytes: int = 0, given_up: GivenUp = never) -> None:
        self.reads.append(copies)
        columns = (column.tolist() for column in (copies.destinations, copies.sources, copies.sizes))
        for to, start, size in zip(*columns, strict=True):
            at = start - self.peer.ctypes.data
            self.memory.put(to, self.peer[at : at + size])

    def prove(self, timeout_s: float) -> None:
        """It is known whose bytes these are."""

    def close(self) -> None:
        """Nothing is open."""

    @property
    def settled(self) -> bool:
        return True


@pytest.mark.usefixtures("host_operators")
def test_a_pull_is_staged_on_the_device(memory: DeviceBytes, monkeypatch: pytest.MonkeyPatch) -> None:
    target = cache(DEVICES[0], [64, 8, 4096], torch.uint8, 1 << 20)
    peer, before = noise(64 * 4 * 4096), noise(64 * 8 * 4096, 1)
    memory.put(target.data_ptr(), before)
    region = Region(target.data_ptr(), target.numel())
    planner = RemoteReader.with_device_staging(CostModel.of_protocol("ascend"), (region,), 4096, [target])
    assert planner.staging is not None
    assert planner.staging.region.address % HUGE_PAGE == 0
    copies = copies_of(
        [
            (region.address + (block * 8 + head) * 4096, peer.ctypes.data + (block * 4 + head) * 4096, 4096)
            for block in range(0, 64, 2)
            for head in range(4)
        ]
    )
    link = Wire(memory, peer)
    torch.npu.synchronize()
    monkeypatch.setenv("SIMACL_COPY_US", "500")
    remote = RegionTable([Region(peer.ctypes.data, peer.nbytes)])
    with planner.planned(copies, remote) as schedule:
        assert len(list(schedule.windows())) > 2
        planner.carry_out(link, schedule, 30.0)
    expected = before.reshape(64, 8, 4096).copy()
    expected[::2, :4] = peer.reshape(64, 4, 4096)[::2]
    np.testing.assert_array_equal(memory.of(target).reshape(64, 8, 4096), expected)
    assert len(concatenate(link.reads)) < len(copies) / 4
