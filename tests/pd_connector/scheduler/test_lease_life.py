"""The lease table in any order of messages, moves and passages of time, against a model of what was promised."""

import itertools
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from pd_connector.scheduler.leases import LeaseTable, Tables
from tests.support.waiting import ManualClock
from transfer.control.messages import Located, Place

TTL_S = 8.0
MAX_AGE_S = 30.0
CONTENTS = "what the lease holds"


@dataclass
class _Promise:
    """The model's view of a lease: what was said, and when it ended. Knows no tables."""

    held: str
    tables: Tables  # none if it must stay on the device
    expires_at: float
    ends_by: float
    read_until: float = 0.0
    ended_at: float | None = None
    place: Place = Place.DEVICE
    is_located: bool = False
    readers: int = 0
    done: set[int] = field(default_factory=set)  # readers, whether what they have read is valid or not
    accepted: set[tuple[int, int, str]] = field(default_factory=set)  # reader, readers, pull id

    def accepts(self, reader: int, readers: int) -> bool:
        return 0 <= reader < readers and self.readers in (0, readers)

    def may_move(self, now: float) -> bool:
        is_read = self.is_located or self.read_until > now or bool(self.done)
        return self.ended_at is None and bool(self.tables) and self.place == Place.DEVICE and not is_read

    @property
    def finished(self) -> bool:
        return len(self.done) == self.readers > 0


class LeaseLife(RuleBasedStateMachine):
    """Any order of messages and any passage of time, against ``_Promise``."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.table: LeaseTable[str] = LeaseTable(TTL_S, self.clock, MAX_AGE_S)
        self.promises: dict[str, _Promise] = {}
        self.to_collect: set[str] = set()
        self.numbers = itertools.count()

    @rule(target=leases, may_move=st.sampled_from([True, True, False]))
    def grant(self, *, may_move: bool) -> str:
        number = next(self.numbers)
        lease_id = f"lease {number}"
        tables = ((number,),) if may_move else ()
        self.table.grant(lease_id, lease_id, CONTENTS, tables)
        self.promises[lease_id] = _Promise(lease_id, tables, self.clock.now + TTL_S, self.clock.now + MAX_AGE_S)
        return lease_id

    @rule(lease_id=leases)
    def move(self, lease_id: str) -> None:
        promise = self.promises[lease_id]
        chosen = [each for each, other in self.promises.items() if other.may_move(self.clock.now)]
        assert [each.lease_id for each in self.table.movable(0.0, len(chosen) + 1)] == chosen
        others = [each.lease_id for each in self.table.movable(0.0, len(chosen) + 1, besides={lease_id})]
        assert others == [each for each in chosen if each != lease_id]
        assert self.table.can_move(lease_id) == (lease_id in chosen)
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
        promise.is_located, promise.read_until = True, max(promise.read_until, promise.expires_at)

    @rule(lease_ids=st.lists(leases, max_size=4, unique=True), reading=st.integers(0, 3))
    def renew(self, lease_ids: list[str], reading: int) -> None:
        held = [lease_id for lease_id in lease_ids if self.promises[lease_id].ended_at is None]
        for lease_id in held:
            promise = self.promises[lease_id]
            promise.expires_at = min(self.clock.now + TTL_S, promise.ends_by)
            if lease_id in lease_ids[:reading]:
                promise.read_until = promise.expires_at
        assert self.table.renew([*lease_ids, "unknown"], [*lease_ids[:reading], "unknown"]) == tuple(held)

    @rule()
    def revoke(self) -> None:
        unread = [
            lease
            for lease, promise in self.promises.items()
            if promise.ended_at is None and promise.read_until <= self.clock.now and promise.place == Place.DEVICE
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
        is_there = place in (None, promise.place)
        answer = self.table.release(lease_id, reader, readers, pull_id, CONTENTS, place or promise.place).valid
        first = (reader, readers, pull_id) in promise.accepted and is_there
        if promise.ended_at is None:
            is_reader = promise.accepts(reader, readers)
            assert answer is (is_reader and is_there)
            if is_reader:
                promise.readers = readers
                promise.done.add(reader)
                if is_there:
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
        self.to_collect.add(self.promises[lease_id].held)

    @invariant()
    def books_balance(self) -> None:
        self.table.check_integrity()

    def teardown(self) -> None:
        self.clock.advance(TTL_S)
        held = {promise.held for promise in self.promises.values() if promise.ended_at is None}
        assert set(self.table.collect()) == self.to_collect | held
        assert (self.table.active, self.table.in_host_memory) == (0, 0)
        assert self.table.collect() == ()


TestLeaseLife = LeaseLife.TestCase
TestLeaseLife.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
