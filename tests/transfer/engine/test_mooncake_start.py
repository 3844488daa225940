"""Options, environment and start-up errors of the Mooncake engine."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from transfer.engine import mooncake
from transfer.engine.base import EngineStartError
from transfer.engine.mooncake import MooncakeEngine, MooncakeOptions
from transfer.engine.mooncake_native import NativeOptions, set_environment, split_address


@pytest.mark.parametrize(("given", "meant"), [("TCP", "tcp"), ("rmda", "rdma"), ("ascent", "ascend")])
def test_an_unknown_protocol_is_refused_and_the_nearest_named(given: str, meant: str) -> None:
    with pytest.raises(EngineStartError, match=f"unknown protocol '{given}'.*did you mean '{meant}'"):
        MooncakeOptions("127.0.0.1", protocol=given)


@pytest.mark.parametrize(
    ("host", "rule"),
    [
        ("", "not an address that a peer can reach"),
        ("0.0.0.0", "not an address that a peer can reach"),
        ("::", "not an address that a peer can reach"),
        ("10.0.0.5:8080", "without port and brackets"),
        ("[::1]", "without port and brackets"),
    ],
)
def test_a_host_that_peers_cannot_use_is_refused(host: str, rule: str) -> None:
    with pytest.raises(EngineStartError, match=rule):
        MooncakeOptions(host)


@pytest.mark.parametrize(("per_call", "in_flight"), [(0, 1024), (2048, 1024), (-1, 5)])
def test_a_call_that_does_not_fit_the_window_is_refused(per_call: int, in_flight: int) -> None:
    with pytest.raises(EngineStartError, match=f"descriptors_per_call {per_call} .* {in_flight}"):
        MooncakeOptions("127.0.0.1", descriptors_per_call=per_call, max_descriptors_in_flight=in_flight)


@pytest.mark.parametrize("name", ["progress_timeout_s", "connect_timeout_s"])
def test_a_timeout_of_zero_is_refused(name: str) -> None:
    with pytest.raises(EngineStartError, match=f"{name} 0"):
        MooncakeOptions("127.0.0.1", **{name: 0.0})  # type: ignore[arg-type]


def test_links_have_engines_of_their_own_on_tcp_only() -> None:
    assert MooncakeOptions("h").isolated
    assert not MooncakeOptions("h", protocol="rdma").isolated
    assert not MooncakeOptions("h", engine_per_link=False).isolated


def test_rdma_without_a_device_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mooncake, "INFINIBAND_DEVICES", tmp_path)
    with pytest.raises(EngineStartError, match=r"no RDMA device.*use protocol 'tcp'"):
        MooncakeEngine(MooncakeOptions("127.0.0.1", protocol="rdma"))


def test_the_environment_is_set_but_a_users_own_value_wins() -> None:
    environment = {"MC_TCP_STATUS_TIMEOUT_SEC": "99"}
    set_environment(NativeOptions("10.0.0.5", "tcp", "", 2.5, 5.0), environment)
    assert environment["MC_TCP_STATUS_TIMEOUT_SEC"] == "99"
    assert environment["MC_TCP_PROGRESS_TIMEOUT_SEC"] == "3"
    assert environment["MC_FORCE_TCP"] == "1"
    assert int(environment["MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER"]) > 1024
    assert "MC_USE_IPV6" not in environment


def test_the_environment_of_an_ipv6_host_and_of_rdma() -> None:
    environment: dict[str, str] = {}
    set_environment(NativeOptions("fd00::5", "rdma", "", 2.5, 5.0), environment)
    assert environment["MC_USE_IPV6"] == "1"
    assert "MC_FORCE_TCP" not in environment


def failing_import(error: ImportError) -> Callable[[str], ModuleType]:
    def fail(name: str) -> ModuleType:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "way_out"),
    [
        (ModuleNotFoundError("No module named 'mooncake'"), r"pip install 'pd-connector\[cpu\]'"),
        (ImportError("libibverbs.so.1: cannot open shared object file"), "apt-get install libibverbs1"),
        (
            ImportError("libcudart.so.12: cannot open shared object file"),
            r"install mooncake-transfer-engine-cuda13 .*\[cuda\]",
        ),
        (
            ImportError("libcudart.so.13: cannot open shared object file"),
            r"install mooncake-transfer-engine in .*\[cuda12\]",
        ),
        (ImportError("libascendcl.so: cannot open shared object file"), "fits the platform"),
    ],
)
def test_a_library_that_is_missing_is_named_with_the_way_to_install_it(
    monkeypatch: pytest.MonkeyPatch, error: ImportError, way_out: str
) -> None:
    monkeypatch.setattr(importlib, "import_module", failing_import(error))
    with pytest.raises(EngineStartError, match=way_out) as failure:
        MooncakeEngine(MooncakeOptions("127.0.0.1"))
    assert str(error) in str(failure.value)


def test_an_address_is_split_into_host_and_port() -> None:
    assert split_address("10.0.0.5:15342") == ("10.0.0.5", 15342)
    assert split_address("[fd00::5]:15342") == ("fd00::5", 15342)


@pytest.mark.parametrize("address", ["10.0.0.5", "10.0.0.5:", ":15342", "h:0", "h:70000", "h:x", ""])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="is not a transfer engine address"):
        split_address(address)
