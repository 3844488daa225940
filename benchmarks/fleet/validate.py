"""Compares the simulator with a real P and a real D that get the same trace, paced and all at once.

What is compared: the medians of the time to first token and of the total, and throughput. Simulated engines have a
machine each; the real ones share this one, which makes them slower wherever both compute. Just after each run prompts
are computed alone, and the simulated engines are as much slower, or faster, than the constants say: a machine that is
lent is not always as fast. The median of several runs counts.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

from benchmarks.fleet.calibrate import PROBE_TOKENS, Bench
from benchmarks.fleet.constants import Constants, slowed
from benchmarks.fleet.node import Legs, Settings
from benchmarks.fleet.real import LONGEST_TOKENS, replay, running
from benchmarks.fleet.simulation import Outcome, simulate, summary
from benchmarks.fleet.traces import Arrival, Mix, faster, synthetic
from benchmarks.peers.connectors import Pair

_LEGS: tuple[Legs, ...] = ("in turn", "together")
#: By name: whether both legs go at once, and how the requests come.
CASES: Mapping[str, tuple[Legs, str]] = {
    f"{legs}, {pace}": (legs, pace) for pace in ("paced", "at once") for legs in _LEGS
}
LOAD = 0.5  # of the time in which D alone would be busy, at the paced rate
AT_ONCE = 1000.0  # times faster: all at once
REQUESTS, SEED = 24, 7
INPUT_TOKENS, OUTPUT_TOKENS, SPREAD = 1000, 32, 0.5
WARM_UP = 6  # requests that do not count


def offered(constants: Constants) -> float:
    """Return the requests a second that keep the busier engine busy for a share ``LOAD`` of the time, one by one."""
    engine = constants.engine
    return LOAD / max(constants.prompt_s(INPUT_TOKENS), OUTPUT_TOKENS * engine.decode_s([INPUT_TOKENS]))


def traces(per_s: float) -> dict[str, list[Arrival]]:
    """Return the requests by their pace."""
    paced = synthetic(_mix(REQUESTS, per_s), SEED)
    return {"paced": paced, "at once": faster(paced, AT_ONCE)}


def _mix(requests: int, per_s: float) -> Mix:
    longest = LONGEST_TOKENS - 4 * OUTPUT_TOKENS
    return Mix(requests, per_s, INPUT_TOKENS, OUTPUT_TOKENS, SPREAD, longest=longest - 256)


def validate(constants: Constants, times: int) -> dict[str, Any]:
    """Run all cases so many times, print a table, and return the figures of the results' file."""
    per_s = float(f"{offered(constants):.4g}")  # as the results' file has it
    by_pace = traces(per_s)
    print(f"{'':18} {'slower':>6} {'first token, ms':>24} {'total, ms':>24} {'requests/s':>24}")
    figures: dict[str, Any] = {}
    with running() as servers, closing(Bench(servers)) as bench:
        replay(servers, faster(synthetic(_mix(WARM_UP, 1.0), SEED + 1), AT_ONCE), "in turn", "warm-up")
        for name, (legs, pace) in CASES.items():
            real = run(servers, name, by_pace[pace], times, bench.probe_s)
            figures[name] = compare(real, legs, by_pace[pace], constants)
            print(_line(name, figures[name]), flush=True)
    return {"cases": figures, "offered_per_s": per_s, "times": times} | overall(figures)


def run(
    servers: Pair, name: str, arrivals: Sequence[Arrival], times: int, probe_s: Callable[[], float]
) -> dict[str, Any]:
    """Return what real servers made of a case's trace that they got so many times.

    ``probe_s``: returns how long a prompt takes now by which the machine's speed is known.
    """
    found: list[dict[str, float]] = []
    probes, failed = [], 0
    for number in range(times):
        outcomes = replay(servers, arrivals, CASES[name][0], f"{name} {number}")
        probes.append(probe_s())  # at once: after a pause, a machine is not what it was
        found.append(compared(outcomes))
        failed += sum(bool(each.failed) for each in outcomes)
    by_figure = {figure: [each[figure] for each in found] for figure in found[0]}
    return {
        "real": {figure: statistics.median(each) for figure, each in by_figure.items()},
        "runs": {figure: {"least": min(each), "most": max(each)} for figure, each in by_figure.items()},
        "failed": failed, "probe_s": statistics.mean(probes),
    }  # fmt: skip


def compared(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return the figures of a run, real or simulated, that are compared."""
    found = summary(outcomes)
    return {
        "first_token_s": found.first_token_s["p50"], "total_s": found.total_s["p50"],
        "requests_per_s": found.requests_per_s,
    }  # fmt: skip


def compare(real: Mapping[str, Any], legs: Legs, arrivals: Sequence[Arrival], constants: Constants) -> dict[str, Any]:
    """Return what ``run`` has returned, beside the same trace simulated on a machine as fast, and what that is off."""
    slower = real["probe_s"] / constants.prompt_s(PROBE_TOKENS)
    simulated = compared(simulate(arrivals, slowed(constants, slower), Settings(legs=legs)).outcomes)
    deviation = {name: simulated[name] / value - 1 for name, value in real["real"].items()}
    return {**real, "slower": slower, "simulated": simulated, "deviation": deviation}


def overall(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return how far off the simulator is in all cases together, and how far real runs of one case are apart."""
    off = [abs(each) for case in figures.values() for each in case["deviation"].values()]
    apart = [each["most"] / each["least"] - 1 for case in figures.values() for each in case["runs"].values()]
    return {"median_off": statistics.median(off), "most_off": max(off), "runs_apart": max(apart)}


def _line(name: str, row: Mapping[str, Any]) -> str:
    cells = (
        f"{scale * row['real'][figure]:7.{digits}f} {scale * row['simulated'][figure]:7.{digits}f} "
        f"{row['deviation'][figure]:+8.0%}"
        for figure, scale, digits in (("first_token_s", 1e3, 0), ("total_s", 1e3, 0), ("requests_per_s", 1, 2))
    )
    return f"{name:18} {row['slower']:6.2f} {' '.join(cells)}   {row['failed']} failed"
