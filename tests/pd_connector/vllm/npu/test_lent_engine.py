"""vllm-ascend's engine is asked for only beside its pool, and then nobody else registers KV caches with it.

With a stand-in for vllm-ascend's module; ``tests/ascend_sim`` has the real one, with Mooncake's wheel for NPUs.
"""

import os
import sys
from types import SimpleNamespace

import pytest

from pd_connector.config import ConfigError, parse_config
from pd_connector.vllm.npu import lent_engine as module
from pd_connector.worker import transfer_engine

LENDER = "vllm_ascend.distributed.kv_transfer.utils.mooncake_transfer_engine"


class GlobalTE:
    """What vllm-ascend keeps for a process."""

    def __init__(self) -> None:
        self.is_register_buffer = False
        self.hosts: list[str] = []
        self.transfer_engine: str | None = None

    def get_transfer_engine(self, hostname: str, device_name: str | None) -> str:
        assert device_name is None
        self.hosts.append(hostname)
        self.transfer_engine = "the engine"
        return self.transfer_engine


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> GlobalTE:
    """A process with the pool beside this connector."""
    kept = GlobalTE()
    packages = [LENDER.rsplit(".", parts)[0] for parts in range(1, LENDER.count(".") + 1)]
    for name in packages:
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    lender = SimpleNamespace(global_te=kept)
    monkeypatch.setitem(sys.modules, LENDER, lender)
    monkeypatch.setattr(sys.modules[LENDER.rsplit(".", 1)[0]], "mooncake_transfer_engine", lender, raising=False)
    monkeypatch.setattr(module, "has_ascend_store", lambda: True)
    monkeypatch.setattr(os, "environ", {"ASCEND_CONNECT_TIMEOUT": "7"})
    monkeypatch.setattr(transfer_engine, "host_address", lambda: "10.0.0.1")
    return kept


def test_the_engine_is_lent_and_all_memory_is_ours_to_register(process: GlobalTE) -> None:
    lend = transfer_engine.lender(parse_config({"protocol": "ascend"}))
    assert process.is_register_buffer, "before anybody is given KV caches"
    assert process.hosts == [], "not started while connectors are made"
    assert lend is not None
    assert lend("10.0.0.1") == "the engine"
    assert process.hosts == ["10.0.0.1"]
    assert os.environ["ASCEND_CONNECT_TIMEOUT"] == "7"
    assert int(os.environ["ASCEND_TRANSFER_TIMEOUT"]) > 30_000, "set before the lender starts it"


def test_a_pool_that_started_it_before_us_is_told_of(process: GlobalTE, caplog: pytest.LogCaptureFixture) -> None:
    """Its connector starts it when it is made, so if it is named first, with what the user has set alone."""
    process.get_transfer_engine("10.0.0.1", None)
    assert transfer_engine.lender(parse_config({"protocol": "ascend"})) is not None
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "without ASCEND_TRANSFER_TIMEOUT, ASCEND_THREAD_POOL_SIZE: name PDConnector first" in warning


def test_another_transport_leaves_it_alone(process: GlobalTE) -> None:
    assert transfer_engine.lender(parse_config({"protocol": "tcp"})) is None
    assert not process.is_register_buffer


def test_without_the_pool_it_is_left_alone(process: GlobalTE, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_ascend_store", lambda: False)
    assert transfer_engine.lender(parse_config({"protocol": "ascend"})) is None
    assert not process.is_register_buffer


@pytest.mark.usefixtures("process")
def test_peers_must_know_it_by_the_address_that_vllm_ascend_gives_it() -> None:
    assert transfer_engine.lender(parse_config({"protocol": "ascend", "host": "10.0.0.1"})) is not None
    with pytest.raises(ConfigError, match=r"host = '10.0.0.2': .* AscendStoreConnector, .* set VLLM_HOST_IP"):
        transfer_engine.lender(parse_config({"protocol": "ascend", "host": "10.0.0.2"}))


@pytest.mark.parametrize("is_started", [False, True])
def test_a_class_of_traffic_has_an_effect_unless_the_pool_has_started_the_engine(
    process: GlobalTE, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, is_started: bool
) -> None:
    if is_started:
        process.get_transfer_engine("10.0.0.1", None)
    config = parse_config({"protocol": "ascend"})
    lend = transfer_engine.lender(config)
    caplog.clear()
    monkeypatch.setattr(transfer_engine, "MooncakeEngine", lambda *_: None)
    monkeypatch.setattr(transfer_engine, "_identity_memory", lambda _: None)
    transfer_engine.open_engine(config, is_read=False, lend=lend, qos=3)
    assert ("qos_priority has no effect" in caplog.text) is is_started
