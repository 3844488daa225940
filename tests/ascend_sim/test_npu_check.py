"""The program that checks a machine's Ascend software, on a simulated NPU with vllm-ascend's own operators.

Covers: pd_connector.vllm.npu.standalone.
"""

import os
import subprocess
import sys

import pytest

from pd_connector.vllm import npu_check
from tests.support.ascend.paths import ROOT_OF_PROJECT, ascend_release
from tests.support.ascend.servers import simulated_environment

#: Starts the program on a runtime without the functions for batches.
WITHOUT_BATCHES = f"""
import runpy
from transfer.batch_copy.acl import AclRuntime
AclRuntime.takes_batches = property(lambda runtime: False)
runpy.run_module("{npu_check.__name__}", run_name="__main__")
"""


def check(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, **dict(simulated_environment()), **variables}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True, text=True, timeout=280, check=False, env=environment, cwd=ROOT_OF_PROJECT,
    )  # fmt: skip


@pytest.fixture
def checked(request: pytest.FixtureRequest) -> "subprocess.CompletedProcess[str]":
    """What the program says, with more variables of the simulated runtime."""
    return check("-m", npu_check.__name__, **getattr(request, "param", {}))


def line_of(checked: "subprocess.CompletedProcess[str]", subject: str) -> str:
    [line] = [line for line in checked.stdout.splitlines() if line[5:].startswith(f"{subject}: ")]
    return line


def test_a_simulated_npu_passes_but_for_strides_that_its_release_does_not_take(
    checked: "subprocess.CompletedProcess[str]",
) -> None:
    copies = "96 runs of 65536 bytes there and back, 0 bytes wrong; the driver takes batches"
    assert line_of(checked, "batched copies") == f"ok   batched copies: {copies}"
    cross_layer = line_of(checked, "cross-layer blocks")
    if ascend_release() == "0.23":
        assert "as if it copied the cache" in cross_layer
        assert "That is known of vllm-ascend 0.23" in cross_layer
    assert cross_layer.startswith("ok   "), checked.stdout + checked.stderr
    assert checked.returncode == 0


@pytest.mark.parametrize("checked", [{"SIMACL_BATCH_UNSUPPORTED": "1"}], indirect=True)
def test_a_driver_that_takes_no_batches_is_named(checked: "subprocess.CompletedProcess[str]") -> None:
    line = line_of(checked, "batched copies")
    assert line.startswith("ok   ")
    assert "0 bytes wrong; acl: aclrtMemcpyBatchAsyncV2 is not supported by this driver or chip" in line


def test_a_runtime_without_the_call_for_batches_is_named() -> None:
    line = line_of(check("-c", WITHOUT_BATCHES), "batched copies")
    assert line.startswith("ok   ")
    assert "0 bytes wrong; acl, host to device: the installed library has no aclrtMemcpyBatchAsync" in line
