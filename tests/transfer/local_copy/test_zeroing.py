"""Zeroing memory: all of a run, and nothing beside it."""

import numpy as np
import pytest

from layout.copies import NO_RUNS, MemoryRuns
from tests.support.memory import noise
from transfer.local_copy.zeroing import warm_up, zero_runs


@pytest.mark.parametrize("size", [0, 1, 63, 64, 4096, 100_001, 5 << 20])
@pytest.mark.parametrize("offset", [0, 1, 64])
def test_a_run_is_zeroed_and_nothing_beside_it(size: int, offset: int) -> None:
    memory = noise(offset + size + 100)
    before, address = memory.copy(), memory.ctypes.data + offset
    zero_runs(MemoryRuns(np.array([address]), np.array([size])))
    assert not memory[offset : offset + size].any()
    np.testing.assert_array_equal(memory[:offset], before[:offset])
    np.testing.assert_array_equal(memory[offset + size :], before[offset + size :])


def test_many_runs_are_zeroed_each() -> None:
    memory = noise(1000 * 64)
    zero_runs(MemoryRuns(memory.ctypes.data + np.arange(0, 1000, 2) * 64, np.full(500, 64)))
    rows = memory.reshape(1000, 64)
    assert not rows[::2].any()
    assert rows[1::2].all()


def test_nothing_is_zeroed_if_a_size_is_negative_or_there_are_no_runs() -> None:
    memory = noise(64)
    with pytest.raises(ValueError, match="negative size: -1 bytes"):
        zero_runs(MemoryRuns(np.full(2, memory.ctypes.data), np.array([8, -1])))
    zero_runs(NO_RUNS)
    warm_up()
    assert memory.all()
