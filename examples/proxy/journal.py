"""What the proxy remembers of requests: one access line each, and counters for ``/metrics``."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable

logger = logging.getLogger(__name__)

#: Logged where the client left before it had its whole answer; no such status is ever sent.
CLIENT_LEFT = 499


class Record:
    """One request, filled in on its way. Times are monotonic seconds, durations seconds."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.identity = "-"
        self.status = 0  # as sent to the client, or CLIENT_LEFT
        self.undivided = ""  # why there was no prefill leg
        self.prefill_url = ""
        self.decode_url = ""
        self.prefill_s: float | None = None  # prefill leg, from its start to its whole answer
        self.first_byte_s: float | None = None  # decode leg, from its start to the first byte of the answer's body
        self.problem = ""  # what went wrong, for people
        self.broken_off = False  # the client got the beginning of an answer only
        self._started = time.monotonic()

    def line(self) -> str:
        """The access line."""
        parts = [
            f"{self.path} id={self.identity} status={self.status}",
            f"P={self.prefill_url or '-'} D={self.decode_url or '-'}",
            f"prefill={_milliseconds(self.prefill_s)} first_byte={_milliseconds(self.first_byte_s)}",
            f"total={_milliseconds(time.monotonic() - self._started)}",
        ]
        if self.undivided:
            parts.append(f"not disaggregated: {self.undivided}")
        if self.problem:
            parts.append(f"problem: {' '.join(self.problem.split())}")  # on one line, whatever a server wrote
        return " ".join(parts)


class Journal:
    """Writes access lines and counts. One per proxy."""

    def __init__(self) -> None:
        self._open = 0
        self._none_open = asyncio.Event()
        self._none_open.set()
        self._statuses: Counter[int] = Counter()
        self._undivided: Counter[str] = Counter()
        self._broken_off = 0
        self._prefill_s = 0.0
        self._prefills = 0
        self._first_byte_s = 0.0
        self._first_bytes = 0

    def open(self, path: str) -> Record:
        """A request has come in. Its record must be closed."""
        self._open += 1
        self._none_open.clear()
        return Record(path)

    async def none_open(self) -> None:
        """Wait until every record is closed."""
        await self._none_open.wait()

    def close(self, record: Record) -> None:
        """The request is over: log it and count it."""
        self._open -= 1
        if not self._open:
            self._none_open.set()
        self._statuses[record.status] += 1
        self._broken_off += record.broken_off
        if record.undivided:
            self._undivided[record.undivided] += 1
        if record.prefill_s is not None:
            self._prefills += 1
            self._prefill_s += record.prefill_s
        if record.first_byte_s is not None:
            self._first_bytes += 1
            self._first_byte_s += record.first_byte_s
        bad = record.broken_off or record.status >= 500
        logger.log(logging.WARNING if bad else logging.INFO, "%s", record.line())

    def exposition(self, in_flight: Iterable[tuple[str, str, int]]) -> str:
        """All counters in Prometheus' text format; ``in_flight`` is (leg, URL, requests) of every server."""
        lines = ["# TYPE pd_proxy_requests_total counter"]
        lines += [
            f'pd_proxy_requests_total{{status="{status}"}} {count}' for status, count in sorted(self._statuses.items())
        ]
        lines.append("# TYPE pd_proxy_not_disaggregated_total counter")
        lines += [
            f'pd_proxy_not_disaggregated_total{{reason="{reason}"}} {count}'
            for reason, count in sorted(self._undivided.items())
        ]
        lines += ["# TYPE pd_proxy_broken_off_total counter", f"pd_proxy_broken_off_total {self._broken_off}"]
        for name, total, count in (
            ("prefill", self._prefill_s, self._prefills),
            ("decode_first_byte", self._first_byte_s, self._first_bytes),
        ):
            lines.append(f"# TYPE pd_proxy_{name}_seconds summary")
            lines += [f"pd_proxy_{name}_seconds_sum {total:.6f}", f"pd_proxy_{name}_seconds_count {count}"]
        lines.append("# TYPE pd_proxy_in_flight gauge")
        lines += [f'pd_proxy_in_flight{{leg="{leg}",url="{url}"}} {count}' for leg, url, count in in_flight]
        return "\n".join(lines) + "\n"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f}ms"
