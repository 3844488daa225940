"""Device memory for the transfer engine, with CPU tensors."""

import secrets
import threading
from typing import Any

import pytest
import torch

from pd_connector.config import parse_config
from pd_connector.vllm.cross_layer_tensors import ALIGNMENT
from pd_connector.worker import transfer_engine
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


@pytest.mark.parametrize(("protocol", "on_device"), [("ascend", True), ("tcp", False)])
def test_identities_are_in_device_memory_on_ascend_only(
    monkeypatch: pytest.MonkeyPatch, protocol: str, on_device: bool
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(DeviceIdentityMemory, "on_npu", lambda size: DeviceIdentityMemory(size, CPU))
    monkeypatch.setattr(transfer_engine, "MooncakeEngine", lambda *arguments: made.append(arguments))
    transfer_engine.open_engine(parse_config({"protocol": protocol, "host": "127.0.0.1"}), is_read=False)
    [(options, identities, lend)] = made
    assert lend is None
    assert isinstance(options, MooncakeOptions)
    assert options.protocol == protocol
    assert isinstance(identities, DeviceIdentityMemory) is on_device


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
