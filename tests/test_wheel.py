"""What ``make dist`` builds: installed into new environments with nothing but what it declares, without a checkout.

It builds and installs with pip, which takes packages from its index: a minute or two.
"""

import json
import subprocess
import sys
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.examples.harness import ProxyProcess, unused_url
from tests.support.imports import PACKAGES, WITHOUT_VLLM, lacks
from tests.support.sources import ROOT, modules, source_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

#: Imports every module of the distribution, and prints which of them lacked what.
IMPORT_ALL = """
import importlib, importlib.metadata, json
files = [file for file in importlib.metadata.files("pd-connector") if file.suffix == ".py"]
names = sorted(str(file.with_suffix("")).replace("/", ".").removesuffix(".__init__") for file in files)
found = {}
for name in names:
    try:
        importlib.import_module(name)
        found[name] = ""
    except ModuleNotFoundError as error:
        found[name] = error.name
print(json.dumps(found))
"""

#: Prints what the entry point of vLLM's plugins is, loaded.
LOAD_PLUGIN = """
from importlib.metadata import entry_points
(point,) = [point for point in entry_points(group="vllm.general_plugins") if point.name == "pd_connector"]
plugin = point.load()
print(plugin.__module__, plugin.__name__, callable(plugin))
"""


def run(command: list[str | Path], cwd: Path) -> str:
    """The output of a command that must succeed."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@dataclass(frozen=True)
class Environment:
    """A new virtual environment, and an empty directory to be in."""

    path: Path
    cwd: Path

    @classmethod
    def new(cls, path: Path) -> "Environment":
        venv.create(path / "venv", with_pip=True, symlinks=True)
        (path / "cwd").mkdir()
        return cls(path / "venv", path / "cwd")

    def command(self, name: str) -> Path:
        return self.path / "bin" / name

    def python(self, *arguments: str) -> str:
        return run([self.command("python"), "-I", *arguments], self.cwd)

    def install(self, *arguments: str) -> None:
        self.python("-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments)

    def files(self) -> set[str]:
        """What is in site-packages and bin, one level deep."""
        (site,) = self.path.glob("lib/python3.*/site-packages")
        return {path.name for path in site.iterdir()} | {f"bin/{path.name}" for path in site.parents[2].glob("bin/*")}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheel and the sdist of this checkout, built as ``make dist`` does."""
    path = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-m", "build", "--outdir", path, ROOT], path)
    return path


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Environment, set[str]]:
    """An environment with the wheel and what it depends on, and what the wheel itself has put there."""
    environment = Environment.new(tmp_path_factory.mktemp("bare"))
    before = environment.files()
    environment.install("--no-deps", str(wheel))
    brought = environment.files() - before
    environment.install(str(wheel))
    return environment, brought


def test_the_wheel_has_our_modules_and_no_others(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
        described = archive.read(metadata).decode()
    ours = {source_file(name).relative_to(ROOT).as_posix() for package in PACKAGES for name in modules(package)}
    typed = {f"{package}/py.typed" for package in PACKAGES}
    pages = {"pd_proxy/status.html"}
    assert {name for name in names if ".dist-info/" not in name} == ours | typed | pages
    assert "License-Expression: Apache-2.0" in described


def test_the_sdist_is_the_repository(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        files = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    made = {name for name in files if ".egg-info/" in name} | {"PKG-INFO", "setup.cfg"}
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    git = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=False)
    if git.returncode:
        pytest.skip("this is no git checkout, so nothing says which files belong to the repository")
    there = {name for name in git.stdout.splitlines() if (ROOT / name).exists() and not name.endswith(".gitignore")}
    assert files - made == there


def test_nothing_else_lands_in_site_packages(bare: tuple[Environment, set[str]], wheel: Path) -> None:
    _, brought = bare
    name, version, *_ = wheel.name.split("-")
    assert brought == {*PACKAGES, f"{name}-{version}.dist-info", "bin/pd-doctor", "bin/pd-proxy"}


def test_every_module_that_needs_no_vllm_is_importable(bare: tuple[Environment, set[str]]) -> None:
    environment, _ = bare
    found: dict[str, str] = json.loads(environment.python("-c", IMPORT_ALL))
    assert set(found) == {name for package in PACKAGES for name in modules(package)}
    engine = {name: missing for name, missing in found.items() if not name.startswith("pd_proxy")}
    assert {name for name, missing in engine.items() if missing} == {name for name in engine if lacks(name)}
    for name, missing in engine.items():
        assert not missing or missing.partition(".")[0] in lacks(name), f"{name} lacks {missing}"
    plain = [name for name in found if name.startswith(WITHOUT_VLLM)]
    assert len(plain) > 20
    assert not [name for name in plain if found[name]]


def test_the_environment_is_consistent(bare: tuple[Environment, set[str]]) -> None:
    environment, _ = bare
    assert "No broken requirements" in environment.python("-m", "pip", "check")


def test_vllms_plugin_is_found(bare: tuple[Environment, set[str]]) -> None:
    environment, _ = bare
    assert environment.python("-c", LOAD_PLUGIN).split() == ["pd_connector.vllm.plugin", "register", "True"]


def test_the_connector_is_of_this_version(bare: tuple[Environment, set[str]], wheel: Path) -> None:
    environment, _ = bare
    (installed,) = [one for one in distributions(environment) if one["name"] == "pd-connector"]
    assert installed["version"] == wheel.name.split("-")[1]


def distributions(environment: Environment) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(environment.python("-m", "pip", "list", "--format", "json"))
    return found


def test_the_doctor_starts_and_says_what_an_engine_lacks(bare: tuple[Environment, set[str]], wheel: Path) -> None:
    environment, _ = bare
    command = [str(environment.command("pd-doctor"))]
    done = subprocess.run(command, cwd=environment.cwd, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"ok   pd-connector: {wheel.name.split('-')[1]} on Python ")
    (mooncake,) = [line for line in lines if line[5:].startswith("mooncake: ")]
    assert "pip install 'pd-connector[cpu]'" in mooncake
    assert {line[5:].partition(":")[0] for line in lines if line.startswith("FAIL")} == {
        *("vllm", "torch", "mooncake", "transfer engine")
    }


def test_the_proxy_says_what_it_lacks(bare: tuple[Environment, set[str]]) -> None:
    environment, _ = bare
    command = [environment.command("pd-proxy")]
    done = subprocess.run(command, cwd=environment.cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "is not installed; run: pip install 'pd-connector[proxy]'" in done.stderr.splitlines()[-1]


def test_the_proxy_starts_with_its_extra(wheel: Path, tmp_path: Path) -> None:
    environment = Environment.new(tmp_path)
    environment.install(f"{wheel}[proxy]")
    servers = ["--prefill", unused_url(), "--decode", unused_url()]
    with ProxyProcess(servers, command=[str(environment.command("pd-proxy"))], cwd=environment.cwd) as proxy:
        answer = httpx.get(f"{proxy.url}/healthcheck", trust_env=False).json()
        assert answer == {"status": "ok", "prefill_instances": 1, "decode_instances": 1}
        failed = httpx.post(f"{proxy.url}/v1/completions", json={"prompt": "a"}, trust_env=False)
        assert failed.status_code == 502
    assert "Traceback" not in proxy.log
