"""Measures what the simulator wants to know, on one P and one D: prompts, decoding, pulls, control messages.

Least squares over the medians of what was measured; no constant is below 0. What the machine does besides is in them.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from benchmarks.fleet import control, real
from benchmarks.fleet.constants import Constants, EngineCosts, PullCosts
from benchmarks.fleet.real import CACHE
from benchmarks.pair import CHUNK as CHUNK_TOKENS
from benchmarks.pair import a_prompt
from benchmarks.peers.connectors import OURS, Pair
from benchmarks.peers.sending import Router

LENGTHS = (64, 256, 512, 1024, 2048, 3500)
AT_ONCE = (1, 4, 8)
CONTEXTS = (64, 1024)
ANSWER_TOKENS = 48
PROBES, PROBE_TOKENS = 5, 1024  # prompts by which `validate` knows how fast the machine is
_SALT = "fleet"


class Samples(msgspec.Struct, frozen=True):
    """What was measured, as the results' file has it."""

    prompt_ms: dict[int, float]  # by tokens: P's answer
    step_ms: dict[str, float]  # by requests at once and tokens of their prompts ("8 of 64"): a step of D
    handover_ms: dict[int, float]  # by tokens: from P's answer to D's first token, in turn, less that of one token


class Bench:
    """One P, one D, one client."""

    def __init__(self, pair: Pair, repeats: int = 1) -> None:
        self._router, self._pair, self._repeats = Router(real.REQUEST_TIMEOUT_S), pair, repeats

    def close(self) -> None:
        """Close the connections."""
        self._router.close()

    def measure(self) -> Samples:
        """Measure everything, after a round that does not count.

        All that is compared is measured in turns: a machine that becomes slower becomes so for all of it.
        """
        cases = [(number, tokens) for number in AT_ONCE for tokens in CONTEXTS]
        prompts = [partial(self._prefill_s, tokens) for tokens in LENGTHS]
        handovers = [partial(self._in_turn, tokens) for tokens in LENGTHS]
        decoding = [partial(self._step_s, *case) for case in cases]
        _medians(handovers, 1)
        medians = iter(_medians([*prompts, *handovers, *decoding, partial(self._decode_s, 1)], self._repeats))
        prompt_ms, handover_ms = ({tokens: 1e3 * next(medians) for tokens in LENGTHS} for _ in range(2))
        step_ms = {f"{number} of {tokens}": 1e3 * next(medians) for number, tokens in cases}
        one_token_ms = 1e3 * next(medians)
        handover_ms = {tokens: each - one_token_ms for tokens, each in handover_ms.items()}
        return Samples(prompt_ms, step_ms, handover_ms)

    def probe_s(self) -> float:
        """Return how long a prompt of ``PROBE_TOKENS`` takes at P now: how fast the machine is."""
        return _medians([partial(self._prefill_s, PROBE_TOKENS)], PROBES)[0]

    def _prefill_s(self, tokens: int) -> float:
        prompt = a_prompt(tokens)
        start = time.perf_counter()
        self._router.prefill(self._pair, prompt, _SALT, {})
        return time.perf_counter() - start

    def _decode_s(self, tokens: int) -> float:
        return self._router.decode(self._pair, a_prompt(tokens), 1, _SALT, None).first_token_s

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


def _medians(measures: Sequence[Callable[[], float]], repeats: int) -> list[float]:
    """Return the medians of what is measured in turns."""
    rounds = [[measure() for measure in measures] for _ in range(repeats)]
    return [statistics.median(each) for each in zip(*rounds, strict=True)]


def fit(samples: Samples, message_s: float) -> Constants:
    """Return the constants under which the samples are most likely."""
    step_s, request_s, token_s, pair_s = _fit(
        [_prompt_row(tokens) for tokens in samples.prompt_ms], samples.prompt_ms.values()
    )
    decoded = [[int(each) for each in case.split(" of ")] for case in samples.step_ms]
    decode_step_s, decode_request_s, decode_context_s = _fit(
        [(1, number, number * (tokens + ANSWER_TOKENS / 2)) for number, tokens in decoded], samples.step_ms.values()
    )
    blocks = (-(-(tokens - 1) // CACHE.block_tokens) for tokens in samples.handover_ms)
    fixed_s, byte_s = _fit([(1, each * CACHE.block_bytes) for each in blocks], samples.handover_ms.values())
    engine = EngineCosts(step_s, token_s, pair_s, decode_step_s, decode_request_s, decode_context_s, request_s)
    pull = PullCosts(max(fixed_s - message_s, 0.0), message_s, byte_s)
    return Constants(CACHE, engine, pull, CHUNK_TOKENS)


def _prompt_row(tokens: int) -> tuple[float, ...]:
    """Return how many steps, requests, tokens and pairs of tokens a prompt is."""
    chunks = [(min(CHUNK_TOKENS, tokens - start), start) for start in range(0, tokens, CHUNK_TOKENS)]
    return len(chunks), 1, tokens, sum(each * (before + each / 2) for each, before in chunks)


def _fit(rows: Sequence[Sequence[float]], milliseconds: Iterable[float]) -> list[float]:
    """Return the costs in seconds, none below 0, with the least squares of what they are off, as shares of each."""
    matrix: npt.NDArray[np.float64] = np.array(rows, np.float64) / (1e-3 * np.array(list(milliseconds)))[:, None]
    result: npt.NDArray[np.float64] = np.zeros(matrix.shape[1])
    used = list(range(matrix.shape[1]))
    while used:
        costs = np.linalg.lstsq(matrix[:, used], np.ones(len(matrix)), rcond=None)[0]
        if (costs >= 0).all():
            result[used] = costs
            break
        used.pop(int(np.argmin(costs * np.abs(matrix[:, used]).max(axis=0))))
    return [float(each) for each in result]


def calibrate(repeats: int) -> dict[str, Any]:
    """Measure, and return the figures of the results' file."""
    messages = control.measure()
    with real.running() as pair, closing(Bench(pair, repeats)) as bench:
        samples = bench.measure()
    constants = fit(samples, messages["round_trip_ms"] / 1e3)
    return {
        "samples": msgspec.to_builtins(samples, str_keys=True), "control": messages,
        "constants": msgspec.to_builtins(constants),
    }  # fmt: skip
