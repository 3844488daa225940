"""The transfer engine of a worker: its transport, its limits and the address at which peers read."""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pd_connector.config import ConfigError, parse_config
from pd_connector.stats import StatsRecorder
from pd_connector.vllm.cache_groups import Ranks
from pd_connector.worker import transfer_engine, worker
from pd_connector.worker.worker import ConnectorWorker
from tests.support.connector.vllm_engine import BLOCK_TOKENS, CACHES, LAYERS, a_config
from tests.support.engine.in_process import InProcessEngine, InProcessFabric
from tests.support.memory import Memory, out_of_reach
from transfer import peers
from transfer.engine.mooncake import MooncakeOptions


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> Callable[..., MooncakeOptions]:
    """The options with which an engine would start, on devices of a type."""

    def open_on(device: str, **settings: Any) -> MooncakeOptions:
        made: list[MooncakeOptions] = []
        monkeypatch.setattr(transfer_engine, "default_protocol", lambda: {"cuda": "rdma"}.get(device, "tcp"))
        monkeypatch.setattr(transfer_engine, "MooncakeEngine", lambda options, *_: made.append(options))
        transfer_engine.open_engine(parse_config({"host": "127.0.0.1", **settings}), is_read=True)
        (found,) = made
        return found

    return open_on


@pytest.mark.parametrize(
    ("device", "has_rdma", "settings", "protocol", "warns"),
    [
        ("cuda", True, {}, "rdma", False),
        ("cuda", False, {}, "tcp", True),
        ("cuda", False, {"protocol": "tcp"}, "tcp", False),
        ("cuda", False, {"protocol": "rdma"}, "rdma", False),
        ("cuda", False, {"devices": "mlx5_0"}, "rdma", False),
        ("cpu", False, {}, "tcp", False),
    ],
)
def test_without_an_rdma_device_cuda_takes_tcp_with_a_warning_unless_rdma_is_asked_for(
    options: Callable[..., MooncakeOptions], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    device: str, has_rdma: bool, settings: dict[str, Any], protocol: str, warns: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(logging.getLogger("pd_connector"), "propagate", True)
    monkeypatch.setattr(transfer_engine, "has_rdma_device", lambda: has_rdma)
    opened = options(device, **settings)
    assert (opened.protocol, opened.connect_timeout_s) == (protocol, 10.0)
    assert ("this machine has no RDMA device" in caplog.text) == warns


def test_rdma_is_refused_on_an_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_engine, "device_type", lambda: "npu")
    with pytest.raises(ConfigError, match=r"^protocol = 'rdma': on an NPU, .*leave protocol out on both sides$"):
        transfer_engine.open_engine(parse_config({"host": "127.0.0.1", "protocol": "rdma"}), is_read=True)


def test_numbers_of_the_user_are_passed_on(options: Callable[..., MooncakeOptions]) -> None:
    tuning = {"descriptors_per_call": 5, "max_descriptors_in_flight": 50, "longest_poll_us": 70.0}
    limits = options("cpu", tuning=tuning).limits
    assert (limits.per_call, limits.in_flight) == (5, 50)
    assert limits.longest_pause_s == pytest.approx(70e-6)


def test_a_recipes_class_of_traffic_reaches_the_engine(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[MooncakeOptions] = []
    monkeypatch.setattr(transfer_engine, "MooncakeEngine", lambda options, *_: made.append(options))
    settings = {"host": "127.0.0.1", "protocol": "tcp", "qos_priority": 3}
    config = a_config(model, "kv_producer", "fail", **settings)
    ConnectorWorker(config, CACHES, parsed := parse_config(settings), StatsRecorder())._make_engine(parsed)
    assert made[0].qos == 3


@pytest.mark.parametrize("host", ["203.0.113.7", "2001:db8::7", "no-such-host.invalid"])
def test_a_host_that_is_not_this_machines_is_refused(host: str) -> None:
    said = rf"^host = '{host}' is not an address of this machine.*VLLM_HOST_IP on each.*\(NAT\) is not supported"
    with pytest.raises(ConfigError, match=said):
        transfer_engine.open_engine(parse_config({"host": host, "protocol": "tcp"}), is_read=True)


def test_a_host_of_vllms_choice_that_is_not_this_machines_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_engine, "host_address", lambda: "203.0.113.7")
    with pytest.raises(ConfigError, match=r"^vLLM's own choice of host \(VLLM_HOST_IP\) = '203.0.113.7' is not"):
        transfer_engine.open_engine(parse_config({"protocol": "tcp"}), is_read=True)


def test_where_peers_read_nothing_the_host_may_be_another_name_of_this_machine() -> None:
    """A decode worker behind an address that is translated, say."""
    engine = transfer_engine.open_engine(parse_config({"host": "192.0.2.1", "protocol": "tcp"}), is_read=False)
    engine.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_host_of_this_machine_is_where_peers_read(host: str) -> None:
    engine = transfer_engine.open_engine(parse_config({"host": host, "protocol": "tcp"}), is_read=True)
    assert engine.address.startswith(f"{host}:")
    engine.close()


def test_a_host_that_is_loopback_here_and_may_be_another_elsewhere_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Debian has the machine's own name in /etc/hosts, as 127.0.1.1."""
    monkeypatch.setattr(logging.getLogger("pd_connector"), "propagate", True)
    resolved = {"debian": "127.0.1.1", "named": "192.0.2.2", "localhost": "127.0.0.1", "127.0.0.1": "127.0.0.1"}
    monkeypatch.setattr(peers, "resolve", resolved.__getitem__)
    monkeypatch.setattr(transfer_engine, "is_own_address", resolved.__contains__)
    monkeypatch.setattr(transfer_engine, "MooncakeEngine", lambda *_: None)
    for host in resolved:
        transfer_engine.open_engine(parse_config({"host": host, "protocol": "tcp"}), is_read=True)
    (warning,) = [each for each in caplog.messages if "reached from this machine only" in each]
    assert "host = 'debian' is 127.0.1.1 on this machine (/etc/hosts)" in warning


@pytest.mark.parametrize(
    ("device", "protocol", "has_secret", "ways"),
    [
        ("cuda", "auto", True, 2),
        ("cuda", "auto", False, 1),
        ("cuda", "auto", None, 1),
        ("cuda", "tcp", True, 1),
        ("cpu", "auto", True, 1),
    ],
)
def test_peers_on_the_same_host_have_a_second_way_on_cuda_with_a_secret_unless_a_protocol_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    device: str, protocol: str, has_secret: bool | None, ways: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(logging.getLogger("pd_connector"), "propagate", True)
    caplog.set_level(logging.INFO, "pd_connector")
    monkeypatch.setattr(transfer_engine, "device_type", lambda: device)
    monkeypatch.setattr(transfer_engine, "default_protocol", lambda: "tcp")
    monkeypatch.setattr(transfer_engine, "MooncakeEngine", lambda *_: "one way")
    monkeypatch.setattr(transfer_engine, "with_second_way", lambda engine, **roles: (engine, roles))
    config = parse_config({"host": "127.0.0.1", "protocol": protocol})
    opened: object = transfer_engine.open_engine(config, is_read=True, reads=False, has_secret=has_secret)
    assert opened == (("one way", {"is_read": True, "reads": False}) if ways == 2 else "one way")
    assert ("which takes a secret (secret_file)" in caplog.text) == (device == "cuda" and has_secret is False)


def test_caches_of_an_npu_that_no_socket_can_send_are_refused_over_tcp(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"host": "127.0.0.1", "protocol": "tcp"}
    side = ConnectorWorker(
        a_config(model, "kv_producer", **settings), CACHES, parse_config(settings), StatsRecorder(),
        lambda _: InProcessEngine(InProcessFabric()),
    )  # fmt: skip
    shape = (len(LAYERS), 8, 2, BLOCK_TOKENS, 128)
    memory = Memory(4 * math.prod(shape))
    caches = dict(zip(LAYERS, torch.from_numpy(memory.view).view(torch.float32).view(shape), strict=True))
    monkeypatch.setattr(worker, "worker_ranks", lambda: Ranks(0, 1, 0, 1))
    monkeypatch.setattr(transfer_engine, "device_type", lambda: "npu")
    with out_of_reach(memory.region), pytest.raises(ConfigError, match=r"^protocol = 'tcp': .*leave protocol out on"):
        side.register_caches(caches)
    side.shutdown()
