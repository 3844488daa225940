"""What the connectors count themselves: transfers, descriptors, bytes and seconds."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

from examples.quickstart import metrics

SETTLED_S = 2.0  # in which a server has counted what it has answered


@dataclass(frozen=True)
class Moved:
    """What was transferred. A transfer is what one rank moves at once; ``seconds`` is the sum over all transfers."""

    transfers: int = 0
    descriptors: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def since(self, before: "Moved") -> "Moved":
        """Return what has been moved since ``before``."""
        return Moved(
            self.transfers - before.transfers, self.descriptors - before.descriptors, self.bytes - before.bytes,
            self.seconds - before.seconds,
        )  # fmt: skip

    def __add__(self, other: "Moved") -> "Moved":
        """Return the sum."""
        return Moved(
            self.transfers + other.transfers, self.descriptors + other.descriptors, self.bytes + other.bytes,
            self.seconds + other.seconds,
        )  # fmt: skip


Counted = Callable[[], Moved]


def of_prometheus(url: str, transfers: str, descriptors: str, total_bytes: str, seconds: str, **labels: str) -> Moved:
    """Return what the server at ``url`` has counted in the metrics of these names."""
    snapshot = metrics.scrape(url)
    return Moved(
        round(snapshot.total(transfers)), round(snapshot.total(descriptors)), round(snapshot.total(total_bytes)),
        snapshot.total(seconds, **labels),
    )  # fmt: skip


def ours(decode_url: str) -> Moved:
    """Return what this connector's decode server has pulled."""
    return of_prometheus(
        decode_url, "vllm:pd_pulls_total", "vllm:pd_pull_descriptors_total", "vllm:pd_pull_bytes_total",
        "vllm:pd_pull_seconds_sum", phase="read",
    )  # fmt: skip


def nixl(decode_url: str) -> Moved:
    """Return what the decode server of vLLM's NIXL connector has read."""
    return of_prometheus(
        decode_url, "vllm:nixl_xfer_time_seconds_count", "vllm:nixl_num_descriptors_sum",
        "vllm:nixl_bytes_transferred_sum", "vllm:nixl_xfer_time_seconds_sum",
    )  # fmt: skip


def mooncake(transfers: Path) -> Moved:
    """Return what the prefill server of vLLM's Mooncake connector has written, of the file that it records it in."""
    rows = [json.loads(line) for line in transfers.read_text().splitlines()] if transfers.exists() else []
    return Moved(len(rows), sum(row[2] for row in rows), sum(row[1] for row in rows), sum(row[0] for row in rows))


def now(counted: Counted) -> Moved | None:
    """Return what has been moved so far, or None where the server does not answer any more."""
    try:
        return counted()
    except (httpx.HTTPError, OSError, ValueError):  # ValueError: half of a line
        return None


def moved_since(counted: Counted, before: Moved | None, complete_bytes: int) -> Moved:
    """Return what was moved since ``before``, when it is at least ``complete_bytes`` or no more comes.

    Of a server that does not answer any more, nothing is known.
    """
    deadline = time.monotonic() + SETTLED_S
    while True:
        current = now(counted)
        if before is None or current is None:
            return Moved()
        moved = current.since(before)
        if moved.bytes >= complete_bytes or time.monotonic() > deadline:
            return moved
        time.sleep(0.05)
