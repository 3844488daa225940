"""The checks of a machine's Ascend software: what they say without an NPU, and of faults. Whole on a simulated NPU:
``tests/ascend_sim/test_doctor.py``.
"""

import ctypes
import importlib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from pd_connector.doctor import npu
from pd_connector.doctor.findings import CheckFailed


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


def modules(monkeypatch: pytest.MonkeyPatch, found: Npu) -> None:
    """Let torch_npu be there, and see these devices."""
    real, torch = importlib.import_module, ModuleType("torch")
    torch.npu = found  # type: ignore[attr-defined]
    stand_ins = {"torch": torch, "torch_npu": ModuleType("torch_npu")}
    monkeypatch.setattr(importlib, "import_module", lambda name: stand_ins.get(name) or real(name))


def test_software_without_its_libraries_is_named() -> None:
    with pytest.raises(CheckFailed, match=r"torch_npu cannot be imported \(.*\); source CANN's set_env\.sh"):
        npu.device()


def test_a_driver_without_devices_is_no_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    modules(monkeypatch, Npu(0))
    with pytest.raises(CheckFailed, match="torch_npu sees no device; npu-smi info shows those of the machine"):
        npu.device()


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
    modules(monkeypatch, Npu())
    assert npu.device().startswith(f"2 devices, the first is Ascend910B3; CANN {version} ({tmp_path / file}); driver ")


def test_what_does_not_say_its_version_is_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    monkeypatch.setattr(npu, "_DRIVER_FILE", tmp_path / "version.info")
    modules(monkeypatch, Npu())
    text = npu.device()
    assert "CANN unknown: ASCEND_HOME_PATH and ASCEND_TOOLKIT_HOME name no directory with a version" in text
    assert text.endswith(f"driver unknown: {tmp_path / 'version.info'} does not say it")
    (tmp_path / "version.info").write_text("Version=25.3.rc1\n")
    assert npu.device().endswith("driver 25.3.rc1")


def test_functions_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(aclrtMemcpyAsync=None, aclrtMallocHost=None, aclrtFreeHost=None)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    text = npu.runtime_functions()
    assert "aclrtMemcpyAsync, aclrtMallocHost, aclrtFreeHost; missing: aclrtMemcpyBatchAsync, " in text
    del library.aclrtFreeHost
    with pytest.raises(CheckFailed, match=r"missing: .*aclrtFreeHost"):
        npu.runtime_functions()


def test_a_runtime_that_is_missing_is_named() -> None:
    with pytest.raises(CheckFailed, match=r"^libascendcl\.so: cannot open shared object file"):
        npu.runtime_functions()
