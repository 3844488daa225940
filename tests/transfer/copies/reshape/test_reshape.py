"""Local copies: every run exactly, nothing beside it, whatever sizes and alignments are."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layout.copies import EMPTY, Copies
from tests.support.memory import Bytes
from transfer.copies.reshape.reshape import run_copies, warm_up


def aligned(size: int) -> Bytes:
    """Noise that starts at a multiple of 64."""
    memory = np.random.default_rng(size).integers(0, 256, size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]


@settings(deadline=None)  # the first call compiles
@given(
    st.lists(
        st.tuples(st.sampled_from([0, 1, 2, 7, 8, 16, 63, 64, 65, 128, 256, 512, 1000, 5000]), st.integers(0, 9)),
        max_size=40,
    ),
    st.sampled_from([1, 8, 16, 64]),
)
def test_random_runs_equal_slices_in_numpy(sizes: list[tuple[int, int]], align: int) -> None:
    noise = np.random.default_rng(len(sizes))
    lengths = np.array([size for size, _ in sizes], np.int64)
    strides = np.array([-(-(size + gap) // align) * align for size, gap in sizes], np.int64)
    to = np.cumsum(strides) - strides
    order = noise.permutation(len(sizes))
    origin = np.zeros(len(sizes), np.int64)
    origin[order] = np.cumsum(strides[order]) - strides[order]
    total = int(strides.sum()) + 64
    source, target = aligned(total), aligned(total)[::-1].copy()
    expected = target.copy()
    for a, b, size in zip(to.tolist(), origin.tolist(), lengths.tolist(), strict=True):
        expected[a : a + size] = source[b : b + size]
    run_copies(Copies(to + target.ctypes.data, origin + source.ctypes.data, lengths))
    np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize("item", [2, 64, 256])
def test_heads_and_tokens_change_places(item: int) -> None:
    blocks, tokens, heads = 3, 16, 4
    source, target = aligned(blocks * tokens * heads * item), aligned(blocks * tokens * heads * item).copy()
    index = np.arange(blocks * tokens * heads).reshape(blocks, tokens, heads)
    places = index.reshape(blocks, heads, tokens).transpose(0, 2, 1)
    run_copies(
        Copies(
            places.ravel() * item + target.ctypes.data,
            index.ravel() * item + source.ctypes.data,
            np.full(index.size, item, np.int64),
        )
    )
    expected = source.reshape(blocks, tokens, heads, item).transpose(0, 2, 1, 3)
    np.testing.assert_array_equal(target.reshape(blocks, heads, tokens, item), expected)


def test_arrays_with_strides_are_taken() -> None:
    source, target = aligned(256), np.zeros(256, np.uint8)
    every_other = np.arange(0, 256, 8)[::2]
    run_copies(Copies(every_other + target.ctypes.data, every_other + source.ctypes.data, np.full(64, 8)[::4]))
    np.testing.assert_array_equal(target.reshape(-1, 16)[:, :8], source.reshape(-1, 16)[:, :8])
    assert not target.reshape(-1, 16)[:, 8:].any()


def test_a_negative_size_is_refused_before_anything_is_copied() -> None:
    source, target = aligned(64), np.zeros(64, np.uint8)
    here, there = np.full(2, target.ctypes.data), np.full(2, source.ctypes.data)
    with pytest.raises(ValueError, match="copy 1 of 2 has a negative size: -5"):
        run_copies(Copies(here, there, np.array([64, -5])))
    assert not target.any()


def test_nothing_to_copy_is_no_error() -> None:
    run_copies(EMPTY)
    warm_up()


def test_other_threads_run_python_during_a_copy() -> None:
    warm_up()
    size, times = 1 << 20, 400
    source, target = aligned(size), aligned(size).copy()
    copies = Copies(
        np.full(times, target.ctypes.data), np.full(times, source.ctypes.data), np.full(times, size, np.int64)
    )
    copier = threading.Thread(target=run_copies, args=(copies,))
    turns = 0
    copier.start()
    while copier.is_alive():
        turns += 1
    copier.join()
    assert turns > 1000
    np.testing.assert_array_equal(target, source)
