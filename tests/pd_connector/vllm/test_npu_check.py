"""The program that checks a machine's Ascend software: what it says without an NPU, and when a check fails."""

import ctypes
import importlib
import inspect
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from pd_connector.vllm import npu_check
from pd_connector.vllm.npu import cache_check
from pd_connector.vllm.npu_check import Finding, report, runtime_functions, versions


class Npu:
    """PyTorch's module of a machine with two NPUs, or with none."""

    def __init__(self, devices: int = 2) -> None:
        self.devices = devices

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return self.devices

    def set_device(self, number: int) -> None:
        assert number == 0

    def get_device_name(self, number: int) -> str:
        return "Ascend910B3"


def written() -> tuple[int, str]:
    lines: list[str] = []
    status = report(lines.append)
    return status, "".join(lines)


def modules(monkeypatch: pytest.MonkeyPatch, npu: Npu) -> None:
    """Let torch_npu be there, and see these devices."""
    real, torch = importlib.import_module, ModuleType("torch")
    torch.npu = npu  # type: ignore[attr-defined]
    stand_ins = {"torch": torch, "torch_npu": ModuleType("torch_npu")}
    monkeypatch.setattr(importlib, "import_module", lambda name: stand_ins.get(name) or real(name))


def test_without_an_npu_it_says_so_in_one_sentence_and_fails() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pd_connector.vllm.npu_check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    [sentence] = done.stdout.splitlines()
    assert sentence.startswith("There is no NPU to check on this machine: torch_npu cannot be imported (")


def test_a_driver_without_devices_is_no_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    modules(monkeypatch, Npu(0))
    assert written() == (
        1,
        "There is no NPU to check on this machine: torch_npu sees no device; npu-smi info shows those of the "
        "machine.\n",
    )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with NPUs on which every check passes."""
    modules(monkeypatch, Npu())
    monkeypatch.setattr(npu_check, "runtime_functions", lambda: Finding("ACL functions", "all"))
    for name in ("batched_copies", "cross_layer_blocks", "mooncake"):
        monkeypatch.setattr(npu_check, name, lambda name=name: Finding(name, "fine"))


@pytest.mark.usefixtures("machine")
def test_what_passes_is_reported_line_by_line() -> None:
    status, text = written()
    assert status == 0
    assert "ok   NPU: 2 devices, the first is Ascend910B3\n" in text
    assert "ok   batched_copies: fine\n" in text
    assert text.endswith("please report that it did on yours.\n")


@pytest.mark.usefixtures("machine")
def test_a_check_that_fails_or_raises_is_named_and_the_report_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def batched_copies() -> Finding:
        raise RuntimeError("107002")

    monkeypatch.setattr(npu_check, "batched_copies", batched_copies)
    monkeypatch.setattr(npu_check, "mooncake", lambda: Finding("Mooncake", "cannot be imported", passed=False))
    status, text = written()
    assert status == 2
    assert "FAIL batched copies: failed: RuntimeError: 107002\nok   cross_layer_blocks: fine\nFAIL Mooncake" in text
    assert "\nFailed: batched copies, Mooncake. Please report all of the above" in text


COPIES = "writing in step 0 takes 16777216 bytes more, as if it copied the cache of 16777216 bytes a part"


@pytest.mark.parametrize(
    ("found", "release", "passed"),
    [
        ("", "0.30.0rc2", True),
        (COPIES, "0.23.0.post1", True),
        (COPIES, "0.30.0rc2", False),
        ("attention changed the cache", "0.23.0.post1", False),
    ],
)
def test_a_copy_that_is_known_of_a_release_is_no_failure_of_the_machine(found: str, release: str, passed: bool) -> None:
    finding = npu_check._cross_layer_finding(found, release)
    assert finding.passed is passed
    assert finding.text.startswith(found)
    assert ("That is known of vllm-ascend 0.23.0.post1" in finding.text) is bool(found and passed)


def test_the_words_by_which_a_copy_is_known_are_those_of_the_check() -> None:
    assert npu_check._COPIES in inspect.getsource(cache_check)


@pytest.mark.parametrize(
    ("file", "text", "version"),
    [
        ("version.cfg", "# comment\nruntime_running_version=[9.1.0:CANN-9.1]\n", "9.1.0:CANN-9.1"),
        ("x86_64-linux/ascend_toolkit_install.info", "package_name=Ascend-cann-toolkit\nversion=9.1.0\n", "9.1.0"),
        ("version.info", "Version=25.3.rc1\n", "25.3.rc1"),
    ],
)
def test_cann_says_its_version_in_its_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: str, text: str, version: str
) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    found = {finding.subject: finding.text for finding in versions()}
    assert found["CANN"] == f"{version} ({tmp_path / file})"
    assert found["torch"] == metadata.version("torch")


def test_what_does_not_say_its_version_is_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    monkeypatch.setattr(npu_check, "_DRIVER_FILE", tmp_path / "version.info")
    found = {finding.subject: finding.text for finding in versions()}
    assert found["CANN"].startswith("unknown: ")
    assert found["driver"] == f"unknown: {tmp_path / 'version.info'} does not say it"
    assert found["vllm-ascend"] == "not installed"


def test_functions_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(aclrtMemcpyAsync=None, aclrtMallocHost=None, aclrtFreeHost=None)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    finding = runtime_functions()
    assert finding.passed
    assert "aclrtMemcpyAsync, aclrtMallocHost, aclrtFreeHost; missing: aclrtMemcpyBatchAsync, " in finding.text
    del library.aclrtFreeHost
    assert not runtime_functions().passed


def test_a_runtime_that_is_missing_is_named() -> None:
    finding = runtime_functions()
    assert not finding.passed
    assert finding.text.startswith("libascendcl.so: cannot open shared object file")
