"""Compares the simulator with real servers: the same trace on 1P1D and on 2P2D, paced and all at once.

All real servers share this machine's cores, so the simulated ones do: ``calibrate`` measures what each thing takes from
the others. What is compared: the medians of the time to first token and of the total, and throughput.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.fleet.constants import Constants
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


def a_trace(constants: Constants, requests: int, seed: int) -> list[Arrival]:
    """Return a trace whose requests come so fast that the machine is busy for a share ``LOAD`` of the time."""
    engine = constants.engine
    prompt_s = 2 * engine.request_s + engine.prompt_s(INPUT_TOKENS, constants.chunk_tokens)
    answer_s = OUTPUT_TOKENS * engine.decode_s([INPUT_TOKENS])
    shared = constants.shared
    per_s = 1 / max(prompt_s, answer_s)
    if shared:
        per_s = shared.cores / (prompt_s * shared.prefill + answer_s * (shared.decode + shared.decode_request))
    return synthetic(_mix(requests, LOAD * per_s), seed)


def _mix(requests: int, per_s: float) -> Mix:
    longest = LONGEST_TOKENS - 4 * OUTPUT_TOKENS
    return Mix(requests, per_s, INPUT_TOKENS, OUTPUT_TOKENS, SPREAD, longest=longest - 256)


def validate(
    constants: Constants, requests: int, burst: int, seed: int, keep: Callable[[dict[str, Any]], object]
) -> None:
    """Run all cases, print a table, and hand the figures so far to ``keep`` after each fleet."""
    paced = a_trace(constants, requests, seed)
    at_once = faster(paced[:burst], AT_ONCE)
    print(f"{'':26} {'first token, ms':>24} {'total, ms':>24} {'requests/s':>20}   pulled, MB")
    figures: dict[str, Any] = {}
    for prefills, decodes in FLEETS:
        with running(prefills, decodes) as servers:
            replay(servers, faster(synthetic(_mix(WARM_UP, 1.0), seed + 1), AT_ONCE), "in turn", "warm-up")
            for case, arrivals in _cases(prefills, decodes, paced, at_once):
                figures[case.name] = compare(servers, case, arrivals, constants)
                print(_line(case, figures[case.name]), flush=True)
        keep({"cases": figures, "requests": requests, "at_once": burst, "goal": GOAL})


def _cases(
    prefills: int, decodes: int, paced: Sequence[Arrival], at_once: Sequence[Arrival]
) -> Iterator[tuple[Case, Sequence[Arrival]]]:
    for pace, arrivals in (("paced", paced), ("at once", at_once)):
        for legs in ALL_LEGS:
            yield Case(prefills, decodes, legs, pace), arrivals


def compare(servers: Running, case: Case, arrivals: Sequence[Arrival], constants: Constants) -> dict[str, Any]:
    """Return what became of a trace, on real servers and simulated."""
    outcomes, descriptors, pulled = replay(servers, arrivals, case.legs, case.name)
    simulated = simulate(arrivals, constants, Settings(legs=case.legs), case.prefills, case.decodes)
    real = asdict(summary(outcomes)) | {"descriptors": descriptors, "bytes": pulled}
    errors = sorted({each.failed for each in outcomes if each.failed})
    return {"real": real, "simulated": _simulated(simulated), "errors": errors,
            "deviation": deviation(summary(outcomes), summary(simulated.outcomes))}  # fmt: skip


def _simulated(ran: Ran) -> dict[str, Any]:
    return asdict(summary(ran.outcomes)) | {"prefill_busy": ran.prefill_busy, "decode_busy": ran.decode_busy}


def deviation(real: Summary, simulated: Summary) -> dict[str, float]:
    """Return by how much the simulator is off, as a share of what is real."""
    return {
        "first_token": simulated.first_token_s["p50"] / real.first_token_s["p50"] - 1,
        "total": simulated.total_s["p50"] / real.total_s["p50"] - 1,
        "requests_per_s": simulated.requests_per_s / real.requests_per_s - 1,
    }


def _line(case: Case, row: dict[str, Any]) -> str:
    real, simulated, off = row["real"], row["simulated"], row["deviation"]

    def cell(name: str, of: str) -> str:
        return f"{1e3 * real[name]['p50']:7.0f} {1e3 * simulated[name]['p50']:7.0f} {off[of]:+8.0%}"

    return (
        f"{case.name:26} {cell('first_token_s', 'first_token')} {cell('total_s', 'total')} "
        f"{real['requests_per_s']:6.2f} {simulated['requests_per_s']:6.2f} {off['requests_per_s']:+6.0%}   "
        f"{real['bytes'] / 1e6:.0f} {simulated['bytes'] / 1e6:.0f}, {real['failed']} failed"
    )
