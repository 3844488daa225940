"""The doctor's checks of an NPU, on a simulated one."""

import os
import subprocess
import sys

from pd_connector.doctor import npu
from tests.support.ascend.paths import ROOT_OF_PROJECT
from tests.support.ascend.servers import simulated_environment

#: The checks of the NPU alone.
NPU_CHECKS = f"""
import {npu.__name__} as npu
from pd_connector.doctor.findings import Examination
report = Examination(print)
for name, check in (("npu", npu.device), *npu.CHECKS):
    report.run(name, check)
"""
#: The same on a runtime without the functions for batches.
WITHOUT_BATCHES = f"""
from transfer.copies.batch.acl import AclRuntime
AclRuntime.takes_batches = property(lambda runtime: False)
{NPU_CHECKS}
"""


def check(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, **dict(simulated_environment()), **variables}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True, text=True, timeout=580, check=False, env=environment, cwd=ROOT_OF_PROJECT,
    )  # fmt: skip


def line_of(checked: "subprocess.CompletedProcess[str]", subject: str) -> str:
    [line] = [line for line in checked.stdout.splitlines() if line[5:].startswith(f"{subject}: ")]
    return line


def test_a_simulated_npu_passes() -> None:
    checked = check("-m", "pd_connector.doctor", "--config", '{"protocol": "tcp"}')
    assert line_of(checked, "npu").startswith("ok   npu: 1 devices, the first is ")
    copies = "96 runs of 65536 bytes there and back, 0 bytes wrong; the driver takes batches"
    assert line_of(checked, "batched copies") == f"ok   batched copies: {copies}"
    assert line_of(checked, "memory").endswith(" ms")
    assert "64 MiB pinned for npu" in line_of(checked, "memory")
    # This environment has two builds of vLLM; that one wants the CPU's PyTorch is a warning.
    assert line_of(checked, "torch").startswith("WARN ")
    assert checked.stdout.splitlines()[-1] == "Failed: vllm."
    assert checked.returncode == 1


def test_a_driver_that_takes_no_batches_is_named() -> None:
    line = line_of(check("-c", NPU_CHECKS, SIMACL_BATCH_UNSUPPORTED="1"), "batched copies")
    assert line.startswith("ok   ")
    assert "0 bytes wrong; acl: aclrtMemcpyBatchAsyncV2 is not supported by this driver or chip" in line


def test_a_runtime_without_the_call_for_batches_is_named() -> None:
    line = line_of(check("-c", WITHOUT_BATCHES), "batched copies")
    assert line.startswith("ok   ")
    assert "0 bytes wrong; acl, host to device: the installed library has no aclrtMemcpyBatchAsync" in line
