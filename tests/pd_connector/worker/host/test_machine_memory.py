"""How much host memory may still be taken: of the machine, and of what its containers are allowed."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from pd_connector.worker.host.machine_memory import MachineMemory, machine_memory

MACHINE = 100_000


@pytest.fixture(autouse=True)
def _a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=2 * MACHINE, available=MACHINE))


def but_a_twentieth(number: int) -> int:
    return number * 95 // 100


class System:
    """A process's control groups, in files as the kernel writes them."""

    def __init__(self, root: Path, memberships: str = "0::/\n") -> None:
        self.root = root
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/cgroup").write_text(memberships)

    @property
    def available(self) -> int:
        return machine_memory(self.root).available

    def v2(
        self,
        path: str = "",
        limit: str = "50000\n",
        used: str = "30000\n",
        stat: str = "anon 1\ninactive_file 7000\n",
        mount: str = "",
    ) -> "System":
        files = {"max": limit, "current": used, "stat": stat}
        return self._write(self.root / "sys/fs/cgroup" / mount / path, files)

    def v1(self, path: str, limit: int, used: int, file_cache: int) -> "System":
        stat = f"inactive_file 1\ntotal_inactive_file {file_cache}\n"
        files = {"limit_in_bytes": f"{limit}\n", "usage_in_bytes": f"{used}\n", "stat": stat}
        return self._write(self.root / "sys/fs/cgroup/memory" / path, files)

    def _write(self, directory: Path, files: dict[str, str]) -> "System":
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (directory / f"memory.{name}").write_text(text)
        return self


def test_without_a_container_it_is_the_machines_but_a_little(tmp_path: Path) -> None:
    whole = MachineMemory(but_a_twentieth(2 * MACHINE), but_a_twentieth(MACHINE))
    assert machine_memory(tmp_path) == whole
    System(tmp_path)
    assert machine_memory(tmp_path) == whole


def test_a_container_without_a_limit_has_the_machines(tmp_path: Path) -> None:
    assert System(tmp_path).v2(limit="max\n").available == but_a_twentieth(MACHINE)


def test_a_limit_leaves_what_is_not_used_and_the_file_cache(tmp_path: Path) -> None:
    assert System(tmp_path).v2().available == but_a_twentieth(50000 - 30000 + 7000)


def test_a_limit_is_all_that_there_is(tmp_path: Path) -> None:
    System(tmp_path).v2()
    assert machine_memory(tmp_path).total == but_a_twentieth(50000)


def test_a_limit_beyond_the_machine_leaves_the_machines(tmp_path: Path) -> None:
    assert System(tmp_path).v2(limit=str(1 << 60)).available == but_a_twentieth(MACHINE)


def test_a_limit_that_is_used_up_leaves_nothing(tmp_path: Path) -> None:
    assert System(tmp_path).v2(used="90000").available == 0


@pytest.mark.parametrize("limited", ["", "system.slice", "system.slice/vllm.service", "system.slice/vllm.service/app"])
def test_a_service_is_limited_by_every_group_above_it(tmp_path: Path, limited: str) -> None:
    system = System(tmp_path, "0::/system.slice/vllm.service/app\n")
    for path in ("", "system.slice", "system.slice/vllm.service", "system.slice/vllm.service/app"):
        system.v2(path, limit="40000" if path == limited else "max")
    assert system.v2("system.slice/another.service", limit="31000").available == but_a_twentieth(17000)


@pytest.mark.parametrize("limited", ["", "docker", "docker/abc"])
def test_the_older_control_groups_are_read_too(tmp_path: Path, limited: str) -> None:
    system = System(tmp_path, "9:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n1:name=systemd:/docker/abc\n0::/\n")
    for path in ("", "docker", "docker/abc"):
        system.v1(path, 60000 if path == limited else (1 << 63) - 4096, 20000, 5000)
    assert system.available == but_a_twentieth(45000)


def test_a_container_that_sees_only_itself_reads_the_root(tmp_path: Path) -> None:
    assert System(tmp_path, "4:memory:/docker/abc\n").v1("", 60000, 20000, 5000).available == but_a_twentieth(45000)


def test_newer_control_groups_beside_older_ones_have_a_place_of_their_own(tmp_path: Path) -> None:
    system = System(tmp_path, "4:pids:/a\n0::/a\n").v2("a", mount="unified")
    assert system.available == but_a_twentieth(27000)


def test_a_kernel_that_does_not_tell_of_the_file_cache_counts_it_as_used(tmp_path: Path) -> None:
    system = System(tmp_path)
    assert system.v2(stat="anon 1\n").available == but_a_twentieth(20000)
    assert system.v2(stat="").available == but_a_twentieth(20000)


@pytest.mark.parametrize("name", ["max", "current", "stat"])
def test_a_file_that_is_missing_means_that_there_is_no_limit(tmp_path: Path, name: str) -> None:
    system = System(tmp_path).v2()
    (tmp_path / "sys/fs/cgroup" / f"memory.{name}").unlink()
    assert system.available == but_a_twentieth(MACHINE)


@pytest.mark.parametrize(
    "garbage",
    [
        {"limit": ""},
        {"limit": "much"},
        {"limit": "-1"},
        {"used": "some"},
        {"stat": "word\n"},
        {"stat": "inactive_file x"},
    ],
)
def test_files_that_make_no_sense_mean_that_there_is_no_limit(tmp_path: Path, garbage: dict[str, str]) -> None:
    assert System(tmp_path).v2(**garbage).available == but_a_twentieth(MACHINE)


@pytest.mark.parametrize("memberships", ["", "nonsense\n", "0:\n", "::\n"])
def test_memberships_that_make_no_sense_are_passed_over(tmp_path: Path, memberships: str) -> None:
    assert System(tmp_path, memberships).available == but_a_twentieth(MACHINE)


@pytest.mark.parametrize("file", ["sys/fs/cgroup/memory.stat", "proc/self/cgroup"])
def test_bytes_that_are_no_text_mean_that_there_is_no_limit(tmp_path: Path, file: str) -> None:
    system = System(tmp_path).v2()
    (tmp_path / file).write_bytes(b"\xff\xfe")
    assert system.available == (but_a_twentieth(MACHINE) if "stat" in file else but_a_twentieth(27000))


def test_on_this_machine_there_is_some() -> None:
    memory = machine_memory()
    assert 0 < memory.available <= but_a_twentieth(MACHINE)
    assert memory.available < memory.total <= but_a_twentieth(2 * MACHINE)
