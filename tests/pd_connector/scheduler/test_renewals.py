"""Leases are renewed in time by a thread, whatever the scheduler does. When they are due: ``test_consumer``."""

import math
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pytest

from pd_connector.scheduler.renewals import Renewals
from tests.support.connector.requests import RecordingClient, a_prompt, a_remote
from tests.support.waiting import ManualClock, until
from transfer.control.errors import PeerRefused, PeerUnreachable
from transfer.control.messages import ErrorCode, Renewed, Reply

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
    until(lambda: len(client.sent) >= 3)
    renewals.drop("r")
    renewals.drop("r")
    assert renewals.request_ids == frozenset()
    assert set(client.take_renewed()) == {"L"}


def test_a_lease_that_is_due_sooner_is_not_kept_waiting(client: RecordingClient, renewals: Renewals) -> None:
    renewals.keep("late", a_remote(PROMPT, lease_id="late", lease_ttl_s=1000.0))
    renewals.keep("soon", a_remote(PROMPT, lease_id="soon", lease_ttl_s=0.06))
    until(lambda: bool(client.sent))
    renewals.drop("soon")
    assert set(client.take_renewed()) == {"soon"}


def test_a_lease_that_is_due_later_does_not_wake_the_thread(
    renewals: Renewals, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewals.keep("first", a_remote(PROMPT, lease_id="first", lease_ttl_s=30.0))
    until(lambda: renewals._wakes_at < math.inf)
    monkeypatch.setattr(renewals._changed, "notify", lambda: pytest.fail("the thread was woken"))
    renewals.keep("second", a_remote(PROMPT, lease_id="second", lease_ttl_s=30.0))
    monkeypatch.undo()


def test_many_leases_of_one_engine_are_renewed_in_several_messages(client: RecordingClient) -> None:
    clock = ManualClock()
    renewals = Renewals(client, 5.0, clock)
    for number in range(2500):
        renewals.keep(str(number), a_remote(PROMPT, lease_id=str(number)))
    clock.advance(1000.0)
    renewals.renew_due()
    assert len(client.sent) == 3
    assert sorted(client.take_renewed()) == sorted(map(str, range(2500)))


def test_an_idle_thread_ends_at_once(client: RecordingClient) -> None:
    renewals = Renewals(client, 5.0)
    renewals.start()
    renewals.close()
    assert client.sent == []


# What prefill engines answer

TTL_S = 30.0


@dataclass
class Desk:
    """Renewals without their thread, and the answers to what they asked."""

    clock: ManualClock
    client: RecordingClient
    renewals: Renewals

    def keep(self, request_id: str, **changes: Any) -> None:
        self.renewals.keep(request_id, a_remote(PROMPT, **{"lease_id": request_id, **changes}))

    def renew(self) -> "Future[Reply]":
        """Renew what is due; the answer of the engine that was asked last."""
        self.clock.advance(TTL_S / 3)
        self.renewals.renew_due()
        self.renewals.check_integrity()
        return self.client.futures[-1]


@pytest.fixture
def desk() -> Iterator[Desk]:
    clock, client = ManualClock(), RecordingClient()
    desk = Desk(clock, client, Renewals(client, 5.0, clock))
    yield desk
    desk.renewals.check_integrity()


def test_a_lease_that_the_engine_does_not_confirm_is_lost(desk: Desk) -> None:
    desk.keep("gone")
    desk.keep("valid")
    desk.renew().set_result(Renewed(("valid",)))
    lost = desk.renewals.lost("gone")
    assert lost is not None
    assert lost.cause == "lease"
    assert "lease gone of engine engine-p at 10.0.0.5:8998 has ended" in lost.reason
    assert desk.renewals.lost("valid") is None
    assert desk.renewals.lost("never kept") is None


def test_a_lost_lease_is_not_renewed_any_more(desk: Desk) -> None:
    desk.keep("gone")
    desk.keep("valid")
    desk.renew().set_result(Renewed(("valid",)))
    desk.client.take_renewed()
    desk.renew()
    assert desk.client.take_renewed() == ["valid"]
    desk.renewals.drop("gone")
    assert desk.renewals.lost("gone") is None


def test_all_leases_of_an_engine_that_has_restarted_are_lost(desk: Desk) -> None:
    desk.keep("a")
    desk.keep("elsewhere", remote_port=77)
    refused = PeerRefused(
        host="10.0.0.5", port=8998, request_type="renew", code=ErrorCode.UNKNOWN_ENGINE, reason="this is engine q"
    )
    desk.renew()
    desk.client.futures[0].set_exception(refused)
    lost = desk.renewals.lost("a")
    assert lost is not None
    assert lost.cause == "refused"
    assert "this is engine q" in lost.reason
    assert desk.renewals.lost("elsewhere") is None


def test_an_answer_says_nothing_about_leases_that_were_not_asked_for(desk: Desk) -> None:
    desk.keep("asked")
    answer = desk.renew()
    desk.keep("later")
    desk.keep("same id elsewhere", lease_id="asked", remote_host="10.0.0.6")
    answer.set_result(Renewed(()))
    assert desk.renewals.lost("asked") is not None
    assert desk.renewals.lost("later") is None
    assert desk.renewals.lost("same id elsewhere") is None


def test_an_answer_that_comes_late_or_never_changes_nothing(desk: Desk) -> None:
    desk.keep("dropped")
    desk.keep("kept")
    first = desk.renew()
    desk.renewals.drop("dropped")
    second = desk.renew()
    second.cancel()
    unreachable = PeerUnreachable(host="10.0.0.5", port=8998, request_type="renew", tried_s=5.0, attempts=3)
    desk.renew().set_exception(unreachable)
    first.set_result(Renewed(("kept",)))
    assert desk.renewals.request_ids == {"kept"}
    assert desk.renewals.lost("kept") is None
