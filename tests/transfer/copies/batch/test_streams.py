"""torch's streams as a copier uses them, played by a stand-in. On devices: ``test_gpu`` and ``tests/npu_sim``."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from transfer.copies.batch.base import CopierStartError
from transfer.copies.batch.streams import DeviceStream


class TorchStream:
    """As much of ``torch.cuda.Stream`` as is asked for. Every look at its handle finds another one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.asked: list[object] = []
        self._handles = itertools.count(7)

    @property
    def cuda_stream(self) -> int:
        return next(self._handles)

    def wait_event(self, event: object) -> None:
        self.asked.append(("wait", event))

    def record_event(self) -> object:
        self.asked.append("record")
        return f"event {len(self.asked)}"

    def synchronize(self) -> None:
        self.asked.append("synchronize")


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The devices that were made current, in order."""
    current: list[int] = []
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(Stream=TorchStream, set_device=current.append))
    return current


def test_a_stream_is_on_the_device_that_was_asked_for(devices: list[int]) -> None:
    stream = DeviceStream("cuda", 3)
    assert stream._stream.device == torch.device("cuda", 3)
    assert devices == []
    stream.enter_thread()
    assert devices == [3]


@pytest.mark.usefixtures("devices")
def test_the_handle_is_asked_for_anew_before_every_submission() -> None:
    """A handle that is kept would let a copy overtake the event that it waits for, under torch_npu."""
    stream = DeviceStream("cuda", 0)
    assert [stream.handle(), stream.handle(), stream.handle()] == [7, 8, 9]


def test_what_torch_submits_goes_to_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[object] = []

    @contextmanager
    def of(stream: object) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch, "cuda", SimpleNamespace(Stream=TorchStream, stream=of))
    stream, found = DeviceStream("cuda", 0), []
    stream.run(lambda: found.extend(current))
    assert found == [stream._stream]
    assert not current


@pytest.mark.usefixtures("devices")
def test_events_go_through_the_stream_itself() -> None:
    stream = DeviceStream("cuda", 0)
    before: Any = object()
    stream.wait_event(before)
    end: object = stream.record_event()
    stream.synchronize()
    assert end == "event 2"
    assert stream._stream.asked == [("wait", before), "record", "synchronize"]


def test_a_torch_without_the_device_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: torch.device) -> None:
        raise RuntimeError(f"no driver for {device}\n  frame 1\n  frame 2")

    monkeypatch.setattr(torch, "cuda", SimpleNamespace(Stream=refuse))
    with pytest.raises(CopierStartError, match=r"no stream on cuda:1: no driver for cuda:1\. It needs torch built"):
        DeviceStream("cuda", 1)


def test_a_machine_without_torch_npu_is_refused() -> None:
    with pytest.raises(CopierStartError, match=r"no stream on npu:0: .*torch_npu.*It needs torch and torch_npu"):
        DeviceStream("npu", 0)
