"""A program that pulls between NHD caches on a simulated NPU and prints what each pull took, as JSON.

    python -m tests.support.ascend.transposes FORM,PREFILL_TP,DECODE_TP,LAYERS... [early]

torch_npu is real: its tensors, allocator, streams and events; kernels run on the host, later than they are launched.
``early`` leaves out the event that the copier waits for, to show that somebody would notice. Wrong bytes end the
program with an AssertionError.
"""

import ctypes
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from layout.cost import CostModel
from pd_connector.worker.remote_reader import SLOTS, RemoteReader
from tests.support.ascend.host_kernels import dispatch
from tests.support.connector.nhd_pulls import Tables, pull_nhd
from tests.support.layout.nhd import NhdEngine, NhdModel, NhdRank
from transfer.copies.reshape.reshape_torch import SideStream

DEVICE = torch.device("npu:0")
_BLOCKS = 4
assert dispatch.host, "without host kernels no operator runs"


def on_the_device(size: int) -> torch.Tensor:
    """An allocation, at an address that suits Ascend's transfer engine."""
    memory = torch.empty(size + (2 << 20), dtype=torch.uint8, device=DEVICE)
    return memory[-memory.data_ptr() % (2 << 20) :]


def copies_of_the_runtime() -> int:
    """How many copies the runtime has been asked for, whatever their kind."""
    runtime = ctypes.CDLL("libascendcl.so")
    runtime.simacl_count.restype = ctypes.c_long
    return sum(int(runtime.simacl_count(kind)) for kind in (b"copies", b"async_copies", b"pageable_copies"))


def at_once(memory: torch.Tensor) -> torch.Tensor:
    """What the network would read now, whatever the device has been told to do."""
    return torch.frombuffer(bytearray(ctypes.string_at(memory.data_ptr(), memory.numel())), dtype=torch.uint8)


@contextmanager
def _early(stream: SideStream) -> Iterator[None]:
    with stream._module.stream(stream._stream):
        yield


def pull_case(form: str, prefill: int, decode: int, layers: int) -> dict[str, Any]:
    """Pull, check every byte, and say what it took."""
    model, order = NhdModel(layers), [6, 1, 4, 3]
    local = NhdRank(model, NhdEngine(decode, form, blocks=2 * _BLOCKS), allocate=on_the_device)
    remotes = [NhdRank(model, NhdEngine(prefill, form, blocks=2 * _BLOCKS), rank) for rank in range(prefill)]
    reader = RemoteReader.with_device_staging(
        CostModel.of_protocol("ascend"), local.geometry().regions, SLOTS * (8 << 20), local.tensors
    )
    torch.npu.synchronize()
    before = copies_of_the_runtime()
    reads = pull_nhd(reader, local, remotes, Tables(order, [1, 7, 0, 5], 0, _BLOCKS * 128), check=False)
    copies = copies_of_the_runtime() - before
    local.check(order, 0, _BLOCKS * 128, at_once)
    ranks = [
        {
            "direct": len(read.schedule.direct),
            "descriptors": read.schedule.descriptors,
            "operators": [dict(calls) for calls in read.operators],
        }
        for read in reads
    ]
    return {"copies": copies, "ranks": ranks}


def main(arguments: list[str]) -> None:
    """Pull once for each case."""
    torch.npu.set_device(DEVICE)
    if "early" in arguments:
        arguments.remove("early")
        SideStream.running = _early  # type: ignore[method-assign, assignment]
    cases = (case.split(",") for case in arguments)
    pulls = [pull_case(form, int(prefill), int(decode), int(layers)) for form, prefill, decode, layers in cases]
    sys.stdout.write(json.dumps(pulls) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
