"""Leases that begin with a prompt, before they are granted.

Covers: pd_connector.scheduler.prefill.leases.
"""

import math

import pytest

from pd_connector.scheduler.prefill.leases import LeaseTable
from tests.support.waiting import ManualClock
from transfer.control.messages import InvalidReason, Release, Released

TTL_S = 8.0
CONTENTS = "what the lease holds"


class Growing:
    """A lease table with one lease that grows."""

    def __init__(self, max_age_s: float = math.inf) -> None:
        self.clock = ManualClock()
        self.table: LeaseTable[str] = LeaseTable(TTL_S, self.clock, max_age_s)
        self.table.begin("a")

    def grant(self) -> bool:
        is_valid = self.table.grant("a", "blocks", CONTENTS)
        self.table.check_integrity()
        return is_valid

    def release(self, reader: int = 0, readers: int = 1, contents: str = CONTENTS, pull: str = "pull") -> Released:
        answer = self.table.release(Release("", "a", reader, readers, pull, contents))
        self.table.check_integrity()
        return answer


@pytest.fixture
def growing() -> Growing:
    return Growing()


def test_a_lease_that_grows_holds_nothing_and_does_not_expire(growing: Growing) -> None:
    growing.clock.advance(1000 * TTL_S)
    assert growing.table.collect() == ()
    assert growing.table.active == 0
    assert growing.table.oldest_age_s == 0
    assert growing.table.still_valid(["a", "b"]) == {"a"}
    assert growing.table.renew(["a", "b"]) == ("a",)
    assert growing.table.take_counts() == {}


def test_it_gives_way_to_nobody(growing: Growing) -> None:
    assert growing.table.revoke_oldest() is None
    growing.table.cancel_all()
    assert growing.grant()


def test_its_time_begins_when_it_is_granted(growing: Growing) -> None:
    growing.clock.advance(1000 * TTL_S)
    assert growing.grant()
    assert growing.table.take_counts() == {"granted": 1}
    growing.clock.advance(TTL_S - 1)
    assert growing.table.collect() == ()
    growing.clock.advance(1)
    assert growing.table.collect() == ("blocks",)


def test_its_age_begins_when_it_is_granted() -> None:
    growing = Growing(max_age_s=TTL_S + 1)
    growing.clock.advance(1000 * TTL_S)
    assert growing.grant()
    growing.clock.advance(TTL_S - 1)
    assert growing.table.renew(["a"]) == ("a",)
    assert growing.table.oldest_age_s == TTL_S - 1
    growing.clock.advance(2)
    assert growing.table.renew(["a"]) == ()


def test_one_that_is_being_read_while_it_grows_does_not_give_way_when_it_is_granted(growing: Growing) -> None:
    growing.table.renew(["a"], reading=["a"])
    growing.table.renew(["a"])
    assert growing.grant()
    assert growing.table.revoke_oldest() is None
    growing.clock.advance(TTL_S - 1)
    growing.table.renew(["a"])
    growing.clock.advance(1)
    assert growing.table.revoke_oldest() == TTL_S


def test_one_that_nobody_reads_gives_way_when_it_is_granted(growing: Growing) -> None:
    growing.table.renew(["a"])
    assert growing.grant()
    assert growing.table.revoke_oldest() == 0


def test_an_id_is_used_once(growing: Growing) -> None:
    with pytest.raises(ValueError, match="lease a was granted before"):
        growing.table.begin("a")
    assert growing.grant()
    for use in (lambda: growing.table.begin("a"), growing.grant):
        with pytest.raises(ValueError, match="lease a was granted before"):
            use()
    growing.table.cancel(["a"])
    with pytest.raises(ValueError, match="lease a was granted before"):
        growing.grant()


@pytest.mark.parametrize("how", ["cancelled", "withdrawn"])
def test_one_that_has_ended_is_not_granted_and_gives_back_what_it_was_to_hold(growing: Growing, how: str) -> None:
    if how == "cancelled":
        growing.table.cancel(["a"])
    else:
        growing.table.withdraw("a")
    assert growing.table.collect() == ()
    assert growing.table.still_valid(["a"]) == frozenset()
    assert not growing.grant()
    assert growing.table.has_ended
    assert growing.table.collect() == ("blocks",)
    assert growing.table.collect() == ()
    assert growing.table.take_counts() == {}, "what was not granted has not ended"


def test_only_what_grows_is_withdrawn(growing: Growing) -> None:
    growing.grant()
    growing.table.withdraw("a")
    growing.table.withdraw("unknown")
    assert growing.table.active == 1


def test_nothing_that_was_read_before_the_grant_is_confirmed(growing: Growing) -> None:
    """Not even what names no contents, which are not known yet."""
    for contents in (CONTENTS, ""):
        assert growing.release(0, 2, contents) == Released(False, InvalidReason.CONTENTS)
    assert growing.grant()
    assert growing.release(1, 2) == Released(True)
    assert growing.table.collect() == ("blocks",)


def test_a_reader_that_asked_too_early_may_still_be_confirmed(growing: Growing) -> None:
    assert not growing.release(0, 2).valid
    growing.grant()
    assert growing.release(0, 2) == Released(True)
    assert growing.table.active == 1
    assert growing.release(1, 2) == Released(True)
    assert growing.table.active == 0


def test_one_that_all_readers_give_up_has_ended(growing: Growing) -> None:
    assert not growing.release(0, 2).valid
    assert growing.table.still_valid(["a"])
    assert not growing.release(1, 2).valid
    assert not growing.table.still_valid(["a"])
    assert not growing.grant()


@pytest.mark.parametrize(("end", "reason"), [("cancel", "cancelled"), ("release", "released")])
def test_who_releases_what_ended_before_its_grant_is_told_how(growing: Growing, end: str, reason: str) -> None:
    """Not that somebody has altered what he has read."""
    if end == "cancel":
        growing.table.cancel(["a"])
    else:
        growing.release()
    assert growing.release(contents="whatever", pull="another") == Released(False, InvalidReason(reason))
    assert growing.release() == Released(False, InvalidReason(reason))


def test_readers_that_disagree_about_their_number_are_refused(growing: Growing) -> None:
    growing.release(0, 2)
    growing.grant()
    assert growing.release(0, 3) == Released(False, InvalidReason.READERS)
