"""The checks and cuts that a batch passes before it is submitted."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layout.copies import Copies
from layout.geometry import Region
from transfer.engine.limits import RegionTable, Window, split_large


def batch(*runs: tuple[int, int, int]) -> Copies:
    table = np.array(runs, np.int64).reshape(-1, 3)
    return Copies(table[:, 0], table[:, 1], table[:, 2])


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


@pytest.mark.parametrize("region", [Region(4096, 0), Region(4096, -1), Region(0, 4096)])
def test_a_region_without_address_or_size_is_refused(region: Region) -> None:
    with pytest.raises(ValueError, match="is empty or has no address"):
        RegionTable([region])


@given(st.lists(st.integers(1, 50), max_size=10), st.integers(1, 20))
def test_pieces_cover_the_same_bytes_once(sizes: list[int], piece: int) -> None:
    whole = batch(*((1000 * i, 7000 + 1000 * i, size) for i, size in enumerate(sizes)))
    parts = split_large(whole, piece)
    expected = [(d + k, s + k) for d, s, n in zip(*_lists(whole), strict=True) for k in range(n)]
    covered = [(d + k, s + k) for d, s, n in zip(*_lists(parts), strict=True) for k in range(n)]
    assert covered == expected
    assert all(0 < size <= piece for size in parts.sizes)


def _lists(copies: Copies) -> tuple[list[int], list[int], list[int]]:
    return copies.destinations.tolist(), copies.sources.tolist(), copies.sizes.tolist()


def test_small_descriptors_are_not_touched() -> None:
    whole = batch((0, 10, 4), (4, 20, 4))
    assert split_large(whole, 4) is whole


def test_a_window_gives_no_more_than_it_has() -> None:
    window = Window(10)
    assert window.try_acquire(7)
    assert not window.try_acquire(4)
    assert window.try_acquire(3)
    window.release(7)
    assert window.try_acquire(7)
    assert (window.in_flight, window.most_in_flight) == (10, 10)
