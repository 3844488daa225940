"""Sends a trace's requests to real servers at their times, and says what became of each.

The router chooses the server with the fewest requests in flight, as the simulated one and the proxy do.
"""

import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from benchmarks.fleet.node import Legs
from benchmarks.fleet.servers import Running
from benchmarks.fleet.simulation import Outcome
from benchmarks.fleet.traces import BLOCK_TOKENS, Arrival
from benchmarks.peers.connectors import OURS
from benchmarks.peers.model import VOCABULARY
from benchmarks.peers.sending import Answer, Prompt, Router

_REQUEST_TIMEOUT_S = 120.0  # two dozen at once are answered within 20 s


def prompt(arrival: Arrival) -> Prompt:
    """Return the tokens of a prompt: those of each id are made of the id."""
    tokens: Prompt = []
    for each in arrival.hash_ids:
        chance = random.Random(each)
        tokens += [chance.randrange(2, VOCABULARY) for _ in range(BLOCK_TOKENS)]
    return tokens[: arrival.input_tokens]


class _Choice:
    """The servers of one leg. Any thread."""

    def __init__(self, count: int) -> None:
        self._in_flight = [0] * count
        self._last = [0] * count
        self._choices = 0
        self._lock = threading.Lock()

    def begin(self) -> int:
        """Return the server with the fewest requests in flight, and count one more."""
        with self._lock:
            chosen = min(range(len(self._in_flight)), key=lambda each: (self._in_flight[each], self._last[each]))
            self._choices += 1
            self._last[chosen] = self._choices
            self._in_flight[chosen] += 1
            return chosen

    def end(self, chosen: int) -> None:
        """Count one less."""
        with self._lock:
            self._in_flight[chosen] -= 1


class _Client:
    def __init__(self, servers: Running, router: Router, legs: Legs, salt: str) -> None:
        self._servers, self._router, self._legs, self._salt = servers, router, legs, salt
        self._prefills, self._decodes = _Choice(len(servers.prefills)), _Choice(len(servers.decodes))

    def send(self, arrival: Arrival, tokens: Prompt, due: float) -> Outcome:
        """Send one request when it is due."""
        time.sleep(max(due - time.perf_counter(), 0.0))
        late_s = time.perf_counter() - due
        answer = self._in_turn(arrival, tokens) if self._legs == "in turn" else self._together(arrival, tokens)
        return _outcome(arrival, answer, late_s)

    def _together(self, arrival: Arrival, tokens: Prompt) -> Answer:
        prefill, decode = self._prefills.begin(), self._decodes.begin()
        try:
            pair = self._servers.pair(prefill, decode)
            # Both counts end together: P's answer is there long before D's.
            return self._router.send(OURS, pair, "together", tokens, arrival.output_tokens, self._salt)
        finally:
            self._prefills.end(prefill)
            self._decodes.end(decode)

    def _in_turn(self, arrival: Arrival, tokens: Prompt) -> Answer:
        start = time.perf_counter()
        prefill = self._prefills.begin()
        try:
            params = self._router.prefill(
                self._servers.pair(prefill, 0), tokens, self._salt, {"do_remote_decode": True}
            )
        finally:
            self._prefills.end(prefill)
        prefilled_s = time.perf_counter() - start
        decode = self._decodes.begin()
        try:
            pair = self._servers.pair(prefill, decode)
            answer = self._router.decode(pair, tokens, arrival.output_tokens, self._salt, params)
        finally:
            self._decodes.end(decode)
        return replace(
            answer, prefilled_s=prefilled_s, first_token_s=prefilled_s + answer.first_token_s,
            total_s=prefilled_s + answer.total_s,
        )  # fmt: skip


def replay(servers: Running, arrivals: Sequence[Arrival], legs: Legs, salt: str) -> list[Outcome]:
    """Return what became of the requests."""
    prompts = [prompt(each) for each in arrivals]
    router = Router(_REQUEST_TIMEOUT_S)
    client = _Client(servers, router, legs, salt)
    try:
        with ThreadPoolExecutor(len(arrivals)) as threads:
            start = time.perf_counter() + 0.5
            sent = [
                threads.submit(client.send, arrival, tokens, start + arrival.at_s)
                for arrival, tokens in zip(arrivals, prompts, strict=True)
            ]
            return [each.result() for each in sent]
    finally:
        router.close()


def _outcome(arrival: Arrival, answer: Answer, late_s: float) -> Outcome:
    """Return an answer's times since the request was due: a client that is late is the machine's doing."""
    if answer.error:
        return Outcome(arrival.at_s, arrival.input_tokens, arrival.output_tokens, failed=answer.error)
    return Outcome(
        arrival.at_s, arrival.input_tokens, arrival.output_tokens, late_s + answer.prefilled_s,
        late_s + answer.first_token_s, late_s + answer.total_s,
    )  # fmt: skip
