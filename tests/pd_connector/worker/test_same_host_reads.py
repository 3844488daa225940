"""How mapped memory is read, by the cost of its link: the plan, and every byte of the oracle's caches.

By Triton's interpreter and on fake drivers, not on a GPU.
"""

import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layout.copies import Copies
from layout.cost import ReadCost
from layout.geometry import Region
from layout.regions import RegionTable
from layout.staging import Schedule, schedule_reads
from pd_connector.worker import remote_reader
from pd_connector.worker.remote_reader import SLOTS, RemoteReader
from tests.support.connector.chunked_prompts import ChunkedPrompt, follow
from tests.support.connector.engines import OURS, THEIRS, Site
from tests.support.connector.shared_memory import Neighbours
from tests.support.connector.staging import TCP, stage
from tests.support.devices.kernel_devices import kernel_marks
from tests.support.devices.shared_devices import SharedDevices
from tests.support.engine.ipc_engines import FakeIpcEngine, kernel_or_skip
from tests.support.layout.oracle import LAYOUTS, Engine, Model, Rank
from tests.support.layout.pulls import plain, pull
from tests.support.layout.strategies import FORMS, engines, few, models, requests
from tests.support.waiting import WAIT_S, until
from transfer.copies.reshape.reshape_kernel import RunKernel

pytestmark = kernel_marks

KERNEL = ReadCost.of_mapped(by_kernel=True, is_between_devices=True)
#: Of a run, where a kernel, operators or a core copies out of the staging buffer.
COPY_ALPHAS = (remote_reader._KERNEL_COPY_ALPHA, remote_reader._DEVICE_COPY_ALPHA, TCP.copy_alpha)


class MappedRanks:
    """Has ranks of the oracle read each other as a pull over CUDA IPC does, with a staging buffer at hand."""

    def __init__(self, kernel: RunKernel | None, gpu: int) -> None:
        """``gpu``: that of whoever reads; the others have 0."""
        self._kernel, self._gpu = kernel, gpu
        self.schedules: list[Schedule] = []

    def read(self, rank: Rank, copies: Copies, source: Rank) -> None:
        here, there = (Region(each.memory.ctypes.data, each.memory.nbytes) for each in (rank, source))
        devices = SharedDevices()
        ours = FakeIpcEngine(devices, is_read=False, gpu=self._gpu, kernel=self._kernel)
        theirs = FakeIpcEngine(devices)
        reader = RemoteReader.with_staging(TCP, (here,), SLOTS << 16)
        ours.register((here, *reader.regions))
        theirs.register((there,))
        link = ours.open(theirs.address, (there,), theirs.identity)
        placed = Copies(
            copies.destinations - rank.base + here.address, copies.sources - source.base + there.address, copies.sizes
        )
        with reader.planned(placed, RegionTable((there,)), link.cost) as schedule:
            reader.carry_out(link, schedule, WAIT_S)
        link.prove(WAIT_S)
        self.schedules.append(schedule)
        for engine in (ours, theirs):
            engine.close()

    def replace_copies(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The oracle still counts what is to be written, and nothing else."""
        count = Rank.receive

        def receive(rank: Rank, copies: Copies, source: Rank) -> None:
            before = rank.memory.copy()
            count(rank, copies, source)
            rank.memory[:] = before
            if len(copies):
                self.read(rank, copies, source)

        monkeypatch.setattr(Rank, "receive", receive)


@pytest.fixture
def kernel() -> RunKernel:
    return kernel_or_skip()


@pytest.fixture(params=[0, 1], ids=["the same GPU", "another GPU"])
def by_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kernel: RunKernel) -> MappedRanks:
    ranks = MappedRanks(kernel, request.param)
    ranks.replace_copies(monkeypatch)
    return ranks


@pytest.mark.thorough
@pytest.mark.parametrize(("remote_tp", "local_tp"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("layouts", [("LBNHC", "BLHNC"), ("BHLNC", "LBHNC"), ("LBHNC", "LBNHC")], ids="-".join)
def test_unequal_caches_are_read_straight_into_place(
    layouts: tuple[str, str], remote_tp: int, local_tp: int, by_kernel: MappedRanks
) -> None:
    model = Model(2, (3, 5), 2, ((0, 1),), (0,))
    local, remote = Engine(layouts[0], tp=local_tp, blocks=4), Engine(layouts[1], tp=remote_tp, blocks=4)
    pull(model, local, remote, plain(20, local, remote, "fragmented"))
    assert by_kernel.schedules
    for schedule in by_kernel.schedules:
        assert schedule.staged_bytes == 0
        assert schedule.read_bytes == schedule.wanted_bytes


@pytest.mark.slow
@pytest.mark.parametrize("layouts", [*product(LAYOUTS, repeat=2)], ids="-".join)
@few
@given(data=st.data())
def test_whatever_both_sides_are(layouts: tuple[str, str], data: st.DataObject, by_kernel: MappedRanks) -> None:
    """Models, forms, sizes, prefix hits, windows, requests that are read in ranges."""
    model, forms = data.draw(models()), data.draw(st.sampled_from(FORMS))
    local, remote = (data.draw(engines(model, *side)) for side in zip(layouts, forms, strict=True))
    request = data.draw(requests(model, local, remote))
    pull(model, local, remote, request, cuts=random.Random(data.draw(st.integers(0, 99))))
    assert not any(schedule.staged_bytes for schedule in by_kernel.schedules)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 1 << 16), st.integers(0, 1 << 12)), min_size=2, max_size=60),
    st.randoms(use_true_random=False),
    st.sampled_from(COPY_ALPHAS),
    st.booleans(),
)
def test_what_a_kernel_reads_of_mapped_memory_goes_straight_into_place(
    steps: list[tuple[int, int]], order: random.Random, copy_alpha: float, is_between_devices: bool
) -> None:
    """Runs with gaps between them in the peer's memory, which go anywhere here."""
    sizes, gaps = (np.array(column, np.int64) for column in zip(*steps, strict=True))
    places = list(range(len(steps)))
    order.shuffle(places)
    destinations = np.empty(len(steps), np.int64)
    destinations[places] = np.cumsum(sizes[places]) - sizes[places]
    copies = Copies(destinations + (1 << 41), np.cumsum(sizes + gaps) - sizes + (1 << 40), sizes)
    everything = RegionTable([Region(1, 1 << 60)])
    cost = replace(TCP, copy_alpha=copy_alpha)
    link = ReadCost.of_mapped(by_kernel=True, is_between_devices=is_between_devices)
    plan = schedule_reads(copies, cost.over(link), everything, everything, Region(1 << 42, 8 << 20))
    assert plan.staged_bytes == 0
    assert plan.read_bytes == plan.wanted_bytes == copies.total_bytes
    assert plan.predicted_s == plan.direct_s


def test_what_the_driver_copies_is_staged_where_that_is_cheaper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copies of small runs cost more than those out of the staging buffer."""
    ranks = MappedRanks(None, 1)
    ranks.replace_copies(monkeypatch)
    local, remote = Engine("LBNHC", blocks=4), Engine("LBHNC", tp=2, blocks=4)
    pull(Model(2, (3, 5), 2, ((0, 1),), (0,)), local, remote, plain(50, local, remote, "fragmented"))
    assert any(schedule.staged_bytes for schedule in ranks.schedules)


@pytest.mark.parametrize("has_kernel", [True, False])
def test_a_pull_is_planned_by_the_cost_of_its_link(site: Site, kernel: RunKernel, has_kernel: bool) -> None:
    here = Neighbours(site, kernel=kernel if has_kernel else None)
    here.ours.register([stage(here.worker, 1 << 20).region])
    _, end = here.pull()
    assert not end.cause, end.reason
    assert end.mapped_bytes == end.copied_bytes > 0
    assert here.worker.holds([(OURS, 0, 69)])
    assert ("reshape" in end.seconds) is not has_kernel
    assert bool(here.ours.driver.launches) is has_kernel


@pytest.mark.parametrize(
    ("costs", "beta"), [([None], TCP.beta), ([KERNEL], KERNEL.beta), ([KERNEL, None], TCP.beta), ([], 0.0)]
)
def test_a_range_is_worth_what_the_slowest_link_brings_meanwhile(costs: list[ReadCost | None], beta: float) -> None:
    least = RemoteReader(TCP, ()).least_bytes(costs)
    assert least == (remote_reader.RANGE_S / beta if beta else float("inf"))


@pytest.mark.parametrize("is_mapped", [True, False])
def test_what_a_fast_link_brings_at_once_is_not_read_ahead(
    site: Site, kernel: RunKernel, monkeypatch: pytest.MonkeyPatch, is_mapped: bool
) -> None:
    """32 tokens take longer than this over TCP, and less over mapped memory."""
    monkeypatch.setattr(remote_reader, "RANGE_S", 3e-6)
    here = Neighbours(site, kernel=kernel)
    if not is_mapped:
        here.announce("")
    prompt = ChunkedPrompt(here.prefill, THEIRS)
    follow(here.worker, prompt)
    session = here.session(prompt.remote())
    prompt.compute(32)
    session.submit(prompt.order("r", OURS))
    until(lambda: prompt.waiting == 1, "it waits for more")
    assert here.worker.holds([(OURS, 0, 32)]) is not is_mapped
    prompt.complete()
    end = here.worker.next_end()
    assert not end.cause, end.reason
    assert (end.ahead_bytes == 0) is is_mapped
    assert here.worker.holds([(OURS, 0, 69)])
