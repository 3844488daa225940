"""Runs as rows: whichever runs they are, and however rows of other widths and phases mix, each byte has its place."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layout.copies import Copies
from transfer.copies.reshape.rows import Rows, Runs, follow_each_other, stretches, widest_rows

VIEWS = np.array([0, 1000, 5000, 9000], np.int64)


def bytes_of(rows: Rows) -> dict[int, int]:
    """Source of each destination byte."""
    moved: dict[int, int] = {}
    ends = [end.row * rows.width + end.phases[end.view] + VIEWS[end.view] for end in (rows.target, rows.origin)]
    for to, start in zip(*(end.tolist() for end in ends), strict=True):
        moved.update(zip(range(to, to + rows.width), range(start, start + rows.width), strict=True))
    return moved


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 11000), st.integers(0, 11000), st.sampled_from([16, 16, 16, 32, 48, 7]), st.booleans()
        ),
        min_size=1,
        max_size=12,
    )
)
def test_rows_are_the_bytes_of_the_runs_that_fit(drawn: list[tuple[int, int, int, bool]]) -> None:
    apart = {to // 64: (to // 64 * 64 + to % 16 * (not even), start, size) for to, start, size, even in drawn}
    runs = [(to, start // 16 * 16 if to % 16 == 0 else start, size) for to, start, size in apart.values()]
    columns = np.array(runs, np.int64).T
    copies = Copies(*columns.copy())
    rows, fit = widest_rows(Runs.of(copies, VIEWS), len(VIEWS))
    wanted: dict[int, int] = {}
    for to, start, size in zip(*(column[fit].tolist() for column in columns), strict=True):
        wanted.update(zip(range(to, to + size), range(start, start + size), strict=True))
    assert bytes_of(rows) == wanted
    assert 2 * int(copies.sizes[fit].sum()) >= copies.total_bytes
    pairs = rows.origin.view * len(VIEWS) + rows.target.view
    assert len(stretches(pairs)) == len(np.unique(pairs))


@pytest.mark.parametrize(("sizes", "width"), [([48, 32], 16), ([512, 512, 8], 512), ([512, 64], 64)])
def test_rows_are_as_wide_as_most_runs_allow_but_for_a_factor(sizes: list[int], width: int) -> None:
    at = np.arange(len(sizes), dtype=np.int64) * 1024
    rows, _ = widest_rows(Runs.of(Copies(at, at, np.array(sizes, np.int64)), VIEWS[:1]), 1)
    assert rows.width == width


def test_views_at_any_phase_take_rows_of_the_full_width() -> None:
    starts = np.concatenate([VIEWS[view] + view + 96 * np.arange(5) for view in range(3)])
    rows, fit = widest_rows(Runs.of(Copies(starts, VIEWS[3] + 96 * np.arange(15), np.full(15, 96)), VIEWS), 4)
    assert rows.target.phases.tolist() == [0, 1, 2, 0]
    assert rows.width == 96
    assert fit.all()


@pytest.mark.parametrize(
    ("rows", "follow"), [([3], True), ([3, 4, 5], True), ([3, 5, 4, 6], False), ([3, 4, 6], False), ([4, 3], False)]
)
def test_rows_that_follow_each_other(rows: list[int], follow: bool) -> None:
    assert follow_each_other(np.array(rows)) == follow
