"""A real P and a real D on this machine, and a client that sends them a trace's requests at their times."""

import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks import pair
from benchmarks.fleet.constants import Cache
from benchmarks.fleet.node import Legs
from benchmarks.fleet.simulation import Outcome
from benchmarks.fleet.traces import BLOCK_TOKENS, Arrival
from benchmarks.peers.connectors import OURS, Pair, Ports
from benchmarks.peers.sending import Prompt, Router

LONGEST_TOKENS = 4096
CACHE_BYTES = 512 << 20  # of each server: what five of the longest prompts take
_BLOCK_BYTES = pair.LAYERS * pair.KV_HEADS * pair.HEAD_SIZE * 2 * 4 * pair.BLOCK_TOKENS
CACHE = Cache(pair.LAYERS, pair.KV_HEADS, pair.HEAD_SIZE, 4, pair.BLOCK_TOKENS, CACHE_BYTES // _BLOCK_BYTES)
REQUEST_TIMEOUT_S = 120.0  # two dozen at once are answered within 20 s


@contextmanager
def running() -> Iterator[Pair]:
    """Yield one P and one D, ready, with one thread for the kernels of each; they end with the context.

    Raises:
        ServerFailed: one of them did not start.
    """
    side = pair.Side(cache_bytes=CACHE_BYTES, longest=LONGEST_TOKENS)
    with pair.running(side, side) as (servers,):
        yield Pair(servers.prefill, servers.decode, Ports(0, 0), Path(), servers.control)


def replay(servers: Pair, arrivals: Sequence[Arrival], legs: Legs, salt: str) -> list[Outcome]:
    """Return what became of the requests, whose prompts are in no cache unless they were sent with the same salt."""
    prompts = [_prompt(each) for each in arrivals]
    with closing(Router(REQUEST_TIMEOUT_S)) as router, ThreadPoolExecutor(len(arrivals)) as threads:
        start = time.perf_counter() + 0.5

        def send(arrival: Arrival, tokens: Prompt) -> Outcome:
            """Send a request when it is due, from when its times count: a late client is the machine's doing."""
            due = start + arrival.at_s
            time.sleep(max(due - time.perf_counter(), 0.0))
            late_s = time.perf_counter() - due
            answer = router.send(OURS, servers, legs, tokens, arrival.output_tokens, salt)
            outcome = Outcome(arrival.at_s, arrival.input_tokens, arrival.output_tokens, failed=answer.error)
            if answer.error:
                return outcome
            return replace(
                outcome, prefilled_s=late_s + answer.prefilled_s, first_token_s=late_s + answer.first_token_s,
                total_s=late_s + answer.total_s,
            )  # fmt: skip

        return list(threads.map(send, arrivals, prompts))


def _prompt(arrival: Arrival) -> Prompt:
    """Return the tokens of a prompt: those of each id are made of the id."""
    tokens: Prompt = []
    for each in arrival.hash_ids:
        chance = random.Random(each)
        tokens += [chance.randrange(2, pair.VOCABULARY) for _ in range(BLOCK_TOKENS)]
    return tokens[: arrival.input_tokens]
