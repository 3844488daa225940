"""Limits on what peers may make an engine do: what a server grants them, and how often warnings are logged."""

import logging
import time
from dataclasses import dataclass

import msgspec

from transfer.control.messages import Cancel, Checksums, Find, Follow, Hello, Locate, Release, Renew, Request

MAX_LEASE_IDS = 20_000  # per message, because they are looked up in one go
MAX_ID_CHARACTERS = 128  # of an engine, lease or pull id, or a digest: some are kept for a while
MAX_READERS = 65_536  # per lease
MAX_BORDERS = 4096  # per request for checksums
MAX_SUMS = 2**18  # per reply to it
MAX_HASHES = 16_384  # of a prompt's blocks, per question for its beginning


class ServerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a control server grants its peers, all together."""

    max_connections: int = 4096
    # What they may have sent that is not read as complete messages. 2 bytes on the wire, as a frame, may take 64 of
    # memory. 64 decode engines that all renew a thousand leases at once stay far below.
    unread_bytes: int = 8 * 1024 * 1024


def exceeded_limit(request: Request) -> str:
    """Return the limit that a well-formed request exceeds, as a text for its sender; empty if it exceeds none."""
    if isinstance(request, Find):
        number = len(request.hashes)
        too_many = f"{number} hashes; at most {MAX_HASHES} are accepted: ask for fewer blocks"
        if number > MAX_HASHES:
            return too_many
        if len(set(request.hashes)) < number:  # else one block would be lent several times over in one lease
            return "a hash comes twice; those of one prompt's blocks are all different"
        return _too_long(request.engine_id, request.find_id, request.hashing)
    return _exceeded_by_lease(request)


def _exceeded_by_lease(request: Hello | Renew | Release | Cancel | Follow | Checksums | Locate) -> str:
    """Return the same for a message about an engine or leases."""
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
    return _too_long(*ids)


def _too_long(*ids: str) -> str:
    longest = max(map(len, ids))
    if longest > MAX_ID_CHARACTERS:
        return f"an id of {longest} characters; at most {MAX_ID_CHARACTERS} are accepted"
    return ""


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
