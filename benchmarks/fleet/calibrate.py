"""Measures what the simulator wants to know, on one P and one D: prompts, decoding, pulls, control messages.

Least squares over the medians of what was measured; no constant is below 0. What the machine does besides is in them;
what it was kept from doing is not, as far as that can be told (see ``calm``).
"""

import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from benchmarks import pull as pull_benchmark
from benchmarks.fleet import control
from benchmarks.fleet.calm import calmest
from benchmarks.fleet.constants import Constants, EngineCosts, PullCosts, SharedMachine
from benchmarks.fleet.pulls import PullPlanner
from benchmarks.fleet.servers import CACHE, CHUNK_TOKENS, Running, processor_s, running
from benchmarks.pair import a_prompt
from benchmarks.peers.connectors import OURS
from benchmarks.peers.sending import Router

LENGTHS = (64, 256, 512, 1024, 2048, 3500)
AT_ONCE = (1, 4, 8)
CONTEXTS = (64, 1024)
ANSWER_TOKENS = 48
PROBES, PROBE_TOKENS = 5, 1024  # prompts by which `validate` knows how fast the machine is
BESIDE_ROUNDS = 3
_SALT = "fleet"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Samples:
    """What was measured, in seconds."""

    prompts: dict[int, float]  # by tokens: P's answer
    decoding: dict[tuple[int, int], float]  # by requests at once and tokens of their prompts: a step
    one_token: float  # D's answer to a prompt of one token
    handovers: dict[int, float]  # by tokens: from P's answer to D's first token, in turn, less ``one_token``
    message: float
    #: What is left of an engine's speed while the other one computes prompts too.
    beside: tuple[float, float]
    #: By requests that D decodes: how many times as long a prompt takes at P, and a step at D, as each takes alone.
    decoding_beside: dict[int, tuple[float, float]]
    cores: dict[str, float]  # kept busy, by what is done; engines that wait for their workers spin, and yield


class Bench:
    """One P, one D, one client."""

    def __init__(self, servers: Running, repeats: int = 1) -> None:
        self._router = Router()
        self._pair = servers.pair(0, 0)
        self._processes = servers.processes
        self._repeats = repeats

    def close(self) -> None:
        """Close the connections."""
        self._router.close()

    def measure(self, message_s: float) -> Samples:
        """Measure everything, after a round that does not count.

        All that is compared is measured in turns: a machine that becomes slower becomes so for all of it.
        """
        cases = [(number, tokens) for number in AT_ONCE for tokens in CONTEXTS]
        prompts = [partial(self._prefill_s, tokens) for tokens in LENGTHS]
        handovers = [partial(self._in_turn, tokens) for tokens in LENGTHS]
        decoding = [partial(self._step_s, *case) for case in cases]
        one = partial(self._decode_s, 1)
        self._medians(handovers, 1)
        medians = iter(self._medians([*prompts, *handovers, *decoding, one]))
        prompt_s = {tokens: next(medians) for tokens in LENGTHS}
        handover_s = {tokens: next(medians) for tokens in LENGTHS}
        step_s = {case: next(medians) for case in cases}
        one_token = next(medians)
        return Samples(
            prompt_s,
            step_s,
            one_token,
            {tokens: seconds - one_token for tokens, seconds in handover_s.items()},
            message_s,
            self._beside(),
            self._decoding_beside(),
            self._cores(),
        )

    def probe_s(self) -> float:
        """Return how long a prompt of ``PROBE_TOKENS`` takes at P now: how fast the machine is."""
        return self._median(partial(self._prefill_s, PROBE_TOKENS), PROBES)

    def _median(self, measure: Callable[[], float], repeats: int | None = None) -> float:
        return statistics.median(found for found, _ in calmest(measure, repeats or self._repeats))

    def _medians(self, measures: Sequence[Callable[[], float]], repeats: int | None = None) -> list[float]:
        """Return the medians of what is measured in turns."""
        rounds = [[_calm(measure) for measure in measures] for _ in range(repeats or self._repeats)]
        return [statistics.median(each) for each in zip(*rounds, strict=True)]

    def _prefill_s(self, tokens: int) -> float:
        prompt = a_prompt(tokens)
        start = time.perf_counter()
        self._router.prefill(self._pair, prompt, _SALT, {})
        return time.perf_counter() - start

    def _decode_s(self, tokens: int) -> float:
        answer = self._router.decode(self._pair, a_prompt(tokens), 1, _SALT, None)
        return answer.first_token_s

    def _in_turn(self, tokens: int) -> float:
        answer = self._router.send(OURS, self._pair, "in turn", a_prompt(tokens), 1, _SALT)
        if answer.error:
            raise RuntimeError(f"a pull of {tokens} tokens failed: {answer.error}")
        return answer.first_token_s - answer.prefilled_s

    def _step_s(self, number: int, tokens: int) -> float:
        """Return how long a step takes that decodes for so many requests, of their last common steps."""
        with ThreadPoolExecutor(number) as threads:
            sent = [
                threads.submit(self._router.decode, self._pair, a_prompt(tokens), ANSWER_TOKENS, _SALT, None)
                for _ in range(number)
            ]
            answers = [each.result() for each in sent]
        if failed := [each.error for each in answers if each.error]:
            raise RuntimeError(f"decoding failed: {failed[0]}")
        # The one whose prompt came last decodes beside all others until the first ends.
        last = max(answers, key=lambda answer: answer.first_token_s)
        return (last.total_s - last.first_token_s) / (ANSWER_TOKENS - 1)

    def _cores(self) -> dict[str, float]:
        """Return how many cores the servers and this client keep busy, by what is done."""
        everything = self._processes

        def busy(what: Callable[[], object], processes: Sequence[int], repeats: int) -> float:
            before, start = self._used_s(processes), time.perf_counter()
            for _ in range(repeats):
                what()
            return (self._used_s(processes) - before) / (time.perf_counter() - start)

        one, many = (busy(partial(self._step_s, number, 64), everything, 2) for number in (AT_ONCE[0], AT_ONCE[-1]))
        return {
            "idle": busy(partial(time.sleep, 3.0), everything, 1),
            "prefill": busy(partial(self._prefill_s, 2048), everything, 2), "decode_1": one, "decode_many": many,
            "waiting": busy(partial(self._together, 3500), everything[1:], 2), "pull": self._pull_cores(),
        }  # fmt: skip

    def _used_s(self, processes: Sequence[int]) -> float:
        return sum(processor_s(each) for each in processes) + time.process_time()

    def _together(self, tokens: int) -> None:
        """Have P compute a prompt that D follows."""
        answer = self._router.send(OURS, self._pair, "together", a_prompt(tokens), 1, _SALT)
        if answer.error:
            raise RuntimeError(f"a pull of {tokens} tokens failed: {answer.error}")

    def _pull_cores(self) -> float:
        """Return how many cores are busy from P's answer to D's first token of long prompts."""
        used = elapsed = 0.0
        for _ in range(self._repeats):
            prompt = a_prompt(3500)
            params = self._router.prefill(self._pair, prompt, _SALT, {"do_remote_decode": True})
            before, start = self._used_s(self._processes), time.perf_counter()
            self._router.decode(self._pair, prompt, 1, _SALT, params)
            elapsed += time.perf_counter() - start
            used += self._used_s(self._processes) - before
        return used / elapsed

    def _decoding_beside(self) -> dict[int, tuple[float, float]]:
        """Return how many times as long a prompt and a step take while P computes prompts and D decodes.

        By how many requests D decodes. In turns, and each time beside both alone: the median of what they differ.
        """
        rounds = [
            {number: _calm(partial(self._decoding_beside_once, number)) for number in AT_ONCE}
            for _ in range(BESIDE_ROUNDS)
        ]
        found = {}
        for number in AT_ONCE:
            prompts, steps = zip(*(each[number] for each in rounds), strict=True)
            found[number] = (statistics.median(prompts), statistics.median(steps))
        return found

    def _decoding_beside_once(self, number: int) -> tuple[float, float]:
        prompt, step = partial(self._prefill_s, 2048), partial(self._step_s, number, 64)
        prompt_s, step_s = self._medians([prompt, step], 1)
        beside_s, steps, _ = while_loaded(step, lambda: self._median(prompt, 3))
        prompt_again_s, step_again_s = self._medians([prompt, step], 1)
        beside_step_s = statistics.median(steps[:-1] or steps)
        return 2 * beside_s / (prompt_s + prompt_again_s), 2 * beside_step_s / (step_s + step_again_s)

    def _beside(self) -> tuple[float, float]:
        """Return the speeds of P and of D while both compute prompts, as shares of their speeds alone."""
        prefills, decodes = zip(*(found for found, _ in calmest(self._beside_once, BESIDE_ROUNDS)), strict=True)
        return statistics.median(prefills), statistics.median(decodes)

    def _beside_once(self) -> tuple[float, float]:
        prefill, decode = partial(self._prefill_s, 2048), partial(self._decode_s, 2048)
        prefill_alone_s, decode_alone_s = self._medians([prefill, decode], 2)
        beside_s, finished, elapsed = while_loaded(decode, lambda: self._median(prefill, 3))
        return prefill_alone_s / beside_s, decode_alone_s / (elapsed / len(finished))


def _calm(measure: Callable[[], _T]) -> _T:
    """Measure once, or up to three times until nobody else takes the cores."""
    ((found, _),) = calmest(measure, tries=3)
    return found


def while_loaded(load: Callable[[], float], measure: Callable[[], float]) -> tuple[float, list[float], float]:
    """Return what is measured while ``load`` runs again and again, what ``load`` returned, and the seconds of it all.

    Whatever either raises ends both.
    """
    stop = threading.Event()
    loaded: list[float] = []

    def run() -> None:
        while not stop.is_set():
            loaded.append(load())

    start = time.perf_counter()
    with ThreadPoolExecutor(1) as threads:
        loading = threads.submit(run)
        try:
            measured = measure()
        finally:
            stop.set()
        loading.result()
    return measured, loaded, time.perf_counter() - start


def fit(samples: Samples, descriptor_s: float) -> Constants:
    """Return the constants under which the samples are most likely."""
    step_s, request_s, token_s, pair_s = _fit_prompts(samples)
    decode_step_s, decode_request_s, decode_context_s = _fit(
        [(1, number, number * (tokens + ANSWER_TOKENS / 2)) for number, tokens in samples.decoding],
        list(samples.decoding.values()),
    )
    planner = PullPlanner(CACHE)
    planned = [planner.planned(0, tokens - 1) for tokens in samples.handovers]
    rest = [
        seconds - descriptor_s * each.descriptors
        for seconds, each in zip(samples.handovers.values(), planned, strict=True)
    ]
    fixed_s, byte_s = _fit([(1, each.bytes) for each in planned], rest)
    engine = EngineCosts(step_s, token_s, pair_s, decode_step_s, decode_request_s, decode_context_s, request_s)
    pull = PullCosts(max(fixed_s - samples.message, 0.0), samples.message, descriptor_s, byte_s)
    return Constants(CACHE, engine, pull, CHUNK_TOKENS, _shared(samples))


def _shared(samples: Samples) -> SharedMachine:
    """Return how many cores each thing wants, so that what goes on together takes as much longer as was measured.

    What is slowed down less than it could be seen wants no more than its share of the cores.
    """
    cores = float(os.cpu_count() or 1)
    idle = samples.cores["idle"] / 2
    prefill = cores / min(sum(samples.beside), 2.0) - idle
    slower = {number: (max(prompt, 1.0), max(step, 1.0)) for number, (prompt, step) in samples.decoding_beside.items()}
    weight = min(sum(prompt for prompt, _ in slower.values()) / sum(step for _, step in slower.values()), 1.0)
    wants = {number: max((cores * prompt - prefill - 2 * idle) / weight, 0.0) for number, (prompt, _) in slower.items()}
    decode, each = _line(list(wants.items()))
    return SharedMachine(
        cores=cores, idle=idle, prefill=prefill, decode=decode, decode_request=each,
        decode_weight=weight, waiting=max(samples.cores["waiting"] - idle, 0.0),
        pull=max(samples.cores["pull"] - 2 * idle, 0.0),
    )  # fmt: skip


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return where a line through points begins, and how it rises; it neither falls nor begins below 0."""
    x, y = zip(*points, strict=True)
    rise = max(statistics.linear_regression(x, y).slope, 0.0)
    return max(statistics.mean(y) - rise * statistics.mean(x), 0.0), rise


def _fit_prompts(samples: Samples) -> tuple[float, float, float, float]:
    """Return the costs of a step, a request, a token and a pair. A request of one token is a request and a step."""
    rows, seconds = [], []
    for tokens, measured in samples.prompts.items():
        starts = range(0, tokens, CHUNK_TOKENS)
        chunks = [(min(CHUNK_TOKENS, tokens - start), start) for start in starts]
        rows.append((len(chunks), 1, tokens, sum(each * (before + each / 2) for each, before in chunks)))
        seconds.append(measured)
    step_s, request_s, token_s, pair_s = _fit(rows, seconds)
    return step_s, request_s, token_s, pair_s


def _fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return the costs, none below 0, with the least squares of what they are off, as shares of each sample."""
    matrix: npt.NDArray[np.float64] = np.array(rows, np.float64)
    wanted: npt.NDArray[np.float64] = np.array(seconds, np.float64)
    matrix, wanted = matrix / wanted[:, None], np.ones_like(wanted)
    used = list(range(matrix.shape[1]))
    while used:
        costs = np.linalg.lstsq(matrix[:, used], wanted, rcond=None)[0]
        if (costs >= 0).all():
            break
        used.pop(int(np.argmin(costs * np.abs(matrix[:, used]).max(axis=0))))
    result = [0.0] * matrix.shape[1]
    for number, cost in zip(used, costs if used else [], strict=True):
        result[number] = float(cost)
    return result


def calibrate(repeats: int) -> dict[str, Any]:
    """Measure, and return the figures of the results' file."""
    messages = control.measure()
    pulled = pull_benchmark.main(["--tokens", "6000", "--rounds", "10"])
    with running(1, 1) as servers, closing(Bench(servers, repeats)) as bench:
        samples = bench.measure(messages["round_trip_ms"] / 1e3)
    return refit({"samples": _written(samples, descriptor_cost(pulled["ms"])), "control": messages})


def refit(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return figures of the results' file with the constants that fit their samples."""
    samples, descriptor_s = _read(figures)
    constants = fit(samples, descriptor_s)
    return {**figures, "constants": msgspec.to_builtins(constants), "fitted": fitted(constants)}


def _written(samples: Samples, descriptor_s: float) -> dict[str, Any]:
    return {
        "prompt_ms": {str(tokens): 1e3 * each for tokens, each in samples.prompts.items()},
        "step_ms": {f"{number} of {tokens}": 1e3 * each for (number, tokens), each in samples.decoding.items()},
        "handover_ms": {str(tokens): 1e3 * each for tokens, each in samples.handovers.items()},
        "one_token_ms": 1e3 * samples.one_token, "descriptor_us": 1e6 * descriptor_s,
        "beside": list(samples.beside), "cores": samples.cores,
        "decoding_beside": {str(number): list(each) for number, each in samples.decoding_beside.items()},
    }  # fmt: skip


def _read(figures: Mapping[str, Any]) -> tuple[Samples, float]:
    """Return the samples of a results' file, and the seconds of a descriptor."""
    of = figures["samples"]

    def seconds(name: str) -> dict[int, float]:
        return {int(tokens): each / 1e3 for tokens, each in of[name].items()}

    decoding = {}
    for case, milliseconds in of["step_ms"].items():
        number, tokens = case.split(" of ")
        decoding[int(number), int(tokens)] = milliseconds / 1e3
    beside_p, beside_d = of["beside"]
    samples = Samples(
        seconds("prompt_ms"), decoding, of["one_token_ms"] / 1e3, seconds("handover_ms"),
        figures["control"]["round_trip_ms"] / 1e3, (beside_p, beside_d),
        {int(number): (prompt, step) for number, (prompt, step) in of["decoding_beside"].items()},
        of["cores"],
    )  # fmt: skip
    return samples, of["descriptor_us"] / 1e6


def descriptor_cost(milliseconds: dict[str, float]) -> float:
    """Return what a descriptor costs, of pulls whose blocks lie in a row and of pulls whose blocks lie anywhere."""
    blocks = -(-6000 // pull_benchmark.BLOCK_TOKENS)
    scattered, adjacent = (milliseconds[f"its read, {where} blocks"] for where in ("scattered", "adjacent"))
    return max(scattered - adjacent, 0.0) / 1e3 / (blocks - 1)


def fitted(constants: Constants) -> dict[str, Any]:
    """Return what the constants make of the samples' cases, to be compared with them."""
    engine, pull = constants.engine, constants.pull
    planner = PullPlanner(constants.cache)

    def handover_s(tokens: int) -> float:
        planned = planner.planned(0, tokens - 1)
        return pull.fixed_s + pull.message_s + pull.read_s(planned.descriptors, planned.bytes)

    return {
        "prompt_ms": {str(tokens): 1e3 * constants.prompt_s(tokens) for tokens in LENGTHS},
        "step_ms": {
            f"{number} of {tokens}": 1e3 * engine.decode_s([tokens + ANSWER_TOKENS // 2] * number)
            for number in AT_ONCE
            for tokens in CONTEXTS
        },
        "handover_ms": {str(tokens): 1e3 * handover_s(tokens) for tokens in LENGTHS},
    }  # fmt: skip
