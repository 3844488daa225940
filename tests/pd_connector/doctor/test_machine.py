"""Address, port, devices and memory of a machine, real where this machine has them."""

import resource
import socket
from pathlib import Path

import pytest

from pd_connector.config import ConnectorConfig
from pd_connector.doctor.findings import CheckFailed, CheckWarned
from pd_connector.doctor.machine import Machine, accelerators, rdma_devices
from tests.support.process import free_port

ELSEWHERE = "192.0.2.1"  # for documentation, of no machine


def machine(protocol: str = "tcp", host: str = "127.0.0.1", *, by_auto: bool = False, **config: object) -> Machine:
    settings = {"host": host, "protocol": protocol, **config}
    return Machine(ConnectorConfig.model_validate(settings), by_auto=by_auto)


def test_nothing_fails_on_this_machine() -> None:
    found = {name: check() for name, check in machine().checks if name != "address"}
    assert found["port"].startswith("the system chooses")
    assert ("accelerators: none" in found["devices"]) == (accelerators() == [])
    assert "MiB available" in found["memory"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])  # vLLM's own choice, where there is no default route
def test_an_address_to_listen_on_is_none_to_be_reached_at(host: str) -> None:
    with pytest.raises(CheckFailed, match="set host, or VLLM_HOST_IP, to that of a network interface"):
        machine(host=host).address()


def test_the_address_must_be_of_this_machine() -> None:
    with pytest.raises(CheckFailed, match=r"192\.0\.2\.1 is not an address of this machine"):
        machine(host=ELSEWHERE).address()
    with pytest.raises(CheckWarned, match=r"127\.0\.0\.1 is of this machine only"):
        machine().address()


def test_a_name_that_means_loopback_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's /etc/hosts has the machine's name for 127.0.1.1: P would listen there, and be looked up elsewhere."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(CheckWarned, match=r"^debian \(127\.0\.1\.1 in /etc/hosts\) is of this machine only"):
        machine(host="debian").address()


def test_a_port_that_is_taken_is_a_warning() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            CheckWarned, match=rf"127\.0\.0\.1:{port} cannot be listened at \(.*in use.*set port to another"
        ):
            machine(port=port).port()
    port = free_port()
    assert machine(port=port).port() == f"127.0.0.1:{port} is free"


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_the_port_is_tried_in_the_family_of_a_names_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pd_connector.doctor.machine.resolve", lambda _: "::1")
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CheckWarned, match=rf"six\.example:{port} cannot be listened at \(.*in use"):
            machine(host="six.example", port=port).port()
    assert machine(host="six.example", port=port).port() == f"six.example:{port} is free"


def test_rdma_ports_are_named_with_their_state(tmp_path: Path) -> None:
    for device, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / device / "ports" / "1"
        port.mkdir(parents=True)
        for name, text in (("state", state), ("rate", "200 Gb/sec (4X HDR)"), ("link_layer", "InfiniBand")):
            (port / name).write_text(f"{text}\n")
    assert rdma_devices(tmp_path) == [
        "mlx5_0/1 ACTIVE 200 Gb/sec (4X HDR) InfiniBand",
        "mlx5_1/1 DOWN 200 Gb/sec (4X HDR) InfiniBand",
    ]
    assert rdma_devices(tmp_path / "none") == []


def test_a_port_that_is_down_is_a_warning_where_rdma_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pd_connector.doctor.machine.rdma_devices", lambda: ["mlx5_1/1 DOWN"])
    with pytest.raises(CheckWarned, match="ports that are not active move nothing"):
        machine("rdma").devices()
    assert "mlx5_1/1 DOWN" in machine("tcp").devices()


def test_tcp_beside_an_accelerator_is_a_warning_unless_it_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pd_connector.doctor.machine.accelerators", lambda: ["H200"])
    with pytest.raises(CheckWarned, match="accelerators: H200; protocol auto takes tcp here"):
        machine(by_auto=True).devices()
    assert machine().devices().endswith("accelerators: H200")
    monkeypatch.setenv("WITH_NVIDIA_PEERMEM", "0")
    assert machine("rdma", by_auto=True).devices().endswith("accelerators: H200")


def test_a_gpu_whose_memory_nics_cannot_reach_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("pd_connector.doctor.machine.accelerators", lambda: ["H200"])
    monkeypatch.setattr("pd_connector.doctor.machine._PEERMEM", tmp_path / "nvidia_peermem")
    monkeypatch.delenv("WITH_NVIDIA_PEERMEM", raising=False)
    with pytest.raises(CheckWarned, match=r"nvidia-peermem is not loaded: .* unless WITH_NVIDIA_PEERMEM=0 is set"):
        machine("rdma").devices()
    monkeypatch.setattr("pd_connector.doctor.machine.rdma_devices", lambda: ["mlx5_0 ACTIVE", "mlx5_1 DOWN"])
    with pytest.raises(CheckWarned, match=r"ports that are not active.*; the kernel module nvidia-peermem"):
        machine("rdma").devices()
    monkeypatch.setattr("pd_connector.doctor.machine.rdma_devices", lambda: ["mlx5_0 ACTIVE"])
    (tmp_path / "nvidia_peermem").mkdir()
    assert machine("rdma").devices().endswith("accelerators: H200")


def test_rdma_wants_to_lock_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status = tmp_path / "status"
    monkeypatch.setattr("pd_connector.doctor.machine._STATUS", status)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64 * 1024, 64 * 1024))
    for capabilities in ("", "CapInh:\tffffffffffffffff\nCapEff:\t00000000a80425fb\nCapBnd:\tffffffffffffffff\n"):
        status.write_text(capabilities)
        with pytest.raises(CheckFailed, match="or the capability IPC_LOCK"):
            machine("rdma").memory()
    status.write_text("Name:\tpd-doctor\nCapEff:\t0000000000004000\n")  # which a pod can be given, and a limit cannot
    assert "lock limit 64 KiB" in machine("rdma").memory()
    status.unlink()
    with pytest.raises(CheckFailed, match=r"lock limit 64 KiB: RDMA locks all memory.*ulimit -l unlimited"):
        machine("rdma").memory()
    assert "lock limit 64 KiB" in machine("tcp").memory()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert "lock limit unlimited" in machine("rdma").memory()


def test_host_memory_that_the_machine_has_not_is_refused() -> None:
    with pytest.raises(CheckFailed, match="cpu_bytes_to_use is 1125899906842624 bytes, and"):
        machine(cpu_bytes_to_use=1 << 50).memory()
