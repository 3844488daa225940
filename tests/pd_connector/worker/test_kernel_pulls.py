"""Pulls that are reshaped by the kernel: by Triton's interpreter, with the CPU taken for a device, and on a GPU."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from tests.support.connector.nhd_pulls import Tables, pull_nhd
from tests.support.connector.staged_ranks import reader_on, wire_of
from tests.support.devices.kernel_devices import KERNEL_DEVICES, kernel_marks, pulls_by_kernel
from tests.support.layout.nhd import NHD_FORMS, NhdEngine, NhdModel, NhdRank

pytestmark = kernel_marks

LAYERS, BLOCKS = 4, 4


@pytest.fixture(params=KERNEL_DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    with pulls_by_kernel(request.param) as device:
        yield device


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("form", NHD_FORMS)
def test_every_byte_is_in_place(form: str, sizes: tuple[int, int], device: torch.device) -> None:
    prefill, decode = sizes
    allocate = partial(torch.empty, dtype=torch.uint8, device=device)
    engine = {tp: NhdEngine(tp, form, block_tokens=32, blocks=2 * BLOCKS) for tp in sizes}
    local = NhdRank(NhdModel(LAYERS), engine[decode], allocate=allocate)
    remotes = [NhdRank(NhdModel(LAYERS), engine[prefill], rank, allocate) for rank in range(prefill)]
    reader = reader_on(device, local.geometry().regions, local.tensors)
    tables = Tables([6, 1, 4, 3], [1, 3, 5, 7], 0, BLOCKS * 32 - 5)
    reads = pull_nhd(reader, local, remotes, tables, wire_of(device))
    assert all(read.schedule.staged_bytes for read in reads)
