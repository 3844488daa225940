"""Measuring while nobody else takes the machine's cores."""

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import psutil
import pytest

from benchmarks.fleet import calm, validate
from benchmarks.fleet.calm import MOST_STOLEN, Processor, calmest
from benchmarks.fleet.servers import Running
from benchmarks.fleet.simulation import Outcome

LITTLE = MOST_STOLEN / 2


class CpuTimes(NamedTuple):
    """What psutil says of a virtual machine's cores, in part."""

    user: float
    idle: float
    steal: float


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


def test_runs_on_real_servers_count_only_if_the_cores_were_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that others disturbed take ten times as long, which neither medians nor the spread may know."""
    shares = iter([0.0, 0.5, LITTLE, 0.4, 0.0])
    used = stolen = 0.0
    salts = []

    def replay(servers: Any, arrivals: Any, legs: str, salt: str) -> list[Outcome]:
        nonlocal used, stolen
        share = next(shares)
        used, stolen = used + 1 - share, stolen + share
        salts.append(salt)
        takes_s = 10.0 if share > MOST_STOLEN else 1.0
        return [Outcome(0.0, 100, 10, takes_s / 4, takes_s / 2, takes_s)]

    monkeypatch.setattr(validate, "replay", replay)
    monkeypatch.setattr(validate, "scraped", lambda decodes: (3.0, 4.0))
    monkeypatch.setattr(validate, "_COUNTED_S", 0.0)
    monkeypatch.setattr(psutil, "cpu_times", lambda: CpuTimes(used, 0.0, stolen))
    servers = Running((), (), (), ())
    ran = validate.run(servers, validate.Case(1, 1, "in turn", "paced"), [], 3, lambda: 0.1)
    assert (ran["real"]["first_token_s"]["p50"], ran["real"]["total_s"]["p50"]) == (0.5, 1.0)
    assert ran["runs"]["total"] == {"least": 1.0, "most": 1.0}
    assert ran["stolen"] == pytest.approx([0.0, LITTLE, 0.0])
    assert len(set(salts)) == 5, "a run would find the prompts of another one in a cache"
