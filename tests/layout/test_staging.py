"""What a schedule promises: the same bytes as the direct plan, inside the regions and the buffer, for less."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba.core.dispatcher import Dispatcher

from layout import staging
from layout.copies import Copies, Int64Array
from layout.cost import CostModel
from layout.geometry import Region
from layout.regions import RegionTable
from layout.staging import CopyAreas, Schedule, schedule_reads
from tests.support.memory import Bytes

REMOTE, LOCAL, STAGING = 1 << 40, 1 << 41, 1 << 42
COST = CostModel(alpha=100.0, beta=1.0, copy_alpha=5.0, copy_beta=0.25)
Run = tuple[int, int, int]  # destination, source, size; offsets


def copies_of(runs: Sequence[Run]) -> Copies:
    destinations, sources, sizes = np.array(runs, np.int64).reshape(-1, 3).T
    return Copies(destinations + LOCAL, sources + REMOTE, sizes)


def regions_of(base: int, borders: Sequence[int]) -> RegionTable:
    return RegionTable([Region(base + start, end - start) for start, end in pairwise(borders)])


def schedule(runs: Sequence[Run], budget: int = 1 << 20, cost: CostModel = COST, *borders: int) -> Schedule:
    staging = Region(STAGING, budget)
    remote = regions_of(REMOTE, borders or (0, 1 << 20))
    return schedule_reads(copies_of(runs), cost, regions_of(LOCAL, (0, 1 << 20)), remote, staging)


class Memories:
    """A peer's memory, the local memory and a staging buffer, on which a schedule is executed byte by byte."""

    def __init__(self, runs: Sequence[Run], budget: int, remote: RegionTable) -> None:
        noise = np.random.default_rng(7)
        size = max((max(to, origin) + length for to, origin, length in runs), default=0) + 64
        self.peer, self.local, self.staging = (noise.integers(0, 256, n, np.uint8) for n in (size, size, budget))
        self.remote, self.written = remote, np.zeros(size, np.int64)
        self.expected = self.local.copy()
        for to, origin, length in runs:
            self.expected[to : to + length] = self.peer[origin : origin + length]
        self.due = np.zeros(size, np.int64)
        for to, _, length in runs:
            self.due[to : to + length] += 1

    def execute(self, plan: Schedule, half: int) -> None:
        self._read(plan.direct, LOCAL, self.local, self.written)
        for number, window in enumerate(plan.windows()):
            assert window.reads.total_bytes <= half
            used = np.zeros(len(self.staging), np.int64)
            self._read(window.reads, STAGING, self.staging, used)
            assert used.max() == 1, "two reads of a window overlap"
            (filled,) = np.nonzero(used)
            assert (filled // half == number % 2).all(), "a window leaves its half of the buffer"
            for to, origin, length in _runs(window.copies, LOCAL, STAGING):
                assert used[origin : origin + length].all(), "a copy of bytes that this window did not read"
                self.local[to : to + length] = self.staging[origin : origin + length]
                self.written[to : to + length] += 1

    def check(self) -> None:
        np.testing.assert_array_equal(self.local, self.expected)
        np.testing.assert_array_equal(self.written, self.due)

    def _read(self, copies: Copies, base: int, into: Bytes, count: Int64Array) -> None:
        for to, origin, length in _runs(copies, base, REMOTE):
            assert length > 0
            holds = [
                r for r in self.remote.regions if r.address <= REMOTE + origin and REMOTE + origin + length <= r.end
            ]
            assert holds, f"a read of {length} bytes at {origin} leaves the registered memory"
            into[to : to + length] = self.peer[origin : origin + length]
            count[to : to + length] += 1


def _runs(copies: Copies, to_base: int, source_base: int) -> list[Run]:
    columns = (copies.destinations - to_base, copies.sources - source_base, copies.sizes)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def cheapest(runs: Sequence[Run], region: Sequence[int], cost: CostModel) -> float:
    """The best price of all ways to split the runs into direct and staged groups, by the book: O(n^2)."""
    ordered = sorted(zip((origin for _, origin, _ in runs), (length for *_, length in runs), region, strict=True))
    best = [0.0]
    for end in range(1, len(ordered) + 1):
        options = [best[end - 1] + cost.read_s(1, ordered[end - 1][1])]
        for begin in range(end - 1):
            group = ordered[begin:end]
            if len({number for *_, number in group}) == 1:
                width = group[-1][0] + group[-1][1] - group[0][0]
                copied = cost.copy_s(len(group), sum(length for _, length, _ in group))
                options.append(best[begin] + cost.read_s(1, width) + copied)
        best.append(min(options))
    return best[-1]


def price(plan: Schedule, cost: CostModel) -> float:
    total = cost.read_s(len(plan.direct), plan.direct.total_bytes)
    for window in plan.windows():
        total += cost.read_s(len(window.reads), window.reads.total_bytes)
        total += cost.copy_s(len(window.copies), window.copies.total_bytes)
    return total


@st.composite
def pulls(draw: st.DrawFn) -> tuple[list[Run], list[int]]:
    """Runs whose destinations never overlap, in any order, and the borders of the peer's regions between them."""
    steps = draw(st.lists(st.tuples(st.integers(1, 150), st.integers(0, 160), st.booleans()), max_size=25))
    sources, borders, at = [], [0], 0
    for size, gap, border in steps:
        if border and at > borders[-1]:
            borders.append(at)  # behind the gap: the gap belongs to the region before
        sources.append((at, size))
        at += size + gap
    borders.append(at + 64)
    order = draw(st.permutations(range(len(sources))))
    gaps = draw(st.lists(st.integers(0, 3), min_size=len(sources), max_size=len(sources)))
    runs, to = [], 0
    for index, gap in zip(order, gaps, strict=True):
        to += gap
        runs.append((to, *sources[index]))
        to += sources[index][1]
    return runs, borders


prices = st.builds(
    CostModel, st.sampled_from([0.0, 10.0, 100.0]), st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([0.0, 5.0, 60.0]), st.sampled_from([0.0, 0.3, 1.0]),
)  # fmt: skip


@settings(deadline=None)
@given(pulls(), prices, st.sampled_from([2, 3, 16, 100, 1000, 1 << 20]))
def test_a_schedule_brings_every_wanted_byte_once_and_no_other(
    pull: tuple[list[Run], list[int]], cost: CostModel, budget: int
) -> None:
    runs, borders = pull
    plan = schedule(runs, budget, cost, *borders)
    memories = Memories(runs, budget, regions_of(REMOTE, borders))
    memories.execute(plan, budget // 2)
    memories.check()
    assert plan.predicted_s == pytest.approx(price(plan, cost))
    assert plan.predicted_s <= plan.direct_s <= cost.read_s(len(runs), plan.wanted_bytes)


@settings(deadline=None)
@given(pulls(), prices)
def test_no_other_choice_of_runs_to_stage_is_cheaper(pull: tuple[list[Run], list[int]], cost: CostModel) -> None:
    runs, borders = pull
    region = [int(np.searchsorted(borders, origin, side="right")) for _, origin, _ in runs]
    plan = schedule(runs, 1 << 20, cost, *borders)
    assert plan.predicted_s <= cheapest(runs, region, cost) * (1 + 1e-9) + 1e-9


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 400), st.integers(1, 120)), max_size=15), st.sampled_from([16, 1 << 20]))
def test_sources_that_overlap_or_repeat_are_exact(ranges: list[tuple[int, int]], budget: int) -> None:
    ends = np.cumsum([0, *(size for _, size in ranges)]).tolist()
    runs = [(to, origin, size) for to, (origin, size) in zip(ends, ranges, strict=False)]
    plan = schedule(runs, budget)
    memories = Memories(runs, budget, regions_of(REMOTE, (0, 1 << 20)))
    memories.execute(plan, budget // 2)
    memories.check()
    assert plan.predicted_s <= plan.direct_s


def test_runs_close_together_are_one_wide_read() -> None:
    plan = schedule([(0, 0, 10), (20, 30, 10), (40, 60, 10)])
    assert plan.descriptors == 1
    assert plan.read_bytes == 70
    assert not len(plan.direct)


def test_a_gap_that_costs_as_much_as_a_descriptor_is_not_read() -> None:
    assert not list(schedule([(0, 0, 10), (20, 110, 10)]).windows())


def test_a_large_run_between_small_ones_is_read_straight_to_its_place() -> None:
    plan = schedule([(0, 0, 4), (10, 10, 4), (100, 20, 4000), (5000, 4030, 4), (5010, 4040, 4)])
    assert _runs(plan.direct, LOCAL, REMOTE) == [(100, 20, 4000)]
    assert plan.descriptors == 3


def test_a_gap_between_two_regions_is_not_read() -> None:
    assert len(schedule([(0, 0, 10), (20, 20, 10)], 1 << 20, COST, 0, 15, 100).direct) == 2


@pytest.mark.parametrize(("apart", "borders"), [(200, (0, 1000)), (1, (0, 45, 1000))])
def test_groups_far_apart_or_in_two_regions_are_two_wide_reads(apart: int, borders: tuple[int, ...]) -> None:
    second = 45 + apart - 1
    runs = [(0, 0, 10), (20, 30, 15), (40, second, 10), (60, second + 30, 10)]
    plan = schedule(runs, 1 << 20, COST, *borders)
    assert plan.reads.sources.tolist() == [REMOTE, REMOTE + second]
    assert plan.reads.sizes.tolist() == [45, 40]


def test_a_run_in_front_of_all_regions_is_not_read_with_those_inside() -> None:
    plan = schedule([(0, 85, 10), (20, 100, 10), (40, 115, 10)], 1 << 20, COST, 100, 1000)
    assert _runs(plan.direct, LOCAL, REMOTE) == [(0, 85, 10)]
    assert plan.reads.sizes.tolist() == [25]


def test_neighbours_on_both_sides_are_one_descriptor_without_staging() -> None:
    plan = schedule([(10, 10, 10), (0, 0, 10)], 0)
    assert _runs(plan.direct, LOCAL, REMOTE) == [(0, 0, 20)]


@pytest.mark.parametrize("side", ["local", "remote"])
def test_neighbours_in_different_regions_stay_apart(side: str) -> None:
    one, two = (0, 100), (0, 10, 100)
    local, remote = regions_of(LOCAL, two if side == "local" else one), regions_of(REMOTE, one)
    remote = regions_of(REMOTE, two) if side == "remote" else remote
    assert len(schedule_reads(copies_of([(0, 0, 10), (10, 10, 10)]), COST, local, remote, None).direct) == 2


def test_runs_outside_all_regions_are_passed_on_for_the_engine_to_refuse() -> None:
    runs = [(0, 0, 10), (20, 15, 10), (40, 200, 10), (60, 215, 10)]
    plan = schedule(runs, 1 << 20, COST, 0, 100)
    assert [origin for _, origin, _ in _runs(plan.direct, LOCAL, REMOTE)] == [200, 215]


def test_an_address_near_the_end_of_the_address_space_does_not_wrap() -> None:
    far = (1 << 63) - 8
    copies = Copies(np.array([LOCAL, LOCAL + 64]), np.array([far - 32, far]), np.array([16, 32]))
    region = RegionTable([Region(1, far)])
    plan = schedule_reads(copies, COST, regions_of(LOCAL, (0, 1000)), region, Region(STAGING, 1000))
    assert len(plan.direct) == 2


def test_a_pull_larger_than_half_the_buffer_is_cut_into_windows() -> None:
    runs = [(n * 20, n * 15, 10) for n in range(100)]
    plan = schedule(runs, 1000)
    assert [window.reads.total_bytes for window in plan.windows()] == [500, 500, 475]
    assert [int(window.reads.destinations[0]) - STAGING for window in plan.windows()] == [0, 500, 0]


def test_a_run_is_copied_whole_and_one_larger_than_half_the_buffer_read_directly() -> None:
    free = CostModel(alpha=100.0, beta=1.0, copy_alpha=0.0, copy_beta=0.0)
    plan = schedule([(0, 0, 10), (20, 10, 41), (70, 51, 25), (100, 76, 10), (120, 86, 25), (150, 111, 10)], 80, free)
    assert _runs(plan.direct, LOCAL, REMOTE) == [(0, 0, 10), (20, 10, 41)]
    assert [window.reads.total_bytes for window in plan.windows()] == [35, 35]
    assert plan.copies.sizes.tolist() == [25, 10, 25, 10]


def test_a_buffer_too_small_to_pay_is_not_used() -> None:
    plan = schedule([(n * 20, n * 15, 10) for n in range(100)], 4)
    assert not list(plan.windows())
    assert plan.predicted_s == plan.direct_s


@pytest.mark.parametrize("staging", [None, Region(STAGING, 0), Region(STAGING, 1)])
def test_without_a_buffer_everything_is_direct(staging: Region | None) -> None:
    regions = regions_of(LOCAL, (0, 100)), regions_of(REMOTE, (0, 100))
    plan = schedule_reads(copies_of([(0, 0, 10), (20, 15, 10)]), COST, *regions, staging)
    assert (len(plan.direct), list(plan.windows())) == (2, [])


def test_an_empty_pull_costs_nothing() -> None:
    plan = schedule([])
    assert (plan.descriptors, plan.predicted_s, plan.describe()) == (0, 0.0, "nothing to read")


def test_a_single_descriptor_is_read_directly() -> None:
    plan = schedule([(3, 5, 7)])
    assert _runs(plan.direct, LOCAL, REMOTE) == [(3, 5, 7)]


@pytest.mark.parametrize("size", [0, -1])
def test_a_run_without_bytes_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"descriptor 1 of 2 has {size} bytes"):
        schedule([(0, 0, 1), (8, 8, size)])


def test_a_schedule_describes_itself_in_numbers() -> None:
    text = schedule([(0, 0, 10), (20, 30, 10), (40, 5000, 10)]).describe()
    assert text.startswith("2 descriptors (1 direct), 50 bytes read for 30 wanted, 40 bytes staged in 1 windows with 2")


TWO_AREAS = CopyAreas(np.array([LOCAL, LOCAL + 100, LOCAL + 200, LOCAL + 300]), 2)


def _scheduled(runs: Sequence[Run], areas: CopyAreas, budget: int = 1 << 20) -> Schedule:
    regions = regions_of(LOCAL, (0, 1 << 20)), regions_of(REMOTE, (0, 1 << 20))
    return schedule_reads(copies_of(runs), COST, *regions, Region(STAGING, budget), areas)


def test_a_window_copies_to_as_many_areas_as_it_may() -> None:
    runs = [(area * 100 + 20 * n, area * 60 + 15 * n, 10) for area in range(4) for n in range(4)]
    windows = list(_scheduled(runs, TWO_AREAS).windows())
    assert [sorted({(to - LOCAL) // 100 for to in window.copies.destinations.tolist()}) for window in windows] == [
        [0, 1],
        [2, 3],
    ]
    assert [int(window.reads.destinations[0]) - STAGING for window in windows] == [0, 1 << 19]


def test_an_area_that_a_window_copies_to_already_does_not_count_again() -> None:
    runs = [(n % 2 * 100 + 10 * (n // 2), 11 * n, 10) for n in range(12)]
    assert len(list(_scheduled(runs, TWO_AREAS).windows())) == 1


def test_a_read_that_is_small_against_a_window_is_not_cut() -> None:
    runs = [(n * 50 + 20 * half, n * 150 + 15 * half, 10) for n in range(9) for half in range(2)]
    windows = list(schedule(runs, 2 * 210).windows())
    assert [window.reads.sizes.tolist() for window in windows] == [[25] * 8, [25]]
    cut = list(schedule(runs, 2 * 190).windows())  # the eighth read would be more than an eighth of it
    assert [window.reads.sizes.tolist() for window in cut] == [[25] * 7 + [10], [10, 25]]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), min_size=2, max_size=40),
    st.lists(st.integers(0, 1200), max_size=6, unique=True),
    st.integers(1, 3),
    st.sampled_from([64, 300, 4096]),
)
def test_limited_to_areas_the_bytes_are_the_same(
    steps: list[tuple[int, int]], starts: list[int], per_window: int, budget: int
) -> None:
    places = np.cumsum([gap + size for gap, size in steps]) - [size for _, size in steps]
    order = np.random.default_rng(len(steps)).permutation(len(steps))
    offsets = np.cumsum([0, *(steps[n][1] for n in order)])
    to = dict(zip(order.tolist(), offsets.tolist(), strict=False))
    runs = [(to[n], int(places[n]), size) for n, (_, size) in enumerate(steps)]
    areas = CopyAreas(np.array(sorted(starts), np.int64) + LOCAL, per_window)
    plan = _scheduled(runs, areas, budget)
    memories = Memories(runs, budget, regions_of(REMOTE, (0, 1 << 20)))
    memories.execute(plan, budget // 2)
    memories.check()
    for window in plan.windows():
        assert len(window.copies)
        area = np.searchsorted(areas.starts, window.copies.destinations, side="right")
        assert len(np.unique(area)) <= per_window


def test_no_loop_is_compiled_for_the_value_of_a_number() -> None:
    """Each further form of a loop takes a part of a second, at the start of every worker."""
    staging.warm_up()
    loops = [each for each in vars(staging).values() if isinstance(each, Dispatcher)]
    assert len(loops) >= 5
    assert "Literal" not in str([loop.signatures for loop in loops])
