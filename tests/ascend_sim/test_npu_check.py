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


@pytest.fixture
def checked(request: pytest.FixtureRequest) -> "subprocess.CompletedProcess[str]":
    """What the program says, with more variables of the simulated runtime."""
    environment = {**os.environ, **dict(simulated_environment()), **getattr(request, "param", {})}
    return subprocess.run(
        [sys.executable, "-m", npu_check.__name__],
        capture_output=True, text=True, timeout=280, check=False, env=environment, cwd=ROOT_OF_PROJECT,
    )  # fmt: skip


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
        assert checked.returncode == 2
    else:
        assert cross_layer.startswith("ok   "), checked.stdout + checked.stderr
        assert checked.returncode == 0


@pytest.mark.parametrize("checked", [{"SIMACL_BATCH_UNSUPPORTED": "1"}], indirect=True)
def test_a_driver_that_takes_no_batches_is_named(checked: "subprocess.CompletedProcess[str]") -> None:
    line = line_of(checked, "batched copies")
    assert line.startswith("ok   ")
    assert "0 bytes wrong; acl: aclrtMemcpyBatchAsyncV2 is not supported by this driver or chip" in line
