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

    def still_valid(self, lease_ids: Iterable[str]) -> frozenset[str]:
        return frozenset(lease_ids) & self.valid


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
    leases.valid.remove("a")
    assert ask(book).reason == NoChecksums.UNKNOWN
    assert not book.wants_step
    book.add(a_report(worker=1))
    leases.valid.add("a")
    assert ask(book).reason == NoChecksums.UNKNOWN


def test_a_lease_that_ends_before_its_order_is_taken_is_not_summed(book: ChecksumTable, leases: Leases) -> None:
    book.order(an_order("a"))
    book.order(an_order("b"))
    leases.valid.remove("a")
    assert book.take_orders() == (an_order("b"),)


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


def test_an_engine_that_takes_none_says_so() -> None:
    service, _ = a_service(verify=False)
    lease_id = service.grant(FakeRequest("r", a_prompt(70)), ([1, 2],), "held", ("host", 1))["lease_id"]
    assert service.handle(Checksums(service.engine_id, lease_id, 0, 0, (0,))) == Checksummed(reason=NoChecksums.OFF)
