"""The lease table in any order of messages, moves and passages of time, against a model of what was promised."""

import itertools
import math
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from pd_connector.scheduler.prefill.leases import LeaseTable, Tables
from tests.support.waiting import ManualClock
from transfer.control.messages import Located, Place, Release

TTL_S = 8.0
UNCLAIMED_S = 12.0
MAX_AGE_S = 30.0
CONTENTS = "what the lease holds"


@dataclass
class _Promise:
    """The model's view of a lease: what was said, and when it ended. Knows no tables."""

    held: str
    grows: bool = True  # it was not granted
    tables: Tables = ()  # none if it must stay on the device
    expires_at: float = math.inf
    ends_by: float = math.inf
    is_claimed: bool = False  # a reader has asked for it
    is_announced: bool = False  # a reader has said, before the grant, that it reads
    is_written: bool = True
    is_located_first: bool = False  # it must be located before it is read
    read_until: float = 0.0
    ended_at: float | None = None
    place: Place = Place.DEVICE
    is_located: bool = False
    readers: int = 0
    done: set[int] = field(default_factory=set)  # readers, whether what they have read is valid or not
    accepted: set[tuple[int, int, str]] = field(default_factory=set)  # reader, readers, pull id

    def accepts(self, reader: int, readers: int) -> bool:
        return 0 <= reader < readers and self.readers in (0, readers)

    def grant(self, now: float, tables: Tables, *, is_written: bool) -> None:
        self.grows, self.tables, self.is_written = False, tables, is_written
        self.ends_by = now + MAX_AGE_S
        self.expires_at = now + (TTL_S if self.is_claimed else UNCLAIMED_S)
        self.read_until = self.expires_at if self.is_announced else 0.0

    def claim(self, now: float, *, reads: bool) -> None:
        self.is_claimed = True
        if self.grows:
            self.is_announced |= reads
            return
        self.expires_at = min(now + TTL_S, self.ends_by)
        self.read_until = self.expires_at if reads else self.read_until

    def may_move(self, now: float) -> bool:
        is_read = self.is_located or self.read_until > now or bool(self.done)
        is_there = self.ended_at is None and self.is_written and self.place == Place.DEVICE
        return is_there and bool(self.tables) and not is_read

    def is_valid(self, place: Place | None) -> bool:
        """Whether what was read at ``place``, None for where it lies, is what was leased."""
        return not self.grows and place in (None, self.place) and (self.is_located or not self.is_located_first)

    @property
    def finished(self) -> bool:
        return len(self.done) == self.readers > 0


class LeaseLife(RuleBasedStateMachine):
    """Any order of messages and any passage of time, against ``_Promise``."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.table: LeaseTable[str] = LeaseTable(TTL_S, self.clock, MAX_AGE_S, unclaimed_s=UNCLAIMED_S)
        self.promises: dict[str, _Promise] = {}
        self.to_collect: set[str] = set()
        self.numbers = itertools.count()

    @rule(target=leases)
    def begin(self) -> str:
        lease_id = f"lease {next(self.numbers)}"
        self.table.begin(lease_id)
        self.promises[lease_id] = _Promise(lease_id)
        return lease_id

    @rule(target=leases, may_move=st.sampled_from([True, True, False]), is_written=st.sampled_from([True, True, False]))
    def grant(self, *, may_move: bool, is_written: bool) -> str:
        number = next(self.numbers)
        lease_id = f"lease {number}"
        tables = ((number,),) if may_move else ()
        self.table.grant(lease_id, lease_id, CONTENTS, tables, is_written=is_written)
        self.promises[lease_id] = promise = _Promise(lease_id, is_located_first=not is_written)
        promise.grant(self.clock.now, tables, is_written=is_written)
        return lease_id

    @rule(target=leases)
    def grant_in_host_memory(self) -> str:
        number = next(self.numbers)
        lease_id, tables = f"lease {number}", ((number,),)
        self.table.grant(lease_id, lease_id, CONTENTS, tables, {number: 7})
        self.promises[lease_id] = promise = _Promise(lease_id, place=Place.HOST)
        promise.grant(self.clock.now, tables, is_written=True)
        return lease_id

    @rule(lease_id=leases, is_written=st.booleans())
    def grant_what_grows(self, lease_id: str, *, is_written: bool) -> None:
        promise, tables = self.promises[lease_id], ((int(lease_id.removeprefix("lease ")),),)
        if not promise.grows or (promise.ended_at is not None and self.clock.now >= promise.ended_at + 2 * TTL_S):
            return
        is_granted = self.table.grant(lease_id, lease_id, CONTENTS, tables, is_written=is_written)
        assert is_granted is (promise.ended_at is None)
        promise.grant(self.clock.now, tables, is_written=is_written)
        self.promises[lease_id] = self.promises.pop(lease_id)  # in the order of the grants
        if not is_granted:
            self.to_collect.add(promise.held)

    @rule(lease_id=leases)
    def withdraw(self, lease_id: str) -> None:
        self.table.withdraw(lease_id)
        if self.promises[lease_id].grows and self.promises[lease_id].ended_at is None:
            self.end(lease_id)

    @rule(lease_id=leases)
    def written(self, lease_id: str) -> None:
        self.table.written(lease_id)
        self.promises[lease_id].is_written |= not self.promises[lease_id].grows
        assert not self.table.is_unwritten(lease_id)

    @rule(lease_id=leases)
    def move(self, lease_id: str) -> None:
        promise = self.promises[lease_id]
        chosen = [each for each, other in self.promises.items() if other.may_move(self.clock.now)]
        assert [each.lease_id for each in self.table.movable(0.0, len(chosen) + 1)] == chosen
        others = [each.lease_id for each in self.table.movable(0.0, len(chosen) + 1, besides={lease_id})]
        assert others == [each for each in chosen if each != lease_id]
        number = int(lease_id.removeprefix("lease "))
        before = self.table.move(lease_id, f"slots of {lease_id}", {number: 7})
        assert before == (promise.held if lease_id in chosen else None)
        if before is not None:
            promise.held, promise.place = f"slots of {lease_id}", Place.HOST

    @rule(lease_id=leases)
    def locate(self, lease_id: str) -> None:
        promise, located = self.promises[lease_id], self.table.locate(lease_id)
        if promise.ended_at is not None:
            assert located.reason
            return
        assert located == (Located(Place.DEVICE) if promise.place == Place.DEVICE else Located(Place.HOST, ((7,),)))
        if promise.grows:
            return
        if not promise.is_claimed:
            promise.claim(self.clock.now, reads=False)
        promise.is_located, promise.read_until = True, max(promise.read_until, promise.expires_at)

    @rule(lease_ids=st.lists(leases, max_size=4, unique=True), reading=st.integers(0, 3))
    def renew(self, lease_ids: list[str], reading: int) -> None:
        held = [lease_id for lease_id in lease_ids if self.promises[lease_id].ended_at is None]
        for lease_id in held:
            self.promises[lease_id].claim(self.clock.now, reads=lease_id in lease_ids[:reading])
        assert self.table.renew([*lease_ids, "unknown"], [*lease_ids[:reading], "unknown"]) == tuple(held)

    @rule()
    def revoke(self) -> None:
        unread = [
            lease
            for lease, promise in self.promises.items()
            if promise.ended_at is None and promise.read_until <= self.clock.now and promise.place == Place.DEVICE
            if not promise.grows
        ]
        age = self.table.revoke_oldest()
        if not unread:
            assert age is None
            return
        assert age == self.clock.now - (self.promises[unread[0]].ends_by - MAX_AGE_S)
        self.end(unread[0])

    @rule(
        lease_id=leases,
        reader=st.integers(-1, 3),
        readers=st.sampled_from([1, 2, 2, 2, 3]),
        pull_id=st.sampled_from(["first pull", "first pull", "second pull"]),
        place=st.sampled_from([None, None, Place.DEVICE, Place.HOST]),
    )
    def release(self, lease_id: str, reader: int, readers: int, pull_id: str, place: Place | None) -> None:
        """``place``: where it was read; None where it lies."""
        promise = self.promises[lease_id]
        is_valid = promise.is_valid(place)
        release = Release("", lease_id, reader, readers, pull_id, CONTENTS, place or promise.place)
        answer = self.table.release(release).valid
        first = (reader, readers, pull_id) in promise.accepted and place in (None, promise.place)
        if promise.ended_at is None:
            is_reader = promise.accepts(reader, readers)
            assert answer is (is_reader and is_valid)
            if is_reader:
                promise.readers = readers
                promise.done.add(reader)
                if is_valid:
                    promise.accepted.add((reader, readers, pull_id))
                if promise.finished:
                    self.end(lease_id)
        elif self.clock.now < promise.ended_at + 2 * TTL_S:
            assert answer is first
        else:
            assert first or not answer

    @rule(lease_ids=st.lists(leases, max_size=3))
    def cancel(self, lease_ids: list[str]) -> None:
        self.table.cancel([*lease_ids, "unknown"])
        for lease_id in lease_ids:
            if self.promises[lease_id].ended_at is None:
                self.end(lease_id)

    @rule()
    def collect(self) -> None:
        collected = self.table.collect()
        assert len(collected) == len(set(collected))
        assert set(collected) == self.to_collect
        self.to_collect.clear()
        there = [each for each in self.promises.values() if each.ended_at is None and each.place == Place.HOST]
        assert self.table.in_host_memory == len(there)

    @rule(halves=st.sampled_from([1, 2, 5, 15, 16, 40]))
    def time_passes(self, halves: int) -> None:
        self.clock.advance(halves / 2)
        for lease_id, promise in self.promises.items():
            if promise.ended_at is None and promise.expires_at <= self.clock.now:
                self.end(lease_id)

    def end(self, lease_id: str) -> None:
        self.promises[lease_id].ended_at = self.clock.now
        if not self.promises[lease_id].grows:
            self.to_collect.add(self.promises[lease_id].held)

    @invariant()
    def books_balance(self) -> None:
        self.table.check_integrity()

    def teardown(self) -> None:
        self.clock.advance(UNCLAIMED_S)
        held = {each.held for each in self.promises.values() if each.ended_at is None and not each.grows}
        assert set(self.table.collect()) == self.to_collect | held
        assert (self.table.active, self.table.in_host_memory) == (0, 0)
        assert self.table.collect() == ()


TestLeaseLife = LeaseLife.TestCase
TestLeaseLife.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
