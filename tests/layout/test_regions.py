"""A run is inside registered memory only if one region holds all of it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layout.geometry import Region
from layout.regions import RegionTable


@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(1, 40)), max_size=5),
    st.lists(st.tuples(st.integers(-5, 400), st.integers(1, 60)), max_size=20),
)
def test_a_run_is_inside_if_one_region_holds_all_of_it(
    gaps_and_sizes: list[tuple[int, int]], runs: list[tuple[int, int]]
) -> None:
    regions, end = [], 1
    for gap, size in gaps_and_sizes:
        regions.append(Region(end + gap, size))
        end += gap + size
    addresses, sizes = np.array(runs, np.int64).reshape(-1, 2).T
    outside = RegionTable(regions[::-1]).outside(addresses, sizes)
    expected = [not any(r.address <= a and a + n <= r.end for r in regions) for a, n in runs]
    assert outside.tolist() == expected


def test_a_size_that_would_overflow_an_address_is_outside() -> None:
    table = RegionTable([Region(2**62, 2**61)])
    assert table.outside(np.array([2**62], np.int64), np.array([2**63 - 1], np.int64)).tolist() == [True]


def test_regions_that_overlap_are_refused_and_named() -> None:
    with pytest.raises(ValueError, match="region at 0x1fff of 9 bytes overlaps region at 0x1000 of 4096 bytes"):
        RegionTable([Region(0x1FFF, 9), Region(0x1000, 4096)])


def test_regions_that_touch_are_two() -> None:
    table = RegionTable([Region(100, 10), Region(110, 10)])
    assert table.outside(np.array([100, 110, 105]), np.array([10, 10, 10])).tolist() == [False, False, True]


@pytest.mark.parametrize("region", [Region(4096, 0), Region(4096, -1), Region(0, 4096)])
def test_a_region_without_address_or_size_is_refused(region: Region) -> None:
    with pytest.raises(ValueError, match="is empty or has no address"):
        RegionTable([region])
