"""The book of checksums: ordered once, answered from when all is there, forgotten with the lease."""

import pickle
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pytest

from layout.checksums import PlaneSums
from pd_connector.orders import ChecksumOrder, ChecksumReport, Report
from pd_connector.scheduler.prefill.checksum_table import ChecksumTable
from pd_connector.scheduler.prefill.lease_service import LeaseService
from pd_connector.scheduler.prefill.leases import LeaseTable
from tests.support.connector.engines import IDENTITY
from tests.support.connector.requests import FakeRequest, a_prompt
from tests.support.waiting import ManualClock
from transfer.control.limits import MAX_SUMS
from transfer.control.messages import Checksummed, Checksums, NoChecksums


@dataclass
class Leases:
    """Those that have not ended."""

    valid: set[str] = field(default_factory=set)
    looked_at: int = 0

    def still_valid(self, lease_ids: Iterable[str]) -> frozenset[str]:
        self.looked_at += 1
        return frozenset(lease_ids) & self.valid

    def end(self, book: ChecksumTable, lease_id: str) -> None:
        self.valid.remove(lease_id)
        book.ended(lease_id)


@pytest.fixture
def leases() -> Leases:
    return Leases({"a", "b"})


@pytest.fixture
def book(leases: Leases) -> ChecksumTable:
    book = ChecksumTable(leases.still_valid)
    book.set_workers(2)
    return book


def an_order(lease_id: str = "a") -> ChecksumOrder:
    return ChecksumOrder(lease_id, ((1, 2, 3),), 40)


def order_a(book: ChecksumTable) -> None:
    """Lease "a" is being summed."""
    book.order(an_order())
    assert book.take_orders() == (an_order(),)


def a_report(lease_id: str = "a", worker: int = 0, first: int = 1) -> ChecksumReport:
    """One group of one plane with two layers and a head, three runs: first, first + 1, ... by layer, then by run."""
    sums = np.arange(first, first + 6, dtype=np.uint64).reshape(3, 2, 1)
    totals = np.concatenate([np.zeros((1, 2, 1), np.uint64), np.cumsum(sums, axis=0, dtype=np.uint64)])
    return ChecksumReport(lease_id, worker, ((PlaneSums(16, 0, totals),),))


def ask(book: ChecksumTable, lease_id: str = "a", worker: int = 0, group: int = 0, *borders: int) -> Checksummed:
    reply = book.answer(Checksums("e", lease_id, worker, group, borders or (0, 16, 32, 40)))
    book.check_integrity()
    return reply


def test_an_order_is_given_to_the_workers_once_and_keeps_the_engine_stepping_until_all_have_reported(
    book: ChecksumTable,
) -> None:
    assert not book.wants_step
    book.order(an_order())
    assert book.wants_step
    assert book.take_orders() == (an_order(),)
    assert book.take_orders() == ()
    for worker in (0, 1):
        assert book.wants_step
        assert ask(book, "a", worker).reason == NoChecksums.PENDING
        book.add(a_report(worker=worker))
        assert ask(book, "a", worker) == Checksummed((1, 2, 3, 4, 5, 6))
    assert not book.wants_step


def test_asking_again_gives_the_same_answer(book: ChecksumTable) -> None:
    order_a(book)
    book.add(a_report())
    assert ask(book) == ask(book)


def test_runs_between_two_borders_are_added_up(book: ChecksumTable) -> None:
    order_a(book)
    book.add(a_report())
    assert ask(book, "a", 0, 0, 0, 32, 40).sums == (4, 6, 5, 6)
    assert ask(book, "a", 0, 0, 16, 40).sums == (8, 10)
    assert ask(book, "a", 0, 0, 16).sums == ()
    assert ask(book, "a", 0, 0, 40, 4096).sums == (0, 0)


def test_a_second_report_changes_nothing(book: ChecksumTable) -> None:
    order_a(book)
    book.add(a_report())
    book.add(a_report(first=100))
    assert ask(book).sums == (1, 2, 3, 4, 5, 6)


def test_a_lease_that_ends_while_its_checksums_are_taken_is_forgotten(book: ChecksumTable, leases: Leases) -> None:
    order_a(book)
    book.add(a_report())
    leases.end(book, "a")
    assert ask(book).reason == NoChecksums.UNKNOWN
    assert not book.wants_step
    book.add(a_report(worker=1))
    leases.valid.add("a")
    assert ask(book).reason == NoChecksums.UNKNOWN


def test_a_lease_that_ends_before_its_order_is_taken_is_not_summed(book: ChecksumTable, leases: Leases) -> None:
    book.order(an_order("a"))
    book.order(an_order("b"))
    leases.end(book, "a")
    assert book.take_orders() == (an_order("b"),)


def test_a_lease_that_ends_before_it_is_ordered_is_not_summed(book: ChecksumTable, leases: Leases) -> None:
    leases.end(book, "a")
    book.order(an_order("a"))
    assert book.take_orders() == ()
    assert not book.wants_step
    assert ask(book).reason == NoChecksums.UNKNOWN


def test_a_step_looks_for_the_end_of_no_lease(book: ChecksumTable, leases: Leases) -> None:
    """There may be thousands, and whoever renews them would wait."""
    order_a(book)
    looked_at = leases.looked_at
    assert book.take_orders() == ()
    assert book.wants_step
    assert leases.looked_at == looked_at


def test_what_workers_have_not_begun_waits_where_the_end_of_its_lease_drops_it(
    book: ChecksumTable, leases: Leases
) -> None:
    ids = [f"lease{number}" for number in range(100)]
    leases.valid |= {*ids}
    for lease_id in ids:
        book.order(an_order(lease_id))
    under_way = [order.lease_id for order in book.take_orders()]
    assert under_way == ids[: len(under_way)] != ids
    for lease_id in ids[:-1]:
        leases.end(book, lease_id)
        assert book.take_orders() == (), "the workers have enough to do, whether it is of use or not"
        assert book.wants_step
    for worker in (0, 1):
        assert book.take_orders() == ()
        book.add(a_report(under_way[0], worker))
    assert book.take_orders() == (an_order(ids[-1]),)
    for worker in (0, 1):
        assert book.wants_step
        book.add(a_report(ids[-1], worker))
    assert not book.wants_step, "nobody waits for what is under way still"


def test_other_workers_carry_nothing_out_that_the_ones_before_were_ordered(book: ChecksumTable, leases: Leases) -> None:
    ids = [f"lease{number}" for number in range(100)]
    leases.valid |= {*ids}
    for lease_id in ids:
        book.order(an_order(lease_id))
    while (orders := book.take_orders()) != ():
        for order in orders:
            leases.end(book, order.lease_id)
        book.set_workers(2)
        book.check_integrity()
    assert not book.wants_step


def test_what_a_worker_could_not_read_is_said(book: ChecksumTable) -> None:
    order_a(book)
    book.add(ChecksumReport("a", 0, None))
    assert ask(book).reason == NoChecksums.FAILED


@pytest.mark.parametrize(("worker", "group"), [(2, 0), (0, 1)])
def test_a_place_that_does_not_exist_is_refused(book: ChecksumTable, worker: int, group: int) -> None:
    order_a(book)
    book.add(a_report())
    assert ask(book, "a", worker, group).reason == NoChecksums.PLACE


def test_more_numbers_than_a_message_holds_are_refused(book: ChecksumTable) -> None:
    order_a(book)
    totals = np.zeros((4, 100, 100), np.uint64)
    book.add(ChecksumReport("a", 0, ((PlaneSums(16, 0, totals),),)))
    most = MAX_SUMS // 10_000
    assert len(ask(book, "a", 0, 0, *range(most + 1)).sums) == most * 10_000
    assert ask(book, "a", 0, 0, *range(most + 2)).reason == NoChecksums.SIZE


def test_reports_of_several_workers_travel_together() -> None:
    a, b = a_report(), a_report(worker=1)
    assert (Report(checksums=(a,)) + Report(checksums=(b,))).checksums == (a, b)


def test_a_report_survives_vllms_way_between_processes(book: ChecksumTable) -> None:
    order_a(book)
    for hashed in pickle.loads(pickle.dumps(Report(checksums=(a_report(),)))).checksums:
        book.add(hashed)
    assert ask(book).sums == (1, 2, 3, 4, 5, 6)


# In the lease service


def a_service(*, verify: bool) -> tuple[LeaseService[str], ManualClock]:
    clock = ManualClock()
    leases: LeaseTable[str] = LeaseTable(30.0, clock)
    return LeaseService(leases, IDENTITY, 1, verify=verify), clock


def test_a_lease_is_summed_up_to_the_last_prompt_token_which_is_computed_by_the_decode_engine() -> None:
    service, _ = a_service(verify=True)
    lease_id = service.grant(FakeRequest("r", a_prompt(70)), ([1, 2], [0, 3]), "held", ("host", 1))["lease_id"]
    assert service.checksums.take_orders() == (ChecksumOrder(lease_id, ((1, 2), (0, 3)), 69),)


def test_an_expired_lease_has_no_checksums() -> None:
    service, clock = a_service(verify=True)
    lease_id = service.grant(FakeRequest("r", a_prompt(70)), ([1, 2],), "held", ("host", 1))["lease_id"]
    asked = Checksums(service.engine_id, lease_id, 0, 0, (0, 69))
    service.checksums.set_workers(1)
    assert service.handle(asked) == Checksummed(reason=NoChecksums.PENDING)
    clock.advance(30.0)
    assert service.handle(asked) == Checksummed(reason=NoChecksums.UNKNOWN)
    service.check_integrity()


def test_the_checksums_of_a_lease_end_with_it() -> None:
    service, _ = a_service(verify=True)
    service.checksums.set_workers(1)
    lease_ids = [
        service.grant(FakeRequest(name, a_prompt(70)), ([1, 2],), name, ("host", 1))["lease_id"] for name in "ab"
    ]
    service.leases.cancel(lease_ids[:1])
    assert [order.lease_id for order in service.checksums.take_orders()] == lease_ids[1:]
    service.leases.cancel(lease_ids[1:])
    assert not service.checksums.wants_step


def test_an_engine_that_takes_none_says_so() -> None:
    service, _ = a_service(verify=False)
    lease_id = service.grant(FakeRequest("r", a_prompt(70)), ([1, 2],), "held", ("host", 1))["lease_id"]
    assert service.handle(Checksums(service.engine_id, lease_id, 0, 0, (0,))) == Checksummed(reason=NoChecksums.OFF)
