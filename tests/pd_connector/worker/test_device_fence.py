"""Fences: a pull writes nothing before the device has done the work that it had been given before the pull."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pd_connector.orders import Cause
from pd_connector.worker.device_fence import RaiseFence, fences, no_fence
from tests.support.connector.engines import OURS, THEIRS, DecodeWorker, Site, an_order
from tests.support.waiting import WAIT_S, holds_for, until


class Work:
    """Work of a device that a test ends; a fence passes when all work that came before it has ended."""

    def __init__(self) -> None:
        self.raised: list[threading.Event] = []

    def raise_fence(self) -> Any:
        done = threading.Event()
        self.raised.append(done)
        return SimpleNamespace(passed=done.is_set)


def assert_writes_nothing_until(work: Work, worker: DecodeWorker) -> None:
    until(lambda: work.raised)
    holds_for(lambda: worker.untouched and worker.ends.empty(), 0.3)
    for done in work.raised:
        done.set()


def test_a_pull_writes_nothing_before_its_fence_has_passed(site: Site) -> None:
    (worker,), work = site.decode(), Work()
    remote = site.prefill().prefill("r", THEIRS)
    site.session(worker, remote, raise_fence=work.raise_fence).submit(an_order("r", remote, OURS))
    assert_writes_nothing_until(work, worker)
    assert worker.next_end().cause == ""
    assert worker.holds([(OURS, 0, 69)])


def test_a_fence_is_raised_when_the_pull_is_ordered_and_not_when_its_turn_comes(site: Site) -> None:
    """Later, it would wait for the work of later steps too, which does not write to the blocks."""
    (worker,), work = site.decode(), Work()
    remote = site.prefill().prefill("r", THEIRS)
    session = site.session(worker, remote, raise_fence=work.raise_fence)
    for number in range(3):
        session.submit(an_order(f"r{number}", remote, OURS))
        assert len(work.raised) == number + 1
    assert_writes_nothing_until(work, worker)
    for _ in range(3):
        worker.next_end()


def test_a_device_that_does_not_end_its_work_in_time_fails_the_pull_before_it_writes(site: Site) -> None:
    (worker,), work = site.decode(), Work()
    worker.pull_timeout_s = 0.5
    prefill = site.prefill()
    remote = prefill.prefill("r", THEIRS)
    site.session(worker, remote, raise_fence=work.raise_fence).submit(an_order("r", remote, OURS))
    end = worker.next_end()
    assert end.cause == Cause.TIMEOUT
    assert "the pull timeout of 0.5 s was over before the device had done the work" in end.reason
    assert worker.untouched
    until(lambda: prefill.leases.active == 0)


def test_a_worker_that_shuts_down_does_not_wait_for_its_device(site: Site) -> None:
    asked = threading.Event()

    def passed() -> bool:
        asked.set()
        return False

    (worker,) = site.decode()
    remote = site.prefill().prefill("r", THEIRS)
    session = site.session(worker, remote, raise_fence=lambda: SimpleNamespace(passed=passed))
    session.submit(an_order("r", remote, OURS))
    assert asked.wait(WAIT_S), "the pull does not wait for the device"
    session.close()
    assert session.join(worker.pull_timeout_s / 2)
    assert worker.untouched


def test_a_device_that_fails_fails_the_pull(site: Site) -> None:
    def broken() -> bool:
        raise RuntimeError("the device is lost")

    (worker,) = site.decode()
    remote = site.prefill().prefill("r", THEIRS)
    fence = SimpleNamespace(passed=broken)
    site.session(worker, remote, raise_fence=lambda: fence).submit(an_order("r", remote, OURS))
    end = worker.next_end()
    assert end.cause == Cause.INTERNAL
    assert "the device is lost" in end.reason
    assert worker.untouched


# On a device


def test_nothing_needs_to_be_waited_for_on_the_cpu() -> None:
    assert fences(torch.device("cpu")) is no_fence
    raise_fence: RaiseFence = no_fence
    assert raise_fence() is None


@pytest.mark.parametrize("device", ["cuda:1", "npu:1"])
def test_a_fence_is_recorded_on_the_models_stream_and_asked_on_any_thread(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    done = False
    set_on: list[tuple[int, object]] = []
    event = SimpleNamespace(query=lambda: done)
    streams: list[object] = []

    def current_stream(of: object) -> Any:
        streams.append(of)
        return SimpleNamespace(record_event=lambda: event)

    module = SimpleNamespace(
        current_stream=current_stream, set_device=lambda of: set_on.append((threading.get_ident(), of))
    )
    wanted: Any = SimpleNamespace(type=device.partition(":")[0])  # torch knows no "npu" without torch_npu
    monkeypatch.setattr(torch, "get_device_module", lambda of: module if of is wanted else None)
    fence: Any = fences(wanted)()
    assert streams == [wanted]
    answers: list[bool] = []
    for now in (False, True):
        done = now
        thread = threading.Thread(target=lambda: answers.append(fence.passed()))
        thread.start()
        thread.join()
        assert set_on[-1] == (thread.ident, wanted), "on an NPU, a thread has no device by default"
    assert answers == [False, True]
    assert streams == [wanted], "recorded once"
