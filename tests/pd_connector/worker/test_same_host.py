"""Pulls on one host: over mapped memory where that works, else as from anywhere, with the same bytes.

Real control channel, real leases, real bytes; the driver is a fake, and the first way the in-process engine.
"""

import ctypes
import logging
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch

from layout.regions import RegionTable
from pd_connector.config import ConnectorConfig, parse_config
from pd_connector.orders import Cause
from pd_connector.stats import StatsRecorder
from pd_connector.vllm.cache_groups import Ranks
from pd_connector.worker import remote_reader, same_host
from pd_connector.worker import worker as worker_module
from pd_connector.worker.pull import AnyEnd
from pd_connector.worker.pull_end import PullFailed
from pd_connector.worker.quarantine import UnsettledPull
from pd_connector.worker.same_host import SameHostLinks, TwoWayEngine, with_second_way
from pd_connector.worker.session import PeerSession
from pd_connector.worker.worker import ConnectorWorker
from tests.support.connector.chunked_prompts import ChunkedPrompt, follow
from tests.support.connector.engines import OURS, THEIRS, Site, an_order
from tests.support.connector.scripted_pulls import raising, scripted_session
from tests.support.connector.shared_memory import Neighbours
from tests.support.connector.staging import stage
from tests.support.connector.vllm_engine import BLOCK_TOKENS, CACHES, LAYERS, a_config
from tests.support.devices.fake_cuda import FakeCuda
from tests.support.devices.shared_devices import SharedDevices
from tests.support.engine.in_process import InProcessEngine, InProcessFabric, InProcessLink
from tests.support.engine.ipc_engines import FakeIpcEngine
from tests.support.waiting import until
from transfer.control.messages import Place
from transfer.copies.batch.base import CopierStartError
from transfer.copies.batch.cuda import CudaRuntime
from transfer.copies.reshape.reshape_kernel import KernelUnusable
from transfer.engine import cuda_ipc, cuda_ipc_address
from transfer.engine.cuda_ipc import CudaIpcLink
from transfer.engine.cuda_ipc_address import ExportedMemory, ProcessPlace
from transfer.engine.interface import TransferEngine


@pytest.fixture(autouse=True)
def logs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(logging.getLogger("pd_connector"), "propagate", True)
    monkeypatch.setattr(cuda_ipc, "_PATIENCE_S", 0.1)
    caplog.set_level(logging.INFO, "pd_connector")


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said of CUDA IPC."""
    return [message for message in caplog.messages if "CUDA IPC" in message]


def test_a_peer_on_the_same_host_is_read_in_mapped_memory(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    here = Neighbours(site)
    session, end = here.pull()
    assert not end.cause, end.reason
    assert end.mapped_bytes == end.copied_bytes > 0
    assert here.worker.holds([(OURS, 0, 69)])
    assert not site.fabric.reads
    assert here.pull(session)[1].mapped_bytes > 0
    (said,) = lines(caplog)
    assert "is on this host, and its memory is read over CUDA IPC" in said
    stats = StatsRecorder()
    end.count(stats)
    assert (stats.take() or {})["counts"]["pull_bytes_over_ipc"] == end.copied_bytes


@pytest.mark.parametrize(("gpu", "ahead"), [(1, True), (0, False)], ids=["another GPU", "the same GPU"])
def test_where_reads_slow_the_prefill_engine_down_a_prompt_is_still_read_ahead_from_another_gpu(
    site: Site, monkeypatch: pytest.MonkeyPatch, *, gpu: int, ahead: bool
) -> None:
    monkeypatch.setattr(remote_reader, "RANGE_S", 0.0)  # everything is worth reading
    here = Neighbours(site, gpu=gpu)
    prompt = ChunkedPrompt(here.prefill, THEIRS)
    follow(here.worker, prompt)
    session = here.session(prompt.remote(), reads_ahead=False)
    prompt.compute(32)
    session.submit(prompt.order("r", OURS))
    until(lambda: prompt.waiting == 1)
    assert here.worker.holds([(OURS, 0, 32)]) is ahead
    prompt.complete()
    end = here.worker.next_end()
    assert not end.cause, end.reason
    assert (end.ahead_bytes > 0) is ahead
    assert end.mapped_bytes == end.copied_bytes
    assert here.worker.holds([(OURS, 0, 69)])


@pytest.mark.parametrize("staged", [False, True])
def test_what_is_read_in_mapped_memory_waits_for_nothing_else_of_the_device(site: Site, *, staged: bool) -> None:
    here, waited = Neighbours(site), Mock()
    if staged:
        here.ours.register([stage(here.worker, 1 << 20).region])
    assert here.worker.reads is not None
    here.worker.reads.land = waited
    end = here.pull()[1]
    assert not end.cause, end.reason
    assert end.mapped_bytes == end.copied_bytes > 0
    assert ("reshape" in end.seconds) == staged
    waited.assert_not_called()
    assert here.worker.holds([(OURS, 0, 69)])


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("open 201", "cuIpcOpenMemHandle_v2 answers 201 .*PID namespaces"),
        ("open 1", "cuIpcOpenMemHandle_v2 answers 1 .*not in this container"),
        ("open 205", "cuIpcOpenMemHandle_v2 answers 205 "),
        ("open 217", "cuIpcOpenMemHandle_v2 answers 217 .*nvidia-smi topo"),
        ("open 704", "cuIpcOpenMemHandle_v2 answers 704 .*its own access"),
        ("no pinned memory", r"cuMemHostRegister refused \d+ bytes: 2 .*ulimit -l"),
        ("no handle", "it shares no memory"),
        ("garbage", "it is no address"),
        ("another boot", "it runs on another host"),
        ("dead", "cuIpcOpenMemHandle_v2 answers 1 "),
        ("restarted", "cannot reach the transfer engine .* it has been closed"),
    ],
)
def test_what_does_not_work_is_read_the_first_way_with_the_reason_in_one_line(
    site: Site, caplog: pytest.LogCaptureFixture, fault: str, said: str
) -> None:
    here = Neighbours(site, ProcessPlace("another boot", 7, 1) if fault == "another boot" else None)
    if fault.startswith("open"):
        here.ours.driver.open_error = int(fault.split()[1])
    elif fault == "no pinned memory":
        here.ours.driver.pin_error = 2
    elif fault == "dead":
        here.theirs.driver.devices.die(here.theirs.driver)
    elif fault == "restarted":
        here.theirs.close()
    elif fault in ("no handle", "garbage"):
        here.announce("" if fault == "no handle" else "cuda-ipc:1@GPU/?")
    session, end = here.pull()
    assert not end.cause, end.reason
    assert end.copied_bytes > end.mapped_bytes == 0
    assert here.worker.holds([(OURS, 0, 69)])
    assert site.fabric.reads
    assert not here.pull(session)[1].mapped_bytes
    assert not here.mapped
    (line,) = lines(caplog)
    assert re.search(f"is read by the transfer engine's protocol, not over CUDA IPC: rank 0: .*{said}", line)


def test_after_a_failed_read_the_first_way_is_taken_for_a_while(
    site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Neighbours(site)
    session, _ = here.pull()
    here.ours.driver.fail_at = 0
    end = here.pull(session)[1]
    assert end.cause is Cause.READ
    assert "CUDA_ERROR_INVALID_VALUE" in end.reason
    here.ours.driver.fail_at = None
    end = here.pull(session)[1]
    assert not end.cause
    assert not end.mapped_bytes
    assert here.worker.holds([(OURS, 0, 69)])
    assert ["a read over CUDA IPC has failed" in line for line in lines(caplog)] == [False, True]
    monkeypatch.setattr(same_host, "_RETRY_S", -1.0)
    here.ours.driver.open_error = 201  # only once more
    session, _ = here.pull()
    here.ours.driver.open_error = 0
    assert here.pull(session)[1].mapped_bytes


def test_a_copy_that_does_not_end_keeps_the_pull_until_it_does(site: Site) -> None:
    here = Neighbours(site)
    ends: list[AnyEnd] = []
    remote = here.prefill.prefill("p", THEIRS)
    session = here.session(remote, settle=ends.append, pull_timeout_s=1.0)
    session.submit(an_order("first", remote, OURS))
    until(lambda: ends, "the first pull has ended")
    here.ours.driver.running.clear()
    session.submit(an_order("second", here.prefill.prefill("q", THEIRS), OURS))
    until(lambda: len(ends) == 2, "the second pull has ended")
    end = ends[1]
    assert isinstance(end, UnsettledPull)
    assert end.end.cause is Cause.TIMEOUT
    assert not any(read.release() for read in end.reads)
    here.ours.driver.running.set()
    until(lambda: all(read.release() for read in end.reads), "its reads have settled")


def test_memory_is_let_go_of_when_the_prefill_engine_goes_away(site: Site) -> None:
    """Nobody pulls meanwhile."""
    here = Neighbours(site)
    session, _ = here.pull()
    assert here.mapped
    here.prefill.close()
    until(lambda: not here.mapped, "nothing is mapped")
    session.check_integrity()


def test_memory_is_let_go_of_when_another_engine_answers(site: Site) -> None:
    """Its leases are located before they are read."""
    here = Neighbours(site, writes_late=True)
    session, end = here.pull()
    assert end.mapped_bytes
    await_second_lane(session)
    remote = here.prefill.prefill("q", THEIRS)
    here.prefill.service.engine_id = "another"
    session.submit(an_order("r", remote, OURS))
    assert here.worker.next_end().cause is Cause.REFUSED
    until(lambda: not here.mapped, "nothing is mapped")


def test_a_refusal_lets_go_of_the_memory_on_all_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_session(monkeypatch, 2) as world:
        world.submit("a")
        until(lambda: world.others, "another lane has links")
        world.scripts["b"] = raising(PullFailed(Cause.REFUSED, "another engine"))
        world.submit("b")
        world.ended()
        assert [peer.let_go_of for peer in (*world.peers, *world.others)] == [1, 1]


def await_second_lane(session: PeerSession) -> None:
    """Wait until the lane that is to be ready for the next pull has its links."""

    def is_there() -> bool:
        peers = [lane.peer for lane in session._lanes.values()]
        return len(peers) == 2 and all(peer is not None and peer.is_linked for peer in peers)

    until(is_there, "the second lane has links")


def test_links_that_were_lost_are_opened_again(site: Site) -> None:
    here = Neighbours(site)
    session, _ = here.pull()
    await_second_lane(session)
    session._let_go()
    until(lambda: not here.mapped, "nothing is mapped")
    assert here.pull(session)[1].mapped_bytes


def test_a_connection_that_ends_while_a_link_is_opened_leaves_nothing_mapped(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Neighbours(site)
    lost: Future[None] = Future()
    links = SameHostLinks(here.ours, (here.announced,), "P", lambda: lost)
    open_link = here.ours.open

    def open_late(*arguments: Any) -> CudaIpcLink:
        link = open_link(*arguments)
        lost.set_result(None)
        return link

    monkeypatch.setattr(here.ours, "open", open_late)
    assert links.link(0) is None
    assert not here.mapped


def test_host_memory_is_read_the_first_way(site: Site) -> None:
    here = Neighbours(site)
    session, _ = here.pull()
    (lane, *_) = session._lanes.values()
    assert lane.peer is not None
    on_device, in_host = (lane.peer.link(0, place) for place in (Place.DEVICE, Place.HOST))
    assert isinstance(on_device, CudaIpcLink)
    assert isinstance(in_host, InProcessLink)
    in_host.is_forgotten = True
    another = lane.peer.link(0, Place.HOST)
    assert another is not in_host
    assert lane.peer.link(0) is on_device
    lane.peer.drop_link(0, Place.HOST)
    assert lane.peer.link(0) is on_device


# What a worker tells of its memory


def worker_with(model: Path, monkeypatch: pytest.MonkeyPatch, engine: TransferEngine | None) -> ConnectorWorker:
    """A prefill worker with caches; ``engine``: None for what it opens itself."""
    monkeypatch.setattr(worker_module, "worker_ranks", lambda: Ranks(0, 1, 0, 1))
    settings = {"host": "127.0.0.1", "canary": "off"}
    config = a_config(model, "kv_producer", **settings)
    make = None if engine is None else lambda _: engine
    worker = ConnectorWorker(config, CACHES, parse_config(settings), StatsRecorder(), make)
    worker.register_caches({name: torch.zeros(8, 2, BLOCK_TOKENS, 128) for name in LAYERS})
    return worker


def test_a_worker_tells_peers_how_to_map_its_caches_and_logs_keep_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = worker_with(model, monkeypatch, TwoWayEngine(InProcessEngine(InProcessFabric()), a_process()))
    handshake = worker.handshake()
    assert handshake is not None
    told = handshake.geometry.same_host_address
    shared = RegionTable([each.region for each in ExportedMemory.decode(told).allocations])
    for region in handshake.geometry.regions:
        assert not shared.outside(np.array([region.address]), np.array([region.size])).any()
    assert told not in repr(handshake)
    worker.shutdown()


def test_a_worker_whose_caches_cannot_be_mapped_tells_nothing_and_logs_why(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    process = a_process()
    process.driver.has_handles = False
    worker = worker_with(model, monkeypatch, TwoWayEngine(InProcessEngine(InProcessFabric()), process))
    handshake = worker.handshake()
    assert handshake is not None
    assert not handshake.geometry.same_host_address
    (line,) = lines(caplog)
    assert "cannot map this worker's KV caches (CUDA IPC)" in line
    assert "sleep mode" in line
    worker.shutdown()


@pytest.mark.parametrize("secret", ["a secret of many letters", None])
def test_a_worker_says_what_it_is_and_whether_it_has_a_secret_when_it_opens_its_engine(
    model: Path, monkeypatch: pytest.MonkeyPatch, secret: str | None
) -> None:
    told: list[dict[str, Any]] = []
    if secret is not None:
        monkeypatch.setenv("PD_CONNECTOR_SECRET", secret)

    def open_engine(_: ConnectorConfig, **options: Any) -> TransferEngine:
        told.append(options)
        return InProcessEngine(InProcessFabric())

    monkeypatch.setattr(worker_module, "open_engine", open_engine)
    worker_with(model, monkeypatch, None).shutdown()
    (options,) = told
    assert options["has_secret"] == (secret is not None)
    assert (options["is_read"], options["reads"]) == (True, False)


def a_process() -> FakeIpcEngine:
    return FakeIpcEngine(SharedDevices())


def test_without_a_driver_there_is_one_way(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(CudaRuntime, "load", raises(CopierStartError("no libcuda")))
    engine = InProcessEngine(InProcessFabric())
    assert with_second_way(engine, is_read=False) is engine
    (line,) = lines(caplog)
    assert line.endswith("not over CUDA IPC: no libcuda")
    engine.close()


def test_where_the_system_does_not_tell_the_process_there_is_one_way(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(CudaRuntime, "load", lambda: CudaRuntime(cast(ctypes.CDLL, FakeCuda())))
    monkeypatch.setattr(same_host, "RunKernel", Mock(side_effect=KernelUnusable("no C compiler")))
    monkeypatch.setattr(cuda_ipc_address, "_PID_NAMESPACE", Path("/no/such/namespace"))
    engine = InProcessEngine(InProcessFabric())
    assert with_second_way(engine, is_read=False) is engine
    assert any("not over CUDA IPC" in line and "/no/such/namespace" in line for line in lines(caplog))
    engine.close()


def raises(error: Exception) -> Callable[[], object]:
    def fail() -> object:
        raise error

    return fail


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mock]:
    """The engine for peers on the same host, as it is made on a device."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(CudaRuntime, "load", lambda: "driver")
    with patch.object(same_host, "CudaIpcEngine") as made:
        yield made


@pytest.mark.parametrize("reads", [True, False])
def test_whoever_reads_has_a_kernel_of_its_device(made: Mock, monkeypatch: pytest.MonkeyPatch, reads: bool) -> None:
    monkeypatch.setattr(same_host, "RunKernel", lambda device: f"kernel of {device}")
    with_second_way(Mock(), is_read=False, reads=reads)
    assert made.call_args.kwargs["kernel"] == ("kernel of cuda:3" if reads else None)


def test_without_a_kernel_the_driver_copies_and_the_log_says_why(
    made: Mock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(same_host, "RunKernel", Mock(side_effect=KernelUnusable("no C compiler")))
    assert isinstance(with_second_way(Mock(), is_read=False), TwoWayEngine)
    assert made.call_args.kwargs["kernel"] is None
    (line,) = caplog.messages
    assert "the driver copies over CUDA IPC, which is slower than by a kernel: no C compiler" in line
