"""Pulls between NHD caches of unequal tensor parallel sizes: whole blocks are read, and transposed by few operators.

Heads are interleaved in every token there, so almost every (token, head range) is a run of its own. The device is the
CPU here, taken for one: the bytes and the operators are the same, only the stream is missing, and what brings the row
numbers to the device.
"""

import mmap
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layout.copies import Copies
from layout.cost import CostModel
from layout.geometry import Region
from layout.plan import BlockTable, compile_plans
from layout.regions import RegionTable
from layout.sharding import choose_sources
from pd_connector.worker import device_memory, remote_reader
from pd_connector.worker.remote_reader import SLOTS, RemoteReader
from tests.support.connector.nhd_pulls import LocalWire, Tables, pull_nhd
from tests.support.layout.nhd import NHD_FORMS, Allocate, NhdEngine, NhdModel, NhdRank, on_the_cpu
from tests.support.memory import Memory
from transfer.copies.reshape.reshape_torch import TensorCopier

ASCEND = CostModel.of_protocol("ascend")
HUGE_PAGE = 2 << 20
PAIRS = [(2, 1), (1, 2), (4, 2)]
#: Every form, every pair and either number of layers. The other cases are slow.
ALWAYS = {("paired", 4, 2, 1), ("apart", 4, 1, 2), ("cross_layer", 4, 4, 2), ("cross_layer", 32, 2, 1)}
#: One operator more than are counted here brings the row numbers to a device.
MOST_OPERATORS = 6 - 1

Segments = Callable[[torch.device], list[Region]]


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Allocate:
    """Allocations that the allocator has put into one segment, with others' memory between them."""
    segment, end = Memory(64 << 20), 0

    def allocate(size: int) -> torch.Tensor:
        nonlocal end
        start, end = end, end + size + 4096
        return torch.from_numpy(segment.view[start : start + size])

    monkeypatch.setattr(remote_reader, "mapped_segments", lambda device: [segment.region])
    return allocate


def reader_for(local: NhdRank, half_bytes: int) -> RemoteReader:
    """A reader with windows of ``half_bytes`` or, as memory of a device is aligned, more."""
    regions = local.geometry().regions
    return RemoteReader.with_device_staging(ASCEND, regions, 2 * SLOTS * half_bytes, local.tensors)


def pair(
    model: NhdModel, form: str, prefill: int, decode: int, blocks: int, allocate: Allocate = on_the_cpu
) -> tuple[NhdRank, list[NhdRank]]:
    ours, theirs = (NhdEngine(tp, form, block_tokens=128, blocks=blocks) for tp in (decode, prefill))
    return NhdRank(model, ours, allocate=allocate), [NhdRank(model, theirs, rank) for rank in range(prefill)]


def scattered(blocks: int, count: int) -> Tables:
    """A prompt of whole blocks, no two of which follow each other."""
    return Tables(list(range(2 * count - 2, -1, -2)), list(range(1, 2 * count, 2)), 0, count * 128)


@pytest.mark.parametrize(
    ("form", "layers", "prefill", "decode"),
    [
        pytest.param(*case, marks=() if case in ALWAYS else pytest.mark.slow)
        for case in ((form, layers, *sizes) for form in NHD_FORMS for layers in (4, 32) for sizes in PAIRS)
    ],
)
def test_a_block_takes_few_reads_and_a_window_few_operators(form: str, layers: int, prefill: int, decode: int) -> None:
    blocks = 4 if layers == 4 else 2
    local, remotes = pair(NhdModel(layers), form, prefill, decode, 2 * blocks)
    for read in pull_nhd(reader_for(local, 8 << 20), local, remotes, scattered(2 * blocks, blocks)):
        assert not len(read.schedule.direct)
        per_block = {"cross_layer": 2, "apart": 2 * layers, "paired": layers}[form]  # K and V, if they lie apart
        assert read.schedule.descriptors <= per_block * blocks
        assert 0 < read.most_operators <= MOST_OPERATORS
        assert all(calls["copy_"] == 0 for calls in read.operators)


@pytest.mark.parametrize(("layers", "blocks"), [(1, 1), (1, 12), (4, 2), (12, 12)])
@pytest.mark.parametrize("form", NHD_FORMS)
def test_in_one_segment_all_layers_of_a_window_are_one_scatter(
    joined: Allocate, form: str, layers: int, blocks: int
) -> None:
    local, remotes = pair(NhdModel(layers), form, 2, 1, 2 * blocks, joined)
    for read in pull_nhd(reader_for(local, 64 << 20), local, remotes, scattered(2 * blocks, blocks)):
        assert len(read.operators) == 1
        assert read.operators[0]["index_copy_"] == 1
        assert sum(read.operators[0].values()) <= 2


@pytest.mark.parametrize("form", NHD_FORMS)
def test_whole_blocks_that_are_read_without_gaps_are_not_gathered(joined: Allocate, form: str) -> None:
    local, remotes = pair(NhdModel(4), form, 2, 1, 8, joined)
    for read in pull_nhd(reader_for(local, 64 << 20), local, remotes, Tables([3, 0, 7, 5], [2, 3, 4, 5], 0, 512)):
        assert read.operators == [{"index_copy_": 1}]
        assert read.schedule.read_bytes == read.schedule.wanted_bytes


def test_heads_that_are_not_wanted_are_read_and_left_out_by_a_gather(joined: Allocate) -> None:
    local, remotes = pair(NhdModel(4), "paired", 1, 2, 8, joined)
    (read,) = pull_nhd(reader_for(local, 64 << 20), local, remotes, Tables([3, 0, 7, 5], [2, 3, 4, 5], 0, 512))
    assert read.operators == [{"index_select": 1, "index_copy_": 1}]
    assert read.schedule.read_bytes < 2 * read.schedule.wanted_bytes


def test_what_lies_between_the_layers_of_a_segment_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    segment, places = Memory.of_noise(4 << 20, 3), [4096 + layer * 300_000 for layer in range(4)]
    free = iter(places)
    model, size = NhdModel(4), 2 * 4 * 128 * 64 * 2 * 2

    def allocate(_: int) -> torch.Tensor:
        return torch.from_numpy(segment.view[(start := next(free)) : start + size])

    monkeypatch.setattr(remote_reader, "mapped_segments", lambda device: [segment.region])
    local, remotes = pair(model, "paired", 2, 1, 2, allocate)
    before = segment.view.copy()
    pull_nhd(reader_for(local, 1 << 20), local, remotes, Tables([1, 0], [0, 1], 0, 256))
    for place in places:
        before[place : place + size] = segment.view[place : place + size]
    np.testing.assert_array_equal(segment.view, before)


def test_the_next_window_is_read_while_one_is_transposed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each side waits for the other: a reader that took turns would end with the timeout below."""
    local, (remote, _) = pair(NhdModel(8, sizes=(128, 128)), "paired", 2, 1, 16)
    reader = reader_for(local, 1 << 20)
    remote.fill(range(8))
    ours, theirs = local.geometry(), [remote.geometry()]
    theirs.append(NhdRank(remote.model, remote.engine, 1).geometry())
    plan = compile_plans(ours, theirs, choose_sources(ours, theirs))[0]
    copies = plan.instantiate([BlockTable.of(range(8))], [BlockTable.of(range(8))], 0, 8 * 128)
    reading = threading.Semaphore(0)
    copy, copied = reader._copy, list[Copies]()

    def transposed_while_reading(window: Copies) -> None:
        wanted = 1 if len(copied) == 0 else 0  # of the reads after the first
        for _ in range(wanted):
            assert reading.acquire(timeout=30), "the second window was not read while the first was transposed"
        copy(window)
        copied.append(window)

    count = 0

    def started(_: Copies) -> None:
        nonlocal count
        count += 1
        if count == 2:
            reading.release()

    monkeypatch.setattr(reader, "_copy", transposed_while_reading)
    with reader.planned(copies, RegionTable(theirs[0].regions)) as schedule:
        assert len(schedule.borders) > 3
        reader.carry_out(LocalWire(started), schedule, 60.0)
    assert len(copied) == len(schedule.borders) - 1
    assert count == len(copied)


@st.composite
def pulls(draw: st.DrawFn) -> tuple[NhdRank, list[NhdRank], Tables, bool]:
    """Any two engines, a range of tokens at borders of units, and blocks in any order."""
    heads = draw(st.sampled_from([1, 2, 3, 4, 6]))
    sizes = [size for size in (1, 2, 3, 4, 6) if heads % size == 0 or size % heads == 0]
    forms = draw(st.tuples(*[st.sampled_from(NHD_FORMS)] * 2))
    contents = draw(st.sampled_from([(64, 64), (5, 5), (96, 64), (64, 8), (17, 3)]))
    if "paired" in forms:
        contents = (contents[0],) * 2
    layers = draw(st.integers(1, 6))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float32, torch.int8]))
    model = NhdModel(layers, heads, contents, dtype)
    block_tokens = draw(st.tuples(*[st.sampled_from([8, 16, 24, 32])] * 2))
    ours, theirs = (
        NhdEngine(draw(st.sampled_from(sizes)), form, size, -(-96 // size) + 3)
        for form, size in zip(forms, block_tokens, strict=True)
    )
    unit = int(np.gcd(*block_tokens))
    first = draw(st.integers(0, 48 // unit)) * unit
    end = draw(st.integers(first + 1, 96))
    ids = [draw(st.permutations(range(engine.blocks)))[: -(-end // engine.block_tokens)] for engine in (ours, theirs)]
    segmented = draw(st.booleans())
    allocate = in_a_segment() if segmented else on_the_cpu
    local = NhdRank(model, ours, draw(st.integers(0, ours.tp - 1)), allocate)
    remotes = [NhdRank(model, theirs, rank) for rank in range(theirs.tp)]
    return local, remotes, Tables(ids[0], ids[1], first, end), segmented


def in_a_segment() -> Allocate:
    memory, end = np.empty(4 << 20, np.uint8), 0

    def allocate(size: int) -> torch.Tensor:
        nonlocal end
        start, end = end, end + size + 64
        return torch.from_numpy(memory[start : start + size])

    return allocate


def check_pull(drawn: tuple[NhdRank, list[NhdRank], Tables, bool], pages: int, areas: int) -> None:
    local, remotes, tables, segmented = drawn
    regions = local.geometry().regions
    whole = Region(regions[0].address, regions[-1].end - regions[0].address)
    staging_bytes = pages * SLOTS * max(8192, mmap.PAGESIZE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote_reader, "mapped_segments", lambda device: [whole] if segmented else [])
        patch.setattr(remote_reader, "AREAS_PER_WINDOW", areas)
        patch.setattr(device_memory, "ALIGNMENT", 4096)  # so that windows are small
        reader = RemoteReader.with_device_staging(ASCEND, regions, staging_bytes, local.tensors)
    for read in pull_nhd(reader, local, remotes, tables):
        assert isinstance(reader._copy, TensorCopier)
        starts = reader._copy.view_starts
        for window in read.schedule.windows():
            written = np.searchsorted(starts, window.copies.destinations, side="right")
            assert len(np.unique(written)) <= areas


def check_pulls(examples: int) -> None:
    drawn = given(pulls(), st.sampled_from([1, 3, 64]), st.integers(1, 4))
    settings(deadline=None, max_examples=examples)(drawn(check_pull))()


@pytest.mark.thorough
def test_any_two_engines() -> None:
    check_pulls(50)


@pytest.mark.slow
def test_any_two_engines_in_many_more_pairs() -> None:
    check_pulls(1000)
