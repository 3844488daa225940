"""What the proxy remembers of requests: one access line each, and counters for ``/metrics``."""

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from http import HTTPStatus
from typing import TYPE_CHECKING

from pd_proxy.detour import Choice
from pd_proxy.settings import Legs
from pd_proxy.spans import Trace

if TYPE_CHECKING:
    from pd_proxy.recent import Recent

logger = logging.getLogger(__name__)

_TOTALS = ("prefill_retries", "first_tokens_from_prefill", "first_tokens_different", "broken_off")
#: Counters, with the name of their label, if they have one.
_COUNTERS = {
    "requests": "status", "not_disaggregated": "reason", "detours": "reason", "legs": "legs", "moved": "result",
} | dict.fromkeys(_TOTALS, "")  # fmt: skip
#: Why a decode server computes a prompt that was to be handed over.
NO_PREFILL = "no prefill server"
#: How decode legs without a prefill leg are called.
_ALONE = "decode-alone"

#: Logged where the client left before it had its whole answer; no such status is ever sent.
CLIENT_LEFT = 499


class Record:
    """One request, filled in on its way. Times are monotonic seconds, durations seconds."""

    def __init__(self, path: str, *, generates: bool = True) -> None:
        self.path = path
        self.generates = generates  # an answer, token by token
        self.identity = "-"
        self.status = 0  # as sent to the client, or CLIENT_LEFT
        self.streams = False  # whether the client has asked for a stream
        self.legs = ""  # how they were sent, as in ``Settings``; empty without a prefill leg
        self.prefill_retries = 0  # prefill servers that took the request and failed, so that another one got it
        self.rest: Record | None = None  # of what the last decode server wrote to which the answer has moved
        self.moves: Counter[str] = Counter()  # by how the rest went on
        self.first_token_at: float | None = None  # when the client was sent P's, if the answer began with it
        self.first_token_differs = False  # D's was another one, so that the answer moved
        self.prompt_tokens: int | None = None  # by the prefill server's usage
        self.undivided = ""  # why there was no prefill leg
        self.choice: Choice | None = None  # of ``Detour``, if that was asked
        self.prefill_url = ""
        self.decode_url = ""
        self.prefill_at: float | None = None  # when the prefill leg began, the last one if there were several
        self.decode_at: float | None = None
        self.prefill_s: float | None = None  # prefill leg, from its start to its whole answer
        self.first_byte_s: float | None = None  # decode leg, from its start to the first byte behind how answers begin
        self.problem = ""  # what went wrong, for people
        self.cause = ""  # the same in a sentence, without anything that a server or a client wrote
        self.broken_off = False  # the client got the beginning of an answer only
        self.trace = Trace()
        self.started = time.monotonic()
        self.ended: float | None = None

    def begin_rest(self) -> "Record":
        """The answer moves to another decode server: return the record of that, with figures of its own."""
        self.rest = Record(self.path)
        self.rest.identity, self.rest.trace = self.identity, self.trace
        return self.rest

    @property
    def failure(self) -> str:
        """What went wrong, in a sentence without anything that a server or a client wrote; empty if nothing did."""
        told = self.cause or self.problem
        if told or self.status < HTTPStatus.BAD_REQUEST:
            return told
        return f"decode server {self.decode_url} answered with status {self.status}"

    @property
    def first_token_s(self) -> float | None:
        """From when it came in to the first token of its stream, P's or D's. None for no stream and for a failure."""
        if not self.streams or self.failure:
            return None
        if self.first_token_at is not None:
            return self.first_token_at - self.started
        began, took = self.decode_at, self.first_byte_s
        return None if began is None or took is None else began + took - self.started

    @property
    def handover_s(self) -> float | None:
        """From P's whole answer, which is its last token, to the first byte of D's; 0.0 where D's came before.

        None where that is not D's first token: without a prefill leg, for an answer in one piece, whose first byte
        comes with its last, and for a failure.
        """
        if not (self.streams and self.legs) or self.failure:
            return None
        if self.prefill_at is None or self.prefill_s is None or self.decode_at is None or self.first_byte_s is None:
            return None
        return max(0.0, self.decode_at + self.first_byte_s - self.prefill_at - self.prefill_s)

    def line(self) -> str:
        """The access line."""
        parts = [
            f"{self.path} id={self.identity} status={self.status}",
            f"P={self.prefill_url or '-'} D={self.decode_url or '-'} legs={self.legs or '-'}",
            f"prefill={_milliseconds(self.prefill_s)} first_byte={_milliseconds(self.first_byte_s)}",
            f"total={_milliseconds((self.ended or time.monotonic()) - self.started)}",
        ]
        if self.first_token_at is not None:
            parts.append("first_token=prefill")
        if self.prefill_retries:
            parts.append(f"prefill_retries={self.prefill_retries}")
        if self.rest is not None:
            parts.append(f"moved={self.rest.decode_url or '-'}")
        if self.undivided:
            parts.append(f"not disaggregated: {self.undivided}")
        elif self.choice is not None:
            parts.append(f"detour: {self.choice.reason}")
        if self.problem:
            parts.append(f"problem: {' '.join(self.problem.split())}")  # on one line, whatever raised it
        return " ".join(parts)


class Journal:
    """Writes access lines and counts. One per proxy."""

    def __init__(self, follower: "Recent | None" = None) -> None:
        self._follower = follower
        self._open = 0
        self._none_open = asyncio.Event()
        self._none_open.set()
        self._counts = {name: Counter[str]() for name in _COUNTERS}
        # One that appeared with its first failures would hide them from rate() and the alert.
        self._counts["requests"].update(dict.fromkeys(("200", "500", "502", "503", "504"), 0))
        self._counts["moved"].update(continued=0, failed=0)
        self._counts["not_disaggregated"][NO_PREFILL] = 0
        for name in _TOTALS:
            self._counts[name][""] = 0
        # By name, and by how the legs were sent.
        self._seconds = defaultdict[tuple[str, str], float](float)
        self._seconds |= {("prefill", ""): 0.0} | {("handover", str(legs)): 0.0 for legs in Legs}
        self._timed = Counter[tuple[str, str]]()

    def open(self, path: str, *, generates: bool = True) -> Record:
        """A request has come in. Its record must be closed. Those that are not divided are not followed."""
        self._open += 1
        self._none_open.clear()
        record = Record(path, generates=generates)
        if self._follower is not None and generates:
            self._follower.begin(record)
        return record

    async def none_open(self) -> None:
        """Wait until every record is closed."""
        await self._none_open.wait()

    def close(self, record: Record) -> None:
        """The request is over: log it and count it."""
        record.ended = time.monotonic()
        if self._follower is not None and record.generates:
            self._follower.end(record)
        self._open -= 1
        if not self._open:
            self._none_open.set()
        detour = record.choice.reason if record.choice is not None and not record.choice.alone else ""
        values = (str(record.status), record.undivided, detour, record.legs)
        for name, value in zip(_COUNTERS, values, strict=False):
            if value:
                self._counts[name][value] += 1
        self._counts["moved"].update(record.moves)
        numbers = record.prefill_retries, bool(record.first_token_at), record.first_token_differs, record.broken_off
        for name, number in zip(_TOTALS, numbers, strict=True):
            self._counts[name][""] += number
        legs = record.legs or _ALONE
        for key, seconds in (
            (("prefill", ""), record.prefill_s),
            (("decode_first_byte", legs), record.first_byte_s),
            (("handover", legs), record.handover_s),
        ):
            if seconds is not None:
                self._seconds[key] += seconds
                self._timed[key] += 1
        bad = record.broken_off or record.status >= 500
        logger.log(logging.WARNING if bad else logging.INFO, "%s", record.line())

    def exposition(self, in_flight: Iterable[tuple[str, str, int]]) -> str:
        """All counters in Prometheus' text format; ``in_flight`` is (leg, URL, requests) of every server."""
        lines = []
        for name, label in _COUNTERS.items():
            lines.append(f"# TYPE pd_proxy_{name}_total counter")
            for value, count in sorted(self._counts[name].items()):
                shown = f'{{{label}="{value}"}}' if label else ""
                lines.append(f"pd_proxy_{name}_total{shown} {count}")
        for name in ("prefill", "decode_first_byte", "handover"):
            lines.append(f"# TYPE pd_proxy_{name}_seconds summary")
            for (_, legs), total in sorted(item for item in self._seconds.items() if item[0][0] == name):
                label = f'{{legs="{legs}"}}' if legs else ""
                lines.append(f"pd_proxy_{name}_seconds_sum{label} {total:.6f}")
                lines.append(f"pd_proxy_{name}_seconds_count{label} {self._timed[name, legs]}")
        lines.append("# TYPE pd_proxy_in_flight gauge")
        lines += [f'pd_proxy_in_flight{{leg="{leg}",url="{url}"}} {count}' for leg, url, count in in_flight]
        return "\n".join(lines) + "\n"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f}ms"
