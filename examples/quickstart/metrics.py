"""Reads the Prometheus metrics of vLLM and of the connector: what a server did between two scrapes.

Only reading and counting: what must hold of the numbers is decided in ``report``.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

_SCRAPE_TIMEOUT_S = 10.0
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of the exposition format, e.g. ``vllm:pd_pull_failures_total{cause="timeout"} 2``."""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float

    def label(self, name: str) -> str:
        """The value of label ``name``, empty where it has none."""
        return dict(self.labels).get(name, "")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All samples of a server at one moment."""

    samples: tuple[Sample, ...]

    def total(self, name: str, **labels: str) -> float:
        """The sum over all samples called ``name`` that carry ``labels``; 0 where there is none."""
        return sum(
            sample.value
            for sample in self.samples
            if sample.name == name and labels.items() <= dict(sample.labels).items()
        )

    def longest_connector_call(self) -> tuple[str, float] | None:
        """Name and seconds of the longest connector call apart from the registration of the caches.

        None where the server exports none.
        """
        calls = [
            (sample.label("call"), sample.value)
            for sample in self.samples
            if sample.name == "vllm:pd_connector_call_seconds_max"
            and not sample.label("call").endswith("register_kv_caches")
        ]
        return max(calls, key=lambda call: call[1], default=None)


@dataclass(frozen=True, slots=True)
class Work:
    """What a server did for its requests between two snapshots. Pulls are counted on every rank of a server."""

    requests: int  # finished
    computed_tokens: int  # prompt tokens that went through the model
    cached_tokens: int  # prompt tokens found in the server's own prefix cache
    pulled_tokens: int  # prompt tokens whose KV came from another server
    pulls: int
    failures: int
    pull_bytes: int
    descriptors: int
    pull_s: float  # of all pulls, from the order to the confirmed release
    read_s: float  # of all pulls, the transfer alone
    decode_s: float  # of all requests, from the first to the last token


def parse(text: str) -> Snapshot:
    """The snapshot in a Prometheus text exposition.

    Raises:
        ValueError: it is not one.
    """
    return Snapshot(
        tuple(
            Sample(sample.name, tuple(sorted(sample.labels.items())), float(sample.value))
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        )
    )


def scrape(url: str) -> Snapshot:
    """The metrics of the server at ``url`` now.

    Raises:
        httpx.HTTPError: it does not answer, or not with 200.
    """
    answer = httpx.get(f"{url}/metrics", timeout=_SCRAPE_TIMEOUT_S, trust_env=False)
    return parse(answer.raise_for_status().text)


def work_between(before: Snapshot, after: Snapshot) -> Work:
    """What the server did between two of its snapshots."""

    def grown(name: str, **labels: str) -> float:
        return after.total(name, **labels) - before.total(name, **labels)

    def tokens(source: str) -> int:
        return round(grown("vllm:prompt_tokens_by_source_total", source=source))

    return Work(
        requests=round(grown("vllm:request_success_total")),
        computed_tokens=tokens("local_compute"),
        cached_tokens=tokens("local_cache_hit"),
        pulled_tokens=tokens("external_kv_transfer"),
        pulls=round(grown("vllm:pd_pulls_total")),
        failures=round(grown("vllm:pd_pull_failures_total")),
        pull_bytes=round(grown("vllm:pd_pull_bytes_total")),
        descriptors=round(grown("vllm:pd_pull_descriptors_total")),
        pull_s=grown("vllm:pd_pull_seconds_sum", phase="total"),
        read_s=grown("vllm:pd_pull_seconds_sum", phase="read"),
        decode_s=grown("vllm:request_decode_time_seconds_sum"),
    )


def work_since(url: str, before: Snapshot, complete: Callable[[Work], bool], timeout_s: float = 3.0) -> Work:
    """What the server at ``url`` did since ``before``, once ``complete`` agrees, or after ``timeout_s`` seconds.

    Servers count a request a moment after they have answered it.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        work = work_between(before, scrape(url))
        if complete(work) or time.monotonic() > deadline:
            return work
        time.sleep(_POLL_S)
