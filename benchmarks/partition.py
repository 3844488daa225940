"""What pulls feel of a prefill server whose network is cut: ``python -m benchmarks.partition``. As root.

Two prefill servers and a decode server, each on a host of its own. Decode legs of prompts at the first prefill server,
one after another; in every other round, clients keep sending the decode server legs that name the second one, whose
packets are dropped from a moment before to the end of the round. Those fail, as its time-outs say.
"""

import argparse
import statistics
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx

from benchmarks.hosts import cut
from benchmarks.pair import DIRECTORY, Pair, Side, a_prompt, running
from examples.quickstart.servers import ServerFailed

MBIT_PER_S = 10_000  # more than loopback and these servers use
SECOND = 2  # the number of its host
STATES = ("whole", "cut")


@contextmanager
def asking(pair: Pair, clients: int, tokens: int, failed_after_s: list[float]) -> Iterator[None]:
    """Clients ask for prompts of a prefill server that cannot be reached, and note when they are told."""
    ends = threading.Event()

    def ask() -> None:
        while not ends.is_set():
            start = time.monotonic()
            params = {"do_remote_prefill": True, "transfer_id": uuid.uuid4().hex} | pair.control
            try:
                pair.complete(pair.decode, a_prompt(tokens), 1, params)
            except httpx.HTTPStatusError:
                failed_after_s.append(time.monotonic() - start)

    with ThreadPoolExecutor(clients) as threads:
        for _ in range(clients):
            threads.submit(ask)
        try:
            yield
        finally:
            ends.set()


def legs(pair: Pair, number: int, tokens: int) -> list[float]:
    """Return the milliseconds of decode legs, one after another."""
    taken = (pair.in_turn(a_prompt(tokens), 1) for _ in range(number))
    return [1e3 * (each.ended - each.prefilled) for each in taken]


def measure(first: Pair, second: Pair, rounds: int, number: int, clients: int, tokens: int) -> dict[str, Any]:
    """Return decode legs by state of the second prefill server's network, and when the requests to it failed."""
    legs(first, number // 4, tokens)
    taken: dict[str, list[float]] = {state: [] for state in STATES}
    failed: list[float] = []
    for _ in range(rounds):
        for state in STATES:
            with ExitStack() as during:
                if state == "cut":
                    during.enter_context(cut(SECOND))
                    during.enter_context(asking(second, clients, tokens, failed))
                taken[state] += legs(first, number, tokens)
    if not failed:
        raise RuntimeError(f"no request to {second.prefill} has failed: its network was not cut")
    figures: dict[str, Any] = {
        state: {"p50_ms": statistics.median(each), "p99_ms": statistics.quantiles(each, n=100)[-1]}
        for state, each in taken.items()
    }
    figures["ratio"] = {name: figures["cut"][f"{name}_ms"] / figures["whole"][f"{name}_ms"] for name in ("p50", "p99")}
    return figures | {"failed": len(failed), "failed_after_s": statistics.median(failed)}


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="with a network that is whole, and with one that is cut")
    parser.add_argument("--requests", type=int, default=100, help="of a round")
    parser.add_argument("--clients", type=int, default=4, help="of the prefill server that cannot be reached")
    parser.add_argument("--tokens", type=int, default=256)
    arguments = parser.parse_args(words)
    try:
        with running(Side(), Side(), others=[Side()], mbit_per_s=MBIT_PER_S) as (first, second):
            figures = measure(first, second, arguments.rounds, arguments.requests, arguments.clients, arguments.tokens)
    except ServerFailed as error:
        sys.exit(f"{error}. The end of its log in {DIRECTORY}:\n{error.log_tail}")
    print(f"decode legs of {arguments.tokens} tokens in ms, median and 99th percentile")
    for state in STATES:
        print(
            f"  another prefill server's network {state}: {figures[state]['p50_ms']:.1f} {figures[state]['p99_ms']:.1f}"
        )
    print(f"  ratios: {figures['ratio']['p50']:.2f} {figures['ratio']['p99']:.2f}")
    print(f"  {figures['failed']} requests to that one failed, after {figures['failed_after_s']:.1f} s (median)")
    return figures


if __name__ == "__main__":
    main()
