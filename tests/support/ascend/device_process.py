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

#: Code for the beginning of another: states in pages with padding, and what must not have changed of them.
IN_PAGES = """
from torch.nn import functional

def in_pages(*shape, dtype=torch.float32):
    pages = torch.randn(shape[0], torch.Size(shape[1:]).numel() + 40).to(device)
    return pages, pages.as_strided(shape, (pages.stride(0), *torch.empty(shape[1:]).stride()))

def assert_rows(pages, states, expected, before):
    kept = before.clone()
    for row, state in expected.items():
        torch.testing.assert_close(states[row].cpu(), state.float(), rtol=1e-4, atol=1e-5)
        kept[row, : state.numel()] = states[row].cpu().flatten()
    assert torch.equal(pages.cpu(), kept)

def on(*tensors):
    return [tensor.to(device) for tensor in tensors]

def whole(numbers):
    return torch.tensor(numbers, dtype=torch.int32).to(device)
"""

#: Code behind another that defines ``go_on``, with ``inputs`` and ``states``: requests of three tokens a step, of which
#: the next step says how many were accepted; and these one by one.
ONE_BY_ONE = """
numbers = torch.arange(27).view(3, 3, 3)  # of a token: step, request, place in it
rows, places = [5, 2, 3], [[4, 1, 7], [2, 8, 9], [11, 3, 6]]
accepted = [1, 1, 1], [1, 2, 3], [3, 1, 2]
first = inputs.cpu()[rows], states.cpu()[[at[0] for at in places]]
drafted = [go_on([*numbers[step]], accepted[step], rows, places) for step in range(3)]
for request, (row, (place, *_)) in enumerate(zip(rows, places)):
    inputs[row], states[place] = first[0][request].to(device), first[1][request].to(device)
    for step, count in enumerate((accepted[1][request], accepted[2][request], 3)):
        for token in range(count):
            (alone,) = go_on([numbers[step, request, token : token + 1]], None, [row], [[place]])
            torch.testing.assert_close(drafted[step][request][token : token + 1], alone)
"""


def on_device(code: str, **variables: str) -> None:
    """Run code in a process with a simulated device; what it asserts must hold."""
    environment = {**os.environ, **dict(simulated_environment()), "SIMACL_NIC": "0", **variables}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _START + code],
        env=environment, cwd=ROOT_OF_PROJECT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
