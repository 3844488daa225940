"""Compares the simulator with real servers: the same trace on 1P1D and on 2P2D, paced and all at once.

All real servers share this machine's cores, so the simulated ones do: ``calibrate`` measures what each thing takes from
the others. What is compared: the medians of the time to first token and of the total, and throughput. Of requests that
come all at once, half of the first tokens come within a second or two of the median, and which engine gets ahead is the
kernel's choice. So real servers are given all requests several times, and the median run counts.

A machine that is lent is not always as fast. Before and after each run prompts are computed alone, and the simulated
engines are as much slower, or faster, than those that were calibrated.
"""

import statistics
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from typing import Any

from benchmarks.fleet.calibrate import Bench
from benchmarks.fleet.constants import Constants, slowed
from benchmarks.fleet.node import Legs, Settings
from benchmarks.fleet.replay import replay
from benchmarks.fleet.servers import LONGEST_TOKENS, Running, running
from benchmarks.fleet.simulation import Ran, Summary, simulate, summary
from benchmarks.fleet.traces import Arrival, Mix, faster, synthetic

FLEETS = ((1, 1), (2, 2))
ALL_LEGS: tuple[Legs, ...] = ("in turn", "together")
LOAD = 0.5  # of what the machine gets done, at the paced rate
AT_ONCE = 1000.0  # times faster: all at once
INPUT_TOKENS, OUTPUT_TOKENS, SPREAD = 1000, 32, 0.5
WARM_UP = 6  # requests that do not count
GOAL = 0.15
PROBES = 5  # prompts by which the machine's speed is known, before and after each case


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


@dataclass(frozen=True)
class Runs:
    """What real servers made of a trace."""

    runs: Sequence[Summary]
    descriptors: float  # of the median run
    bytes: float
    slower: float  # how many times as long the machine took as when the constants were measured
    errors: Sequence[str]


def a_trace(constants: Constants, requests: int, seed: int) -> list[Arrival]:
    """Return a trace whose requests come so fast that the machine is busy for a share ``LOAD`` of the time."""
    engine = constants.engine
    prompt_s = 2 * engine.request_s + engine.prompt_s(INPUT_TOKENS, constants.chunk_tokens)
    answer_s = OUTPUT_TOKENS * engine.decode_s([INPUT_TOKENS])
    shared = constants.shared
    per_s = 1 / max(prompt_s, answer_s)
    if shared:
        prefill, decode = (shared.idle + each for each in (shared.prefill, shared.decode + shared.decode_request))
        per_s = shared.cores / (prompt_s * prefill + answer_s * decode)
    return synthetic(_mix(requests, LOAD * per_s), seed)


def _mix(requests: int, per_s: float) -> Mix:
    longest = LONGEST_TOKENS - 4 * OUTPUT_TOKENS
    return Mix(requests, per_s, INPUT_TOKENS, OUTPUT_TOKENS, SPREAD, longest=longest - 256)


def validate(constants: Constants, probe_s: float, plan: Plan, keep: Callable[[dict[str, Any]], object]) -> None:
    """Run all cases, print a table, and hand the figures so far to ``keep`` after each fleet.

    ``probe_s``: what the prompt took by which the machine's speed is known, when the constants were measured.
    """
    paced = a_trace(constants, plan.requests, plan.seed)
    at_once = faster(paced[: plan.burst], AT_ONCE)
    print(f"{'':26} {'slower':>6} {'first token, ms':>24} {'total, ms':>24} {'requests/s':>20}   pulled, MB")
    figures: dict[str, Any] = {}
    for prefills, decodes in FLEETS:
        with running(prefills, decodes) as servers, closing(Bench(servers, PROBES)) as bench:
            replay(servers, faster(synthetic(_mix(WARM_UP, 1.0), plan.seed + 1), AT_ONCE), "in turn", "warm-up")
            for pace, arrivals, times in (("paced", paced, plan.times), ("at once", at_once, plan.bursts)):
                for legs in ALL_LEGS:
                    case = Case(prefills, decodes, legs, pace)
                    ran = run(servers, case, arrivals, times, lambda: bench.probe_s() / probe_s)
                    figures[case.name] = compare(case, arrivals, constants, ran)
                    print(_line(case, figures[case.name]), flush=True)
        keep({"cases": figures, "goal": GOAL} | asdict(plan))


def run(servers: Running, case: Case, arrivals: Sequence[Arrival], times: int, slower: Callable[[], float]) -> Runs:
    """Give real servers a trace so many times; ``slower``: asks how much slower the machine is than calibrated."""
    probes, ran = [slower()], []
    for number in range(times):
        ran.append(replay(servers, arrivals, case.legs, f"{case.name} {number}"))
        probes.append(slower())
    outcomes, descriptors, sizes = zip(*ran, strict=True)
    errors = {each.failed for of_run in outcomes for each in of_run if each.failed}
    return Runs(
        [summary(of_run) for of_run in outcomes], statistics.median(descriptors), statistics.median(sizes),
        statistics.mean(probes), sorted(errors),
    )  # fmt: skip


def compare(case: Case, arrivals: Sequence[Arrival], constants: Constants, ran: Runs) -> dict[str, Any]:
    """Return what became of a trace on real servers, and simulated on a machine as fast."""
    real = typical(ran.runs)
    settings = Settings(legs=case.legs)
    simulated = simulate(arrivals, slowed(constants, ran.slower), settings, case.prefills, case.decodes)
    each = [_compared(run) for run in ran.runs]
    return {
        "real": asdict(real) | {"descriptors": ran.descriptors, "bytes": ran.bytes},
        "runs": {
            name: {"least": min(run[name] for run in each), "most": max(run[name] for run in each)} for name in each[0]
        },
        "slower": ran.slower,
        "simulated": _simulated(simulated),
        "errors": ran.errors,
        "deviation": deviation(real, summary(simulated.outcomes)),
    }


def typical(runs: Sequence[Summary]) -> Summary:
    """Return the median of each figure of runs of the same trace, and the failures of all of them."""

    def middle(values: Sequence[Any]) -> Any:
        if isinstance(values[0], dict):
            return {name: middle([value[name] for value in values]) for name in values[0]}
        return statistics.median(values)

    found = {each.name: middle([getattr(run, each.name) for run in runs]) for each in fields(Summary)}
    return Summary(**found | {"failed": sum(run.failed for run in runs)})


def _simulated(ran: Ran) -> dict[str, Any]:
    return asdict(summary(ran.outcomes)) | {"prefill_busy": ran.prefill_busy, "decode_busy": ran.decode_busy}


def _compared(of: Summary) -> dict[str, float]:
    return {
        "first_token": of.first_token_s["p50"],
        "total": of.total_s["p50"],
        "requests_per_s": of.requests_per_s,
    }


def deviation(real: Summary, simulated: Summary) -> dict[str, float]:
    """Return by how much the simulator is off, as a share of what is real."""
    found = _compared(simulated)
    return {name: found[name] / value - 1 for name, value in _compared(real).items()}


def _line(case: Case, row: dict[str, Any]) -> str:
    real, simulated, off = row["real"], row["simulated"], row["deviation"]

    def cell(name: str, of: str) -> str:
        return f"{1e3 * real[name]['p50']:7.0f} {1e3 * simulated[name]['p50']:7.0f} {off[of]:+8.0%}"

    return (
        f"{case.name:26} {row['slower']:6.2f} {cell('first_token_s', 'first_token')} {cell('total_s', 'total')} "
        f"{real['requests_per_s']:6.2f} {simulated['requests_per_s']:6.2f} {off['requests_per_s']:+6.0%}   "
        f"{real['bytes'] / 1e6:.0f} {simulated['bytes'] / 1e6:.0f}, {real['failed']} failed"
    )
