"""What ``make test-cuda`` says on a machine that cannot run it, before it installs anything."""

import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.gpu_machine import ON_CPU_VARIABLE, lacking
from tests.support.sources import ROOT


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory with programs."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def nvidia_smi(path: Path, said: str, code: int = 0) -> None:
    program = path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{said}'\nexit {code}\n")
    program.chmod(0o755)


def not_asked(name: str) -> None:
    pytest.fail(f"{name} was imported")


def torch_is(cuda: str | None, *, is_available: bool) -> Callable[[str], Any]:
    """What loads such a PyTorch."""
    torch = SimpleNamespace(version=SimpleNamespace(cuda=cuda), cuda=SimpleNamespace(is_available=lambda: is_available))
    return {"torch": torch}.__getitem__


@pytest.mark.usefixtures("path")
def test_without_a_driver() -> None:
    assert lacking(not_asked).startswith("no NVIDIA driver: there is no nvidia-smi. Install the driver, 580")


@pytest.mark.parametrize(("said", "code"), [("No devices were found", 6), ("", 0)])
def test_without_a_gpu(path: Path, said: str, code: int) -> None:
    nvidia_smi(path, said, code)
    assert lacking(not_asked).startswith(f"no GPU: nvidia-smi says {said or 'nothing'!r}. Load the driver")


class TestPyTorch:
    @pytest.fixture(autouse=True)
    def a_gpu(self, path: Path) -> None:
        nvidia_smi(path, "NVIDIA H200, 570.86.15")

    def test_that_is_built_without_cuda(self) -> None:
        assert "is built without CUDA: make test-cuda makes one" in lacking(torch_is(None, is_available=False))

    def test_that_the_driver_is_too_old_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
        assert lacking(torch_is("13.0", is_available=False)) == (
            "PyTorch for CUDA 13.0 finds no GPU under driver 570.86.15: it needs driver 580 or newer, and "
            "CUDA_VISIBLE_DEVICES = '7' must name a GPU or be unset"
        )

    def test_that_finds_it(self) -> None:
        assert lacking(torch_is("13.0", is_available=True)) == ""

    def test_that_is_not_there_yet(self) -> None:
        def missing(name: str) -> None:
            raise ImportError(name)

        assert lacking(missing) == ""


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what a make around this one wants from the makes of a test."""
    for variable in (ON_CPU_VARIABLE, "MAKEFLAGS", "MAKELEVEL"):
        monkeypatch.delenv(variable, raising=False)


def make(environment: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = ["make", *words, f"PYTHON={sys.executable}", f"CUDA_ENV={environment}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("target", ["test-cuda", "bench-cuda"])
def test_make_stops_before_it_installs(tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(tmp_path, "No devices were found", 6)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    ran = make(tmp_path / "environment", target)
    assert ran.returncode
    assert ran.stdout == ""
    assert ran.stderr.startswith("no GPU: nvidia-smi says 'No devices were found'")
    assert not (tmp_path / "environment").exists()


@pytest.mark.usefixtures("alone")
@pytest.mark.skipif(shutil.which("compute-sanitizer") is not None, reason="it is installed")
@pytest.mark.parametrize("is_there", [True, False])
def test_the_kernels_are_tested_under_compute_sanitizer_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    program = tmp_path / "compute-sanitizer"
    if is_there:
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    said = make(tmp_path / "environment", "-n", "test-cuda").stdout
    modules = "tests/transfer/copies/reshape/test_reshape_kernel.py tests/pd_connector/worker/test_kernel_pulls.py"
    assert (f"for module in {modules}; do" in said) == is_there
    assert (f"PYTORCH_NO_CUDA_MEMORY_CACHING=1 {program} --error-exitcode 9 " in said) == is_there


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("target", ["test-cuda", "bench-cuda"])
def test_make_installs_the_mooncake_that_the_other_tests_run_on(tmp_path: Path, target: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (release,) = [line.partition("==")[2] for line in extras["cpu"] if line.startswith("mooncake")]
    said = make(tmp_path / "environment", "-n", target).stdout
    assert f'-e ".[$extra,test]" "$mooncake=={release}"' in said
    for extra in ("cuda", "cuda12"):
        (name,) = [line.partition(">=")[0] for line in extras[extra] if line.startswith("mooncake")]
        assert f"extra={extra} mooncake={name};;" in said


@pytest.mark.usefixtures("alone")
def test_another_vllm_is_installed_where_one_is(tmp_path: Path) -> None:
    here = "vllm==0.32.0", "0.3.13.post1"
    (tmp_path / "installed-vllm-0.32.0-0.3.13.post1").touch()

    def installs(vllm: str, mooncake: str) -> bool:
        return f"install -qq --disable-pip-version-check '{vllm}'" in make(
            tmp_path, "-n", "test-cuda", f"VLLM_CUDA={vllm}", f"MOONCAKE={mooncake}"
        ).stdout  # fmt: skip

    assert not installs(*here)
    assert installs("vllm==0.33.0", here[1])
    assert installs(here[0], "0.3.14")
