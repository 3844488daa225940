"""Limits on what peers may make an engine do: in a message, with all connections, what it remembers, and logs."""

import logging
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TypeVar

import msgspec

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

MAX_LEASE_IDS = 20_000  # per message, because they are looked up in one go
MAX_ID_CHARACTERS = 128  # of an engine, lease or pull id, or a digest: some are kept for a while
MAX_READERS = 65_536  # per lease
MAX_BORDERS = 4096  # per request for checksums
MAX_SUMS = 2**18  # per reply to it
MAX_HASHES = 16_384  # of a prompt's blocks, per question for its beginning


class ServerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a control server grants its peers, all together."""

    max_connections: int = 16_384  # one of each rank of a decode engine, and up to two of its scheduler
    # What they may have sent that is not read as complete messages. 2 bytes on the wire, as a frame, may take 64 of
    # memory. 64 decode engines that all renew a thousand leases at once stay far below.
    unread_bytes: int = 8 * 1024 * 1024


class LastFew(OrderedDict[_Key, _Value]):
    """What was set last, oldest first: for keys of which peers and clients could name any number."""

    def __init__(self, most: int) -> None:
        """Hold nothing yet, and never more than ``most`` entries."""
        super().__init__()
        self._most = most

    def __setitem__(self, key: _Key, value: _Value) -> None:
        """Set an entry anew. What was set longest ago is forgotten."""
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)


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
