"""x P and y D: sends a trace's requests to them, and says what became of each."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import simpy

from benchmarks.fleet.constants import Constants
from benchmarks.fleet.decode import Decode
from benchmarks.fleet.links import Links
from benchmarks.fleet.node import Job, Settings, blocks_of
from benchmarks.fleet.prefill import Prefill
from benchmarks.fleet.traces import Arrival

Engine = TypeVar("Engine", Prefill, Decode)


@dataclass(frozen=True)
class Outcome:
    """What became of one request. Seconds since it was sent."""

    at_s: float
    input_tokens: int
    output_tokens: int
    prefilled_s: float = 0.0
    first_token_s: float = 0.0
    total_s: float = 0.0
    failed: str = ""
    reads: int = 0
    bytes: int = 0
    pulled_tokens: int = 0


@dataclass(frozen=True)
class Summary:
    """Of all requests of a run."""

    requests: int
    failed: int
    first_token_s: dict[str, float]
    total_s: dict[str, float]
    handover_s: dict[str, float]
    requests_per_s: float  # that were answered, from the first that was sent to the last that was answered


@dataclass(frozen=True)
class Ran:
    """A simulation's end."""

    outcomes: tuple[Outcome, ...]
    prefill_busy: float  # share of the time in which P computed, on average
    decode_busy: float


class Fleet:
    """The engines, and a router that chooses the one with the fewest requests in flight, as the proxy does."""

    def __init__(self, constants: Constants, settings: Settings, prefills: int, decodes: int) -> None:
        self.env = simpy.Environment()
        links = Links(self.env)
        self._settings, self._constants = settings, constants
        self.prefills = [Prefill(self.env, constants, settings, number) for number in range(prefills)]
        self.decodes = [Decode(self.env, constants, settings, self.prefills, links) for _ in range(decodes)]
        self._choices = 0

    def run(self, arrivals: Sequence[Arrival]) -> Ran:
        """Send all requests at their times, and wait until each has ended."""
        jobs = [Job(number, arrival) for number, arrival in enumerate(arrivals)]
        clients = [self.env.process(self._client(job)) for job in jobs]
        self.env.run(until=self.env.all_of(clients))
        for prefill in self.prefills:
            prefill.check_integrity()
        for decode in self.decodes:
            decode.check_integrity()
        seconds = self.env.now - arrivals[0].at_s
        return Ran(
            tuple(_outcome(job) for job in jobs),
            sum(each.busy_s for each in self.prefills) / len(self.prefills) / seconds,
            sum(each.busy_s for each in self.decodes) / len(self.decodes) / seconds,
        )  # fmt: skip

    def _client(self, job: Job) -> Generator[simpy.Event, Any, None]:
        yield self.env.timeout(job.arrival.at_s)
        job.failed = self._misfit(job)
        if job.failed:
            return
        prefill = self._choose(self.prefills)
        if self._settings.legs == "in turn":
            yield from self._prefill_leg(job, prefill)
            job.is_complete, job.told = True, job.num_tokens
            yield from self._decode_leg(job, prefill, self._choose(self.decodes))
        else:
            decode = self._choose(self.decodes)
            legs = (self._prefill_leg(job, prefill), self._decode_leg(job, prefill, decode))
            yield self.env.all_of([self.env.process(leg) for leg in legs])

    def _misfit(self, job: Job) -> str:
        """Return why no engine could ever hold a request; empty if one can."""
        tokens, cache = job.num_tokens + job.arrival.output_tokens, self._constants.cache
        if blocks_of(tokens, self._constants) <= cache.blocks:
            return ""
        return f"{tokens} tokens: an engine has {cache.blocks} blocks of {cache.block_tokens} tokens"

    def _prefill_leg(self, job: Job, prefill: Prefill) -> Generator[simpy.Event, Any, None]:
        yield from prefill.serve(job)
        prefill.in_flight -= 1

    def _decode_leg(self, job: Job, prefill: Prefill, decode: Decode) -> Generator[simpy.Event, Any, None]:
        yield from decode.serve(job, prefill)
        decode.in_flight -= 1

    def _choose(self, engines: list[Engine]) -> Engine:
        chosen = min(engines, key=lambda each: (each.in_flight, each.last_chosen))
        self._choices += 1
        chosen.last_chosen = self._choices
        chosen.in_flight += 1
        return chosen


def simulate(
    arrivals: Sequence[Arrival], constants: Constants, settings: Settings, prefills: int = 1, decodes: int = 1
) -> Ran:
    """Run a trace on a fresh fleet. Equal arguments give equal outcomes."""
    return Fleet(constants, settings, prefills, decodes).run(arrivals)


def summary(outcomes: Sequence[Outcome]) -> Summary:
    """Return medians and percentiles of requests that were answered, real or simulated."""
    right = [each for each in outcomes if not each.failed]
    first, end = min(each.at_s for each in outcomes), max((each.at_s + each.total_s for each in outcomes), default=0.0)
    return Summary(
        len(outcomes), len(outcomes) - len(right),
        _percentiles([each.first_token_s for each in right]), _percentiles([each.total_s for each in right]),
        _percentiles([each.first_token_s - each.prefilled_s for each in right]),
        len(right) / (end - first),
    )  # fmt: skip


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {f"p{rank}": float(np.percentile(values, rank)) for rank in (50, 90, 99)}


def _outcome(job: Job) -> Outcome:
    at_s = job.arrival.at_s
    ends = (0.0, 0.0, 0.0) if job.failed else (job.prefilled_s - at_s, job.first_token_s - at_s, job.ended_s - at_s)
    return Outcome(
        at_s, job.num_tokens, job.arrival.output_tokens, *ends, job.failed, job.reads, job.bytes, job.pulled_tokens
    )
