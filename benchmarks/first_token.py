"""How soon a client has the first token, from P or from D: ``python -m benchmarks.first_token``.

A small real model on P and D, with a proxy that sends P's own token (``--first-token prefill``) and one that waits for
D's. Beside them, what P alone takes for the same, under the same load. Each prompt is new, and the three take turns.
Time: from the client's request to the first event of the stream. ``--at-once 1 8 32`` sends so many at a time.
"""

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from benchmarks.pair import CONNECTIONS, REQUEST_TIMEOUT_S
from benchmarks.serving import NAME, P, started

FROM_P, FROM_D = "from P", "from D"
WAYS = (P, FROM_P, FROM_D)
VOCABULARY = range(1000, 40000)  # of the model, without what is no text


def first_event_s(http: httpx.Client, url: str, tokens: int, answer_tokens: int = 8) -> float:
    """Return the seconds until the first event of a stream; the stream is read to its end."""
    prompt = [random.choice(VOCABULARY) for _ in range(tokens)]
    body = {"model": NAME, "prompt": prompt, "max_tokens": answer_tokens, "temperature": 0, "stream": True,
            "ignore_eos": True}  # fmt: skip
    start, first = time.perf_counter(), 0.0
    with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data:") and not first:
                first = time.perf_counter() - start
    return first


def measure(http: httpx.Client, urls: dict[str, str], tokens: int, at_once: int, repeats: int) -> dict[str, float]:
    """Return medians in milliseconds, and how much longer P's token takes through the proxy than from P alone."""
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    with ThreadPoolExecutor(at_once) as clients:
        for number in range(max(2, repeats // at_once) + 1):
            for way in WAYS[:: -1 if number % 2 else 1]:
                asked = [clients.submit(first_event_s, http, urls[way], tokens) for _ in range(at_once)]
                times[way] += [each.result() * 1e3 for each in asked][: None if number else 0]
    prefill, from_p, from_d = (statistics.median(times[way]) for way in WAYS)
    print(f"{tokens:>7,} {at_once:>7} {prefill:>9.0f} {from_p:>15.0f} {from_d:>15.0f} {from_p / prefill:>6.2f}")
    return {"prefill_ms": prefill, "from_prefill_ms": from_p, "from_decode_ms": from_d, "ratio": from_p / prefill}


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    """Print a table, and return the figures by the length of the prompt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[200, 500, 1000], help="tokens of a prompt")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1], help="requests at a time")
    parser.add_argument("--repeats", type=int, default=15, help="requests, but twice as many as at once at least")
    parser.add_argument("--megabytes", type=int, default=256, help="of P's and of D's KV cache")
    arguments = parser.parse_args(words)
    proxies = {FROM_P: ("--first-token", "prefill"), FROM_D: ("--first-token", "decode")}
    with started(arguments.megabytes, proxies) as urls, httpx.Client(
        timeout=REQUEST_TIMEOUT_S, limits=CONNECTIONS, trust_env=False
    ) as http:  # fmt: skip
        print("first event of a stream in ms, medians")
        print(f"{'tokens':>7} {'at once':>7} {'P alone':>9} {'proxy, from P':>15} {'proxy, from D':>15} {'ratio':>6}")
        first, *others = (
            {str(tokens): measure(http, urls, tokens, many, arguments.repeats) for tokens in arguments.lengths}
            for many in arguments.at_once
        )
    return first | {f"{many} at once": each for many, each in zip(arguments.at_once[1:], others, strict=True)}


if __name__ == "__main__":
    main()
