"""The worker side: which roles it takes up, how they are asked, what a request waits for, and how all of it ends.

Covers: pd_connector.worker.readers.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

from layout.geometry import Region
from pd_connector.config import ConfigError, parse_config
from pd_connector.orders import CanaryRoom, ChecksumReport, Orders, Report
from pd_connector.stats import StatsRecorder
from pd_connector.vllm.cache_groups import Ranks
from pd_connector.worker import worker as module
from pd_connector.worker.canary import CanaryPulls
from pd_connector.worker.host.pool import HostPool
from pd_connector.worker.lease_checksums import LeaseChecksums
from pd_connector.worker.pulls import Pulls
from pd_connector.worker.unawaited_pulls import LandingPulls
from pd_connector.worker.worker import ConnectorWorker
from pd_connector.worker.worker_role import PartEnd, WorkerRole
from tests.support.connector.vllm_engine import BLOCK_TOKENS, CACHES, LAYERS, a_config
from tests.support.engine.in_process import InProcessEngine, InProcessFabric
from transfer.engine.interface import EngineStartError

Calls = list[tuple[str, str]]


@dataclass(frozen=True)
class Part:
    """The end of a part of a request."""

    request_id: str
    failure: str = ""
    is_told: bool = False
    comes_of_leaving: bool = False

    def count(self, stats: StatsRecorder) -> None:
        stats.count("parts", label=self.request_id)


class Recorded(WorkerRole):
    """Does nothing but write down what it is asked."""

    def __init__(self, name: str, calls: Calls) -> None:
        self.name, self.calls = name, calls
        self.starts: Sequence[str] = ()
        self.ends: list[PartEnd] = []
        self.report = Report()

    def execute(self, orders: Orders) -> Sequence[str]:
        self.calls.append((self.name, "execute"))
        return self.starts

    def take_ends(self) -> Sequence[PartEnd]:
        ends, self.ends = self.ends, []
        return ends

    def take_report(self) -> Report:
        return self.report

    def close(self) -> None:
        self.calls.append((self.name, "close"))

    def join(self) -> None:
        self.calls.append((self.name, "join"))

    def check_integrity(self) -> None:
        self.calls.append((self.name, "check"))


class Engine(InProcessEngine):
    """Writes down when it is closed."""

    def __init__(self, calls: Calls) -> None:
        super().__init__(InProcessFabric())
        self.calls = calls

    def close(self) -> None:
        self.calls.append(("engine", "close"))
        super().close()


@dataclass
class Worker:
    side: ConnectorWorker
    stats: StatsRecorder
    engine: Engine
    calls: Calls

    def with_roles(self, *names: str) -> list[Recorded]:
        """Other roles in the place of its own."""
        roles = [Recorded(name, self.calls) for name in names]
        self.side._roles[:] = roles
        return roles

    @property
    def kinds(self) -> list[type[WorkerRole]]:
        return [type(role) for role in self.side._roles]


Open = Callable[..., Worker]


@pytest.fixture
def worker_of(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Makes workers of a kv_role; ``registered`` ones know their caches."""
    before, made = set(threading.enumerate()), list[Worker]()
    monkeypatch.setattr(module, "worker_ranks", lambda: Ranks(0, 1, 0, 1))

    def make(role: str, policy: str = "fail", *, registered: bool = False, **extra: Any) -> Worker:
        settings = {"host": "127.0.0.1", "protocol": "tcp", "canary": "off", **extra}
        config = a_config(model, role, policy, **settings)
        stats, engine = StatsRecorder(), Engine(calls := Calls())
        worker = Worker(
            ConnectorWorker(config, CACHES, parse_config(settings), stats, lambda _: engine), stats, engine, calls
        )
        if registered:
            worker.side.register_caches({name: torch.zeros(8, 2, BLOCK_TOKENS, 128) for name in LAYERS})
        made.append(worker)
        return worker

    yield make
    for worker in made:
        worker.side.check_integrity()
        worker.side.shutdown()
    assert set(threading.enumerate()) <= before


# Roles


@pytest.mark.thorough
@pytest.mark.parametrize("needs", [False, True])
def test_pulls_to_where_vllm_zeroes_blocks_clear_what_they_leave(
    worker_of: Open, monkeypatch: pytest.MonkeyPatch, needs: bool
) -> None:
    monkeypatch.setattr(module, "needs_zeroing", lambda config: needs)
    worker = worker_of("kv_consumer", registered=True, host_transfers="auto", cpu_bytes_to_use=64 << 20, canary=None)
    _, pulls, canaries, landings = cast("list[Any]", worker.side._roles)
    contexts = [each._context for each in (pulls, landings, canaries._pulls)]
    cleaned = [getattr(context.clear_tails, "_geometry", None) for context in contexts]
    assert cleaned == ([contexts[0].local, contexts[1].local, None] if needs else [None] * 3)


@pytest.mark.parametrize(
    ("kv_role", "settings", "kinds"),
    [
        ("kv_producer", {}, []),
        ("kv_consumer", {}, [Pulls]),
        ("kv_both", {}, [Pulls]),
        ("kv_producer", {"verify": True}, [LeaseChecksums]),
        ("kv_consumer", {"verify": True}, [Pulls]),
        ("kv_both", {"verify": True, "cpu_bytes_to_use": 64 << 20}, [HostPool, LeaseChecksums, Pulls]),
        ("kv_consumer", {"host_transfers": "auto", "cpu_bytes_to_use": 64 << 20}, [HostPool, Pulls, LandingPulls]),
        ("kv_producer", {"host_transfers": "always", "cpu_bytes_to_use": 64 << 20}, [HostPool]),
        ("kv_producer", {"canary": "refuse"}, []),
        ("kv_consumer", {"canary": "refuse"}, [Pulls, CanaryPulls]),
        ("kv_both", {"canary": None}, [Pulls, CanaryPulls]),
    ],
)
def test_a_worker_takes_up_what_its_engine_does(
    worker_of: Open, kv_role: str, settings: dict[str, Any], kinds: list[type[WorkerRole]]
) -> None:
    assert worker_of(kv_role, registered=True, **settings).kinds == kinds


@pytest.mark.parametrize(("kv_role", "canary", "tells"), [
    ("kv_producer", "refuse", False), ("kv_consumer", "off", False), ("kv_consumer", "warn", True),
])  # fmt: skip
def test_a_worker_that_takes_canaries_says_what_it_has_room_for(
    worker_of: Open, kv_role: str, canary: str, tells: bool
) -> None:
    handshake = worker_of(kv_role, registered=True, canary=canary).side.handshake()
    assert handshake is not None
    assert handshake.canary == (CanaryRoom(512, 4, 32, 16) if tells else None)


def test_workers_that_share_the_computation_of_prompts_tell_by_a_report_alone(
    worker_of: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM has one place for the handshakes of all that have the same tensor parallel rank."""
    monkeypatch.setattr(module, "worker_ranks", lambda: Ranks(1, 2, 0, 1, 1, 2))
    worker = worker_of("kv_producer", registered=True)
    assert worker.side.handshake() is None
    assert [*worker.side.take_report().handshakes] == [(0, 3)]


def test_what_a_worker_tells_peers_is_known_once_its_caches_are(worker_of: Open) -> None:
    assert worker_of("kv_both").side.handshake() is None
    worker = worker_of("kv_both", registered=True, cpu_bytes_to_use=64 << 20)
    handshake = worker.side.handshake()
    assert handshake is not None
    (host, _) = worker.side._roles
    assert isinstance(host, HostPool)
    assert handshake.host_slots == host.slots > 0
    assert handshake.geometry.engine_address == worker.engine.address
    assert handshake.geometry.transport == "tcp"
    assert handshake.geometry.identity == worker.engine.identity
    assert set(handshake.geometry.regions) <= set(worker.engine.memory.table.regions)


def test_a_worker_tells_what_it_computes_with_where_engines_share_blocks(worker_of: Open) -> None:
    def told(quantization: str | None, **settings: Any) -> str:
        side = worker_of("kv_producer", cpu_bytes_to_use=64 << 20, **settings).side
        side._vllm_config.model_config.quantization = quantization
        side.register_caches({name: torch.zeros(8, 2, BLOCK_TOKENS, 128) for name in LAYERS})
        handshake = side.handshake()
        assert handshake is not None
        return handshake.arithmetic

    assert (told(None), told("fp8")) == ("", "")
    plain, quantised = (told(each, pool="127.0.0.1:50052") for each in (None, "fp8"))
    assert plain != quantised


@pytest.mark.parametrize(
    ("kv_role", "settings", "is_shown", "is_registered", "buffers"),
    [
        ("kv_producer", {}, False, False, 0),
        ("kv_producer", {"host_transfers": "auto"}, True, True, 0),
        ("kv_producer", {"host_transfers": "always"}, True, True, 0),
        ("kv_consumer", {}, False, False, 1),
        ("kv_consumer", {"host_transfers": "always"}, False, True, 2),
        ("kv_consumer", {"host_transfers": "always", "tuning": {"staging_bytes": 0}}, False, True, 0),
        ("kv_both", {}, False, False, 1),
        ("kv_both", {"host_transfers": "auto"}, True, True, 2),
    ],
)
def test_host_memory_is_registered_and_shown_only_if_settings_say_so_and_nothing_else_but_caches_and_staging_buffers(
    worker_of: Open, kv_role: str, settings: dict[str, Any], is_shown: bool, is_registered: bool, buffers: int
) -> None:
    settings = {"tuning": {"staging_bytes": 8 << 20}, **settings}
    worker = worker_of(kv_role, registered=True, cpu_bytes_to_use=64 << 20, **settings)
    handshake, host = worker.side.handshake(), worker.side._roles[0]
    assert handshake is not None
    assert isinstance(host, HostPool)
    assert (handshake.host is not None) == is_shown
    assert handshake.host is None or handshake.host.regions == (host.region,)
    registered = {*worker.engine.memory.table.regions}
    known = {*handshake.geometry.regions} | ({host.region} if is_registered else set())
    assert known <= registered
    assert [region.size for region in registered - known] == [settings["tuning"]["staging_bytes"]] * buffers


@pytest.mark.parametrize("kv_role", ["kv_producer", "kv_consumer"])
@pytest.mark.parametrize("transfers", ["auto", "always"])
def test_a_transport_that_cannot_use_host_memory_is_refused(worker_of: Open, kv_role: str, transfers: str) -> None:
    worker = worker_of(kv_role, cpu_bytes_to_use=64 << 20, protocol="ascend", host_transfers=transfers)
    with pytest.raises(
        ConfigError, match=f"host_transfers = '{transfers}': over the Ascend transport.*; set it to 'off'$"
    ):
        worker.side.register_caches({name: torch.zeros(8, 2, BLOCK_TOKENS, 128) for name in LAYERS})


@pytest.mark.parametrize(
    ("kv_role", "settings"),
    [
        ("kv_producer", {"host_transfers": "auto"}),
        ("kv_consumer", {"host_transfers": "auto"}),
        ("kv_consumer", {"host_transfers": "always", "tuning": {"staging_bytes": 0}}),
        ("kv_both", {"host_transfers": "always"}),
    ],
)
def test_host_memory_that_the_engine_refuses_ends_the_start_with_the_way_out(
    worker_of: Open, kv_role: str, settings: dict[str, Any]
) -> None:
    worker = worker_of(kv_role, cpu_bytes_to_use=64 << 20, **settings)
    register, calls = worker.engine.register, list[Sequence[Region]]()

    def refuse_a_second_time(regions: Sequence[Region]) -> None:
        calls.append(regions)
        if len(calls) > 1:
            raise EngineStartError("the NIC takes no more")
        register(regions)

    worker.engine.register = refuse_a_second_time  # type: ignore[method-assign]
    with pytest.raises(EngineStartError) as refusal:
        worker.side.register_caches({name: torch.zeros(8, 2, BLOCK_TOKENS, 128) for name in LAYERS})
    host = calls[1][0]
    assert str(refusal.value) == (
        f"host_transfers: the transfer engine refuses the {host.size} bytes of this worker's host memory, which must "
        "be registered in one piece: the NIC takes no more. Allow the process to lock more memory (ulimit -l), set "
        "cpu_bytes_to_use to less, or host_transfers to 'off'"
    )
    assert 0 < host.size <= 64 << 20


def test_a_handshake_that_vllm_does_not_pass_on_goes_with_the_next_report(worker_of: Open) -> None:
    passed_on, reported = (worker_of("kv_producer", registered=True) for _ in range(2))
    handshake = passed_on.side.handshake()
    assert not passed_on.side.take_report()
    (sent,) = reported.side.take_report().handshakes.items()
    assert sent == ((0, 0), reported.side.handshake())
    assert not reported.side.take_report()
    assert handshake is not None
    assert not worker_of("kv_producer").side.take_report(), "there are no caches yet"


@pytest.mark.parametrize(
    ("protocol", "device", "ahead"), [("tcp", "cuda", False), ("rdma", "cuda", True), ("tcp", "cpu", True)]
)
def test_prompts_are_not_read_ahead_where_a_gpu_copies_piece_by_piece_what_is_read(
    worker_of: Open, monkeypatch: pytest.MonkeyPatch, protocol: str, device: str, ahead: bool
) -> None:
    monkeypatch.setattr(module, "device_type", lambda: device)
    (pulls,) = worker_of("kv_consumer", registered=True, protocol=protocol).side._roles
    assert isinstance(pulls, Pulls)
    assert pulls._context.reads_ahead is ahead


@pytest.mark.parametrize(("ranks", "protocol", "left"), [(1, "tcp", 1), (2, "tcp", 0), (1, "rdma", 0)])
def test_the_model_of_a_single_rank_leaves_the_stream_that_copies_over_tcp_wait_for(
    worker_of: Open, monkeypatch: pytest.MonkeyPatch, ranks: int, protocol: str, left: int
) -> None:
    devices: list[torch.device] = []
    monkeypatch.setattr(module, "device_type", lambda: "cuda")
    monkeypatch.setattr(module, "worker_ranks", lambda: Ranks(0, ranks, 0, 1))
    monkeypatch.setattr(module, "leave_default_stream", devices.append)
    worker_of("kv_producer", registered=True, protocol=protocol)
    assert devices == [torch.device("cpu")] * left


def test_prices_of_the_user_take_the_place_of_the_protocols(worker_of: Open) -> None:
    def prices(**settings: Any) -> tuple[float, float]:
        (pulls,) = worker_of("kv_consumer", registered=True, **settings).side._roles
        assert isinstance(pulls, Pulls)
        cost = pulls._context.reads._cost
        return cost.alpha, cost.beta

    alpha, beta = prices()
    assert prices(tuning={"descriptor_cost_us": 77.0}) == pytest.approx((77e-6, beta))
    assert prices(tuning={"byte_cost_ns": 3.0}) == pytest.approx((alpha, 3e-9))


def test_a_layers_first_step_leaves_the_scales_that_were_brought_before_it(worker_of: Open) -> None:
    """vLLM's own layer, which sets a scale for each token and head to 1, in the blocks of its kernel."""
    side, impl = worker_of("kv_consumer").side, TritonAttentionImpl(4, 64, 0.125, 2, None, None, "int8_per_token_head")
    caches = {name: torch.zeros(8, 2, BLOCK_TOKENS, 128) for name in LAYERS}
    of_kernel = caches["l0"][:, :, : BLOCK_TOKENS // 2]
    tensors = {"encoder": torch.tensor([]), "l0": of_kernel}
    layers = {name: SimpleNamespace(impl=impl, kv_cache=tensor) for name, tensor in tensors.items()}
    side._vllm_config.compilation_config.static_forward_context = layers
    side.register_caches(caches)
    brought = caches["l0"].uniform_().clone()
    impl._pth_key_value_caches(of_kernel)
    assert torch.equal(caches["l0"], brought)
    assert impl._k_scale_cache is not None
    assert impl._k_scale_cache.shape == (8, BLOCK_TOKENS // 2, 2)


# What requests wait for


def test_a_request_waits_for_its_parts_of_all_roles(worker_of: Open) -> None:
    worker = worker_of("kv_both")
    host, pulls = worker.with_roles("host", "pulls")
    host.starts, pulls.starts = ["both", "loaded"], ["both", "pulled"]
    worker.side.execute(Orders())
    assert worker.calls == [("host", "execute"), ("pulls", "execute")]
    host.ends = [Part("both"), Part("loaded")]
    assert worker.side.take_results() == ({"loaded"}, set())
    pulls.ends = [Part("both")]
    assert worker.side.take_results() == ({"both"}, set())
    pulls.ends = [Part("pulled")]
    assert worker.side.take_results() == ({"pulled"}, set())
    assert worker.side.take_results() == (set(), set())


@pytest.mark.parametrize(
    ("policy", "what_now"), [("fail", "The request fails"), ("recompute", "Its prompt is computed here instead")]
)
def test_one_failed_part_fails_the_request_and_the_log_says_what_becomes_of_it(
    worker_of: Open, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, policy: str, what_now: str
) -> None:
    monkeypatch.setattr(logging.getLogger("pd_connector"), "propagate", True)
    worker = worker_of("kv_both", policy)
    host, pulls = worker.with_roles("host", "pulls")
    host.starts = pulls.starts = ["r"]
    worker.side.execute(Orders())
    host.ends = [Part("r", "the load of 3 blocks failed")]
    assert worker.side.take_results() == (set(), set())
    pulls.ends = [Part("r", "refused", is_told=True)]
    assert worker.side.take_results() == ({"r"}, {"r"})
    assert [record.message for record in caplog.records if record.levelno == logging.ERROR] == [
        f"PDConnector: request r: the load of 3 blocks failed. {what_now}"
    ]


def test_every_part_that_ends_is_counted(worker_of: Open) -> None:
    worker = worker_of("kv_both")
    host, pulls = worker.with_roles("host", "pulls")
    host.starts = pulls.starts = ["r"]
    worker.side.execute(Orders())
    host.ends, pulls.ends = [Part("r")], [Part("r", "failed")]
    worker.side.take_results()
    data = worker.stats.take()
    assert data is not None
    assert data["counts"] == {"parts:r": 2}


def test_what_no_request_waits_for_is_reported_together(worker_of: Open) -> None:
    worker = worker_of("kv_both")
    host, checksums = worker.with_roles("host", "checksums")
    one, other = ChecksumReport("lease 1", 0, ()), ChecksumReport("lease 2", 0, ())
    host.report, checksums.report = Report(checksums=(one,)), Report(checksums=(other,))
    assert worker.side.take_report().checksums == (one, other)


def test_the_number_of_a_step_is_in_its_report_and_in_no_other(worker_of: Open) -> None:
    worker = worker_of("kv_both")
    assert not worker.side.take_report()
    worker.side.execute(Orders(steps=(7,)))
    assert worker.side.take_report().steps == {7: 1}
    assert not worker.side.take_report()
    worker.side.execute(Orders())
    worker.side.execute(Orders(steps=(8,)))
    reports = worker.side.take_report(), Report(steps={8: 1})
    assert sum(reports, Report()).steps == {8: 2}


# The end


def test_all_roles_begin_nothing_any_more_before_the_engine_ends_their_reads_and_all_are_joined(
    worker_of: Open,
) -> None:
    worker = worker_of("kv_both", registered=True)
    own = list(worker.side._roles)
    worker.with_roles("host", "pulls")
    worker.side.shutdown()
    closed, ended, joined = worker.calls[:2], worker.calls[2], worker.calls[3:]
    assert sorted(closed) == [("host", "close"), ("pulls", "close")]
    assert ended == ("engine", "close")
    assert sorted(joined) == [("host", "join"), ("pulls", "join")]
    for role in own:
        role.close()
        role.join()


def test_host_memory_goes_when_nothing_uses_it_any_more(worker_of: Open) -> None:
    worker = worker_of("kv_consumer", registered=True, cpu_bytes_to_use=64 << 20, host_transfers="always")
    host: Any = worker.side._host
    join = host.join

    def joined() -> None:
        worker.calls.append(("host", "join"))
        join()

    host.join = joined
    own = worker.side._roles[1:]
    worker.with_roles("pulls")
    worker.side._roles.insert(0, host)
    worker.side.shutdown()
    assert worker.calls == [("pulls", "close"), ("engine", "close"), ("pulls", "join"), ("host", "join")]
    for role in own:
        role.close()
        role.join()


def test_a_worker_that_never_got_caches_ends(worker_of: Open) -> None:
    worker = worker_of("kv_both")
    worker.side.shutdown()
    assert worker.calls == []


def test_the_books_of_all_roles_are_checked(worker_of: Open) -> None:
    worker = worker_of("kv_both")
    worker.with_roles("host", "pulls")
    worker.side.check_integrity()
    assert worker.calls == [("host", "check"), ("pulls", "check")]


# Limits


def test_a_worker_keeps_the_limits_that_are_no_settings(worker_of: Open) -> None:
    transfers = {"host_transfers": "auto", "cpu_bytes_to_use": 64 << 20}
    _, pulls, landings = worker_of("kv_consumer", registered=True, **transfers).side._roles
    assert isinstance(pulls, Pulls)
    assert isinstance(landings, LandingPulls)
    for each in (pulls, landings):
        assert (each._peer_idle_s, each._context.handshake_timeout_s) == (600.0, 10.0)
