"""The lease table: a lease ends exactly once, and nobody is told that it was valid when it was not."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from pd_connector.orders import LeaseEnd
from pd_connector.scheduler.prefill.leases import LeaseTable
from tests.support.waiting import ManualClock
from transfer.control.messages import InvalidReason, Release

TTL_S = 8.0
CONTENTS = "what the lease holds"


class Books:
    """A lease table on a clock of its own, checked after every use by the tests below."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.table: LeaseTable[str] = LeaseTable(TTL_S, self.clock)
        self.reason = ""  # of the last release

    def grant(self, *lease_ids: str) -> None:
        for lease_id in lease_ids:
            self.table.grant(lease_id, f"request of {lease_id}", CONTENTS)

    def release(self, lease_id: str, reader: int, readers: int, pull_id: str, contents: str = CONTENTS) -> bool:
        """Whether the release was valid; one that is not says why."""
        answer = self.table.release(Release("", lease_id, reader, readers, pull_id, contents))
        self.table.check_integrity()
        assert answer.valid is (answer.reason == "")
        self.reason = answer.reason
        return answer.valid


@pytest.fixture
def books() -> Books:
    return Books()


def test_a_lease_ends_when_its_last_reader_has_released(books: Books) -> None:
    books.grant("a")
    assert books.release("a", 0, 2, "pull")
    assert books.table.collect() == ()
    assert books.release("a", 1, 2, "pull")
    assert books.table.collect() == ("request of a",)


def test_a_reader_is_counted_once_however_often_it_releases(books: Books) -> None:
    books.grant("a")
    assert all(books.release("a", 0, 2, "pull") for _ in range(3))
    assert books.table.active == 1
    assert books.table.collect() == ()


def test_a_second_pull_by_the_same_reader_after_the_end_is_refused(books: Books) -> None:
    """Its data was read after the blocks were given back; only a repetition of the first release is answered alike."""
    books.grant("a")
    assert books.release("a", 0, 1, "pull")
    assert not books.release("a", 0, 1, "another pull")
    assert books.release("a", 0, 1, "pull")


def test_a_second_pull_before_the_end_is_valid_and_counts_no_reader(books: Books) -> None:
    books.grant("a")
    assert books.release("a", 0, 2, "pull")
    assert books.release("a", 0, 2, "another pull")
    assert books.table.active == 1


def test_the_pulls_of_one_reader_that_are_remembered_are_few(books: Books) -> None:
    """A reader that made up pulls without end would otherwise fill the memory."""
    books.grant("a")
    answers = [books.release("a", 0, 2, f"pull {number}") for number in range(20)]
    assert answers == 4 * [True] + 16 * [False]
    assert books.release("a", 0, 2, "pull 3")


def test_a_release_after_expiry_is_refused(books: Books) -> None:
    books.grant("a")
    books.clock.advance(TTL_S)
    assert not books.release("a", 0, 1, "pull")


def test_a_release_after_cancel_is_refused(books: Books) -> None:
    books.grant("a")
    books.table.cancel(["a"])
    assert not books.release("a", 0, 1, "pull")


def test_a_release_of_a_lease_that_never_was_is_refused(books: Books) -> None:
    assert not books.release("a", 0, 1, "pull")


def test_a_lease_is_valid_until_just_before_its_time_to_live(books: Books) -> None:
    books.grant("a", "b")
    books.clock.advance(TTL_S - 0.001)
    assert books.release("a", 0, 1, "pull")
    books.clock.advance(0.001)
    assert not books.release("b", 0, 1, "pull")
    assert books.table.collect() == ("request of a", "request of b")


@pytest.mark.parametrize("end", ["released", "cancelled", "expired"])
def test_a_repeated_release_gets_the_first_answer_after_the_lease_has_ended(books: Books, end: str) -> None:
    books.grant("a")
    assert books.release("a", 0, 2, "pull")
    if end == "released":
        assert books.release("a", 1, 2, "pull")
    elif end == "cancelled":
        books.table.cancel(["a"])
    else:
        books.clock.advance(TTL_S)
    assert books.release("a", 0, 2, "pull")
    assert books.release("a", 1, 2, "pull") is (end == "released")
    assert books.release("a", 1, 2, "pull") is (end == "released")


def test_readers_that_disagree_about_their_number_are_refused(books: Books) -> None:
    books.grant("a")
    assert books.release("a", 0, 2, "pull")
    assert not books.release("a", 1, 3, "pull")
    assert not books.release("a", 0, 1, "pull")
    assert books.reason == "readers"
    assert books.table.collect() == ()
    assert books.release("a", 1, 2, "pull")


def test_a_refused_release_stays_refused_when_another_reader_of_its_number_was_not(books: Books) -> None:
    books.grant("a")
    assert books.release("a", 0, 2, "pull")
    assert not books.release("a", 1, 3, "pull")
    assert books.release("a", 1, 2, "pull")
    assert not books.release("a", 1, 3, "pull")


@pytest.mark.parametrize(("reader", "readers"), [(-1, 2), (2, 2), (0, 0), (0, -1), (5, 1)])
def test_a_reader_outside_its_number_is_refused_and_changes_nothing(books: Books, reader: int, readers: int) -> None:
    books.grant("a")
    assert not books.release("a", reader, readers, "pull")
    assert books.release("a", 0, 1, "pull")


def test_a_reader_that_read_something_else_is_refused_and_yet_done(books: Books) -> None:
    """What it read may be another request's blocks, whatever this lease's state."""
    books.grant("a")
    assert not books.release("a", 0, 2, "pull", "something else")
    assert books.reason == "contents"
    assert books.release("a", 1, 2, "pull")
    assert books.table.collect() == ("request of a",)
    assert not books.release("a", 1, 2, "pull", "something else")
    assert books.reason == "contents"
    assert books.release("a", 1, 2, "pull")
    assert not books.release("a", 0, 2, "pull")
    assert books.reason == "released"


@pytest.mark.parametrize("end", ["released", "cancelled", "expired", "revoked", "unknown"])
def test_a_release_that_is_too_late_is_told_how_the_lease_ended(books: Books, end: str) -> None:
    books.grant("a")
    if end == "released":
        books.release("a", 0, 1, "pull")
    elif end == "cancelled":
        books.table.cancel(["a"])
    elif end == "revoked":
        assert books.table.revoke_oldest() == 0
    else:
        books.clock.advance(TTL_S)
        books.table.collect()
    books.clock.advance(4 * TTL_S if end == "unknown" else 0.0)
    assert not books.release("a", 0, 1, "another pull")
    assert books.reason == end


def test_every_end_of_a_lease_is_a_reason_for_a_release_to_be_refused() -> None:
    assert {end.value for end in LeaseEnd} <= {reason.value for reason in InvalidReason}


def test_a_lease_expires_at_its_maximum_age_however_often_it_is_renewed() -> None:
    clock = ManualClock()
    table: LeaseTable[str] = LeaseTable(TTL_S, clock, max_age_s=2.5 * TTL_S)
    table.grant("a", "blocks", CONTENTS)
    for _ in range(4):
        clock.advance(TTL_S / 2)
        assert table.renew(["a"], ["a"]) == ("a",)
    assert table.oldest_age_s == 2 * TTL_S
    clock.advance(TTL_S / 2)
    assert table.renew(["a"]) == ()
    assert table.collect() == ("blocks",)
    assert table.oldest_age_s == 0


def test_the_oldest_lease_that_is_not_being_read_gives_way(books: Books) -> None:
    books.grant("read")
    books.clock.advance(1)
    books.grant("waits")
    books.clock.advance(1)
    books.grant("later")
    books.table.renew(["read", "waits"], reading=["read"])
    assert books.table.revoke_oldest() == 1
    assert books.table.collect() == ("request of waits",)
    assert not books.release("waits", 0, 1, "pull")
    assert books.reason == "revoked"
    assert books.table.revoke_oldest() == 0
    assert books.table.revoke_oldest() is None
    assert books.table.active == 1


def test_a_lease_that_is_no_longer_read_gives_way_after_a_time_to_live(books: Books) -> None:
    books.grant("a")
    books.table.renew(["a"], reading=["a"])
    books.clock.advance(TTL_S - 1)
    books.table.renew(["a"])  # may have been sent before the other one
    assert books.table.revoke_oldest() is None
    books.clock.advance(1)
    assert books.table.revoke_oldest() == TTL_S


def test_a_lease_that_is_too_old_ends_behind_one_that_was_renewed_before_it() -> None:
    clock = ManualClock()
    table: LeaseTable[str] = LeaseTable(TTL_S, clock, max_age_s=2 * TTL_S)
    table.grant("old", "held by old", CONTENTS)
    clock.advance(TTL_S - 1)
    assert table.renew(["old"]) == ("old",)
    clock.advance(TTL_S - 2)
    table.grant("young", "held by young", CONTENTS)
    clock.advance(1)
    assert table.renew(["old"]) == ("old",)
    clock.advance(2)
    assert table.collect() == ("held by old",)
    assert table.still_valid(["old", "young"]) == {"young"}


def test_a_renewal_gives_another_time_to_live(books: Books) -> None:
    books.grant("a", "b")
    books.clock.advance(TTL_S - 1)
    assert books.table.renew(["a"]) == ("a",)
    books.clock.advance(TTL_S - 1)
    assert books.table.collect() == ("request of b",)
    assert books.release("a", 0, 1, "pull")


def test_a_renewal_does_not_revive_what_has_expired(books: Books) -> None:
    books.grant("a", "b")
    books.clock.advance(TTL_S - 1)
    books.table.renew(["b"])
    books.clock.advance(1)
    assert books.table.renew(["a", "b", "never granted"]) == ("b",)
    assert not books.release("a", 0, 1, "pull")


def test_cancelling_what_has_ended_or_never_was_is_ignored(books: Books) -> None:
    books.grant("a")
    books.table.cancel(["a", "a", "never granted"])
    books.table.cancel(["a"])
    assert books.table.collect() == ("request of a",)
    assert books.table.collect() == ()


def test_each_ended_request_is_collected_once(books: Books) -> None:
    books.grant("a", "b", "c", "d")
    books.release("a", 0, 1, "pull")
    books.table.cancel(["b"])
    assert books.table.collect() == ("request of a", "request of b")
    books.clock.advance(TTL_S)
    books.release("a", 0, 1, "pull")
    books.table.cancel(["b", "c"])
    assert books.table.collect() == ("request of c", "request of d")
    assert books.table.collect() == ()


def test_a_lease_id_is_never_granted_twice(books: Books) -> None:
    books.grant("a")
    with pytest.raises(ValueError, match="lease a was granted before"):
        books.grant("a")
    books.table.cancel(["a"])
    with pytest.raises(ValueError, match="lease a was granted before"):
        books.grant("a")


def test_ended_leases_are_forgotten_after_a_while(books: Books) -> None:
    books.grant("a")
    assert books.release("a", 0, 1, "pull")
    books.clock.advance(2 * TTL_S - 0.5)
    assert books.release("a", 0, 1, "pull")
    books.clock.advance(2 * TTL_S)
    assert not books.release("a", 0, 1, "pull")
    books.grant("a")  # the proof that nothing of it is left


def test_a_busy_table_forgets_too(books: Books) -> None:
    for number in range(50):
        books.grant(f"lease {number}")
        books.table.cancel([f"lease {number}"])
        books.clock.advance(TTL_S / 2)
    books.table.collect()
    kept = [number for number in range(50) if not _grantable(books.table, f"lease {number}")]
    assert 1 <= len(kept) <= 7
    assert kept == list(range(50 - len(kept), 50))


def _grantable(table: LeaseTable[str], lease_id: str) -> bool:
    try:
        table.grant(lease_id, f"second request of {lease_id}", CONTENTS)
    except ValueError:
        return False
    return True


def test_events_are_counted_by_kind_since_the_last_time(books: Books) -> None:
    books.grant("a", "b", "c")
    books.release("a", 0, 1, "pull")
    books.table.cancel(["b"])
    books.clock.advance(TTL_S)
    books.table.collect()
    assert books.table.take_counts() == {"granted": 3, "released": 1, "cancelled": 1, "expired": 1}
    assert books.table.take_counts() == {}


class _Crowd:
    """Threads that use one table at once; what one of them raises comes out of ``join``."""

    def __init__(self) -> None:
        self.table: LeaseTable[str] = LeaseTable(TTL_S, ManualClock())
        self.collected: Counter[str] = Counter()
        self.all_granted = threading.Event()
        self._failures: list[BaseException] = []
        self._threads: list[threading.Thread] = []

    def start(self, work: Callable[..., None], *arguments: Any) -> None:
        def run() -> None:
            try:
                work(*arguments)
            except BaseException as error:
                self._failures.append(error)

        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()

    def collect(self) -> None:
        while not self.all_granted.is_set() or self.table.active:
            self.collected.update(self.table.collect())
            time.sleep(0.0005)
        self.collected.update(self.table.collect())

    def read(self, lease_ids: list[str], reader: int) -> None:
        """Renew and release every lease; cancel some."""
        for number, lease_id in enumerate(lease_ids):
            self.table.renew([lease_id])
            self.table.release(Release("", lease_id, reader, 3, "pull", CONTENTS))
            if number % 10 == reader:
                self.table.cancel([lease_id])
            self.table.check_integrity()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()
        assert not self._failures


def test_threads_may_use_the_table_at_once() -> None:
    """Every lease is renewed, released and cancelled from several threads; each request is collected once."""
    crowd = _Crowd()
    lease_ids = [f"lease {number}" for number in range(150)]
    crowd.start(crowd.collect)
    for lease_id in lease_ids:
        crowd.table.grant(lease_id, lease_id, CONTENTS)
    for reader in range(3):
        crowd.start(crowd.read, lease_ids, reader)
    crowd.all_granted.set()
    crowd.join()
    assert crowd.collected == Counter(lease_ids)
    events = crowd.table.take_counts()
    assert events["granted"] == events["released"] + events["cancelled"] == len(lease_ids)


@pytest.mark.parametrize("word", ["renew", "locate"])
def test_before_the_first_word_of_a_reader_a_lease_lives_longer_and_after_it_as_any_other(word: str) -> None:
    """A request may wait for a minute before its engine has it, and nobody renews its lease so long."""
    clock = ManualClock()
    table: LeaseTable[str] = LeaseTable(30.0, clock, unclaimed_s=120.0)
    table.grant("a", "request of a", CONTENTS)
    table.grant("nobody's", "request of nobody's", CONTENTS)
    clock.advance(60.0)
    if word == "renew":
        assert table.renew(["a"]) == ("a",)
    else:
        assert table.locate("a").reason == ""
    table.check_integrity()
    clock.advance(29.9)
    assert table.collect() == ()
    clock.advance(0.1)
    assert table.collect() == ("request of a",)
    table.check_integrity()
    clock.advance(30.0)
    assert table.collect() == ("request of nobody's",)
    table.check_integrity()


def test_a_lease_that_was_read_while_it_grew_is_renewed_from_its_grant_on() -> None:
    clock = ManualClock()
    table: LeaseTable[str] = LeaseTable(30.0, clock, unclaimed_s=120.0)
    table.begin("a")
    table.renew(["a"], reading=["a"])
    table.grant("a", "request of a", CONTENTS)
    clock.advance(30.0)
    table.check_integrity()
    assert table.collect() == ("request of a",)
