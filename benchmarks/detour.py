"""Which way a prompt takes, and what ``--prefill-from auto`` makes of it: ``python -m benchmarks.detour``.

A small real model on P and D, behind three proxies: one sends every prompt over P, one has D compute all of them, and
one chooses (``auto``), and has learned from some requests before. They take turns, some requests each, of a few
lengths; every prompt is new. Time: from the client's request to the first event of the stream. All the while, D runs
another, long stream, whose gaps between two tokens show what the prompts that D computes do to it.

P and D share the cores here: a prompt that P computes slows D's stream down as well, which it would not on machines of
their own. So the gaps say less than they would there, and so does the first token of prompts over P.
"""

import argparse
import os
import random
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.first_token import VOCABULARY, first_event_s
from benchmarks.pair import CONNECTIONS, REQUEST_TIMEOUT_S
from benchmarks.serving import NAME, started

OVER_P, ALONE, AUTO = "over P", "D alone", "auto"
LEARNING = "auto, learning"
PROXIES = {OVER_P: ("--prefill-from", "0"), ALONE: ("--prefill-from", "100000"), AUTO: ("--prefill-from", "auto")}
BLOCK = 5  # requests that a proxy gets before it is the next one's turn
LONG_STREAM = 1900  # tokens
#: The goals: of ``auto`` beside the better way, and of the gaps beside those while all prompts go over P.
P50, P90, GAPS = 1.10, 1.25, 1.05


class LongStream:
    """A stream on D that never ends, and the gaps between its tokens, by what goes on meanwhile."""

    def __init__(self, url: str) -> None:
        self.gaps_ms: defaultdict[str, list[float]] = defaultdict(list)
        self.meanwhile = ""  # what the next gaps belong to
        self._url = url
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="long stream")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run it until the context is left.

        Raises:
            RuntimeError: it has failed meanwhile.
        """
        self._thread.start()
        try:
            yield
            if not self._thread.is_alive():
                raise RuntimeError("the long stream has failed: its error is printed above")
        finally:
            self._ends.set()
            self._thread.join()

    def _run(self) -> None:
        with httpx.Client(timeout=REQUEST_TIMEOUT_S, trust_env=False) as http:
            while not self._ends.is_set():
                prompt = [random.choice(VOCABULARY) for _ in range(16)]
                body = {"model": NAME, "prompt": prompt, "max_tokens": LONG_STREAM, "stream": True, "ignore_eos": True}
                with http.stream("POST", f"{self._url}/v1/completions", json=body) as answer:
                    answer.raise_for_status()
                    self._note(answer)

    def _note(self, answer: httpx.Response) -> None:
        last, before = None, ""
        for line in answer.iter_lines():
            if self._ends.is_set():
                return
            if not line.startswith("data: {"):
                continue
            now, meanwhile = time.perf_counter(), self.meanwhile
            if last is not None and meanwhile == before:
                self.gaps_ms[meanwhile].append((now - last) * 1e3)
            last, before = now, meanwhile


def measure(http: httpx.Client, urls: Mapping[str, str], options: argparse.Namespace) -> dict[str, Any]:
    """Send all requests, and return the figures."""
    times_ms: dict[str, dict[int, list[float]]] = {way: defaultdict(list) for way in PROXIES}
    for way in PROXIES:
        for tokens in options.lengths:  # kernels are built at the first request of a size
            first_event_s(http, urls[OVER_P if way == AUTO else way], tokens, 2)
    stream, order = LongStream(urls[ALONE]), list(PROXIES)
    lengths = [options.lengths[number % len(options.lengths)] for number in range(options.requests)]
    random.Random(1).shuffle(lengths)
    with stream.running():
        stream.meanwhile = LEARNING
        for number in range(options.learn):
            first_event_s(http, urls[AUTO], options.lengths[number % len(options.lengths)], 2)
        before = chosen(http, urls[AUTO])
        for begin in range(0, options.requests, BLOCK):
            for way in order:
                stream.meanwhile = way
                for tokens in lengths[begin : begin + BLOCK]:
                    times_ms[way][tokens].append(first_event_s(http, urls[way], tokens, 2) * 1e3)
            order = order[1:] + order[:1]
    rows = {str(tokens): row({way: times_ms[way][tokens] for way in PROXIES}) for tokens in options.lengths}
    gaps = {way: _figures(stream.gaps_ms[way]) for way in PROXIES}
    ways = {what: times - before.get(what, 0.0) for what, times in chosen(http, urls[AUTO]).items()}
    return {"lengths": rows, "gaps": gaps, "gaps_grow": gaps[AUTO]["mean_ms"] / gaps[OVER_P]["mean_ms"] - 1,
            "chosen": ways}  # fmt: skip


def row(times_ms: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return the figures of one length, with those of ``auto`` beside the way whose median is better."""
    found = {way: _figures(times) for way, times in times_ms.items()}
    better = min((OVER_P, ALONE), key=lambda way: found[way]["p50_ms"])
    ratios = {name: found[AUTO][f"{name}_ms"] / found[better][f"{name}_ms"] for name in ("p50", "p90")}
    return {**found, "better": better, "ratio": ratios}


def chosen(http: httpx.Client, url: str) -> dict[str, float]:
    """Return how often a proxy has chosen each way, by way and reason."""
    text = http.get(f"{url}/metrics").raise_for_status().text
    ways = {"pd_proxy_detours_total": OVER_P, "pd_proxy_not_disaggregated_total": ALONE}
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {f"{ways[one.name]}: {one.labels['reason']}": one.value for one in samples if one.name in ways}


def _figures(times_ms: Sequence[float]) -> dict[str, float]:
    p50, p90 = np.percentile(times_ms, [50, 90])
    return {"p50_ms": float(p50), "p90_ms": float(p90), "mean_ms": float(np.mean(times_ms)), "count": len(times_ms)}


def show(figures: Mapping[str, Any]) -> None:
    """Print the tables."""
    print(f"first event of a stream in ms, p50 / p90; goals: auto within {P50:g} and {P90:g} times the better way")
    print(f"{'tokens':>7} " + " ".join(f"{way:>15}" for way in PROXIES) + f" {'ratios':>13}")
    for tokens, found in figures["lengths"].items():
        cells = " ".join(f"{found[way]['p50_ms']:>7.0f} {found[way]['p90_ms']:>7.0f}" for way in PROXIES)
        print(f"{tokens:>7} {cells} {found['ratio']['p50']:>6.2f} {found['ratio']['p90']:>6.2f}")
    gaps = "; ".join(f"{way} {found['mean_ms']:.1f} ({found['p90_ms']:.1f})" for way, found in figures["gaps"].items())
    print(f"gaps of a stream on D in ms, mean (p90): {gaps}; goal: auto within {GAPS:g} times over P")
    for what, times in figures["chosen"].items():
        print(f"auto, {what}: {times:g}")


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    """Print tables, and return the figures by the length of the prompt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[32, 120, 480], help="tokens of a prompt")
    parser.add_argument("--learn", type=int, default=200, help="requests to auto before it is measured")
    parser.add_argument("--requests", type=int, default=200, help="to each proxy")
    parser.add_argument("--megabytes", type=int, default=256, help="of P's and of D's KV cache")
    options = parser.parse_args(words)
    load = os.getloadavg()[0]
    print(f"processes that ran before, on {os.cpu_count()} cores (load average of a minute): {load:.1f}")
    with started(options.megabytes, PROXIES) as urls, httpx.Client(
        timeout=REQUEST_TIMEOUT_S, limits=CONNECTIONS, trust_env=False
    ) as http:  # fmt: skip
        figures = measure(http, urls, options)
    show(figures)
    return figures | {"load_before": load}


if __name__ == "__main__":
    main()
