"""The checks and cuts that a batch passes before it is submitted."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layout.copies import Copies
from transfer.engine.batches import split_large


def batch(*runs: tuple[int, int, int]) -> Copies:
    table = np.array(runs, np.int64).reshape(-1, 3)
    return Copies(table[:, 0], table[:, 1], table[:, 2])


@pytest.mark.thorough
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
