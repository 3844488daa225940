"""What a call takes from the device: by PyTorch's allocator, or past it."""

from typing import Any

import pytest
import torch

from pd_connector.vllm.npu.memory_watch import DeviceMemoryWatch


class Npu:
    """A device of which calls take memory: of the allocator, in passing, or past it, for workspace that is kept."""

    def __init__(self) -> None:
        self.allocated = self.peak = 100
        self.free = 1000
        self.kept = 0
        self.calls: list[str] = []

    def take_in_passing(self, size: int) -> None:
        self.peak = max(self.peak, self.allocated + size)

    def take_workspace(self, size: int) -> None:
        self.free -= max(0, size - self.kept)
        self.kept = max(self.kept, size)

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def empty_cache(self) -> None:
        self.calls.append("empty_cache")
        self.free += self.kept
        self.kept = 0

    def reset_peak_memory_stats(self) -> None:
        self.peak = self.allocated

    def memory_allocated(self) -> int:
        return self.allocated

    def max_memory_allocated(self) -> int:
        return self.peak

    def mem_get_info(self) -> tuple[int, int]:
        return self.free, 2000


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> Any:
    device = Npu()
    monkeypatch.setattr(torch, "npu", device, raising=False)
    return device


def test_memory_that_a_call_takes_in_passing_is_seen(npu: Npu) -> None:
    npu.peak = 5000  # of an earlier call
    assert DeviceMemoryWatch().taken_by(lambda: npu.take_in_passing(300)) == 300


def test_memory_that_a_call_takes_past_the_allocator_is_seen(npu: Npu) -> None:
    def call() -> None:
        npu.take_workspace(250)
        npu.take_in_passing(30)

    assert DeviceMemoryWatch().taken_by(call) == 250


def test_workspace_that_is_kept_from_an_earlier_call_hides_nothing(npu: Npu) -> None:
    npu.take_workspace(400)
    assert DeviceMemoryWatch().taken_by(lambda: npu.take_workspace(250)) == 250


def test_the_call_has_ended_before_it_is_judged(npu: Npu) -> None:
    assert DeviceMemoryWatch().taken_by(lambda: npu.calls.append("call")) == 0
    assert npu.calls == ["synchronize", "empty_cache", "call", "synchronize"]


def test_what_is_not_in_use_is_given_back(npu: Npu) -> None:
    DeviceMemoryWatch().give_back()
    assert npu.calls == ["synchronize", "empty_cache"]
