"""The leases of a prefill engine: which requests' blocks must stay unchanged, and until when.

A lease is granted when a prefill is done, and ends exactly once: released by all its readers, cancelled, revoked, or
expired. Only then may what it holds be freed, which ``collect`` returns to the owner. Ended leases are remembered for a
while, so that a repeated message gets the same answer as the first one.

What a lease holds may move to another place, such as host memory, which frees what it held before. It moves at most
once, and not any more once a reader has asked where it lies, or has announced that it reads. A release names the place
that was read, so that nothing is valid that was read where the lease lies no longer.

The lease of a prompt that can be followed begins with the prompt, before it is granted. Until then it *grows*: it
holds nothing, because the request itself holds the blocks, and it neither expires nor gives way.
"""

import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice, repeat, takewhile
from typing import Generic, TypeVar

from pd_connector.orders import LeaseEnd
from transfer.control.messages import InvalidReason, Located, Place, Release, Released

Held = TypeVar("Held")

#: Number of pulls of one reader whose releases are remembered. A second one is a mistake already; this bounds memory.
_MAX_PULLS = 4

#: Number of leases renewed without letting other threads, such as the scheduler's, have the lock.
_RENEWED_AT_ONCE = 500


#: Ids by cache group, for each entry of a request's block table.
Tables = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class MovableLease(Generic[Held]):
    """A lease on the device that nobody has begun to read, as far as is known."""

    lease_id: str
    held: Held
    tables: Tables  # its block ids; 0 marks a hole


@dataclass(slots=True)
class _Readers:
    """The readers of a lease that are done. Each may have several pulls."""

    count: int = 0  # as the first release said; 0 before it
    valid: dict[int, set[str]] = field(default_factory=dict)  # by reader that is done: its valid pulls

    def refuse(self, release: Release) -> InvalidReason | None:
        """Return why a release cannot count, None if it can."""
        if self.count not in (0, release.readers) or not 0 <= release.reader < release.readers:
            return InvalidReason.READERS
        pulls = self.valid.get(release.reader, ())
        return InvalidReason.RELEASED if release.pull_id not in pulls and len(pulls) >= _MAX_PULLS else None


@dataclass(slots=True)
class _Growing:
    """A lease before it is granted."""

    is_claimed: bool = False  # a reader has asked for it
    is_being_read: bool = False  # as the reader has announced
    readers: _Readers = field(default_factory=_Readers)

    def invalid(self, release: Release) -> InvalidReason | None:
        """Return why what was read is not valid: what the lease will hold is not known yet."""
        return InvalidReason.CONTENTS


@dataclass(slots=True)
class _Granted(Generic[Held]):
    """A lease proper."""

    held: Held
    contents: str
    granted_at: float
    too_old_at: float  # then it expires, although it is renewed
    renewed_until: float
    tables: Tables  # of its blocks on the device; none if it must stay there
    readers: _Readers
    is_written: bool  # the device has written all of it
    must_be_located: bool  # it was granted before that, and its reader does not know when
    read_until: float = -math.inf  # as the reader has announced
    slots: Mapping[int, int] | None = None  # of host memory, by its blocks on the device before, if it lies there
    is_located: bool = False  # a reader was told where it lies

    @property
    def expires_at(self) -> float:
        return min(self.renewed_until, self.too_old_at)

    @property
    def place(self) -> Place:
        return Place.DEVICE if self.slots is None else Place.HOST

    def can_move(self, now: float) -> bool:
        """Return whether nobody reads the lease, and it may lie elsewhere."""
        is_read = self.is_located or self.read_until > now or bool(self.readers.valid)
        return bool(self.tables) and self.slots is None and self.is_written and not is_read

    def invalid(self, release: Release) -> InvalidReason | None:
        """Return why what was read is not valid, None if it is."""
        if release.contents != self.contents:
            return InvalidReason.CONTENTS
        if self.must_be_located and not self.is_located:
            return InvalidReason.EARLY
        return None if release.place == self.place else InvalidReason.MOVED


@dataclass(frozen=True, slots=True)
class _PastLease:
    end: LeaseEnd
    contents: str | None  # None if it was not granted
    place: Place
    readers: _Readers
    forget_at: float


class LeaseTable(Generic[Held]):
    """All leases of a prefill engine. Each holds something for its owner, such as references to blocks.

    Thread-safe: the scheduler's thread grants and collects, the control channel's thread renews, releases and
    cancels. Methods take microseconds, those that end thousands of leases at once milliseconds.
    """

    def __init__(
        self, ttl_s: float, clock: Callable[[], float], max_age_s: float = math.inf, unclaimed_s: float = 0.0
    ) -> None:
        """Start without leases.

        Args:
            ttl_s: time for which a lease is renewed.
            clock: a monotonic clock, in seconds.
            max_age_s: time after which a lease expires although it is renewed.
            unclaimed_s: time for which a lease is granted, before the first word of a reader; ``ttl_s`` if that is
                longer.
        """
        #: Called with the id of every lease that was granted and has ended, and how, on whichever thread ends it. They
        #: must be quick, and must not call this table.
        self.on_end: list[Callable[[str, LeaseEnd], None]] = []
        self.ttl_s, self.unclaimed_s = ttl_s, max(ttl_s, unclaimed_s)
        self._max_age_s = max_age_s
        self._clock = clock
        self._lock = threading.Lock()
        # In the order of their grants, so that the first is too old first; those that a reader has asked for in that of
        # their renewals, and the others in that of their grants, so that the first expires first. Nothing is
        # searched: there may be thousands, and every message looks for expired ones.
        self._active: OrderedDict[str, _Granted[Held]] = OrderedDict()
        self._by_renewal: OrderedDict[str, _Granted[Held]] = OrderedDict()
        self._unclaimed: OrderedDict[str, _Granted[Held]] = OrderedDict()
        #: In the order of their grants: those on the device that may lie elsewhere, and nobody has asked about.
        self._may_move: OrderedDict[str, _Granted[Held]] = OrderedDict()
        self._growing: dict[str, _Growing] = {}
        self._past: OrderedDict[str, _PastLease] = OrderedDict()  # in the order of their ends
        self._ended: list[Held] = []  # what leases held that have ended since the last ``collect``
        self._in_host_memory = 0  # leases that have moved, and not ended
        self._counts: Counter[str] = Counter()

    def begin(self, lease_id: str) -> None:
        """Begin a lease that grows until it is granted, or ended by its readers or ``withdraw``.

        Raises:
            ValueError: the id was used before.
        """
        with self._lock:
            self._check_new(lease_id)
            self._growing[lease_id] = _Growing()

    def grant(
        self,
        lease_id: str,
        held: Held,
        contents: str,
        tables: Tables = (),
        slots: Mapping[int, int] | None = None,
        *,
        is_written: bool = True,
    ) -> bool:
        """Grant a lease over ``held``, which must stay unchanged until ``collect`` returns it.

        Readers must name ``contents`` as what they have read, see ``contents_digest``. With ``tables``, its block ids
        by cache group, the lease may move. With ``slots`` of host memory, by those ids, it lies there from the first.
        Unless it ``is_written`` on the device, it is not located or moved before ``written``.

        Returns:
            False if the lease had begun, and has ended since. Then ``collect`` returns ``held`` at once.

        Raises:
            ValueError: the id was granted before.
        """
        with self._lock:
            begun = self._growing.pop(lease_id, None)
            if begun is None:
                if (past := self._past.get(lease_id)) is not None and past.contents is None:
                    self._ended.append(held)
                    return False
                self._check_new(lease_id)
            growing, now = begun or _Growing(), self._clock()
            self._active[lease_id] = lease = _Granted(
                held, contents, now, now + self._max_age_s, now + self.unclaimed_s, tables, growing.readers,
                is_written=is_written, must_be_located=begun is None and not is_written, slots=slots,
            )  # fmt: skip
            if growing.is_claimed or self.unclaimed_s == self.ttl_s:
                self._claim(lease_id, lease, now)
            else:
                self._unclaimed[lease_id] = lease
            if growing.is_being_read:
                lease.read_until = lease.expires_at
            if slots is not None:
                self._in_host_memory += 1
            elif tables:
                self._may_move[lease_id] = lease
            self._counts["granted"] += 1
            return True

    def written(self, lease_id: str) -> None:
        """Note that the device has written all that a lease holds; its end may have come first."""
        with self._lock:
            if (lease := self._active.get(lease_id)) is not None:
                lease.is_written = True

    def is_unwritten(self, lease_id: str) -> bool:
        """Return whether a lease is valid that cannot be read yet, because the device may still write to it."""
        with self._lock:
            lease = self._active.get(lease_id)
            return lease is not None and not lease.is_written

    def withdraw(self, lease_id: str) -> None:
        """End a lease that grows: it will not be granted. Others, and unknown ids, are ignored."""
        with self._lock:
            if lease_id in self._growing:
                self._end(lease_id, LeaseEnd.CANCELLED)

    def renew(self, lease_ids: Sequence[str], reading: Iterable[str] = ()) -> tuple[str, ...]:
        """Extend leases by their time to live, starting now; return those that were still valid.

        ``reading``: those of them that are being read; they are not revoked for another time to live. A renewal without
        it takes nothing back, because it may have been sent before the read began, and arrive after.
        """
        being_read = frozenset(reading)
        renewed: list[str] = []
        for first in range(0, len(lease_ids), _RENEWED_AT_ONCE):
            with self._expired() as now:
                for lease_id in lease_ids[first : first + _RENEWED_AT_ONCE]:
                    if (growing := self._growing.get(lease_id)) is not None:
                        growing.is_claimed = True
                        growing.is_being_read |= lease_id in being_read
                    elif (lease := self._active.get(lease_id)) is not None:
                        self._claim(lease_id, lease, now)
                        if lease_id in being_read:
                            lease.read_until = lease.expires_at
                    else:
                        continue
                    renewed.append(lease_id)
        return tuple(renewed)

    def locate(self, lease_id: str) -> Located:
        """Return where a lease lies, and keep it there until it ends. A lease that grows lies on the device."""
        with self._expired() as now:
            if lease_id in self._growing:
                return Located(Place.DEVICE)
            lease = self._active.get(lease_id)
            if lease is None:
                past = self._past.get(lease_id)
                return Located(reason=InvalidReason.UNKNOWN if past is None else InvalidReason(past.end.value))
            if lease_id in self._unclaimed:
                self._claim(lease_id, lease, now)
            lease.is_located = True
            self._may_move.pop(lease_id, None)
            lease.read_until = max(lease.read_until, lease.expires_at)
            tables, slots = lease.tables, lease.slots
        if slots is None:
            return Located(Place.DEVICE)
        return Located(Place.HOST, tuple(tuple(map(slots.get, table, repeat(-1))) for table in tables))

    def movable(self, min_age_s: float, most: int, besides: Container[str] = ()) -> list[MovableLease[Held]]:
        """Return leases that ``move`` would move now, the oldest first.

        Args:
            min_age_s: their age at least, in seconds.
            most: how many at most.
            besides: those that are not to be returned.
        """
        with self._expired() as now:
            old = takewhile(lambda each: now - each[1].granted_at >= min_age_s, self._may_move.items())
            movable = ((each, lease) for each, lease in old if each not in besides and lease.can_move(now))
            return [MovableLease(each, lease.held, lease.tables) for each, lease in islice(movable, most)]

    def move(self, lease_id: str, held: Held, slots: Mapping[int, int]) -> Held | None:
        """Let a lease hold something else, which holds the same bytes in host memory.

        ``slots``: of host memory, by the blocks of the lease's tables. It must not change any more.

        Returns:
            What it held before, which is the caller's now; None if the lease has ended, or a reader has come meanwhile.
            Then nothing has changed, and ``held`` is still the caller's.
        """
        with self._expired() as now:
            lease = self._active.get(lease_id)
            if lease is None or not lease.can_move(now):
                return None
            before, lease.held, lease.slots = lease.held, held, slots
            self._in_host_memory += 1
            del self._may_move[lease_id]
            return before

    def release(self, release: Release) -> Released:
        """Count one reader as done; the last one ends the lease.

        Returns:
            Whether the lease was valid, that is, whether its blocks were unchanged until now, and if not, why. A
            repeated release gets the same answer. A second pull by the same reader is another release: after the end of
            the lease the blocks may have changed while it read. A reader that has read something else than the lease
            holds, or elsewhere than where it lies, counts as done, but what it read is not valid.
        """
        with self._expired():
            lease = self._active.get(release.lease_id) or self._growing.get(release.lease_id)
            if lease is None:
                return self._release_past(release)
            done = lease.readers
            if (refused := done.refuse(release)) is not None:
                return Released(False, refused)
            invalid = lease.invalid(release)
            done.count = release.readers
            done.valid.setdefault(release.reader, set()).update(() if invalid else (release.pull_id,))
            if len(done.valid) == done.count:
                self._end(release.lease_id, LeaseEnd.RELEASED)
            return Released(True) if invalid is None else Released(False, invalid)

    def cancel(self, lease_ids: Iterable[str]) -> None:
        """End leases immediately. Unknown and ended ones are ignored."""
        with self._expired():
            for lease_id in lease_ids:
                if lease_id in self._active or lease_id in self._growing:
                    self._end(lease_id, LeaseEnd.CANCELLED)

    def cancel_all(self) -> None:
        """End every lease that is granted immediately."""
        with self._expired():
            for lease_id in list(self._active):
                self._end(lease_id, LeaseEnd.CANCELLED)

    def revoke_oldest(self) -> float | None:
        """End the oldest lease on the device that is not being read; return its age in seconds, or None."""
        with self._expired() as now:
            for lease_id, lease in self._active.items():
                if lease.read_until <= now and lease.slots is None:
                    self._end(lease_id, LeaseEnd.REVOKED)
                    return now - lease.granted_at
            return None

    def still_valid(self, lease_ids: Iterable[str]) -> frozenset[str]:
        """Return those of the leases that have not ended, without renewing them. Those that grow are among them."""
        with self._expired():
            return frozenset(each for each in lease_ids if each in self._active or each in self._growing)

    def collect(self) -> tuple[Held, ...]:
        """Return what the leases held that have ended since the last call, each exactly once."""
        with self._expired():
            ended, self._ended = tuple(self._ended), []
            return ended

    @property
    def has_ended(self) -> bool:
        """Whether ``collect`` would return something."""
        with self._expired():
            return bool(self._ended)

    def take_counts(self) -> dict[str, int]:
        """Return how many leases were granted and ended since the last call, by event."""
        with self._lock:
            counts, self._counts = dict(self._counts), Counter()
            return counts

    @property
    def active(self) -> int:
        """Number of leases that are granted and have not ended."""
        with self._lock:
            return len(self._active)

    @property
    def in_host_memory(self) -> int:
        """Number of leases that lie there, and have not ended."""
        with self._lock:
            return self._in_host_memory

    @property
    def oldest_age_s(self) -> float:
        """Age of the oldest lease that has not ended, in seconds; 0 if there is none."""
        with self._lock:
            return max((self._clock() - lease.granted_at for lease in islice(self._active.values(), 1)), default=0.0)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        with self._lock:
            assert not self._active.keys() & self._past.keys(), "a lease is active and past at once"
            assert not self._growing.keys() & (self._active.keys() | self._past.keys()), "a lease grows and does not"
            ended = {id(held) for held in self._ended}
            assert len(ended) == len(self._ended), "something would be freed twice"
            assert not ended & {id(lease.held) for lease in self._active.values()}, "something is held and to be freed"
            assert not self._by_renewal.keys() & self._unclaimed.keys(), "a lease is claimed and is not"
            seen = self._by_renewal.keys() | self._unclaimed.keys()
            assert self._active.keys() == seen, "a lease would not be seen to expire"
            moved = sum(lease.slots is not None for lease in self._active.values())
            assert self._in_host_memory == moved, "leases in host memory are miscounted"
            now = self._clock()
            could = {lease_id for lease_id, lease in self._active.items() if lease.can_move(now)}
            assert could <= self._may_move.keys() <= self._active.keys(), "a lease that could move would not be found"
            ages = [lease.granted_at for lease in self._active.values()]
            assert ages == sorted(ages), "leases are not in the order of their grants"
            for leases in (self._by_renewal, self._unclaimed):
                times = [lease.renewed_until for lease in leases.values()]
                assert times == sorted(times), "a lease would not be seen to expire in time"
            for lease_id, lease in self._active.items():
                done = lease.readers
                assert not done.count or len(done.valid) < done.count, f"{lease_id} should have ended"
                assert lease.slots is None or lease.tables, f"{lease_id} has moved and must not"

    def _check_new(self, lease_id: str) -> None:
        if lease_id in self._active or lease_id in self._growing or lease_id in self._past:
            raise ValueError(f"lease {lease_id} was granted before")

    def _release_past(self, release: Release) -> Released:
        """Return the answer for a lease that has ended: to a repeated release as before, otherwise how it ended."""
        past = self._past.get(release.lease_id)
        if past is None:
            return Released(False, InvalidReason.UNKNOWN)
        if past.contents not in (None, release.contents):
            return Released(False, InvalidReason.CONTENTS)
        if release.place != past.place:
            return Released(False, InvalidReason.MOVED)
        done = past.readers
        if release.readers == done.count and release.pull_id in done.valid.get(release.reader, ()):
            return Released(True)
        return Released(False, InvalidReason(past.end.value))

    @contextmanager
    def _expired(self) -> Iterator[float]:
        """Hold the lock once what is due has expired; the value is the time. What ended long ago is forgotten."""
        with self._lock:
            now = self._clock()
            for leases in (self._by_renewal, self._unclaimed, self._active):
                while leases and (first := next(iter(leases.items())))[1].expires_at <= now:
                    self._end(first[0], LeaseEnd.EXPIRED)
            while self._past and next(iter(self._past.values())).forget_at <= now:
                self._past.popitem(last=False)
            yield now

    def _claim(self, lease_id: str, lease: _Granted[Held], now: float) -> None:
        lease.renewed_until = now + self.ttl_s
        self._unclaimed.pop(lease_id, None)
        self._by_renewal[lease_id] = lease
        self._by_renewal.move_to_end(lease_id)

    def _end(self, lease_id: str, how: LeaseEnd) -> None:
        # Repeated messages should arrive within this time. Later ones are answered with "unknown", which is safe.
        forget_at = self._clock() + 2 * self.ttl_s
        if (growing := self._growing.pop(lease_id, None)) is not None:  # what was not granted is not counted
            self._past[lease_id] = _PastLease(how, None, Place.DEVICE, growing.readers, forget_at)
            return
        lease = self._active.pop(lease_id)
        self._by_renewal.pop(lease_id, None)
        self._unclaimed.pop(lease_id, None)
        self._may_move.pop(lease_id, None)
        self._in_host_memory -= lease.slots is not None
        self._past[lease_id] = _PastLease(how, lease.contents, lease.place, lease.readers, forget_at)
        self._ended.append(lease.held)
        self._counts[how.value] += 1
        for on_end in self.on_end:
            on_end(lease_id, how)
