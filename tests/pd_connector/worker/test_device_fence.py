"""Fences: a pull writes nothing before the device has done the work that it had been given before the pull.

Nor is a step that drafts reported before the device has done it. There is no device here: the events are the test's.
"""

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from pd_connector.connector import PDConnector
from pd_connector.orders import Cause, Orders
from pd_connector.vllm.metadata import StepMetadata
from pd_connector.vllm.releases import installed
from pd_connector.worker import worker as worker_module
from pd_connector.worker.device_fence import RaiseFence, StepEnds, fences, landing, no_fence
from pd_connector.worker.host.pool import _event_recorder
from pd_connector.worker.pulls import Pulls
from pd_connector.worker.unawaited_pulls import PrefixPulls
from tests.support.connector.engines import OURS, THEIRS, DecodeWorker, Site, an_order
from tests.support.connector.vllm_engine import BLOCK_TOKENS, CACHES, LAYERS, StartEngine, a_config
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
    worker.pull_timeout_s = 1.0
    prefill = site.prefill()
    remote = prefill.prefill("r", THEIRS)
    site.session(worker, remote, raise_fence=work.raise_fence).submit(an_order("r", remote, OURS))
    end = worker.next_end()
    assert end.cause == Cause.TIMEOUT
    assert "the pull timeout of 1.0 s was over before the device had done the work" in end.reason
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


@pytest.mark.parametrize("of", [lambda npu: fences(npu)(), lambda npu: _event_recorder(npu)()], ids=["pull", "store"])
def test_what_begins_is_behind_the_stream_on_which_vllm_ascend_moves_states(
    monkeypatch: pytest.MonkeyPatch, of: Callable[[Any], object]
) -> None:
    calls: list[tuple[str, object]] = []
    moved = object()

    def record_event() -> object:
        calls.append(("record", "model"))
        return SimpleNamespace(query=lambda: True)

    model = SimpleNamespace(wait_event=lambda event: calls.append(("wait", event)), record_event=record_event)
    ascend = SimpleNamespace(_GLOBAL_STREAM=SimpleNamespace(record_event=lambda: moved))
    monkeypatch.setitem(sys.modules, "vllm_ascend.utils", ascend)
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(current_stream=lambda _: model))
    npu: Any = SimpleNamespace(type="npu")
    of(npu)
    assert calls == [("wait", moved), ("record", "model")]


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


# Steps that draft


def test_a_step_is_reported_when_the_device_has_done_all_that_it_has_launched() -> None:
    work = Work()
    steps = StepEnds(work.raise_fence)
    steps.begin([1])
    assert steps.take() == [], "its drafts are not launched yet"
    steps.begin([2])
    assert steps.take() == []
    steps.begin([])
    (first, second) = work.raised
    second.set()
    assert steps.take() == [], "what comes later is done first"
    first.set()
    assert steps.take() == [1, 2]
    assert steps.take() == []


def test_what_a_step_has_launched_is_known_when_the_next_begins() -> None:
    """Not before: behind the last call of a step, vllm-ascend moves states."""
    work = Work()
    steps = StepEnds(work.raise_fence)
    steps.begin([1])
    steps.begin([2])
    (first,) = work.raised
    first.set()
    assert steps.take() == [1]


def test_steps_without_drafts_are_reported_at_once_and_so_are_all_where_nothing_needs_to_be_waited_for() -> None:
    steps = StepEnds()
    steps.begin([1])
    assert steps.take() == [1]
    steps.begin([])
    assert steps.take() == []
    steps = StepEnds(no_fence)
    steps.begin([1])
    steps.begin([])
    assert steps.take() == [1]


@pytest.mark.parametrize("drafts", [False, True])
def test_a_worker_reports_a_step_that_drafts_when_its_device_has_done_it(
    start: StartEngine, monkeypatch: pytest.MonkeyPatch, drafts: bool
) -> None:
    work = Work()
    monkeypatch.setattr(worker_module, "drafts_late", lambda config: drafts)
    monkeypatch.setattr(worker_module, "fences", lambda device: work.raise_fence)
    worker = start("kv_producer").worker

    def step(*numbers: int) -> dict[int, int]:
        """What is reported in a step, behind whose last call vLLM may launch more."""
        worker.bind_connector_metadata(StepMetadata(Orders(steps=numbers)))
        report = worker.build_connector_worker_meta()
        worker.wait_for_save()
        worker.clear_connector_metadata()
        return dict(report.report.steps) if report is not None else {}

    reported = step(1), step()
    if not drafts:
        assert reported == ({1: 1}, {})
        return
    assert reported == ({}, {})
    work.raised[0].set()
    assert step(2) == {1: 1}
    assert step() == {}


@pytest.mark.usefixtures("fabric")
@pytest.mark.parametrize("late", ["", "drafts", "zeroes"])
@pytest.mark.parametrize("role", ["kv_consumer", "kv_both", "kv_producer"])
def test_pulls_wait_for_what_may_still_be_written_to_blocks_that_vllm_has_freed(
    model: Path, monkeypatch: pytest.MonkeyPatch, late: str, role: str
) -> None:
    """VLLM defers the reuse of a block until the results of the last step that used it, except on prefill engines.

    It does not count a step that zeroes a block and then does not run the request (``scheduler/test_states.py``).
    """
    monkeypatch.setattr(worker_module, "drafts_late", lambda config: late == "drafts")
    monkeypatch.setattr(worker_module, "needs_zeroing", lambda config: late == "zeroes")
    work = Work()
    monkeypatch.setattr(worker_module, "fences", lambda device: work.raise_fence)
    monkeypatch.setattr(installed.current(), "defers_block_reuse", True)
    worker = PDConnector(a_config(model, role, peers=[]), KVConnectorRole.WORKER, CACHES)
    worker.register_kv_caches({name: torch.rand(8, 2, BLOCK_TOKENS, 128) for name in LAYERS})
    side = worker._worker
    pulls = [each for each in side._roles if isinstance(each, Pulls)]
    assert [type(each) for each in pulls] == ([PrefixPulls] if role == "kv_producer" else [Pulls, PrefixPulls])
    waits = late in ("drafts", "zeroes") or role == "kv_producer"
    for each in pulls:
        assert each._context.raise_fence == (work.raise_fence if waits else no_fence)
    worker.shutdown()


def test_a_pull_from_a_prefill_engine_that_drafts_begins_when_the_lease_is_written(site: Site) -> None:
    (worker,), prefill = site.decode(), site.prefill(writes_late=True)
    remote = prefill.prefill("r", THEIRS, is_written=False)
    site.session(worker, remote).submit(an_order("r", remote, OURS))
    until(lambda: len(prefill._server._waiting) > 0)
    assert worker.untouched
    assert worker.ends.empty()
    prefill.service.written(remote.lease_id)
    assert worker.next_end().cause == ""
    assert worker.holds([(OURS, 0, 69)])


@pytest.mark.thorough
def test_a_pull_waits_for_a_lease_to_be_written_longer_than_for_an_answer(site: Site) -> None:
    (worker,), prefill = site.decode(), site.prefill(writes_late=True)
    worker.handshake_timeout_s = 1.5
    remote = prefill.prefill("r", THEIRS, is_written=False)
    site.session(worker, remote).submit(an_order("r", remote, OURS))
    holds_for(worker.ends.empty, 3.0)
    prefill.service.written(remote.lease_id)
    assert worker.next_end().cause == ""


@pytest.mark.thorough
def test_a_lease_that_is_not_written_in_time_fails_the_pull_by_name(site: Site) -> None:
    (worker,), prefill = site.decode(), site.prefill(writes_late=True)
    worker.pull_timeout_s = 3.0
    remote = prefill.prefill("r", THEIRS, is_written=False)
    site.session(worker, remote).submit(an_order("r", remote, OURS))
    end = worker.next_end()
    assert end.cause == Cause.TIMEOUT, "P is well, and other pulls go on"
    assert "still writing the draft layers" in end.reason
    assert worker.untouched


@pytest.mark.parametrize(("transport", "device", "waits"), [("tcp", "cuda", 1), ("rdma", "cuda", 0), ("tcp", "cpu", 0)])
def test_what_cuda_may_still_copy_over_tcp_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, transport: str, device: str, waits: int
) -> None:
    waited: list[torch.device] = []

    def default_stream(of: torch.device) -> Any:
        return SimpleNamespace(synchronize=lambda: waited.append(of))

    monkeypatch.setattr(torch.cuda, "default_stream", default_stream)
    landing(transport, torch.device(device, 0))()
    assert waited == [torch.device("cuda", 0)] * waits
