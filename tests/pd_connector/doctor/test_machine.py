"""Protocols, devices, memory and clock of a machine, real where this machine has them."""

import os
import resource
from pathlib import Path

import pytest

from pd_connector.config import ConnectorConfig
from pd_connector.doctor.findings import CheckFailed, CheckSkipped, Outcome
from pd_connector.doctor.machine import Machine, Started, rdma_devices, start_engine, start_engine_apart
from tests.support.waiting import ManualClock

STARTED = Started()
ELSEWHERE = "192.0.2.1"  # for documentation, of no machine


def machine(protocol: str = "tcp", started: Started = STARTED, host: str = "127.0.0.1", **config: object) -> Machine:
    return Machine(ConnectorConfig.model_validate(config), host, protocol, lambda *_: started)


def test_a_real_engine_starts_in_a_process_of_its_own() -> None:
    started = start_engine_apart("tcp", "127.0.0.1", "")
    assert started.error == ""
    assert started.address.startswith("127.0.0.1:")
    assert started.registered_s > 0
    verdict = machine(started=started).protocol("tcp")
    assert verdict.text.startswith(f"starts at {started.address}; 64 MiB registered in ")
    assert verdict.values["used"] is verdict.values["starts"] is True


def test_a_protocol_without_its_hardware_does_not_start() -> None:
    if rdma_devices():
        pytest.skip("this machine has RDMA devices")
    assert "has no RDMA device" in start_engine("rdma", "127.0.0.1", "").error


def test_the_protocol_that_is_used_must_start() -> None:
    broken = Started("no such device")
    with pytest.raises(CheckFailed, match=r"^no such device$"):
        machine("rdma", broken).protocol("rdma")
    with pytest.raises(CheckSkipped, match="not used, and does not start: no such device"):
        machine("tcp", broken).protocol("rdma")


def test_a_library_that_crashes_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pd_connector.doctor.machine.start_engine", crash)
    assert "the library crashed" in start_engine_apart("tcp", "127.0.0.1", "").error


def crash(*_: object) -> Started:
    os.abort()


def test_the_address_must_be_of_this_machine() -> None:
    with pytest.raises(CheckFailed, match=r"192\.0\.2\.1 is not an address of this machine"):
        machine(host=ELSEWHERE).address()
    assert machine().address().outcome is Outcome.WARN  # loopback: for this machine alone


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
    assert machine("rdma").devices().outcome is Outcome.WARN
    assert machine("tcp").devices().outcome is Outcome.OK


@pytest.mark.parametrize(("protocol", "outcome"), [("auto", Outcome.WARN), ("tcp", Outcome.OK)])
def test_tcp_beside_an_accelerator_is_a_warning_unless_it_is_meant(
    monkeypatch: pytest.MonkeyPatch, protocol: str, outcome: Outcome
) -> None:
    monkeypatch.setattr("pd_connector.doctor.machine._accelerators", lambda: ["H200"])
    config = ConnectorConfig.model_validate({"protocol": protocol})
    verdict = Machine(config, "127.0.0.1", "tcp", lambda *_: STARTED).devices()
    assert verdict.outcome is outcome
    assert ("protocol auto takes tcp here" in verdict.text) == (outcome is Outcome.WARN)


def test_rdma_wants_to_lock_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64 * 1024, 64 * 1024))
    with pytest.raises(CheckFailed, match=r"lock limit 64 KiB: RDMA locks all memory.*ulimit -l unlimited"):
        machine("rdma").memory()
    assert machine("tcp").memory().values["memlock_bytes"] == 64 * 1024
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert machine("rdma").memory().values["memlock_bytes"] is None


def test_host_memory_that_the_machine_has_not_is_refused() -> None:
    with pytest.raises(CheckFailed, match="cpu_bytes_to_use is 1125899906842624 bytes, and"):
        machine(cpu_bytes_to_use=1 << 50).memory()


def test_the_clock_of_this_machine_is_looked_at() -> None:
    values = machine().clock().values
    assert 0 <= values["wakes_late_ms"]["median"] <= values["wakes_late_ms"]["worst"]
    assert values["resolution_s"] > 0


class SlowMachine(ManualClock):
    """A machine on which every nap takes so much longer, and on which the wall clock has a speed of its own."""

    def __init__(self, late_s: float, wall_speed: float = 1.0, suspended_s: float = 0.0) -> None:
        super().__init__()
        self._late_s = late_s
        self._wall_speed = wall_speed
        self._suspended_s = suspended_s

    def sleep(self, seconds: float) -> None:
        self.advance(seconds + self._late_s)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        time = "pd_connector.doctor.machine.time"
        monkeypatch.setattr(f"{time}.monotonic", self)
        monkeypatch.setattr(f"{time}.sleep", self.sleep)
        monkeypatch.setattr(f"{time}.time", lambda: self.now * self._wall_speed)
        monkeypatch.setattr(f"{time}.clock_gettime", lambda clock: self._suspended_s if clock == 7 else 0.0)


@pytest.mark.parametrize(
    ("slow", "said"),
    [
        (SlowMachine(0.0), ""),
        (SlowMachine(1.5), "transfers stall when threads do"),
        (SlowMachine(0.0, wall_speed=1.5), "it is being set, and logs will not agree"),
        (SlowMachine(0.0, suspended_s=3600.0), "has slept for 3600 s: leases stand still meanwhile"),
    ],
)
def test_what_is_said_of_clocks(monkeypatch: pytest.MonkeyPatch, slow: SlowMachine, said: str) -> None:
    slow.install(monkeypatch)
    verdict = machine().clock()
    assert verdict.outcome is (Outcome.WARN if said else Outcome.OK)
    assert said in verdict.text


def test_a_machine_that_would_miss_renewals_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    SlowMachine(0.5).install(monkeypatch)
    with pytest.raises(CheckFailed, match=r"500\.0 ms at the worst: leases of 0\.9 s are renewed every third of that"):
        machine(lease_ttl_s=0.9).clock()
