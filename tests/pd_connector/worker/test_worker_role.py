"""A request is reported once, when the last of its parts has settled, and as failed if one of them has failed."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_connector.orders import Destinations, Orders
from pd_connector.worker.worker_role import Arrivals, FailedBlocks, WorkerRole

IDS = st.sampled_from("abc")
EVENTS = st.one_of(
    st.tuples(st.just("expect"), IDS, st.integers(1, 3)),
    st.tuples(st.just("settle"), IDS, st.booleans()),
    st.tuples(st.just("take"), IDS, st.just(0)),
    st.tuples(st.just("leave"), IDS, st.just(0)),
)


@pytest.mark.thorough
@settings(max_examples=300)
@given(events=st.lists(EVENTS, max_size=40))
def test_every_request_is_reported_once_after_its_last_part(events: list[tuple[str, str, int]]) -> None:
    """In the order in which workers call: a request's parts are all expected before one of them settles."""
    arrivals = Arrivals()
    parts: Counter[str] = Counter()
    failed: set[str] = set()
    over: set[str] = set()
    for kind, request_id, detail in events:
        if kind == "expect" and not parts[request_id] and request_id not in over:
            parts[request_id] = detail
            for _ in range(detail):
                arrivals.expect(request_id)
        elif kind == "settle" and parts[request_id]:
            parts[request_id] -= 1
            failed |= {request_id} if detail else set()
            over |= set() if parts[request_id] else {request_id}
            arrivals.settle(request_id, failed=bool(detail))
        elif kind == "leave":
            arrivals.leave([request_id])
            assert arrivals.has_left(request_id) == bool(parts[request_id])
        elif kind == "take":
            assert arrivals.take() == (over, over & failed)
            failed -= over
            over = set()
        arrivals.check_integrity()
    assert arrivals.take() == (over, over & failed)
    assert arrivals.take() == (set(), set())
    arrivals.check_integrity()


def test_a_failure_is_remembered_until_the_last_part_has_settled() -> None:
    arrivals = Arrivals()
    for _ in range(2):
        arrivals.expect("r")
    arrivals.settle("r", failed=True)
    assert arrivals.take() == (set(), set())
    arrivals.settle("r", failed=False)
    assert arrivals.take() == ({"r"}, {"r"})


def test_a_request_that_has_failed_once_may_succeed_later() -> None:
    arrivals = Arrivals()
    for failed in (True, False):
        arrivals.expect("r")
        arrivals.settle("r", failed=failed)
        assert arrivals.take() == ({"r"}, {"r"} if failed else set())


def test_the_failure_of_one_request_is_not_that_of_another() -> None:
    arrivals = Arrivals()
    for name, failed in (("a", True), ("b", False)):
        arrivals.expect(name)
        arrivals.settle(name, failed=failed)
    assert arrivals.take() == ({"a", "b"}, {"a"})


def test_what_settles_unexpectedly_is_found() -> None:
    arrivals = Arrivals()
    arrivals.settle("r", failed=False)
    with pytest.raises(AssertionError, match="not expected"):
        arrivals.check_integrity()


def test_requests_that_are_abandoned_fail_whatever_has_arrived_for_them() -> None:
    arrivals = Arrivals()
    for request_id in ("arrived", "taken", "waits"):
        arrivals.expect(request_id)
    arrivals.settle("taken", failed=False)
    assert arrivals.take() == ({"taken"}, set())
    arrivals.settle("arrived", failed=False)
    arrivals.abandon()
    arrivals.check_integrity()
    assert arrivals.take() == ({"arrived", "waits"}, {"arrived", "waits"})
    arrivals.expect("waits")
    arrivals.settle("waits", failed=False)
    assert arrivals.take() == ({"waits"}, set())


# Failures told by blocks


def test_of_a_request_that_fails_the_blocks_are_told_once_and_so_is_its_id() -> None:
    failures = FailedBlocks()
    failures.expect([Destinations("a", (3, 4)), Destinations("b", (7,))])
    failures.settle({"b"}, set())
    assert (failures.take_blocks(), failures.take_requests()) == (set(), frozenset())
    failures.settle({"a"}, {"a"})
    assert (failures.take_blocks(), failures.take_requests()) == ({3, 4}, frozenset({"a"}))
    assert (failures.take_blocks(), failures.take_requests()) == (set(), frozenset())
    failures.check_integrity()


def test_failures_of_requests_whose_destinations_are_not_known_are_told_by_vllms_own_means() -> None:
    failures = FailedBlocks()
    failures.settle({"a"}, {"a"})
    assert (failures.take_blocks(), failures.take_requests()) == (set(), frozenset())


def test_destinations_are_kept_no_longer_than_a_request_waits() -> None:
    """Its blocks become another request's, and its id may come again."""
    failures = FailedBlocks()
    for blocks, failed in (((3, 4), set()), ((5,), {"a"})):
        failures.expect([Destinations("a", blocks)])
        failures.settle({"a"}, failed)
    assert failures.take_blocks() == {5}
    assert not failures._destinations


def test_a_role_that_does_nothing_holds_nobody_up() -> None:
    role = WorkerRole()
    role.close()
    role.join()
    role.check_integrity()
    assert (role.execute(Orders()), role.take_ends(), bool(role.take_report())) == ((), (), False)
