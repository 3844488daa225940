"""Device memory for the transfer engine, with CPU tensors."""

import secrets
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pd_connector.config import parse_config
from pd_connector.vllm.cross_layer_tensors import ALIGNMENT
from pd_connector.worker import device_memory as device_memory_module
from pd_connector.worker import transfer_engine
from pd_connector.worker.device_fence import Land
from pd_connector.worker.device_memory import DeviceIdentityMemory, device_memory
from transfer.engine.mooncake import IDENTITY_BYTES, MooncakeOptions

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [1, ALIGNMENT, ALIGNMENT + 1])
def test_device_memory_is_whole_aligned_units(size: int) -> None:
    memory = device_memory(size, CPU, "take less")
    assert memory.data_ptr() % ALIGNMENT == memory.numel() % ALIGNMENT == 0
    assert size <= memory.numel() < size + ALIGNMENT


def test_a_device_without_memory_names_the_size_and_the_way_out() -> None:
    with pytest.raises(MemoryError, match=r"cpu has no \d{14,} bytes left .*: take less"):
        device_memory(1 << 60, CPU, "take less")


def test_what_is_written_is_read_from_any_thread() -> None:
    memory = DeviceIdentityMemory(IDENTITY_BYTES, CPU)
    pages = [memory.region.address + page * 4096 for page in (0, 1, 256)]
    numbers = [secrets.token_bytes(16) for _ in pages]
    for page, number in zip(pages, numbers, strict=True):
        memory.write(page, number)
    read: list[bytes] = []
    thread = threading.Thread(target=lambda: read.extend(memory.read(page, 16) for page in pages))
    thread.start()
    thread.join()
    assert read == numbers
    assert memory.region.address % ALIGNMENT == 0
    assert memory.region.size >= IDENTITY_BYTES


def test_what_has_been_read_into_a_gpu_is_there_before_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    number, asked = secrets.token_bytes(16), list[tuple[str, torch.device]]()

    def land() -> None:
        memory.write(memory.region.address, number)

    def landing(transport: str, device: torch.device) -> Land:
        asked.append((transport, device))
        return land

    monkeypatch.setattr(device_memory_module, "landing", landing)
    memory = DeviceIdentityMemory(IDENTITY_BYTES, CPU)
    assert memory.read(memory.region.address, 16) == number
    assert asked == [("tcp", CPU)]


@pytest.mark.parametrize(
    ("protocol", "device", "computes", "place"),
    [
        ("ascend", "npu", True, "npu"),
        ("tcp", "npu", True, None),
        ("tcp", "cuda", True, "gpu"),
        ("tcp", "cuda", False, None),
        ("rdma", "cuda", True, None),
        ("tcp", "cpu", False, None),
    ],
)
def test_identities_are_where_transports_read_them_and_gpus_take_them(
    monkeypatch: pytest.MonkeyPatch, protocol: str, device: str, computes: bool, place: str | None
) -> None:
    """A doctor computes on no GPU, and needs none."""
    made: list[Any] = []
    places: list[str | None] = []

    def on(place: str) -> Callable[[int], DeviceIdentityMemory]:
        def allocate(size: int) -> DeviceIdentityMemory:
            places.append(place)
            return DeviceIdentityMemory(size, CPU)

        return allocate

    monkeypatch.setattr(DeviceIdentityMemory, "on_npu", on("npu"))
    monkeypatch.setattr(DeviceIdentityMemory, "on_gpu", on("gpu"))
    monkeypatch.setattr(transfer_engine, "device_type", lambda: device)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: computes)
    monkeypatch.setattr(transfer_engine, "MooncakeEngine", lambda *arguments: made.append(arguments))
    transfer_engine.open_engine(parse_config({"protocol": protocol, "host": "127.0.0.1"}), is_read=False)
    [(options, identities, lend)] = made
    assert lend is None
    assert isinstance(options, MooncakeOptions)
    assert options.protocol == protocol
    assert places == [place] * (place is not None)
    assert isinstance(identities, DeviceIdentityMemory) is (place is not None)


def test_on_an_npu_the_device_is_that_of_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    class Npu:
        @staticmethod
        def current_device() -> int:
            return 3

    asked: list[torch.device] = []

    def note(self: DeviceIdentityMemory, size: int, device: torch.device) -> None:
        asked.append(device)

    monkeypatch.setattr(torch, "npu", Npu, raising=False)
    monkeypatch.setattr(torch, "device", lambda *arguments: arguments)
    monkeypatch.setattr(DeviceIdentityMemory, "__init__", note)
    DeviceIdentityMemory.on_npu(4096)
    assert asked == [("npu", 3)]
