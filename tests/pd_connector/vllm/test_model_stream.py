"""The stream on which vLLM's model computes, by vLLM's own note of it, over the streams of a GPU that is not there."""

import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from vllm.utils import torch_utils

from pd_connector.vllm.model_stream import leave_default_stream

GPU = torch.device("cuda", 0)


class Stream:
    def __init__(self) -> None:
        self.waits_for: list[Stream] = []

    def wait_stream(self, other: "Stream") -> None:
        self.waits_for.append(other)


class Streams:
    """Those of a GPU: each thread begins on the default one."""

    def __init__(self) -> None:
        self.default = Stream()
        self._of_thread = threading.local()

    def current(self, _device: torch.device | None = None) -> Stream:
        return getattr(self._of_thread, "current", self.default)

    def set(self, stream: Stream) -> None:
        self._of_thread.current = stream


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """In a process that vLLM has started, where nobody has asked vLLM for its stream yet."""
    streams = Streams()
    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: Stream())
    monkeypatch.setattr(torch.cuda, "current_stream", streams.current)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda _device: streams.default)
    monkeypatch.setattr(torch.cuda, "set_stream", torch_utils._patched_set_stream)
    monkeypatch.setattr(torch_utils, "prev_set_stream", streams.set)
    monkeypatch.setattr(torch_utils, "_current_stream_tls", threading.local())
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    return streams


def capture(streams: Streams) -> None:
    """What vLLM does to learn how much memory its CUDA graphs take: on a stream of theirs, and back."""
    before = streams.current()
    torch.cuda.set_stream(Stream())
    torch.cuda.set_stream(before)


def test_a_model_that_a_capture_has_left_on_the_default_stream_gets_its_own(streams: Streams) -> None:
    capture(streams)
    assert torch_utils.current_stream() is streams.default
    leave_default_stream(GPU)
    own = streams.current()
    assert own is not streams.default
    assert own.waits_for == [streams.default], "the caches are zero before anything is written to them"
    capture(streams)
    assert torch_utils.current_stream() is own, "what vLLM captures and copies goes by its note"


def test_a_model_with_a_stream_of_its_own_keeps_it(streams: Streams) -> None:
    torch.cuda.set_stream(own := Stream())
    leave_default_stream(GPU)
    assert streams.current() is torch_utils.current_stream() is own


def on_another_thread(call: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as thread:
        thread.submit(call).result()


@pytest.mark.parametrize("is_ours", [True, False], ids=["on another thread", "in a process of its user"])
def test_a_model_whose_steps_other_threads_may_run_stays(
    streams: Streams, monkeypatch: pytest.MonkeyPatch, is_ours: bool
) -> None:
    if not is_ours:
        monkeypatch.setattr(multiprocessing, "parent_process", lambda: None)

    def leave() -> None:
        capture(streams)
        leave_default_stream(GPU)
        assert streams.current() is streams.default

    on_another_thread(leave) if is_ours else leave()
