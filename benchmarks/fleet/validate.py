"""Compares the simulator with real servers: the same trace on 1P1D and on 2P2D, paced and all at once.

All real servers share this machine's cores, so the simulated ones do: ``calibrate`` measures what each thing takes from
the others. What is compared: the medians of the time to first token and of the total, and throughput. Of requests that
come all at once, half of the first tokens come within a second or two of the median, and which engine gets ahead is the
kernel's choice. So real servers are given all requests several times, and the median run counts.

A machine that is lent is not always as fast, and slower after a pause. Just after each run prompts are computed alone,
and the simulated engines are as much slower, or faster, than the constants say. Runs are repeated of which other
machines took too much, see ``calm``.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from typing import Any

from benchmarks.fleet.calibrate import PROBE_TOKENS, Bench
from benchmarks.fleet.calm import calmest
from benchmarks.fleet.constants import Constants, slowed
from benchmarks.fleet.node import Legs, Settings
from benchmarks.fleet.replay import replay
from benchmarks.fleet.servers import LONGEST_TOKENS, Running, running, scraped
from benchmarks.fleet.simulation import Outcome, Summary, simulate, summary
from benchmarks.fleet.traces import Arrival, Mix, faster, synthetic

FLEETS = ((1, 1), (2, 2))
ALL_LEGS: tuple[Legs, ...] = ("in turn", "together")
LOAD = 0.5  # of what the machine gets done, at the paced rate
AT_ONCE = 1000.0  # times faster: all at once
INPUT_TOKENS, OUTPUT_TOKENS, SPREAD = 1000, 32, 0.5
WARM_UP = 6  # requests that do not count
GOAL = 0.15
_COUNTED_S = 3.0  # in which D has counted what it has pulled


@dataclass(frozen=True)
class Case:
    """One run."""

    prefills: int
    decodes: int
    legs: Legs
    pace: str  # "paced" or "at once"

    @property
    def name(self) -> str:
        """As the results' file has it."""
        return f"{self.prefills}P{self.decodes}D {self.legs}, {self.pace}"


@dataclass(frozen=True)
class Plan:
    """How many requests come, and how often."""

    requests: int  # paced
    times: int  # that they do
    burst: int  # the first of them, all at once
    bursts: int  # of these
    seed: int  # of the trace


def offered(constants: Constants) -> float:
    """Return the requests a second that keep the machine busy for a share ``LOAD`` of the time."""
    engine = constants.engine
    prompt_s = 2 * engine.request_s + engine.prompt_s(INPUT_TOKENS, constants.chunk_tokens)
    answer_s = OUTPUT_TOKENS * engine.decode_s([INPUT_TOKENS])
    shared = constants.shared
    if shared is None:
        return LOAD / max(prompt_s, answer_s)
    prefill, decode = (shared.idle + each for each in (shared.prefill, shared.decode + shared.decode_request))
    return LOAD * shared.cores / (prompt_s * prefill + answer_s * decode)


def traces(plan: Plan, per_s: float) -> dict[str, list[Arrival]]:
    """Return the requests by their pace."""
    paced = synthetic(_mix(plan.requests, per_s), plan.seed)
    return {"paced": paced, "at once": faster(paced[: plan.burst], AT_ONCE)}


def _mix(requests: int, per_s: float) -> Mix:
    longest = LONGEST_TOKENS - 4 * OUTPUT_TOKENS
    return Mix(requests, per_s, INPUT_TOKENS, OUTPUT_TOKENS, SPREAD, longest=longest - 256)


def validate(constants: Constants, plan: Plan, keep: Callable[[dict[str, Any]], object]) -> None:
    """Run all cases, print a table, and hand the figures so far to ``keep`` after each fleet."""
    per_s = float(f"{offered(constants):.4g}")  # as the results' file has it
    by_pace = traces(plan, per_s)
    times = {"paced": plan.times, "at once": plan.bursts}
    print(_HEAD)
    figures: dict[str, Any] = {}
    for prefills, decodes in FLEETS:
        with running(prefills, decodes) as servers, closing(Bench(servers)) as bench:
            replay(servers, faster(synthetic(_mix(WARM_UP, 1.0), plan.seed + 1), AT_ONCE), "in turn", "warm-up")
            for case in _cases(prefills, decodes):
                arrivals = by_pace[case.pace]
                real = run(servers, case, arrivals, times[case.pace], bench.probe_s)
                figures[case.name] = compare(real, case, arrivals, constants)
                print(_line(case, figures[case.name]), flush=True)
        keep({"cases": figures, "offered_per_s": per_s, "goal": GOAL} | asdict(plan) | overall(figures))


def compare_again(recorded: Mapping[str, Any], constants: Constants) -> dict[str, Any]:
    """Return figures of ``validate`` with the same real runs, simulated anew, and print the table."""
    plan = Plan(**{each.name: recorded[each.name] for each in fields(Plan)})
    by_pace = traces(plan, recorded["offered_per_s"])
    print(_HEAD)
    figures = {}
    for case in (case for fleet in FLEETS for case in _cases(*fleet)):
        figures[case.name] = compare(recorded["cases"][case.name], case, by_pace[case.pace], constants)
        print(_line(case, figures[case.name]))
    return {**recorded, "cases": figures} | overall(figures)


def overall(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return how far off the simulator is in all cases together, and how far real runs of one case are apart."""
    off = [abs(each) for case in figures.values() for each in case["deviation"].values()]
    apart = [each["most"] / each["least"] - 1 for case in figures.values() for each in case["runs"].values()]
    return {
        "compared": len(off), "near": sum(each <= GOAL for each in off), "median_off": statistics.median(off),
        "most_off": max(off), "runs_apart": max(apart),
    }  # fmt: skip


def _cases(prefills: int, decodes: int) -> Iterator[Case]:
    for pace in ("paced", "at once"):
        for legs in ALL_LEGS:
            yield Case(prefills, decodes, legs, pace)


def run(
    servers: Running, case: Case, arrivals: Sequence[Arrival], times: int, probe_s: Callable[[], float]
) -> dict[str, Any]:
    """Return what real servers made of a trace that they got so many times.

    ``probe_s``: returns how long a prompt takes now by which the machine's speed is known.
    """
    salts = (f"{case.name} {number}" for number in itertools.count())
    measured = calmest(lambda: _run_once(servers, case, arrivals, next(salts), probe_s), times)
    ran = [run for run, _ in measured]
    runs = [summary(run.outcomes) for run in ran]
    descriptors, size = (statistics.median(each) for each in zip(*(run.pulled for run in ran), strict=True))
    each = [_compared(asdict(run)) for run in runs]
    return {
        "real": asdict(typical(runs)) | {"descriptors": descriptors, "bytes": size},
        "runs": {
            name: {"least": min(run[name] for run in each), "most": max(run[name] for run in each)} for name in each[0]
        },
        "stolen": [share for _, share in measured],
        "errors": sorted({each.failed for run in ran for each in run.outcomes if each.failed}),
        "probe_s": statistics.mean(run.probe_s for run in ran),
    }  # fmt: skip


@dataclass(frozen=True)
class _Run:
    outcomes: list[Outcome]
    probe_s: float
    pulled: list[float]  # descriptors and bytes


def _run_once(
    servers: Running, case: Case, arrivals: Sequence[Arrival], salt: str, probe_s: Callable[[], float]
) -> _Run:
    before = scraped(servers.decodes)
    outcomes = replay(servers, arrivals, case.legs, salt)
    probe = probe_s()  # at once: after a pause, a machine is not what it was
    time.sleep(_COUNTED_S)
    return _Run(outcomes, probe, [now - then for now, then in zip(scraped(servers.decodes), before, strict=True)])


def compare(real: Mapping[str, Any], case: Case, arrivals: Sequence[Arrival], constants: Constants) -> dict[str, Any]:
    """Return what ``run`` has returned, beside the same trace simulated on a machine as fast."""
    slower = real["probe_s"] / constants.prompt_s(PROBE_TOKENS)
    there = slowed(constants, slower)
    ran = simulate(arrivals, there, Settings(legs=case.legs), case.prefills, case.decodes)
    simulated = asdict(summary(ran.outcomes))
    return {
        **real,
        "slower": slower,
        "simulated": simulated | {"prefill_busy": ran.prefill_busy, "decode_busy": ran.decode_busy},
        "deviation": deviation(real["real"], simulated),
    }


def typical(runs: Sequence[Summary]) -> Summary:
    """Return the median of each figure of runs of the same trace, and the failures of all of them."""

    def middle(values: Sequence[Any]) -> Any:
        if isinstance(values[0], dict):
            return {name: middle([value[name] for value in values]) for name in values[0]}
        return statistics.median(values)

    found = {each.name: middle([getattr(run, each.name) for run in runs]) for each in fields(Summary)}
    return Summary(**found | {"failed": sum(run.failed for run in runs)})


def _compared(of: Mapping[str, Any]) -> dict[str, float]:
    return {
        "first_token": of["first_token_s"]["p50"],
        "total": of["total_s"]["p50"],
        "requests_per_s": of["requests_per_s"],
    }


def deviation(real: Mapping[str, Any], simulated: Mapping[str, Any]) -> dict[str, float]:
    """Return by how much the simulator is off, as a share of what is real. Both: ``Summary``, as a mapping."""
    found = _compared(simulated)
    return {name: found[name] / value - 1 for name, value in _compared(real).items()}


_HEAD = f"{'':26} {'slower':>6} {'first token, ms':>24} {'total, ms':>24} {'requests/s':>20}   pulled, MB"


def _line(case: Case, row: dict[str, Any]) -> str:
    real, simulated, off = row["real"], row["simulated"], row["deviation"]

    def cell(name: str, of: str) -> str:
        return f"{1e3 * real[name]['p50']:7.0f} {1e3 * simulated[name]['p50']:7.0f} {off[of]:+8.0%}"

    return (
        f"{case.name:26} {row['slower']:6.2f} {cell('first_token_s', 'first_token')} {cell('total_s', 'total')} "
        f"{real['requests_per_s']:6.2f} {simulated['requests_per_s']:6.2f} {off['requests_per_s']:+6.0%}   "
        f"{real['bytes'] / 1e6:.0f} {simulated['bytes'] / 1e6:.0f}, {real['failed']} failed"
    )
