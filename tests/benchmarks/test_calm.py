"""Measuring while nobody else takes the machine's cores."""

from collections.abc import Callable, Iterator
from itertools import accumulate

import pytest

from benchmarks.fleet import calm
from benchmarks.fleet.calm import MOST_STOLEN, Processor, calmest

LITTLE = MOST_STOLEN / 2


def machine(*shares: float) -> tuple[Callable[[], int], Callable[[], Processor]]:
    """What measures the numbers from 0 on, of whose seconds these shares are taken one after the other, and a clock."""
    readings: Iterator[Processor] = (
        Processor(used, stolen)
        for used, stolen in zip(
            accumulate([5.0, *(1 - share for share in shares)]), accumulate([7.0, *shares]), strict=True
        )
    )
    now = [next(readings)]
    numbers = iter(range(len(shares)))

    def measure() -> int:
        now[0] = next(readings)
        return next(numbers)

    return measure, lambda: now[0]


def test_calm_results_count_as_they_come() -> None:
    measure, clock = machine(0.0, LITTLE, 0.5)
    assert calmest(measure, 2, clock=clock) == [(0, 0.0), (1, pytest.approx(LITTLE))]
    assert measure() == 2


def test_disturbed_results_are_measured_again() -> None:
    measure, clock = machine(0.0, 0.4, LITTLE, 0.3)
    assert [number for number, _ in calmest(measure, 2, clock=clock)] == [0, 2]
    assert measure() == 3


def test_where_it_is_never_calm_the_least_disturbed_ones_count() -> None:
    measure, clock = machine(0.4, 0.1, 0.3, 0.2, 0.0)
    assert [number for number, _ in calmest(measure, 2, clock=clock)] == [1, 3]
    assert measure() == 4


def test_the_number_of_tries_is_kept() -> None:
    measure, clock = machine(0.4, 0.3, 0.5)
    assert [number for number, _ in calmest(measure, tries=3, clock=clock)] == [1]


def test_a_machine_that_wants_no_core_loses_none() -> None:
    assert calmest(lambda: "done", clock=lambda: Processor(5.0, 7.0)) == [("done", 0.0)]


def test_the_kernel_counts_what_this_process_uses() -> None:
    before = calm.processor()
    while (now := calm.processor()).used - before.used < 0.2:
        assert now.stolen >= before.stolen >= 0.0
