"""Options, limits, environment and start-up errors of the Mooncake engine.

Covers: transfer.engine.rdma, transfer.engine.mooncake_limits, transfer.engine.ascend_environment.
"""

import importlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest

from layout.copies import Copies
from layout.cost import CostModel
from tests.support.memory import Memory, even_copies
from transfer.engine import mooncake, mooncake_native, rdma
from transfer.engine.ascend_environment import link_s
from transfer.engine.connecting import listeners
from transfer.engine.interface import EngineStartError, ReadFailed
from transfer.engine.mooncake import PROTOCOLS, MooncakeEngine, MooncakeOptions
from transfer.engine.mooncake_limits import LIMITS
from transfer.engine.mooncake_native import NativeEngine, NativeOptions, set_environment

RESOURCES = "ASCEND_GLOBAL_RESOURCE_CONFIG"


@pytest.mark.parametrize(("given", "meant"), [("TCP", "tcp"), ("rmda", "rdma"), ("ascent", "ascend")])
def test_an_unknown_protocol_is_refused_and_the_nearest_named(given: str, meant: str) -> None:
    with pytest.raises(EngineStartError, match=f"unknown protocol '{given}'.*did you mean '{meant}'"):
        MooncakeOptions("127.0.0.1", protocol=given)


@pytest.mark.parametrize(
    ("host", "rule"),
    [
        ("", "not an address that a peer can reach"),
        ("0.0.0.0", "not an address that a peer can reach: set host, or VLLM_HOST_IP, to that of a network interface"),
        ("::", "not an address that a peer can reach: set host, or VLLM_HOST_IP, to that of a network interface"),
        ("10.0.0.5:8080", "without port and brackets"),
        ("[::1]", "without port and brackets"),
    ],
)
def test_a_host_that_peers_cannot_use_is_refused(host: str, rule: str) -> None:
    with pytest.raises(EngineStartError, match=rule):
        MooncakeOptions(host)


@pytest.mark.parametrize(("per_call", "in_flight"), [(0, 1024), (1025, 1024), (-1, 5)])
def test_a_call_that_does_not_fit_the_window_is_refused(per_call: int, in_flight: int) -> None:
    with pytest.raises(EngineStartError, match=f"descriptors_per_call {per_call} .* {in_flight}"):
        MooncakeOptions("127.0.0.1", descriptors_per_call=per_call, max_descriptors_in_flight=in_flight)


@pytest.mark.parametrize(
    ("protocol", "in_flight", "most"), [("tcp", 1025, 1024), ("rdma", 65537, 65536), ("tcp", 0, 1024)]
)
def test_a_window_that_the_transport_does_not_bear_is_refused(protocol: str, in_flight: int, most: int) -> None:
    with pytest.raises(EngineStartError, match=f"_in_flight {in_flight} must be from 1 to {most} with .*'{protocol}'"):
        MooncakeOptions("127.0.0.1", protocol=protocol, max_descriptors_in_flight=in_flight)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_each_protocol_has_limits_of_its_own_and_settings_win(protocol: str) -> None:
    own = MooncakeOptions("127.0.0.1", protocol=protocol).limits
    assert own == LIMITS[protocol]
    assert own.in_flight % own.per_call == 0, "the last call of a window would be shorter than the others"
    small = MooncakeOptions("127.0.0.1", protocol=protocol, max_descriptors_in_flight=100).limits
    assert (small.per_call, small.in_flight) == (100, 100)
    calls = MooncakeOptions("127.0.0.1", protocol=protocol, descriptors_per_call=7).limits
    assert (calls.per_call, calls.in_flight) == (7, own.in_flight)
    rare = MooncakeOptions("127.0.0.1", protocol=protocol, longest_pause_s=2e-3).limits
    assert (rare.pause_s(0.0), rare.pause_s(1.0)) == (own.shortest_pause_s, 2e-3)
    often = MooncakeOptions("127.0.0.1", protocol=protocol, longest_pause_s=1e-6).limits
    assert often.pause_s(0.0) == often.pause_s(1.0) == 1e-6


def test_on_rdma_a_window_of_small_descriptors_outlasts_a_pause_at_the_rate_of_the_wire() -> None:
    limits = LIMITS["rdma"]
    assert limits.in_flight * 4096 / limits.longest_pause_s >= 25e9


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_call_in_flight_outlasts_a_pause_while_the_other_is_replaced(protocol: str) -> None:
    limits = LIMITS[protocol]
    assert limits.window().call_s >= 2 * limits.longest_pause_s


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_no_piece_is_longer_than_a_call(protocol: str) -> None:
    limits, cost = LIMITS[protocol], CostModel.of_protocol(protocol)
    call_s = limits.window().call_s
    assert cost.read_s(1, limits.piece_bytes) <= call_s


def test_on_rdma_no_descriptor_is_so_large_that_mooncake_posts_part_of_it_before_it_has_looked_at_all() -> None:
    assert LIMITS["rdma"].piece_bytes < 512 * 64 * 1024


def test_what_calls_cost_is_what_the_protocol_costs_unless_it_was_set() -> None:
    own = CostModel(1e-6, 1e-9, 0.0, 0.0)
    assert MooncakeOptions("h", protocol="rdma").costs == CostModel.of_protocol("rdma")
    assert MooncakeOptions("h", protocol="rdma", cost=own).costs is own


def test_a_read_is_split_into_the_pieces_of_its_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    submitted: list[int] = []

    def note(native: NativeEngine, address: str, part: Copies) -> None:
        submitted.extend(part.sizes.tolist())

    monkeypatch.setitem(LIMITS, "tcp", replace(LIMITS["tcp"], piece_bytes=1000))
    memory = Memory(1 << 20)
    engine = MooncakeEngine(MooncakeOptions("127.0.0.1"))
    engine.register([memory.region])
    link = engine.open(engine.address, [memory.region], engine.identity)
    monkeypatch.setattr("transfer.engine.mooncake_read.submit", note)
    with pytest.raises(ReadFailed, match="refused to queue"):
        link.read(even_copies(memory.region, memory.region, 1, 2500), 5)
    assert submitted == [1000, 1000, 500]
    engine.close()


@pytest.mark.parametrize(("elapsed_s", "pause_s"), [(0.0, 50e-6), (0.0016, 200e-6), (60.0, 500e-6)])
def test_a_read_pauses_for_an_eighth_of_its_time_within_limits(elapsed_s: float, pause_s: float) -> None:
    assert LIMITS["tcp"].pause_s(elapsed_s) == pytest.approx(pause_s)


@pytest.mark.parametrize("value", ["1", "0", ""])
def test_asynchronous_transfers_of_ascend_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("ASCEND_USE_ASYNC_TRANSFER", value)
    with pytest.raises(EngineStartError, match=r"ASCEND_USE_ASYNC_TRANSFER is set .* unset it"):
        MooncakeEngine(MooncakeOptions("127.0.0.1", protocol="ascend"))


@pytest.mark.parametrize(
    ("given", "milliseconds"),
    [
        ({}, 33064),  # as vllm-ascend's connectors: 7 times 4.096 us * 2^20, and 3 s
        ({"HCCL_RDMA_TIMEOUT": "14", "HCCL_RDMA_RETRY_CNT": "3"}, 3201),
        ({"ASCEND_TRANSFER_TIMEOUT": "10000"}, 10000),
    ],
)
def test_the_environment_of_ascend(given: dict[str, str], milliseconds: int) -> None:
    environment = {"ASCEND_CONNECT_TIMEOUT": "99", **given}
    set_environment(NativeOptions("10.0.0.5", "ascend", "", 2.5, 5.0), environment)
    assert environment["ASCEND_CONNECT_TIMEOUT"] == "99"
    assert environment["ASCEND_TRANSFER_TIMEOUT"] == str(milliseconds)
    assert link_s(environment, 0.5) == milliseconds / 1000
    assert link_s(environment, 1000.0) == link_s({}, 1000.0) == 1000.0
    assert environment["ASCEND_THREAD_POOL_SIZE"] == "16"
    assert "MC_WORKERS_PER_CTX" not in environment
    assert RESOURCES not in environment


def test_a_number_of_hccl_that_is_none_is_refused() -> None:
    with pytest.raises(EngineStartError, match="HCCL_RDMA_TIMEOUT is '20s', which must be a whole number"):
        set_environment(NativeOptions("10.0.0.5", "ascend", "", 2.5, 5.0), {"HCCL_RDMA_TIMEOUT": "20s"})


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, {"comm_resource_config.qos": 3}),
        ("", {"comm_resource_config.qos": 3}),
        ('{"store": 1}', {"store": 1, "comm_resource_config.qos": 3}),
        ('{"comm_resource_config.qos": 0}', {"comm_resource_config.qos": 3}),
    ],
)
def test_a_class_of_traffic_is_added_to_the_users_resources(given: str | None, found: dict[str, int]) -> None:
    environment = {} if given is None else {RESOURCES: given}
    set_environment(NativeOptions("10.0.0.5", "ascend", "", 2.5, 5.0, qos=3), environment)
    assert json.loads(environment[RESOURCES]) == found


@pytest.mark.parametrize("given", ["{", "[1]"])
def test_a_class_of_traffic_that_cannot_be_added_is_refused(given: str) -> None:
    with pytest.raises(EngineStartError, match=f"{RESOURCES} is .*, which must be a JSON object"):
        set_environment(NativeOptions("10.0.0.5", "ascend", "", 2.5, 5.0, qos=3), {RESOURCES: given})


@pytest.mark.parametrize("host", ["localhost", "node-1"])
def test_on_ascend_a_host_must_be_an_ip_address(host: str) -> None:
    assert MooncakeOptions(host).host == host
    with pytest.raises(EngineStartError, match=f"host '{host}': CANN takes IP addresses only; set host, or VLLM_HOST"):
        MooncakeOptions(host, protocol="ascend")


def test_links_have_engines_of_their_own_on_tcp_only() -> None:
    assert MooncakeOptions("h").isolated
    assert not MooncakeOptions("h", protocol="rdma").isolated
    assert not MooncakeOptions("h", engine_per_link=False).isolated


def test_rdma_without_a_device_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rdma, "INFINIBAND_DEVICES", tmp_path)
    with pytest.raises(EngineStartError, match=r"no RDMA device.*use protocol 'tcp'"):
        MooncakeEngine(MooncakeOptions("127.0.0.1", protocol="rdma"))


@pytest.mark.parametrize(
    ("state", "passed_in", "is_there"),
    [("4: ACTIVE\n", True, True), ("1: DOWN\n", True, False), ("4: ACTIVE\n", False, False), ("", True, False)],
)
def test_an_rdma_device_must_be_active_and_passed_into_the_container(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, state: str, passed_in: bool, is_there: bool
) -> None:
    """A container sees all devices of its machine in sysfs."""
    devices, verbs = tmp_path / "devices", tmp_path / "verbs"
    (devices / "mlx5_0/ports/1").mkdir(parents=True)
    (devices / "mlx5_0/ports/1/state").write_text(state)
    verbs.mkdir()
    if passed_in:
        (verbs / "uverbs0").touch()
    monkeypatch.setattr(rdma, "INFINIBAND_DEVICES", devices)
    monkeypatch.setattr(rdma, "VERBS_DEVICES", verbs)
    assert rdma.has_rdma_device() is is_there


def test_a_device_that_is_not_there_is_named_though_others_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Mooncake would go on with those, and nobody would know why reads are slow."""
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(rdma, "INFINIBAND_DEVICES", tmp_path)
    monkeypatch.setattr(mooncake, "has_rdma_device", lambda: True)
    with pytest.raises(EngineStartError, match=r"devices 'mlx5_0,mlx5_l': mlx5_l is not in .* leave devices empty"):
        MooncakeEngine(MooncakeOptions("127.0.0.1", protocol="rdma", devices="mlx5_0,mlx5_l"))


def test_mooncake_takes_no_other_transport_where_no_device_can_be_used() -> None:
    environment: dict[str, str] = {}
    set_environment(NativeOptions("10.0.0.5", "rdma", "mlx5_O", 2.5, 5.0), environment)
    assert environment["MC_FORCE_HCA"] == "1"


def test_the_environment_is_set_but_a_users_own_value_wins() -> None:
    environment = {"MC_TCP_STATUS_TIMEOUT_SEC": "99"}
    set_environment(NativeOptions("10.0.0.5", "tcp", "", 2.5, 5.0), environment)
    assert environment["MC_TCP_STATUS_TIMEOUT_SEC"] == "99"
    assert environment["MC_TCP_PROGRESS_TIMEOUT_SEC"] == "3"
    assert environment["MC_FORCE_TCP"] == "1"
    assert int(environment["MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER"]) > 1024


OF_A_LINK = (
    "fe8000000000000000fc00fffe000001 02 40 20 80     eth0\n00000000000000000000000000000001 01 80 10 80       lo\n"
)
GLOBAL = "fd000000000000000000000000000002 02 40 00 82     eth0\n"


@pytest.mark.parametrize(
    ("host", "protocol", "addresses", "before", "after"),
    [
        ("10.0.0.5", "tcp", OF_A_LINK, None, None),
        ("10.0.0.5", "tcp", None, None, None),
        ("10.0.0.5", "tcp", OF_A_LINK + GLOBAL, None, "1"),
        ("10.0.0.5", "rdma", OF_A_LINK + GLOBAL, None, None),
        ("fd00::5", "rdma", OF_A_LINK, None, "1"),
        ("10.0.0.5", "tcp", OF_A_LINK, "yes", "yes"),
        ("fd00::5", "tcp", OF_A_LINK + GLOBAL, "0", None),
        ("10.0.0.5", "tcp", OF_A_LINK + GLOBAL, "", None),
    ],
)
def test_both_address_families_are_spoken_where_the_machine_has_both_and_the_user_does_not_say_no(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    host: str,
    protocol: str,
    addresses: str | None,
    before: str | None,
    after: str | None,
) -> None:
    monkeypatch.setattr(mooncake_native, "_IPV6_ADDRESSES", tmp_path / "if_inet6")
    monkeypatch.setattr("socket.has_dualstack_ipv6", lambda: True)
    if addresses is not None:
        (tmp_path / "if_inet6").write_text(addresses)
    environment = {} if before is None else {"MC_USE_IPV6": before}
    set_environment(NativeOptions(host, protocol, "", 2.5, 5.0), environment)
    assert environment.get("MC_USE_IPV6") == after


def test_the_environment_of_an_ipv6_host_and_of_rdma() -> None:
    environment: dict[str, str] = {}
    set_environment(NativeOptions("fd00::5", "rdma", "", 2.5, 5.0), environment)
    assert environment["MC_USE_IPV6"] == "1"
    assert "MC_FORCE_TCP" not in environment
    assert environment["MC_WORKERS_PER_CTX"] == "4"
    assert environment["MC_CONN_PAUSE_TTL_MS"] == "2000"
    assert environment["MC_HANDSHAKE_CONNECT_TIMEOUT"] == "2"


def failing_import(error: ImportError) -> Callable[[str], ModuleType]:
    def fail(name: str) -> ModuleType:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "way_out"),
    [
        (ModuleNotFoundError("No module named 'mooncake'"), r"pip install 'pd-connector\[cpu\]'"),
        *(
            (ImportError(f"{library}: cannot open shared object file"), f"apt-get install .*{package}")
            for library, package in {
                "libibverbs.so.1": "libibverbs1",
                "libmlx5.so.1": "ibverbs-providers",
                "libnuma.so.1": "libnuma1",
                "libcurl.so.4": "libcurl4",
            }.items()
        ),
        (
            ImportError("libcudart.so.12: cannot open shared object file"),
            r"install mooncake-transfer-engine-cuda13 .*\[cuda\]",
        ),
        (
            ImportError("libcudart.so.13: cannot open shared object file"),
            r"install mooncake-transfer-engine in .*\[cuda12\]",
        ),
        *(
            (ImportError(f"{library}.so: cannot open shared object file"), "part of CANN: source CANN's set_env.sh")
            for library in ("libascendcl", "libllm_datadist", "libmetadef")
        ),
        (ImportError("engine.so: undefined symbol: aclrtGetPhyDevIdByLogicDevId"), "too old for it; on an NPU that is"),
        (ImportError("libother.so.1: cannot open shared object file"), "fits the platform"),
    ],
)
def test_a_library_that_is_missing_is_named_with_the_way_to_install_it(
    monkeypatch: pytest.MonkeyPatch, error: ImportError, way_out: str
) -> None:
    monkeypatch.setattr(importlib, "import_module", failing_import(error))
    with pytest.raises(EngineStartError, match=way_out) as failure:
        MooncakeEngine(MooncakeOptions("127.0.0.1"))
    assert str(error) in str(failure.value)


def test_a_descriptor_that_is_given_to_another_file_meanwhile_is_left_alone() -> None:
    """Between the look at it and the duplicate, another thread closes it, and a third opens a file."""
    reading, writing = os.pipe()
    duplicate = os.dup
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port, open_files = listener.getsockname()[1], os.listdir("/proc/self/fd")
        assert [own.getsockname() for own in listeners() if own.getsockname()[1] == port] == [listener.getsockname()]
        with patch.object(os, "dup", lambda _: duplicate(reading)):
            assert list(listeners()) == []
        assert len(os.listdir("/proc/self/fd")) == len(open_files)
    os.close(reading)
    os.close(writing)


def test_listeners_are_found_without_the_table_of_all_sockets_of_the_host() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()),
        socket.socket(socket.AF_UNIX),
        patch.object(Path, "read_text") as read,
    ):
        found = [os.path.sameopenfile(each.fileno(), listener.fileno()) for each in listeners()]
    assert found.count(True) == 1
    read.assert_not_called()


def test_a_look_at_sockets_leaves_all_of_them_blocking() -> None:
    """They belong to Mooncake and to other code. Python's default timeout is for sockets that Python makes."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as other:
        socket.setdefaulttimeout(1.0)
        try:
            assert any(each.getsockname() == listener.getsockname() for each in listeners())
        finally:
            socket.setdefaulttimeout(None)
        assert os.get_blocking(listener.fileno())
        assert os.get_blocking(other.fileno())


def test_a_link_looks_at_its_own_files_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links may have thousands, and whoever opens or closes one holds up the model's thread meanwhile."""
    engine, memory = MooncakeEngine(MooncakeOptions("127.0.0.1")), Memory(4096)
    engine.register([memory.region])
    look_up, looked_at = os.readlink, list[str]()

    def count(path: str) -> str:
        looked_at.append(path)
        return look_up(path)

    with ExitStack() as others:
        for _ in range(200):
            others.enter_context(socket.socket())
        monkeypatch.setattr(os, "readlink", count)
        link = engine.open(engine.address, [memory.region], engine.identity)
        link.close()
    assert 2 <= len(looked_at) < 100
    engine.close()


def test_a_listener_with_the_number_of_a_file_that_was_closed_meanwhile_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = os.listdir

    def none_new(path: str) -> list[str]:
        return files(path) if path != mooncake_native._FILES else [str(number) for number in range(1000)]

    usual = NativeEngine(MooncakeOptions("127.0.0.1"))
    monkeypatch.setattr(os, "listdir", none_new)
    native = NativeEngine(MooncakeOptions("127.0.0.1"))
    for each in (usual, native):
        found = []
        for listener in each._listeners():
            with listener:
                found.append(listener.getsockname()[1])
        assert found == [each._port]
        each.delete()
    assert native.speaks_ipv6 == usual.speaks_ipv6


#: Starts engines until Mooncake has no port left of ten, which it reads of the environment once a process.
FULL = """
from transfer.engine.mooncake import MooncakeOptions
from transfer.engine.mooncake_native import NativeEngine
engines = []
try:
    while len(engines) < 11:
        engines.append(NativeEngine(MooncakeOptions("127.0.0.1")))
except Exception as error:
    print(len(engines), type(error).__name__, error)
for each in engines:
    each.delete()
"""


def test_without_a_free_port_an_engine_says_how_many_it_takes_and_how_to_give_it_more() -> None:
    own = {"MC_MIN_RPC_PORT": "17100", "MC_MAX_RPC_PORT": "17109"}
    ended = subprocess.run(
        [sys.executable, "-c", FULL], env=os.environ | own, capture_output=True, text=True, timeout=60, check=True
    )
    assert re.match(r"[1-5] EngineStartError .*MC_MAX_RPC_PORT say: over TCP, each link takes two", ended.stdout)
