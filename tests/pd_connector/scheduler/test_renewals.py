"""Leases are renewed in time by a thread, whatever the scheduler does. When they are due: ``test_consumer``."""

import threading
from collections.abc import Iterator

import pytest

from pd_connector.scheduler.renewals import Renewals
from tests.pd_connector.support import RecordingClient, a_prompt, a_remote, until

PROMPT = a_prompt(70)


@pytest.fixture
def client() -> RecordingClient:
    return RecordingClient()


@pytest.fixture
def renewals(client: RecordingClient) -> Iterator[Renewals]:
    before = set(threading.enumerate())
    renewals = Renewals(client, 5.0)
    renewals.start()
    yield renewals
    renewals.close()
    assert set(threading.enumerate()) <= before


def test_a_lease_is_renewed_again_and_again_though_no_step_is_made(client: RecordingClient, renewals: Renewals) -> None:
    renewals.keep("r", a_remote(PROMPT, lease_id="L", lease_ttl_s=0.06))
    assert until(lambda: len(client.sent) >= 3)
    renewals.drop("r")
    renewals.drop("r")
    assert renewals.request_ids == frozenset()
    assert set(client.take_renewed()) == {"L"}


def test_a_lease_that_is_due_sooner_is_not_kept_waiting(client: RecordingClient, renewals: Renewals) -> None:
    renewals.keep("late", a_remote(PROMPT, lease_id="late", lease_ttl_s=1000.0))
    renewals.keep("soon", a_remote(PROMPT, lease_id="soon", lease_ttl_s=0.06))
    assert until(lambda: bool(client.sent))
    renewals.drop("soon")
    assert set(client.take_renewed()) == {"soon"}


def test_an_idle_thread_ends_at_once(client: RecordingClient) -> None:
    renewals = Renewals(client, 5.0)
    renewals.start()
    renewals.close()
    assert client.sent == []
