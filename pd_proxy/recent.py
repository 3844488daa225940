"""The requests that the status page shows: those under way, and those that ended in the last minutes. Bounded.

What is kept of a request is when its legs began and ended, which servers had it, and why it failed: nothing of what
a client asked or was answered, but the request id.
"""

import math
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from pd_proxy.detour import Choice
from pd_proxy.journal import Record

#: How many requests are kept when they have ended, and for how long.
MAX_ENDED = 400
KEPT_S = 900.0
#: How far the figures on top of the page look back, and over how many requests at most.
MINUTE_S = 60.0
MAX_COUNTED = 3000
#: How many of the requests under way are shown, the oldest ones.
MAX_UNDER_WAY = 100

_LONGEST_ID = 64
_LONGEST_FAILURE = 300


#: A request at one moment, or figures, as the page is told them.
Shown = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What is counted of a request."""

    ended: float  # monotonic seconds
    first_token_s: float | None
    handover_s: float | None
    failed: bool


class Recent:
    """Keeps the requests of the last minutes. It follows the journal."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._places = 0
        self._under_way: dict[Record, None] = {}  # the oldest first
        self._ended: deque[Shown] = deque(maxlen=MAX_ENDED)
        self._outcomes: deque[_Outcome] = deque(maxlen=MAX_COUNTED)
        self._choices: Counter[Choice] = Counter()

    def begin(self, record: Record) -> None:
        """A request has come in."""
        self._under_way[record] = None

    def end(self, record: Record) -> None:
        """A request is over."""
        del self._under_way[record]
        self._places += 1
        self._ended.append(_summary(record, self._places))
        ended, failed = record.ended or time.monotonic(), bool(record.failure)
        self._outcomes.append(_Outcome(ended, record.first_token_s, record.handover_s, failed))
        if record.choice is not None:
            self._choices[record.choice] += 1

    def count_under_way(self) -> int:
        """Return how many requests are under way, shown or not."""
        return len(self._under_way)

    def under_way(self) -> list[Shown]:
        """Return the requests under way, the oldest first."""
        return [_summary(record) for record in list(self._under_way)[:MAX_UNDER_WAY]]

    def ended_after(self, place: int) -> list[Shown]:
        """Return the requests that ended behind this place and within the last minutes, in that order."""
        oldest = time.time() - KEPT_S
        return [one for one in self._ended if one["place"] > place and one["at"] + (one["ended"] or 0) >= oldest]

    def choices(self) -> list[tuple[Choice, int]]:
        """Return how often each way was chosen for a prompt since the start, and why; the most frequent first."""
        return self._choices.most_common()

    def last_minute(self, now: float) -> Shown:
        """Return the figures of the minute before ``now``, in monotonic seconds. What no request can tell is None."""
        counted = [one for one in self._outcomes if one.ended > now - MINUTE_S]
        begun = counted[0].ended if len(counted) == MAX_COUNTED else max(self._started, now - MINUTE_S)
        window_s = max(1.0, now - begun)
        first_tokens = sorted(one.first_token_s for one in counted if one.first_token_s is not None)
        handovers = sorted(one.handover_s for one in counted if one.handover_s is not None)
        return {
            "window_s": window_s,  # less than a minute for a young proxy, or one that ended MAX_COUNTED in less
            "requests": len(counted),
            "requests_per_s": len(counted) / window_s if counted else None,
            "streams": len(first_tokens),  # those with a time to first token
            "first_token_p50_s": _percentile(first_tokens, 50),
            "first_token_p95_s": _percentile(first_tokens, 95),
            "handover_p50_s": _percentile(handovers, 50),
            "failures": sum(one.failed for one in counted) if counted else None,
        }


def _percentile(ordered: list[float], percent: int) -> float | None:
    """Return the smallest value that so many percent of them do not exceed."""
    return ordered[math.ceil(percent * len(ordered) / 100) - 1] if ordered else None


def _summary(record: Record, place: int = 0) -> Shown:
    """Return a request at this moment: times in seconds since it came in, or None while it has not come to that.

    ``place``: in the order in which requests ended; 0 while it is under way.
    """

    def since(moment: float | None, later_s: float | None = 0.0) -> float | None:
        return None if moment is None or later_s is None else moment + later_s - record.started

    return {
        "place": place,
        "identity": record.identity[:_LONGEST_ID],
        "at": time.time() - (time.monotonic() - record.started),  # Unix time
        "legs": record.legs,
        "prefill_url": record.prefill_url,
        "decode_url": record.decode_url if record.rest is None else record.rest.decode_url,
        "prefill_began": since(record.prefill_at),
        "prefill_ended": since(record.prefill_at, record.prefill_s),
        "decode_began": since(record.decode_at),
        "first_byte": since(record.decode_at, record.first_byte_s),
        "ended": since(record.ended),
        "status": record.status,
        "failure": record.failure[:_LONGEST_FAILURE],
    }
