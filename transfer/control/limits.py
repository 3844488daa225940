"""Limits on what peers may make an engine do: what a server grants them, and how often warnings are logged.

Numbers, and how to measure against them. Opens no sockets.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from transfer.control.messages import Cancel, Checksums, Follow, Locate, Release, Renew, Request

MAX_LEASE_IDS = 20_000  # per message, because they are looked up in one go
MAX_ID_CHARACTERS = 128  # of an engine, lease or pull id, or a digest: some are kept for a while
MAX_READERS = 65_536  # per lease
MAX_BORDERS = 4096  # per request for checksums
MAX_SUMS = 2**18  # per reply to it
REFUSED_S = 1.0  # how long a server refuses connections from a host that has flooded it


class ServerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a control server grants its peers. A host is an IP address, which engines behind one NAT share.

    The defaults leave room for 256 decode workers behind one address that all say hello at once: each gets its welcome,
    of up to 2 MB, within 10 s.
    """

    max_connections: int = 4096
    max_connections_per_host: int = 1024
    requests_per_s: float = 5000.0  # per host, on average
    burst: float = 10_000.0  # requests of one host at once
    bytes_per_request: int = 4096  # a longer request counts as several
    reply_bytes_per_request: int = 16_384  # a longer reply counts as several requests
    # What a connection may send that is not read as complete messages. 2 bytes on the wire, as a frame, may take 64 of
    # memory.
    unread_bytes: int = 4 * 1024 * 1024
    total_unread_bytes: int = 64 * 1024 * 1024


def exceeded_limit(request: Request) -> str:
    """Return the limit that a well-formed request exceeds, as a text for its sender; empty if it exceeds none."""
    ids = [request.engine_id]
    match request:
        case Renew(lease_ids=lease_ids) | Cancel(lease_ids=lease_ids):
            others = request.reading if isinstance(request, Renew) else request.transfer_ids
            number = max(len(lease_ids), len(others))
            if number > MAX_LEASE_IDS:
                return f"{number} lease ids; at most {MAX_LEASE_IDS} are accepted: split the message"
            ids += lease_ids
            ids += others
        case Follow(transfer_id=transfer_id):
            ids.append(transfer_id)
        case Locate(lease_id=lease_id):
            ids.append(lease_id)
        case Release(readers=readers):
            if readers > MAX_READERS:
                return f"{readers} readers; at most {MAX_READERS} are accepted"
            ids += (request.lease_id, request.pull_id, request.contents, request.place)
        case Checksums(borders=borders):
            if len(borders) > MAX_BORDERS:
                return f"{len(borders)} borders; at most {MAX_BORDERS} are accepted: split the message"
            ids.append(request.lease_id)
    longest = max(map(len, ids))
    if longest > MAX_ID_CHARACTERS:
        return f"an id of {longest} characters; at most {MAX_ID_CHARACTERS} are accepted"
    return ""


class TokenBuckets:
    """Holds a token bucket for each host: how much it may still request. Belongs to one thread.

    Keeps only buckets that are not full, so its size is bounded by the requests of the last ``burst / rate`` seconds.
    """

    def __init__(self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Refill each bucket with ``rate`` tokens a second, up to ``burst``."""
        self._rate = rate
        self._burst = burst
        self._clock = clock
        self._full_at: dict[str, float] = {}  # when a host's bucket will be full again; no entry: it is full
        self._sweep_at = 0.0

    def __len__(self) -> int:
        return len(self._full_at)

    def take(self, host: str) -> bool:
        """Take one token of ``host``. If it has none left, take nothing and return False."""
        now = self._clock()
        self._sweep(now)
        full_at = max(self._full_at.get(host, now), now)
        if (full_at - now) * self._rate > self._burst - 0.5:  # half a token is missing: tolerates rounding errors
            return False
        self._full_at[host] = full_at + 1 / self._rate
        return True

    def charge(self, host: str, tokens: int) -> None:
        """Take ``tokens`` for work that is already done; the bucket may fall below empty."""
        if tokens:
            now = self._clock()
            self._full_at[host] = max(self._full_at.get(host, now), now) + tokens / self._rate

    def _sweep(self, now: float) -> None:
        if now >= self._sweep_at:
            self._full_at = {host: full_at for host, full_at in self._full_at.items() if full_at > now}
            self._sweep_at = now + self._burst / self._rate


@dataclass(slots=True)
class _Cause:
    last_s: float
    suppressed: int = 0


class ThrottledWarnings:
    """Logs a cause's first warning at once, then at most one per ``interval_s`` seconds, with the number suppressed.

    Belongs to one thread. ``cause`` must come from a small fixed set, never from a peer's input.
    """

    def __init__(self, logger: logging.Logger, interval_s: float) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._causes: dict[str, _Cause] = {}

    def warn(self, cause: str, text: str, *, error: BaseException | None = None) -> None:
        """Log ``text`` (and the traceback of ``error``), or only count it."""
        now = time.monotonic()
        seen = self._causes.get(cause)
        if seen is None:
            self._causes[cause] = _Cause(now)
            self._logger.warning("%s", text, exc_info=error)
        elif now - seen.last_s >= self._interval_s:
            left_out = seen.suppressed
            self._causes[cause] = _Cause(now)
            self._logger.warning("%s (and %d more like it since the last such line)", text, left_out, exc_info=error)
        else:
            seen.suppressed += 1
