"""Pulls that are reshaped by the kernel, run by Triton's interpreter, with the CPU taken for a device."""

from collections.abc import Iterator

import pytest

from layout.cost import CostModel
from pd_connector.worker.remote_reader import SLOTS, RemoteReader
from tests.support.connector.nhd_pulls import Tables, pull_nhd
from tests.support.devices.kernel_devices import kernel_for_cpu, kernel_marks
from tests.support.layout.nhd import NHD_FORMS, NhdEngine, NhdModel, NhdRank
from transfer.copies.reshape.reshape_kernel import KernelCopier

pytestmark = kernel_marks

LAYERS, BLOCKS = 4, 4
HALF_BYTES = 256 << 10


@pytest.fixture(autouse=True)
def kernel() -> Iterator[None]:
    with kernel_for_cpu():
        yield


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("form", NHD_FORMS)
def test_every_byte_is_in_place(form: str, sizes: tuple[int, int]) -> None:
    prefill, decode = sizes
    engine = {tp: NhdEngine(tp, form, block_tokens=32, blocks=2 * BLOCKS) for tp in sizes}
    local = NhdRank(NhdModel(LAYERS), engine[decode])
    remotes = [NhdRank(NhdModel(LAYERS), engine[prefill], rank) for rank in range(prefill)]
    regions = local.geometry().regions
    reader = RemoteReader.with_device_staging(
        CostModel.of_protocol("tcp"), regions, 2 * SLOTS * HALF_BYTES, local.tensors
    )
    assert isinstance(reader._copy, KernelCopier)
    tables = Tables([6, 1, 4, 3], [1, 3, 5, 7], 0, BLOCKS * 32 - 5)
    reads = pull_nhd(reader, local, remotes, tables)
    assert all(read.schedule.staged_bytes for read in reads)
