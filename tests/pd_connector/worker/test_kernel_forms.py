"""Pulls of states, MLA and compressed caches that are reshaped by the kernel; their own oracles check every byte."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.releases import INSTALLED, module_needs

if INSTALLED < (0, 30):
    module_needs((0, 30), "states of recurrent layers")

from layout.copies import Copies
from layout.cost import CostModel
from layout.geometry import Region
from layout.regions import RegionTable
from pd_connector.worker.remote_reader import SLOTS, RemoteReader
from tests.support.connector.nhd_pulls import LocalWire
from tests.support.connector.state_caches import MODELS, StateLayout, StateRank
from tests.support.connector.state_pulls import pull_states
from tests.support.devices.kernel_devices import kernel_for_cpu, kernel_marks
from tests.support.layout.oracle import Engine, Model, Rank
from tests.support.layout.pulls import plain, pull, pull_rows
from transfer.copies.reshape.reshape_kernel import KernelCopier

pytestmark = kernel_marks

STAGING_BYTES = SLOTS * (512 << 10)


@pytest.fixture(autouse=True)
def kernel() -> Iterator[None]:
    with kernel_for_cpu():
        yield


def staged_by_kernel(rank: Rank | StateRank, copies: Copies, source: Rank | StateRank) -> int:
    """Read ``copies`` into a rank's memory, through staging and by the kernel; return the bytes that were staged."""
    here, there = (Region(each.memory.ctypes.data, each.memory.nbytes) for each in (rank, source))
    reader = RemoteReader.with_device_staging(
        CostModel.of_protocol("tcp"), (here,), STAGING_BYTES, [torch.from_numpy(rank.memory)]
    )
    assert isinstance(reader._copy, KernelCopier)
    placed = Copies(
        copies.destinations - rank.base + here.address, copies.sources - source.base + there.address, copies.sizes
    )
    with reader.planned(placed, RegionTable((there,))) as schedule:
        reader.carry_out(LocalWire(), schedule, 60.0)
    return int(schedule.staged_bytes)


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that were staged for each rank; its oracle keeps count of what was to be written, and nothing else."""
    sizes: list[int] = []

    def receives(kind: Any) -> None:
        count = kind.receive

        def receive(rank: Any, copies: Copies, source: Any) -> None:
            before = rank.memory.copy()
            count(rank, copies, source)
            rank.memory[:] = before
            sizes.append(staged_by_kernel(rank, copies, source))

        monkeypatch.setattr(kind, "receive", receive)

    receives(Rank)
    receives(StateRank)
    return sizes


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", [(2, 1), (3, 2)], ids=str)
@pytest.mark.parametrize("name", ["GDN", "Mamba2, one group"])
def test_states_are_in_place(name: str, sizes: tuple[int, int], staged: list[int], monkeypatch: Any) -> None:
    remote, local = sizes
    pull_states(MODELS[name], StateLayout(tp=local), StateLayout(tp=remote), monkeypatch)
    assert all(staged), staged


@pytest.mark.parametrize("layouts", [("LBNHC", "BLHNC"), ("BHLNC", "LBNHC")], ids="-".join)
def test_both_parts_of_mla_are_in_place(layouts: tuple[str, str], staged: list[int]) -> None:
    remote, local = (Engine(layout, "apart", blocks=12) for layout in layouts)
    pull(Model(1, (8, 1), 2, ((0, 1, 2),), (0,)), local, remote, plain(150, local, remote, "fragmented"))
    assert all(staged), staged


@pytest.mark.parametrize("remote_tp", [1, 2])
def test_compressed_rows_are_in_place(remote_tp: int, staged: list[int]) -> None:
    remote, local = Engine("LBNHC", tp=remote_tp, blocks=12), Engine("BLHNC", blocks=12)
    pull_rows(Model(2, (3, 5), 2, ((0, 1, 2),), (0,)), (local, remote), plain(150, local, remote, "fragmented"), 4, 3)
    assert all(staged), staged
