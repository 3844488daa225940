"""How much host memory may still be taken: of the machine, and of what its container is allowed."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from pd_connector.host_memory import available_bytes

MACHINE = 10_000


@pytest.fixture(autouse=True)
def _a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=MACHINE))


def group(
    directory: Path, limit: str = "5000\n", used: str = "3000\n", stat: str = "anon 1\ninactive_file 700\n"
) -> Path:
    """A control group's files, as the kernel writes them."""
    for name, text in (("max", limit), ("current", used), ("stat", stat)):
        (directory / f"memory.{name}").write_text(text)
    return directory


def test_without_a_container_it_is_the_machines(tmp_path: Path) -> None:
    assert available_bytes(tmp_path / "none") == MACHINE


def test_a_container_without_a_limit_has_the_machines(tmp_path: Path) -> None:
    assert available_bytes(group(tmp_path, limit="max\n")) == MACHINE


def test_a_limit_leaves_what_is_not_used_and_the_file_cache(tmp_path: Path) -> None:
    assert available_bytes(group(tmp_path)) == 5000 - 3000 + 700


def test_a_limit_beyond_the_machine_leaves_the_machines(tmp_path: Path) -> None:
    assert available_bytes(group(tmp_path, limit=str(1 << 60))) == MACHINE


def test_a_limit_that_is_used_up_leaves_nothing(tmp_path: Path) -> None:
    assert available_bytes(group(tmp_path, used="9000")) == 0


def test_a_kernel_that_does_not_tell_of_the_file_cache_counts_it_as_used(tmp_path: Path) -> None:
    assert available_bytes(group(tmp_path, stat="anon 1\n")) == 2000
    assert available_bytes(group(tmp_path, stat="")) == 2000


@pytest.mark.parametrize("name", ["max", "current", "stat"])
def test_a_file_that_is_missing_means_that_there_is_no_limit(tmp_path: Path, name: str) -> None:
    (group(tmp_path) / f"memory.{name}").unlink()
    assert available_bytes(tmp_path) == MACHINE


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
    assert available_bytes(group(tmp_path, **garbage)) == MACHINE


def test_bytes_that_are_no_text_mean_that_there_is_no_limit(tmp_path: Path) -> None:
    (group(tmp_path) / "memory.stat").write_bytes(b"\xff\xfe")
    assert available_bytes(tmp_path) == MACHINE


def test_on_this_machine_there_is_some() -> None:
    assert 0 < available_bytes() <= MACHINE
