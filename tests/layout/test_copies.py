"""Descriptor arrays: equally long, cut and joined in order; runs that continue each other are one."""

import numpy as np
import pytest

from layout.copies import EMPTY, Copies, concatenate, merge_adjacent


def descriptors(*rows: tuple[int, int, int]) -> Copies:
    """Of (destination, source, size)."""
    destinations, sources, sizes = np.array(rows, np.int64).reshape(-1, 3).T
    return Copies(destinations, sources, sizes)


def rows_of(copies: Copies) -> list[tuple[int, ...]]:
    return list(zip(copies.destinations.tolist(), copies.sources.tolist(), copies.sizes.tolist(), strict=True))


ROWS = [(10, 1, 4), (20, 2, 5), (30, 3, 6)]


@pytest.mark.parametrize("short", range(3))
def test_arrays_of_unequal_lengths_are_refused_with_their_lengths(short: int) -> None:
    arrays = [np.zeros(2 if number == short else 3, np.int64) for number in range(3)]
    with pytest.raises(ValueError, match=r"differ in length: \(.,\), \(.,\), \(.,\)") as refused:
        Copies(*arrays)
    assert str(refused.value).count("(2,)") == 1


def test_a_slice_keeps_whole_descriptors() -> None:
    copies = descriptors(*ROWS)
    assert rows_of(copies[1:]) == ROWS[1:]
    assert rows_of(copies[:0]) == []
    assert (len(copies), copies.total_bytes) == (3, 15)


def test_batches_are_joined_in_their_order() -> None:
    parts = [descriptors(*ROWS[2:]), EMPTY, descriptors(*ROWS[:2])]
    assert rows_of(concatenate(parts)) == [ROWS[2], ROWS[0], ROWS[1]]


def test_nothing_joined_is_an_empty_batch() -> None:
    assert rows_of(concatenate([])) == []
    assert (len(EMPTY), EMPTY.total_bytes) == (0, 0)


def merged(*runs: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    local, remote, sizes = merge_adjacent(*np.array(runs, np.int64).T)
    return list(zip(local.tolist(), remote.tolist(), sizes.tolist(), strict=True))


def test_runs_that_follow_each_other_on_both_sides_are_joined_in_any_order() -> None:
    assert merged((8, 108, 4), (0, 100, 8), (12, 112, 1)) == [(0, 100, 13)]


def test_runs_that_follow_each_other_on_one_side_only_are_kept_apart() -> None:
    assert merged((0, 100, 8), (8, 109, 4)) == [(0, 100, 8), (8, 109, 4)]
    assert merged((0, 100, 8), (9, 108, 4)) == [(0, 100, 8), (9, 108, 4)]
