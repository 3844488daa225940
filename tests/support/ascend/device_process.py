"""Code that runs in a process of its own with simulated devices, whose kernels are queued on the host."""

import os
import subprocess
import sys

from tests.support.ascend.paths import ROOT_OF_PROJECT
from tests.support.ascend.servers import simulated_environment

#: What the code finds: a device, the stream that is current, another one, and ways to let a stream pause and to read.
_START = """
import time, torch
from tests.support.ascend.host_kernels import plugin
plugin.register()
from tests.support.ascend.host_kernels.dispatch import host
device = torch.device("npu:0")
here, there = torch.npu.current_stream(), torch.npu.Stream(device)

def pause():
    host.launch(lambda: time.sleep(0.5))

def read_on(stream, tensor):
    result = torch.empty(tensor.shape, dtype=tensor.dtype).pin_memory()
    with torch.npu.stream(stream):
        result.copy_(tensor, non_blocking=True)
    stream.synchronize()
    return result
"""


def on_device(code: str, **variables: str) -> None:
    """Run code in a process with a simulated device; what it asserts must hold."""
    environment = {**os.environ, **dict(simulated_environment()), "SIMACL_NIC": "0", **variables}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _START + code],
        env=environment, cwd=ROOT_OF_PROJECT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
