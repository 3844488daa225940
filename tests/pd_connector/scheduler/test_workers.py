"""Handshakes that arrive together or one after another."""

from layout.geometry import WorkerGeometry
from pd_connector.orders import WorkerHandshake
from pd_connector.scheduler.workers import Workers


def a_handshake(slots: int, generation: int = 0) -> WorkerHandshake:
    return WorkerHandshake(WorkerGeometry(0, 1, 0, 1, "10.0.0.5:15000", (), ()), slots, generation=generation)


def test_workers_are_known_when_the_last_handshake_has_arrived() -> None:
    workers = Workers(3)
    assert not workers.known
    assert workers.add({}) == ()
    assert workers.add({(1, 0): a_handshake(3)}) == ()
    assert workers.add({(0, 1): a_handshake(2)}) == ()
    assert not workers.known
    in_order = tuple(map(a_handshake, (1, 2, 3)))
    assert workers.add({(0, 0): a_handshake(1)}) == in_order
    assert workers.known


def test_what_is_known_already_is_no_news() -> None:
    workers = Workers(1)
    assert workers.add({(0, 0): a_handshake(1)})
    assert workers.add({(0, 0): a_handshake(1)}) == ()
    assert workers.add({}) == ()
    assert workers.add({(0, 0): a_handshake(2)}) == (a_handshake(2),)


def test_workers_that_have_slept_are_known_again_when_all_have_woken() -> None:
    workers = Workers(2)
    workers.add({(0, 0): a_handshake(1), (0, 1): a_handshake(1)})
    assert workers.add({(0, 1): a_handshake(1, generation=1)}) == ()
    assert not workers.known
    assert workers.add({(0, 0): a_handshake(1, generation=1)}) == (a_handshake(1, 1), a_handshake(1, 1))
    assert workers.known


def test_workers_that_are_expected_again_may_send_what_they_have_sent() -> None:
    workers = Workers(2)
    both = {(0, 0): a_handshake(1), (0, 1): a_handshake(2)}
    workers.add(both)
    workers.expect_again()
    assert not workers.known
    assert workers.add({(0, 0): both[0, 0]}) == ()
    assert not workers.known
    assert workers.add({(0, 1): both[0, 1]}) == ()
    assert workers.known
